//! Which signed tokens identify a client, and which do not.

use std::fs;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair,
};
use serde_json::json;

use super::*;

const NOW_US: u64 = 1_800_000_000_000_000;
const NOW: u64 = NOW_US / 1_000_000;

// Signed by a key that nobody has any more; they end in the year 3000.
const RSA_MODULUS: &str = "5KY1JIba7b-K-ZximsXP2hrnSioLUZQMvtZPKuxlffud7KIh9Vk5nivf7KzrbAaISyuZsY7evB5b5mCV2ifSDFaxPX9LLI3p0u4u\
    TjjtMjhob_XwfRRVAGOXz0tLxmbmAoe0BhfK8F5aLPMyfipd3yALPcpjpHkJQdtW1LoZiA6992k99Bj9CVtodyXoSOJgh9FhI1lK\
    v5bklKt42cgGuyW65fy4O4QLwLspMB7LOO1aQPztj4-YzuYbwLujiGNW7NSm-CcG-Ismk_rTLnP83aHGQIeb4Oz12iKrvqmEsQMt\
    6Q-ijiJVvD44vsxvjjMh9OOX9UK-pDiBXw_PUFEBOw";
const RS256: &str = "eyJhbGciOiJSUzI1NiIsImtpZCI6InIxIn0.eyJpc3MiOiJodHRwczovL2lkLnRlc3QiLCJhdWQiOiJsb2NrcyIsInN1YiI6ImJp\
    bGxpbmciLCJleHAiOjMyNTAzNjgwMDAwfQ.ovV2eEWcdOMrz0cLQAydR1ywYN-DtlOLANW0tdht1xYxg5miTfqj8Yh20CaayuYSz\
    TN__XAWXa7TskNx6dFySxLW0dIF87Y2VF1moH2ZttXYSNumXFbySj0uRaid7xDOhh5kaAecKivTRRy6aX8APY5W37VSivXXh8Yfj\
    qYXVp2t_ItUCuQB2zuDhRluFSIs36UGR_-uZR571vc8sys0Otp6epISECvzLm9DXBKbdA5JhVdITTU8YXQ2189nlYz7i0-jbzDXh\
    uSQebhehCTqSrI_fnOg4DqEPywD--r8SNprmAzPBhxXwwv4AVxsJaYfzBeFE3oKc3hBJmU5HSO8og";
const PS256: &str = "eyJhbGciOiJQUzI1NiIsImtpZCI6InIxIn0.eyJpc3MiOiJodHRwczovL2lkLnRlc3QiLCJhdWQiOiJsb2NrcyIsInN1YiI6ImJp\
    bGxpbmciLCJleHAiOjMyNTAzNjgwMDAwfQ.pDl8iKuWMKQ02lRPUQ2C6AWzyd3Ccgkz5OjIlgyjKYI5x28QYLb8oeCNJAitA7iGr\
    53yl6p0As-iNa8TwCd-9JnwpYeobNKG4Nl5_aOdEp86BZeEcX1xOWi6oTgWyuQPPgtdlMoQwkrEri59zAHxwvu1jf7RHFOZCxg5P\
    v81QcsgrblQfcEOrdv0iHYD-HVKuAib7s0ufIxQSyqDzm8mikrvKE59yIEKHyzTtBJ1JbLmIRsuOVsc0zrZyECLrWkVGvK2BkSLg\
    GBxOOa2UAZse3c6l4sT-nERt6LqUL0r86RA8B9_TJqkNV76N54WfsEYngsjHBJeELCm5t82FLZ87A";

/// A private key, which signs tokens.
enum Signer {
    Ec(&'static str, EcdsaKeyPair),
    Ed(Ed25519KeyPair),
}

fn base64(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

impl Signer {
    fn ec() -> Signer {
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
        Signer::Ec(
            "P-256",
            EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, key.as_ref(), &random).unwrap(),
        )
    }

    fn ec384() -> Signer {
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::generate_pkcs8(&ECDSA_P384_SHA384_FIXED_SIGNING, &random).unwrap();
        Signer::Ec(
            "P-384",
            EcdsaKeyPair::from_pkcs8(&ECDSA_P384_SHA384_FIXED_SIGNING, key.as_ref(), &random).unwrap(),
        )
    }

    fn ed() -> Signer {
        let key = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        Signer::Ed(Ed25519KeyPair::from_pkcs8(key.as_ref()).unwrap())
    }

    fn algorithm(&self) -> &'static str {
        match self {
            Signer::Ec("P-256", _) => "ES256",
            Signer::Ec(..) => "ES384",
            Signer::Ed(_) => "EdDSA",
        }
    }

    fn jwk(&self, kid: &str) -> Value {
        match self {
            Signer::Ec(curve, key) => {
                let (x, y) = key.public_key().as_ref()[1..].split_at(key.public_key().as_ref().len() / 2);
                json!({"kty": "EC", "crv": curve, "kid": kid, "x": base64(x), "y": base64(y)})
            }
            Signer::Ed(key) => {
                json!({"kty": "OKP", "crv": "Ed25519", "kid": kid, "x": base64(key.public_key())})
            }
        }
    }

    fn sign(&self, header: &Value, claims: &Value) -> String {
        let message = format!("{}.{}", base64(header.to_string()), base64(claims.to_string()));
        let signature = match self {
            Signer::Ec(_, key) => {
                key.sign(&SystemRandom::new(), message.as_bytes()).unwrap().as_ref().to_vec()
            }
            Signer::Ed(key) => key.sign(message.as_bytes()).as_ref().to_vec(),
        };
        format!("{message}.{}", base64(signature))
    }

    fn token(&self, kid: &str, claims: &Value) -> String {
        self.sign(&json!({"alg": self.algorithm(), "kid": kid, "typ": "JWT"}), claims)
    }
}

fn claims() -> Value {
    json!({"iss": "https://id.test", "aud": "locks", "sub": "billing", "exp": NOW + 600, "jti": "t1"})
}

fn with(name: &str, value: Value) -> Value {
    let mut claims = claims();
    claims[name] = value;
    claims
}

fn without(name: &str) -> Value {
    let mut claims = claims();
    claims.as_object_mut().unwrap().remove(name);
    claims
}

/// The rules of a file whose issuer has these keys.
fn parse(keys: &[Value], more: &str) -> AuthRules {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("keys.json"), json!({"keys": keys}).to_string()).unwrap();
    let more = match more {
        "" => "algorithms = [\"ES256\", \"ES384\", \"EdDSA\", \"RS256\", \"PS256\"]\n",
        more => more,
    };
    let text = format!(
        "[[jwt]]\nissuer = \"https://id.test\"\naudience = [\"locks\", \"other\"]\njwks = \"keys.json\"\n{more}\
         [[principal]]\nname = \"a\"\n[[principal]]\nname = \"billing\"\njwt = [{{ subject = \"billing\" }}]\n"
    );
    AuthRules::parse(Path::new(&folder.path().join("auth.toml")), &text).unwrap()
}

fn issuers(keys: &[Value], more: &str) -> Issuers {
    Issuers::new(&parse(keys, more))
}

fn found(issuers: &Issuers, token: &str) -> Result<usize, JwtFault> {
    issuers.verified(token).and_then(|claims| issuers.principal(&claims, NOW_US))
}

#[test]
fn a_token_of_each_kind_of_key_identifies_its_principal() {
    let rsa = json!({"kty": "RSA", "kid": "r1", "n": RSA_MODULUS, "e": "AQAB", "use": "sig"});
    let signers = [Signer::ec(), Signer::ec384(), Signer::ed()];
    let ids = ["a", "b", "c"];
    let mut keys: Vec<Value> = signers.iter().zip(ids).map(|(signer, id)| signer.jwk(id)).collect();
    keys.push(rsa);
    let issuers = issuers(&keys, "");
    for (signer, id) in signers.iter().zip(ids) {
        assert_eq!(found(&issuers, &signer.token(id, &claims())), Ok(1), "{}", signer.algorithm());
        assert_eq!(found(&issuers, &signer.token("other", &claims())), Err(JwtFault::Key));
        for other in ids.into_iter().filter(|other| *other != id) {
            let refused = found(&issuers, &signer.token(other, &claims())).unwrap_err();
            assert!([JwtFault::Algorithm, JwtFault::Signature].contains(&refused), "{refused}");
        }
    }
    for token in [RS256, PS256] {
        assert_eq!(found(&issuers, token), Ok(1));
        let altered = token.replace("ImJpbGxpbmci", "ImFpbGxpbmci");
        assert!(altered != token && found(&issuers, &altered).is_err());
    }
}

#[test]
fn an_altered_token_is_refused() {
    let signer = Signer::ed();
    let issuers = issuers(&[signer.jwk("a")], "");
    let good = signer.token("a", &claims());
    let parts: Vec<&str> = good.split('.').collect();
    let other = base64(with("sub", json!("a")).to_string());
    assert_eq!(found(&issuers, &[parts[0], &other, parts[2]].join(".")), Err(JwtFault::Signature));
    let zeros = base64([0; 64]);
    for signature in ["", "AAAA", &zeros] {
        assert_eq!(found(&issuers, &[parts[0], parts[1], signature].join(".")), Err(JwtFault::Signature));
    }
    for wrong in ["", "a", "a.b", "a.b.c", "..", &good[1..], &format!("{good}.a"), &format!("{}.", parts[0])]
    {
        assert!(found(&issuers, wrong).is_err(), "{wrong}");
    }
    assert_eq!(found(&issuers, &good), Ok(1));
}

#[test]
fn algorithms_without_a_public_key_and_those_that_are_not_allowed_are_refused() {
    let signer = Signer::ec();
    let issuers = issuers(&[signer.jwk("a")], "algorithms = \"ES256\"\n");
    let unsigned = |alg: &str| {
        format!("{}.{}.", base64(json!({"alg": alg, "kid": "a"}).to_string()), base64(claims().to_string()))
    };
    for alg in ["none", "None", "nOnE", ""] {
        assert_eq!(found(&issuers, &unsigned(alg)), Err(JwtFault::Unreadable), "{alg}");
    }
    // The public key as the secret of an HMAC.
    let Signer::Ec(_, key) = &signer else { panic!() };
    for secret in [key.public_key().as_ref().to_vec(), signer.jwk("a").to_string().into_bytes()] {
        let header = base64(json!({"alg": "HS256", "kid": "a"}).to_string());
        let message = format!("{header}.{}", base64(claims().to_string()));
        let mac =
            ring::hmac::sign(&ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &secret), message.as_bytes());
        assert_eq!(found(&issuers, &format!("{message}.{}", base64(mac))), Err(JwtFault::Algorithm));
    }
    let header = json!({"alg": "EdDSA", "kid": "a"});
    assert_eq!(found(&issuers, &Signer::ed().sign(&header, &claims())), Err(JwtFault::Algorithm));
    let critical = json!({"alg": "ES256", "kid": "a", "crit": ["b64"], "b64": "false"});
    assert_eq!(found(&issuers, &signer.sign(&critical, &claims())), Err(JwtFault::Critical));
    assert_eq!(found(&issuers, &signer.token("a", &claims())), Ok(1));
}

#[test]
fn each_claim_is_checked() {
    let signer = Signer::ed();
    let issuers = issuers(&[signer.jwk("a")], "");
    let asked = |claims: &Value| found(&issuers, &signer.token("a", claims));
    assert_eq!(asked(&with("aud", json!(["a", "other"]))), Ok(1));
    for (claims, fault) in [
        (with("iss", json!("https://id.test/")), JwtFault::Issuer),
        (with("iss", json!(["https://id.test"])), JwtFault::Issuer),
        (without("iss"), JwtFault::Issuer),
        (with("aud", json!("lock")), JwtFault::Audience),
        (with("aud", json!([])), JwtFault::Audience),
        (without("aud"), JwtFault::Audience),
        (without("exp"), JwtFault::NoEnd),
        (with("exp", json!("3000-01-01")), JwtFault::NoEnd),
        (with("exp", json!(-1)), JwtFault::NoEnd),
        (with("exp", json!(NOW - 11)), JwtFault::Ended),
        (with("nbf", json!(NOW + 11)), JwtFault::Early),
        (with("nbf", json!("soon")), JwtFault::Early),
        (with("sub", json!("a")), JwtFault::Subject),
        (with("sub", json!("Billing")), JwtFault::Subject),
        (with("sub", json!(["billing"])), JwtFault::Unreadable),
        (without("sub"), JwtFault::Subject),
    ] {
        assert_eq!(asked(&claims), Err(fault), "{claims}");
    }
    // Clocks differ by some seconds.
    assert_eq!(asked(&with("exp", json!(NOW - 9))), Ok(1));
    assert_eq!(asked(&with("nbf", json!(NOW + 9))), Ok(1));
    assert_eq!(asked(&with("exp", json!(NOW as f64 + 0.5))), Ok(1));
    assert_eq!(asked(&with("exp", json!(1e300))), Ok(1));
}

#[test]
fn a_token_without_a_key_id_needs_an_issuer_with_one_key() {
    let (first, second) = (Signer::ed(), Signer::ed());
    let token = first.sign(&json!({"alg": "EdDSA"}), &claims());
    assert_eq!(found(&issuers(&[first.jwk("a")], ""), &token), Ok(1));
    assert_eq!(found(&issuers(&[first.jwk("a"), second.jwk("b")], ""), &token), Err(JwtFault::Key));
}

#[test]
fn a_long_token_is_refused_before_it_is_read() {
    let signer = Signer::ed();
    let issuers = issuers(&[signer.jwk("a")], "");
    let token = signer.token("a", &with("padding", json!("x".repeat(MAX_BYTES))));
    assert_eq!(found(&issuers, &token), Err(JwtFault::TooLong));
}

#[test]
fn another_claim_can_name_the_client() {
    let signer = Signer::ed();
    let issuers = issuers(&[signer.jwk("a")], "algorithms = \"EdDSA\"\nclaim = \"client_id\"\n");
    assert_eq!(found(&issuers, &signer.token("a", &claims())), Err(JwtFault::Subject));
    let mut named = with("sub", json!("x"));
    named["client_id"] = json!("billing");
    assert_eq!(found(&issuers, &signer.token("a", &named)), Ok(1));
}

#[test]
fn a_verified_token_is_checked_again_under_other_rules() {
    let (signer, next) = (Signer::ed(), Signer::ed());
    let before = issuers(&[signer.jwk("a")], "");
    let claims = before.verified(&signer.token("a", &claims())).unwrap();
    let under = |rules: &AuthRules| Issuers::new(rules).principal(&claims, NOW_US);
    assert_eq!(under(&parse(&[next.jwk("b"), signer.jwk("a")], "")), Ok(1));
    assert_eq!(under(&parse(&[next.jwk("a")], "")), Err(JwtFault::Key), "another key with the same id");
    let es = Signer::ec();
    let only_ec = parse(&[signer.jwk("a"), es.jwk("e")], "algorithms = \"ES256\"\n");
    assert_eq!(under(&only_ec), Err(JwtFault::Key), "the algorithm is no longer allowed");
    let mut changed = parse(&[signer.jwk("a")], "");
    changed.principals[1].jwt.clear();
    assert_eq!(under(&changed), Err(JwtFault::Subject));
    let mut changed = parse(&[signer.jwk("a")], "");
    changed.jwt[0].audience = vec!["other".to_owned()];
    assert_eq!(under(&changed), Err(JwtFault::Audience));
    changed.jwt.clear();
    assert_eq!(under(&changed), Err(JwtFault::Issuer));
    assert_eq!(before.principal(&claims, NOW_US + 610_000_000 - 1), Ok(1));
    assert_eq!(before.principal(&claims, NOW_US + 610_000_000), Err(JwtFault::Ended));
}

#[test]
fn a_verified_token_is_kept_and_the_number_of_kept_ones_is_bounded() {
    let signer = Signer::ed();
    let issuers = issuers(&[signer.jwk("a")], "");
    let used = signer.token("a", &claims());
    let first = issuers.verified(&used).unwrap();
    assert!(Arc::ptr_eq(&first, &issuers.verified(&used).unwrap()));
    assert_eq!(first.id, "t1");
    for n in 0..3 * MAX_KEPT {
        let digest = Sha256::digest(n.to_le_bytes()).into();
        issuers.kept.lock().insert(digest, first.clone());
        if n % 1_000 == 0 {
            assert!(
                Arc::ptr_eq(&first, &issuers.verified(&used).unwrap()),
                "a token in use is not forgotten"
            );
        }
        let kept = issuers.kept.lock();
        assert!(kept.newer.len() + kept.older.len() <= MAX_KEPT);
    }
    // A refused token is not kept.
    let wrong = Signer::ed().token("a", &claims());
    let before = issuers.kept.lock().newer.len();
    assert!(issuers.verified(&wrong).is_err());
    assert_eq!(issuers.kept.lock().newer.len(), before);
}

#[test]
fn the_id_of_a_token_in_logs_is_short_and_tells_nothing() {
    let signer = Signer::ed();
    let issuers = issuers(&[signer.jwk("a")], "");
    for claims in [without("jti"), with("jti", json!("x".repeat(65))), with("jti", json!(""))] {
        let token = signer.token("a", &claims);
        let id = issuers.verified(&token).unwrap().id.clone();
        assert!(id.len() == 12 && !token.contains(&id), "{id}");
    }
}

/// The least time of a call, which other work of the machine does not lengthen.
fn least(mut call: impl FnMut()) -> std::time::Duration {
    let measured = |_| {
        let begun = std::time::Instant::now();
        call();
        begun.elapsed()
    };
    (0..200).map(measured).min().unwrap()
}

/// `--nocapture` shows the figures.
#[test]
fn a_kept_token_costs_less_than_its_signature() {
    let rsa = json!({"kty": "RSA", "kid": "r1", "n": RSA_MODULUS, "e": "AQAB"});
    let signers = [Signer::ec(), Signer::ec384(), Signer::ed()];
    let ids = ["a", "b", "c"];
    let mut tokens: Vec<(&str, String)> = signers
        .iter()
        .zip(ids)
        .map(|(signer, id)| (signer.algorithm(), signer.token(id, &claims())))
        .collect();
    tokens.push(("RS256", RS256.to_owned()));
    let keys = signers.iter().zip(ids).map(|(signer, id)| signer.jwk(id)).chain([rsa]).collect::<Vec<_>>();
    let issuers = issuers(&keys, "");
    for (algorithm, token) in tokens {
        let digest = Sha256::digest(token.as_bytes()).into();
        let signature = least(|| drop(issuers.verify(&token, &digest).unwrap()));
        let kept = least(|| assert_eq!(found(&issuers, &token), Ok(1)));
        println!("{algorithm}: {signature:?} with its signature, {kept:?} if it is kept");
        assert!(2 * kept < signature, "{algorithm}: {kept:?} is not less than {signature:?}");
    }
}

//! `[[jwt]]` of the file of principals: the issuers of signed tokens (JWT), and the files with their keys (JWKS).

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind};
use serde_json::Value;

use super::reader::{Section, resolve};

/// The algorithms that a file can allow: all of them have a public key and a private one.
const ALGORITHMS: [(&str, Algorithm); 9] = [
    ("RS256", Algorithm::RS256),
    ("RS384", Algorithm::RS384),
    ("RS512", Algorithm::RS512),
    ("PS256", Algorithm::PS256),
    ("PS384", Algorithm::PS384),
    ("PS512", Algorithm::PS512),
    ("ES256", Algorithm::ES256),
    ("ES384", Algorithm::ES384),
    ("EdDSA", Algorithm::EdDSA),
];
const RSA: [Algorithm; 6] = [
    Algorithm::RS256,
    Algorithm::RS384,
    Algorithm::RS512,
    Algorithm::PS256,
    Algorithm::PS384,
    Algorithm::PS512,
];
/// A larger file is no file of keys.
const MAX_JWKS_BYTES: u64 = 1 << 20;
/// The most keys of an issuer.
const MAX_KEYS: usize = 100;
/// The size of an RSA key, in bytes: 2048 to 8192 bits.
const RSA_BYTES: std::ops::RangeInclusive<usize> = 256..=1024;

/// An issuer of JSON Web Tokens (RFC 7519), and which of its tokens count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JwtIssuer {
    /// The claim `iss` of its tokens. No other issuer has it.
    pub issuer: String,
    /// The claim `aud` of a token must have one of these.
    pub audience: Vec<String>,
    /// How its tokens may be signed. Never empty.
    pub algorithms: Vec<Algorithm>,
    /// The claim that names the client.
    pub claim: String,
    /// The file of its keys.
    pub jwks: PathBuf,
    /// Its keys. Never empty, and no two have the same id.
    pub keys: Vec<JwtKey>,
}

/// A public key of an issuer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JwtKey {
    /// The id of the key, which tokens name as `kid`.
    pub id: Option<String>,
    /// The allowed algorithms that fit the key. Never empty.
    pub algorithms: Vec<Algorithm>,
    /// The key itself.
    pub key: Jwk,
}

/// A client of an issuer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JwtSubject {
    /// The claim `iss` of its tokens.
    pub issuer: String,
    /// The value of the claim that names the client.
    pub subject: String,
}

impl JwtIssuer {
    pub(super) fn read(section: &Section<'_>) -> Option<JwtIssuer> {
        let text = |what: &'static str| {
            move |text: &str, _: &_| match text {
                "" => Err(format!("is empty; must be {what}")),
                text => Ok(text.to_owned()),
            }
        };
        let issuer = section.required("issuer", text("the `iss` of tokens"));
        for key in ["audience", "algorithms"] {
            if !section.holds(key) {
                section.complain(key, "is missing");
            }
        }
        let audience = section.texts("audience", |names| match names.is_empty() || names.contains(&"") {
            true => Err("is empty; must be the `aud` of tokens for this proxy".to_owned()),
            false => Ok(names.iter().map(|&name| name.to_owned()).collect()),
        });
        let algorithms = section.texts("algorithms", algorithms);
        let claim = section.parsed("claim", "sub".to_owned(), text("the name of a claim, such as sub"));
        let allowed = algorithms.clone().unwrap_or_default();
        let jwks = section.required("jwks", |text, place| {
            let path = resolve(text, place);
            // Without algorithms, no key would fit, which would be a second fault.
            let keys = if allowed.is_empty() { Vec::new() } else { load(&path, &allowed)? };
            Ok((path, keys))
        });
        section.finish();
        let (jwks, keys) = jwks?;
        Some(JwtIssuer { issuer: issuer?, audience: audience?, algorithms: algorithms?, claim, jwks, keys })
    }
}

impl JwtSubject {
    /// Reads one of `jwt` of a principal. The only one of `issuers` need not be named.
    pub(super) fn read(section: &Section<'_>, issuers: &[JwtIssuer]) -> Option<JwtSubject> {
        let subject = section.required("subject", |text, _| match text {
            "" => Err("is empty; must be what the claim of a token has".to_owned()),
            text => Ok(text.to_owned()),
        });
        let known =
            || issuers.iter().map(|issuer| format!("`{}`", issuer.issuer)).collect::<Vec<_>>().join(", ");
        let issuer = section.parsed("issuer", None, |text, _| {
            match issuers.iter().any(|known| known.issuer == text) {
                true => Ok(Some(text.to_owned())),
                false => Err(format!("is `{text}`, but the issuers in [[jwt]] are {}", known())),
            }
        });
        let issuer = match (issuer, issuers) {
            (Some(issuer), _) => Some(issuer),
            (None, [only]) => Some(only.issuer.clone()),
            (None, _) if section.holds("issuer") => None,
            (None, []) => {
                section.complain_of_it("needs an issuer of tokens, but there is no [[jwt]]");
                None
            }
            (None, _) => {
                section.complain("issuer", format!("is missing; must be one of {}", known()));
                None
            }
        };
        section.finish();
        Some(JwtSubject { issuer: issuer?, subject: subject? })
    }
}

fn algorithms(names: &[&str]) -> Result<Vec<Algorithm>, String> {
    let known = |name: &str| ALGORITHMS.into_iter().find(|(known, _)| *known == name);
    let all = || ALGORITHMS.map(|(name, _)| name).join(", ");
    if names.is_empty() {
        return Err(format!("is empty; must be some of {}", all()));
    }
    let algorithm = |name: &&str| match known(name) {
        Some((_, algorithm)) => Ok(algorithm),
        None => Err(format!("has `{name}`; must be some of {}, which have a public key", all())),
    };
    names.iter().map(algorithm).collect()
}

/// The keys of a file that fit the algorithms.
fn load(path: &Path, algorithms: &[Algorithm]) -> Result<Vec<JwtKey>, String> {
    let wrong = |what: String| format!("{}: {what}", path.display());
    let unreadable = |error: std::io::Error| wrong(format!("cannot be read: {error}"));
    let file = File::open(path).map_err(unreadable)?;
    let mode = file.metadata().map_err(unreadable)?.mode();
    if mode & 0o022 != 0 {
        let (mode, file) = (mode & 0o777, path.display());
        return Err(wrong(format!(
            "has the mode {mode:o}: other users can change it; run `chmod go-w {file}`"
        )));
    }
    let mut bytes = Vec::new();
    file.take(MAX_JWKS_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_JWKS_BYTES {
        return Err(wrong(format!("has more than {MAX_JWKS_BYTES} bytes")));
    }
    keys(&bytes, algorithms).map_err(wrong)
}

fn keys(bytes: &[u8], algorithms: &[Algorithm]) -> Result<Vec<JwtKey>, String> {
    let set: Value = serde_json::from_slice(bytes).map_err(|error| format!("is no JSON: {error}"))?;
    let entries = set["keys"].as_array().ok_or("must have a list `keys` (a JWKS, RFC 7517)")?;
    let mut keys: Vec<JwtKey> = Vec::new();
    for (at, entry) in entries.iter().enumerate() {
        let Some(key) = key(entry, algorithms).map_err(|what| format!("keys[{at}]: {what}"))? else {
            continue;
        };
        if keys.iter().any(|other| other.id == key.id) {
            let id = key.id.unwrap_or_default();
            return Err(format!("keys[{at}]: the id (kid) `{id}` is that of another key"));
        }
        keys.push(key);
    }
    match keys.len() {
        0 => Err("has no key that fits the algorithms".to_owned()),
        1..=MAX_KEYS => Ok(keys),
        more => Err(format!("has {more} keys that fit the algorithms; may have {MAX_KEYS}")),
    }
}

/// `None` if the key is for something else, as RFC 7517 asks for.
fn key(entry: &Value, allowed: &[Algorithm]) -> Result<Option<JwtKey>, String> {
    if entry.get("d").is_some() {
        return Err("has a private key (`d`), which belongs to the issuer alone".to_owned());
    }
    if entry["kty"].as_str().is_none() {
        return Err("is no object with a `kty`".to_owned());
    }
    if !is_known_kind(entry) {
        return Ok(None);
    }
    let key: Jwk = serde_json::from_value(entry.clone()).map_err(|error| format!("is no key: {error}"))?;
    let fitting: &[Algorithm] = match &key.algorithm {
        AlgorithmParameters::RSA(_) => &RSA,
        AlgorithmParameters::EllipticCurve(key) => match key.curve {
            EllipticCurve::P256 => &[Algorithm::ES256],
            EllipticCurve::P384 => &[Algorithm::ES384],
            _ => &[],
        },
        AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => &[Algorithm::EdDSA],
        _ => &[],
    };
    let own = key.common.key_algorithm.map(|own| own.to_string().parse::<Algorithm>());
    let fits = |algorithm: &Algorithm| {
        fitting.contains(algorithm)
            && own.as_ref().is_none_or(|own| own.as_ref().is_ok_and(|own| own == algorithm))
    };
    let algorithms: Vec<Algorithm> = allowed.iter().copied().filter(fits).collect();
    let verifies = key.common.public_key_use.as_ref().is_none_or(|usage| *usage == PublicKeyUse::Signature)
        && key.common.key_operations.as_ref().is_none_or(|all| all.contains(&KeyOperations::Verify));
    if algorithms.is_empty() || !verifies {
        return Ok(None);
    }
    let decoded = DecodingKey::from_jwk(&key).map_err(|error| format!("cannot be used: {error}"))?;
    let has_its_length = match (decoded.kind(), fitting[0]) {
        (DecodingKeyKind::RsaModulusExponent { n, .. }, _) => RSA_BYTES.contains(&n.len()) && n[0] != 0,
        (DecodingKeyKind::SecretOrDer(bytes), Algorithm::ES256) => bytes.len() == 65,
        (DecodingKeyKind::SecretOrDer(bytes), Algorithm::ES384) => bytes.len() == 97,
        (DecodingKeyKind::SecretOrDer(bytes), _) => bytes.len() == 32,
    };
    if !has_its_length {
        return Err("has not the length of such a key; RSA keys must have 2048 to 8192 bits".to_owned());
    }
    Ok(Some(JwtKey { id: key.common.key_id.clone(), algorithms, key }))
}

/// Whether the key is of a kind that could verify tokens.
fn is_known_kind(entry: &Value) -> bool {
    match (entry["kty"].as_str(), entry["crv"].as_str()) {
        (Some("RSA"), _) => true,
        (Some("EC"), curve) => matches!(curve, None | Some("P-256" | "P-384")),
        (Some("OKP"), curve) => matches!(curve, None | Some("Ed25519")),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use serde_json::json;

    use super::*;
    use crate::config::AuthRules;

    const ALL: [Algorithm; 4] = [Algorithm::RS256, Algorithm::ES256, Algorithm::ES384, Algorithm::EdDSA];

    fn number(bytes: usize) -> String {
        URL_SAFE_NO_PAD.encode(vec![7; bytes])
    }

    fn ed(kid: &str) -> Value {
        json!({"kty": "OKP", "crv": "Ed25519", "kid": kid, "x": number(32)})
    }

    fn rsa(bytes: usize) -> Value {
        json!({"kty": "RSA", "kid": "r", "n": number(bytes), "e": "AQAB"})
    }

    fn read(entries: &[Value]) -> Result<Vec<Vec<Algorithm>>, String> {
        let keys = keys(json!({ "keys": entries }).to_string().as_bytes(), &ALL)?;
        Ok(keys.into_iter().map(|key| key.algorithms).collect())
    }

    #[test]
    fn keys_are_used_for_the_allowed_algorithms_that_fit_them() {
        let ec = json!({"kty": "EC", "crv": "P-384", "kid": "e", "x": number(48), "y": number(48)});
        let read = read(&[ed("a"), rsa(256), ec]);
        assert_eq!(read, Ok(vec![vec![Algorithm::EdDSA], vec![Algorithm::RS256], vec![Algorithm::ES384]]));
        let mut other = rsa(256);
        other["alg"] = json!("RS512");
        assert_eq!(
            self::read(&[other.clone(), ed("a")]),
            Ok(vec![vec![Algorithm::EdDSA]]),
            "it is for another one"
        );
        assert!(self::read(&[other]).unwrap_err().contains("no key that fits"));
    }

    #[test]
    fn keys_for_something_else_are_passed_over() {
        let mut encryption = ed("b");
        encryption["use"] = json!("enc");
        let mut derivation = ed("c");
        derivation["key_ops"] = json!(["deriveKey"]);
        let others = [
            encryption,
            derivation,
            json!({"kty": "oct", "k": number(32), "kid": "d"}),
            json!({"kty": "AKP", "alg": "ML-DSA-44", "pub": "x"}),
            json!({"kty": "EC", "crv": "secp256k1", "x": number(32), "y": number(32)}),
        ];
        for other in others {
            assert_eq!(read(&[other.clone(), ed("a")]), Ok(vec![vec![Algorithm::EdDSA]]), "{other}");
            assert!(read(std::slice::from_ref(&other)).is_err(), "{other}");
        }
    }

    #[test]
    fn a_fault_of_a_key_names_the_key() {
        let private = {
            let mut key = ed("a");
            key["d"] = json!(number(32));
            key
        };
        let short = json!({"kty": "OKP", "crv": "Ed25519", "kid": "a", "x": number(31)});
        for (entry, what) in [
            (private, "keys[1]: has a private key (`d`)"),
            (short, "keys[1]: has not the length of such a key"),
            (rsa(255), "keys[1]: has not the length of such a key"),
            (rsa(1025), "keys[1]: has not the length of such a key"),
            (json!({"kty": "RSA", "n": number(256)}), "keys[1]: is no key"),
            (json!({"kty": "EC", "crv": "P-256", "x": number(32)}), "keys[1]: is no key"),
            (json!({"kty": "OKP", "crv": "Ed25519", "x": "?"}), "keys[1]: cannot be used"),
            (json!("a"), "keys[1]: is no object with a `kty`"),
            (ed("first"), "keys[1]: the id (kid) `first` is that of another key"),
        ] {
            let fault = read(&[ed("first"), entry]).unwrap_err();
            assert!(fault.starts_with(what), "{fault}");
        }
        assert!(keys(b"{", &ALL).unwrap_err().starts_with("is no JSON"));
        assert!(keys(b"[]", &ALL).unwrap_err().starts_with("must have a list `keys`"));
        let many: Vec<Value> = (0..=MAX_KEYS).map(|n| ed(&n.to_string())).collect();
        assert!(read(&many).unwrap_err().contains("has 101 keys"));
    }

    /// The faults of a file beside which `keys.json` is.
    fn faults(text: &str, mode: u32) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let jwks = folder.path().join("keys.json");
        fs::write(&jwks, json!({"keys": [ed("a")]}).to_string()).unwrap();
        fs::set_permissions(&jwks, fs::Permissions::from_mode(mode)).unwrap();
        let file = folder.path().join("auth.toml");
        let faults = AuthRules::parse(&file, text).err().unwrap_or_default();
        let place = format!("{}/", folder.path().display());
        faults.iter().map(|fault| fault.to_string().replace(&place, "")).collect()
    }

    const ISSUER: &str =
        "[[jwt]]\nissuer = \"i\"\naudience = \"locks\"\nalgorithms = \"EdDSA\"\njwks = \"keys.json\"\n";
    const PRINCIPAL: &str = "[[principal]]\nname = \"a\"\n";

    #[test]
    fn the_faults_of_an_issuer_are_reported_with_their_lines() {
        assert_eq!(faults(&format!("{ISSUER}{PRINCIPAL}"), 0o644), [""; 0]);
        let changed = |from: &str, to: &str| faults(&(ISSUER.replace(from, to) + PRINCIPAL), 0o644);
        for (from, to, what) in [
            ("issuer = \"i\"", "", "auth.toml:1: jwt[0].issuer: is missing"),
            ("audience = \"locks\"", "", "auth.toml:1: jwt[0].audience: is missing"),
            ("audience = \"locks\"", "audience = []", "auth.toml:3: jwt[0].audience: is empty"),
            ("\"EdDSA\"", "[]", "auth.toml:4: jwt[0].algorithms: is empty; must be some of RS256"),
            ("\"EdDSA\"", "\"none\"", "auth.toml:4: jwt[0].algorithms: has `none`; must be some of RS256"),
            ("\"EdDSA\"", "\"HS256\"", "auth.toml:4: jwt[0].algorithms: has `HS256`; must be some of RS256"),
            ("\"EdDSA\"", "\"RS256\"", "auth.toml:5: jwt[0].jwks: keys.json: has no key that fits"),
            ("keys.json", "no.json", "auth.toml:5: jwt[0].jwks: no.json: cannot be read"),
            ("jwks = ", "claim = \"\"\njwks = ", "auth.toml:5: jwt[0].claim: is empty"),
            ("jwks = ", "key = \"\"\njwks = ", "auth.toml:5: unknown key `jwt[0].key`"),
        ] {
            let faults = changed(from, to);
            assert!(faults.len() == 1 && faults[0].starts_with(what), "{what}: {faults:#?}");
        }
        let faults = faults(&format!("{ISSUER}{PRINCIPAL}"), 0o664);
        assert!(faults.len() == 1 && faults[0].contains("keys.json: has the mode 664"), "{faults:#?}");
    }

    #[test]
    fn a_subject_belongs_to_one_principal_and_to_a_known_issuer() {
        let second = ISSUER.replace("\"i\"", "\"j\"");
        let principal = |name: &str, jwt: &str| format!("[[principal]]\nname = \"{name}\"\njwt = [{jwt}]\n");
        let x = "{ subject = \"x\" }";
        let of = |issuer: &str| format!("{{ issuer = \"{issuer}\", subject = \"x\" }}");
        for (text, what) in [
            (ISSUER.to_owned() + &principal("a", x) + &principal("b", "{ subject = \"y\" }"), ""),
            (format!("{ISSUER}{second}{}{}", principal("a", &of("i")), principal("b", &of("j"))), ""),
            (
                principal("a", x),
                "auth.toml:3: principal[0].jwt[0]: needs an issuer of tokens, but there is no [[jwt]]",
            ),
            (
                format!("{ISSUER}{second}{}", principal("a", x)),
                "auth.toml:13: principal[0].jwt[0].issuer: is missing; must be one of `i`, `j`",
            ),
            (
                format!("{ISSUER}{}", principal("a", &of("k"))),
                "auth.toml:8: principal[0].jwt[0].issuer: is `k`, but the issuers in [[jwt]] are `i`",
            ),
            (
                format!("{ISSUER}{}", principal("a", "{}")),
                "auth.toml:8: principal[0].jwt[0].subject: is missing",
            ),
            (
                format!("{ISSUER}{}{}", principal("a", x), principal("b", &of("i"))),
                "auth.toml:9: principal[1]: the subject `x` in jwt is that of another principal",
            ),
            (
                format!("{ISSUER}{ISSUER}{PRINCIPAL}"),
                "auth.toml:7: jwt[1].issuer: `i` is that of another [[jwt]]",
            ),
        ] {
            let faults = faults(&text, 0o644);
            match what {
                "" => assert_eq!(faults, [""; 0], "{text}"),
                what => assert!(faults.len() == 1 && faults[0].starts_with(what), "{what}: {faults:#?}"),
            }
        }
    }
}

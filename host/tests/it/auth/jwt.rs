//! Signed tokens (JWT) of an issuer whose public keys are in a file (JWKS).

use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use lockkeeper::fronts::routes::Needs;
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair};

use super::*;

/// The private key of an issuer.
struct Signer {
    kid: &'static str,
    key: Ed25519KeyPair,
}

fn base64(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

impl Signer {
    fn new(kid: &'static str) -> Signer {
        let key = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        Signer { kid, key: Ed25519KeyPair::from_pkcs8(key.as_ref()).unwrap() }
    }

    fn jwk(&self) -> Value {
        json!({"kty": "OKP", "crv": "Ed25519", "kid": self.kid, "x": base64(self.key.public_key())})
    }

    fn sign(&self, claims: &Value) -> String {
        let header = json!({"alg": "EdDSA", "kid": self.kid, "typ": "JWT"});
        let message = format!("{}.{}", base64(header.to_string()), base64(claims.to_string()));
        format!("{message}.{}", base64(self.key.sign(message.as_bytes())))
    }

    fn token(&self, subject: &str) -> String {
        self.sign(&claims(subject))
    }
}

fn claims(subject: &str) -> Value {
    json!({"iss": "https://id.test", "aud": ["locks"], "sub": subject, "exp": now() + 600, "jti": format!("id-of-{subject}")})
}

fn with(subject: &str, name: &str, value: Value) -> Value {
    let mut claims = claims(subject);
    claims[name] = value;
    claims
}

/// A proxy with an issuer; `billing` has one subject, the operator another one.
async fn start(kind: Kind, signers: &[&Signer]) -> Secured {
    start_with(kind, signers, "max_refused_per_second = 0\n").await
}

/// As [`start`], with these settings of `[auth]`.
async fn start_with(kind: Kind, signers: &[&Signer], auth: &str) -> Secured {
    let secured = Secured::start(kind, &format!("{auth}[audit]\nfile = \"audit.log\"\n")).await;
    write_keys(&secured, signers);
    write(&secured.file(), &rules(&secured));
    let client = secured.proxy.client().with_token(&signers[0].token("spiffe://test/billing"));
    eventually("the issuer is known", async || client.get("/v1/locks").await.status == 200).await;
    secured
}

fn write_keys(secured: &Secured, signers: &[&Signer]) {
    let keys: Vec<Value> = signers.iter().map(|signer| signer.jwk()).collect();
    write(&secured.folder.path().join("keys.json"), &json!({ "keys": keys }).to_string());
}

fn rules(secured: &Secured) -> String {
    let subject = |name: &str, subject: &str, text: String| {
        let name = format!("name = \"{name}\"\n");
        text.replace(&name, &format!("{name}jwt = [{{ subject = \"{subject}\" }}]\n"))
    };
    let text = subject("billing", "spiffe://test/billing", secured.tokens.to_toml());
    "[[jwt]]\nissuer = \"https://id.test\"\naudience = \"locks\"\nalgorithms = [\"EdDSA\", \"ES256\"]\njwks = \"keys.json\"\n"
        .to_owned()
        + &subject("operator", "root", text)
}

fn is_unauthenticated(answer: &Response) {
    assert_eq!((answer.status, answer.slug()), (401, "unauthenticated"), "{}", answer.text);
}

on_both! {
    async fn a_signed_token_gives_the_rights_of_its_subject_and_no_others(kind: Kind) {
        let signer = Signer::new("a");
        let secured = start(kind, &[&signer]).await;
        let (api, admin) = (secured.proxy.client(), secured.proxy.admin());
        let token = signer.token("spiffe://test/billing");
        let billing = api.with_token(&token);
        let lease = billing.lease("orders/1", 60_000).await;
        assert_eq!(billing.show("orders/1").await["holders"][0]["principal"], "billing");
        is_forbidden(&billing.acquire(json!({"resource": "other/1"})).await);
        is_forbidden(&admin.with_token(&token).get("/v1/policies").await);
        // As the password of basic authentication, too.
        let basic = |user: &str| {
            let pair = base64::engine::general_purpose::STANDARD.encode(format!("{user}:{token}"));
            format!("Basic {pair}")
        };
        let by_basic = async |user| api.send_with("GET", "/v1/locks", &[("authorization", &basic(user))], "").await;
        assert_eq!(by_basic("billing").await.status, 200);
        is_unauthenticated(&by_basic("operator").await);
        let operator = admin.with_token(&signer.token("root"));
        assert_eq!(operator.send("DELETE", "/v1/locks/orders/1", "").await.status, 200);
        assert_eq!(billing.renew(&lease).await.slug(), "lost");
    }

    /// Each path of the routers' own tables.
    async fn no_path_accepts_a_token_that_is_not_valid(kind: Kind) {
        let (signer, stranger) = (Signer::new("a"), Signer::new("a"));
        let secured = start(kind, &[&signer]).await;
        let root = |name: &str, value: Value| signer.sign(&with("root", name, value));
        let unsigned = format!("{}.{}.", base64(r#"{"alg":"none"}"#), base64(claims("root").to_string()));
        let hmac = {
            let message = format!("{}.{}", base64(r#"{"alg":"HS256","kid":"a"}"#), base64(claims("root").to_string()));
            let secret = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, signer.key.public_key().as_ref());
            format!("{message}.{}", base64(ring::hmac::sign(&secret, message.as_bytes())))
        };
        let tokens = [
            ("has ended", root("exp", json!(now() - 60))),
            ("is not valid yet", root("nbf", json!(now() + 60))),
            ("has no expiry", root("exp", Value::Null)),
            ("audience", root("aud", json!("others"))),
            ("issuer", root("iss", json!("https://id.example"))),
            ("signature", stranger.token("root")),
            ("is not in the JWKS file", Signer::new("b").token("root")),
            ("no principal", signer.token("nobody")),
            ("is not a JWT", unsigned),
            ("algorithm", hmac),
        ];
        let (api, admin) = (secured.proxy.client(), secured.proxy.admin());
        let of_api = api::ROUTES.iter().map(|route| (&api, route.methods, route.path, route.needs));
        let of_admin = admin::ROUTES.iter().map(|route| (&admin, route.methods, route.path, route.needs));
        for (listener, methods, path, _) in of_api.chain(of_admin).filter(|(.., needs)| *needs != Needs::Nothing) {
            let method = methods.allow().split(',').next().unwrap();
            let path = path.replace("{name...}", "orders/1").replace("{key...}", "orders/1").replace("{name}", "default");
            for (_, token) in &tokens {
                is_unauthenticated(&listener.with_token(token).send(method, &path, "").await);
            }
        }
        // The client is not told what is wrong; the operator is.
        let audit = std::fs::read_to_string(secured.proxy.config_file().with_file_name("audit.log.refusals")).unwrap();
        for (what, token) in &tokens {
            let answer = api.with_token(token).get("/v1/locks").await;
            assert!(answer.text.contains("the token is not valid") || *what == "has ended", "{}", answer.text);
            assert!(audit.contains(what), "{what}: {audit}");
            assert!(!audit.contains(token.as_str()) && !secured.proxy.log().contains(token.as_str()));
        }
    }

    /// To verify a signature costs time, so an address that guesses is served only with signed tokens that were valid before.
    async fn an_address_that_guesses_is_refused_new_signed_tokens_and_no_known_ones(kind: Kind) {
        let signer = Signer::new("a");
        let secured = start_with(kind, &[&signer], "max_refused_per_second = 2\n").await;
        let known = secured.proxy.client().with_token(&signer.token("spiffe://test/billing"));
        assert_eq!(known.get("/v1/locks").await.status, 200);
        // Each token is another one.
        let ask = async |subject: &str, n: usize| {
            let token = signer.sign(&with(subject, "jti", json!(format!("{subject}-{n}"))));
            secured.proxy.client().with_token(&token).get("/v1/locks").await.status
        };
        // A machine that is busy may have no more guesses in a second than the limit allows: then they go on.
        let (mut guessed, mut signed, mut round) = (Vec::new(), Vec::new(), 0);
        eventually("an address that guesses is refused, also with tokens that are new and valid", async || {
            let batch = round * 20..(round + 1) * 20;
            round += 1;
            let guesses = futures_util::future::join_all(batch.clone().map(|n| ask("nobody", n)));
            let valid = futures_util::future::join_all(batch.map(|n| ask("root", n)));
            let again = futures_util::future::join_all((0..5).map(|_| known.get("/v1/locks")));
            let (guesses, valid, again) = tokio::join!(guesses, valid, again);
            assert!(again.iter().all(|answer| answer.status == 200), "a token that was valid before is refused");
            guessed.extend(guesses);
            signed.extend(valid);
            guessed.contains(&429) && signed.contains(&429)
        })
        .await;
        assert!(guessed.contains(&401) && guessed.iter().all(|status| [401, 429].contains(status)), "{guessed:?}");
        assert!(signed.iter().all(|status| [200, 429].contains(status)), "{signed:?}");
        eventually("another client is served in its turn", async || ask("root", usize::MAX).await == 200).await;
    }

    async fn a_removed_key_ends_streams_and_a_broken_file_of_keys_changes_nothing(kind: Kind) {
        let (old, new) = (Signer::new("old"), Signer::new("new"));
        let secured = start(kind, &[&old]).await;
        let billing = secured.proxy.client().with_token(&old.token("spiffe://test/billing"));
        let (mut held, _) = billing.hold(&json!({"resource": "orders/1", "ttl_ms": 60_000})).await;
        let keys = secured.folder.path().join("keys.json");
        write(&keys, "{\"keys\": [");
        let ready = async || secured.proxy.admin().get("/ready").await;
        eventually("the fault is reported", async || ready().await.text.contains("file of principals")).await;
        assert!(secured.proxy.log().contains("keys.json: is no JSON"), "{}", secured.proxy.log());
        assert_eq!(billing.get("/v1/locks").await.status, 200);
        // The issuer changes its key: for a while, both are there.
        write_keys(&secured, &[&old, &new]);
        let next = secured.proxy.client().with_token(&new.token("spiffe://test/billing"));
        eventually("the new key is used", async || next.get("/v1/locks").await.status == 200).await;
        assert_eq!(billing.get("/v1/locks").await.status, 200);
        eventually("the fault is gone", async || !ready().await.text.contains("file of principals")).await;
        write_keys(&secured, &[&new]);
        let lost = held.json().await.expect("a last line");
        assert_eq!(lost["event"], "lost", "{lost}");
        is_unauthenticated(&billing.get("/v1/locks").await);
        assert_eq!(next.get("/v1/locks").await.status, 200);
    }

    async fn the_end_of_a_token_ends_streams_and_waiters(kind: Kind) {
        let signer = Signer::new("a");
        let secured = start(kind, &[&signer]).await;
        // Ten seconds are allowed for clocks that differ.
        let token = signer.sign(&with("spiffe://test/billing", "exp", json!(now() - 2)));
        let billing = secured.proxy.client().with_token(&token);
        let (mut held, _) = billing.hold(&json!({"resource": "orders/1", "ttl_ms": 60_000})).await;
        let waiter = billing.clone();
        let waiting = tokio::spawn(async move {
            waiter.acquire(json!({"resource": "orders/1", "wait_ms": 600_000})).await
        });
        let lost = held.json().await.expect("a last line");
        assert_eq!(lost["event"], "lost", "{lost}");
        is_forbidden(&waiting.await.unwrap());
        is_unauthenticated(&billing.get("/v1/locks").await);
    }
}

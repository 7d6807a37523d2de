//! The cost of knowing who asks: the look-up of a principal and its rights, and TLS with a token against plain HTTP
//! without one.

use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use serde_json::json;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring};

use lockkeeper::auth::{Auth, Credentials, NewToken, new_token};
use lockkeeper::config::{AuthRules, PrincipalConfig, Role, Rule, Verb, Wildcard};

use crate::cycles::{Clients, proxy_round};
use crate::direct;
use crate::http::Client;
use crate::report::{Report, Row};
use crate::rounds::{CLIENTS, Rates, Target};
use crate::stats::{median, percentile};
use crate::world::World;

const PRINCIPALS: usize = 1_000;
const RULES: usize = 10;
const CALLS: usize = 50_000;
const TARGET_US: f64 = 2.0;
const ENCRYPTED: Target =
    Target { text: "≥ 0.8 times plain", times: 0.8, ours: "TLS and token", theirs: "plain" };

/// Measures the look-up: what a request costs before its policy is asked.
pub fn rights(report: &mut Report) -> Result<()> {
    let tokens: Vec<NewToken> = (0..PRINCIPALS).map(|_| new_token()).collect();
    let auth = Auth::new(&rules(&tokens));
    let mut took = Vec::with_capacity(CALLS);
    for call in 0..CALLS {
        let principal = call % PRINCIPALS;
        let resource = format!("p{principal}/rule{}/42", RULES - 1);
        let begun = Instant::now();
        let identity = auth.identify(Credentials::Token(&tokens[principal].token))?.context("an identity")?;
        let may = identity.may_somewhere(Verb::Acquire)
            && identity.may(Verb::Acquire, black_box(&resource))
            && identity.may(Verb::Acquire, black_box(&resource));
        took.push(begun.elapsed());
        anyhow::ensure!(may, "the last rule allows it");
    }
    let us = |duration: Duration| duration.as_nanos() as f64 / 1_000.0;
    let (median, p99) = (us(median(&took)), us(percentile(&took, 0.99)));
    report.add(Row {
        name: "1,000 principals with 10 rules each: token and rights of a request",
        target: "median ≤ 2 µs",
        figure: format!("{median:.2} µs"),
        note: format!("99th percentile {p99:.2} µs over {CALLS} requests"),
        met: Some(median <= TARGET_US),
        details: json!({ "median_us": median, "p99_us": p99, "requests": CALLS }),
    });
    Ok(())
}

/// Each principal has a role of ten rules, of which the last one allows what the bench asks for.
fn rules(tokens: &[NewToken]) -> AuthRules {
    let mut rules = AuthRules::default();
    for (n, token) in tokens.iter().enumerate() {
        let rule = |k: usize| Rule {
            verbs: vec![Verb::Acquire, Verb::Read],
            on: Wildcard::new(format!("p{n}/rule{k}/*")),
        };
        rules.roles.insert(format!("r{n}"), Role { allow: (0..RULES).map(rule).collect(), deny: Vec::new() });
        rules.principals.push(PrincipalConfig {
            name: format!("p{n}"),
            tokens: vec![token.config()],
            roles: vec![format!("r{n}")],
            ..PrincipalConfig::default()
        });
    }
    rules
}

/// Measures the cycles of 64 clients with their own keys, over TLS with a token, and without either.
pub async fn encrypted(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let (rounds, length) = if quick { (2, 1) } else { (5, 4) };
    let length = Duration::from_secs(length);
    let folder = world.dir().join("certificates");
    fs::create_dir_all(&folder)?;
    let token = new_token();
    let tls = prepare(&folder, &token)?;
    let show = |name: &str| folder.join(name).display().to_string();
    let more = format!(
        "[api.tls]\ncert = \"{}\"\nkey = \"{}\"\n[auth]\nfile = \"{}\"\n",
        show("cert.pem"),
        show("key.pem"),
        show("auth.toml")
    );
    let proxy = world.another_proxy("encrypted", &more).await?;
    let keys: Vec<String> = (0..CLIENTS).map(|client| format!("bench/encrypted/{client}")).collect();
    direct::prepare(world.url(), &keys).await?;
    let (mut plain, mut encrypted): (Clients, Clients) = (Vec::new(), Vec::new());
    for key in keys {
        plain.push((Client::connect(world.api()).await?, key.clone()));
        let name = ServerName::try_from("localhost")?;
        encrypted.push((Client::encrypted(proxy.api(), name, tls.clone(), &token.token).await?, key));
    }
    let warm = Duration::from_millis(500);
    (plain, _) = proxy_round(plain, warm).await?;
    (encrypted, _) = proxy_round(encrypted, warm).await?;
    let run = async |clients| proxy_round(clients, length).await;
    let rates = Rates::measure(rounds, plain, run, encrypted, run).await?;
    report.add(rates.row("64 clients, own keys: over TLS with a token", &ENCRYPTED));
    Ok(())
}

/// Writes the proxy's certificate and the file of principals. Returns the settings of the clients.
fn prepare(folder: &Path, token: &NewToken) -> Result<Arc<ClientConfig>> {
    use std::os::unix::fs::PermissionsExt;
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".to_owned()])?;
    fs::write(folder.join("cert.pem"), cert.pem())?;
    fs::write(folder.join("key.pem"), signing_key.serialize_pem())?;
    let auth = folder.join("auth.toml");
    let text = format!(
        "[[principal]]\nname = \"bench\"\nroles = [\"all\"]\ntokens = [{{ id = \"{}\", sha256 = \"{}\" }}]\n\
         [roles.all]\nallow = [{{ do = \"*\" }}]\n",
        token.id, token.sha256
    );
    fs::write(&auth, text)?;
    fs::set_permissions(&auth, fs::Permissions::from_mode(0o600))?;
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(cert.pem().as_bytes())?)?;
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config))
}

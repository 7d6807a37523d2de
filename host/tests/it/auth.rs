//! Who may do what: each client gets what the rules give it, and nothing else.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use lockkeeper::auth::{NewToken, new_token};
use lockkeeper::{admin, api};
use serde_json::{Value, json};

use crate::harness::{
    Client, Kind, Proxy, Response, Settings, database, eventually, folder, fresh, lockkeeper,
};

mod abuse;
mod agreement;
mod audit;
pub(crate) mod authority;
mod command_line;
mod company;
mod encrypted;
mod jwt;
mod limits;
mod rules;
mod sockets;
mod store;

/// A store, a proxy that asks for tokens, and a token for each of its principals.
struct Secured {
    proxy: Proxy,
    settings: Settings,
    folder: tempfile::TempDir,
    tokens: Tokens,
}

struct Tokens {
    /// May do everything with orders.
    billing: NewToken,
    /// May do the same.
    shipping: NewToken,
    /// May do everything with the resources of another tenant.
    other: NewToken,
    /// A token of `billing` that has ended.
    ended: NewToken,
    /// May do everything.
    operator: NewToken,
    /// May read who holds orders, but no values.
    auditor: NewToken,
}

const ROLES: &str = r#"
[roles.orders]
allow = [{ do = ["acquire", "read", "read-value", "watch"], on = "orders/*" }]
deny = [{ do = "*", on = "orders/secret*" }]
[roles.other]
allow = [{ do = ["acquire", "read", "read-value", "watch", "force"], on = "other/*" }, { do = ["policy.push", "policy.rollback"], on = "other" }]
[roles.auditor]
allow = [{ do = ["read", "watch"], on = "orders/*" }]
[roles.operator]
allow = [{ do = "*" }]
"#;

impl Tokens {
    fn new() -> Tokens {
        Tokens {
            billing: new_token(),
            shipping: new_token(),
            other: new_token(),
            ended: new_token(),
            operator: new_token(),
            auditor: new_token(),
        }
    }

    fn to_toml(&self) -> String {
        let token = |token: &NewToken, more: &str| {
            format!("{{ id = \"{}\", sha256 = \"{}\"{more} }}", token.id, token.sha256)
        };
        let principal = |name: &str, role: &str, tokens: String| {
            format!("[[principal]]\nname = \"{name}\"\nroles = [\"{role}\"]\ntokens = [{tokens}]\n")
        };
        let billing = token(&self.billing, "") + ", " + &token(&self.ended, ", until = \"2020-01-01\"");
        [
            principal("billing", "orders", billing),
            principal("shipping", "orders", token(&self.shipping, "")),
            principal("other", "other", token(&self.other, "")),
            principal("operator", "operator", token(&self.operator, "")),
            principal("auditor", "auditor", token(&self.auditor, "")),
        ]
        .concat()
            + ROLES
    }
}

fn write(path: &Path, text: &str) {
    // In one step, as a deployment does it.
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::rename(&new, path).unwrap();
}

impl Secured {
    async fn start(kind: Kind, sections: &str) -> Secured {
        let (folder, tokens) = (folder(), Tokens::new());
        let file = folder.path().join("auth.toml");
        write(&file, &tokens.to_toml());
        let sections = format!("[auth]\nfile = \"{}\"\n{sections}", file.display());
        let url = database(kind).await;
        let settings = Settings { url, sections, ..Settings::default() };
        let proxy = Proxy::with(settings.clone()).await;
        proxy.until_ready().await;
        Secured { proxy, settings, folder, tokens }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("auth.toml")
    }

    /// Gives `billing` these limits.
    async fn limit(&self, limits: &str) {
        let name = "name = \"billing\"\n";
        let limited = format!("{name}limits = {{ {limits} }}\n");
        self.replace(&self.tokens.to_toml().replace(name, &limited)).await;
    }

    /// Replaces the file of principals, and waits until the proxy has applied it.
    async fn replace(&self, text: &str) {
        let times = || self.proxy.log().matches("the principals were replaced").count();
        let before = times();
        write(&self.file(), text);
        eventually("the file is applied", async || times() > before).await;
    }

    fn client(&self, token: &NewToken) -> Client {
        self.proxy.client().with_token(&token.token)
    }

    fn billing(&self) -> Client {
        self.client(&self.tokens.billing)
    }

    fn shipping(&self) -> Client {
        self.client(&self.tokens.shipping)
    }
}

/// Whether the metrics show trouble with a subject.
async fn trouble(secured: &Secured, about: &str) -> f64 {
    let operator = secured.proxy.admin().with_token(&secured.tokens.operator.token);
    let metrics = operator.get("/metrics").await.text;
    let line = metrics
        .lines()
        .find_map(|line| line.strip_prefix(&format!("lockkeeper_trouble{{about=\"{about}\"}} ")));
    line.map_or(0.0, |value| value.parse().expect("a number"))
}

/// Runs a command to its end. Returns its exit code and what it wrote.
async fn output(mut command: Command) -> (Option<i32>, String) {
    ending(tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap())
}

/// The exit code of a command that has ended, and what it wrote.
fn ending(Output { status, stdout, stderr }: Output) -> (Option<i32>, String) {
    let text = String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr);
    (status.code(), text)
}

fn is_forbidden(answer: &Response) {
    assert_eq!((answer.status, answer.slug()), (403, "forbidden"), "{}", answer.text);
}

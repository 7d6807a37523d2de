//! Policies in the running proxy: replaced under load, refused, failing, rolled back.

use std::path::Path;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use crate::harness::{Client, Kind, Proxy, Response, Settings, database, eventually, folder};

pub(crate) mod command_line;
mod compiling;
mod faults;
mod languages;
mod naming;
mod order;
mod published;
mod refused;
mod reload;
mod replaying;
mod scenarios;
mod tokens;
mod trying;

/// Names its keys `x/` and the resource, or `x/` and the value of the label `pool`.
pub(crate) static RENAMED: LazyLock<Vec<u8>> = LazyLock::new(|| guest("renamed"));
/// Misbehaves as the name of the resource or key says.
pub(crate) static BAD: LazyLock<Vec<u8>> = LazyLock::new(|| guest("bad"));
/// Makes a key for each of the `items` in the query of a guarded request.
pub(crate) static BASKET: LazyLock<Vec<u8>> = LazyLock::new(|| guest("basket"));
/// The example of a policy for guarded routes.
pub(crate) static ORDERS: LazyLock<Vec<u8>> = LazyLock::new(|| built("../examples/orders-policy"));

/// The example of a policy that keeps tenants apart.
static TENANT: LazyLock<Vec<u8>> = LazyLock::new(|| built("../examples/tenant-policy"));

fn guest(name: &str) -> Vec<u8> {
    built(&format!("tests/guests/{name}"))
}

/// Builds the crate in this folder of the package.
fn built(folder: &str) -> Vec<u8> {
    let host = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (dir, target) = (host.join(folder), host.join("../target/policies"));
    lockkeeper_builder::build(&dir, Some(&target)).expect("the guest builds")
}

/// The component of the default policy.
pub(crate) fn default_policy() -> &'static [u8] {
    lockkeeper::policy::builtin("default").expect("it is built in")
}

/// The same policy with another digest, because of an additional custom section that nothing reads.
pub(crate) fn variant(component: &[u8], number: u8) -> Vec<u8> {
    [component, &[0, 3, 1, b'v', number]].concat()
}

/// A proxy whose default policy is in a file.
struct Deployment {
    proxy: Proxy,
    url: String,
    dir: TempDir,
}

impl Deployment {
    async fn start(kind: Kind, component: &[u8]) -> Deployment {
        Deployment::with(kind, component, "").await
    }

    /// `more` is appended to config.toml, after `[policies.default]`.
    async fn with(kind: Kind, component: &[u8], more: &str) -> Deployment {
        // Compiled before a test begins: that may take longer than the test's time-outs.
        for guest in [&RENAMED, &BAD] {
            LazyLock::force(guest);
        }
        let (url, dir) = (database(kind).await, folder());
        deploy(dir.path(), component);
        let proxy = start(&url, dir.path(), more).await;
        Deployment { proxy, url, dir }
    }

    /// Replaces the policy's file, as a deployment would.
    fn deploy(&self, component: &[u8]) {
        deploy(self.dir.path(), component);
    }

    /// Stops the proxy and starts another one on the same database with the same policy file.
    async fn restart(self) -> Deployment {
        let Deployment { proxy, url, dir } = self;
        drop(proxy);
        let proxy = start(&url, dir.path(), "").await;
        Deployment { proxy, url, dir }
    }

    /// Pushes a component, which must be accepted.
    async fn push(&self, component: &[u8]) -> Value {
        push(&self.proxy, "default", component).await
    }

    /// The status of the default policy.
    async fn status(&self) -> Value {
        status(&self.proxy, "default").await
    }
}

async fn start(url: &str, dir: &Path, more: &str) -> Proxy {
    let file = dir.join("policy.wasm");
    let sections = format!("[policies.default]\npath = \"{}\"\n{more}\n", file.display());
    let settings = Settings { url: url.to_owned(), sections, ..Settings::default() };
    let proxy = Proxy::with(settings).await;
    proxy.until_ready().await;
    proxy
}

fn deploy(dir: &Path, component: &[u8]) {
    let new = dir.join("policy.new");
    std::fs::write(&new, component).expect("a file of our own");
    std::fs::rename(new, dir.join("policy.wasm")).expect("a file of our own");
}

async fn push(proxy: &Proxy, name: &str, component: &[u8]) -> Value {
    let path = format!("/v1/policies/{name}");
    let pushed = proxy.admin().send("PUT", &path, component.to_vec()).await;
    assert_eq!(pushed.status, 200, "{}", pushed.text);
    pushed.json
}

/// The status of a policy.
pub(crate) async fn status(proxy: &Proxy, name: &str) -> Value {
    let answer = proxy.admin().get("/v1/policies").await.json;
    let policies = answer["policies"].as_array().expect("a list");
    policies.iter().find(|policy| policy["name"] == name).expect(name).clone()
}

/// The view of a lock; `Null` if nothing is known.
async fn shown(client: &Client, name: &str) -> Value {
    let answer = client.get(&format!("/v1/locks/{name}")).await;
    if answer.status == 404 { Value::Null } else { answer.json }
}

/// The owners of the waiters, in the order of the queue.
async fn queue(client: &Client, name: &str) -> Vec<String> {
    owners(&shown(client, name).await["queue"])
}

fn owners(list: &Value) -> Vec<String> {
    let owner = |entry: &Value| entry["owner"].as_str().expect("an owner").to_owned();
    list.as_array().into_iter().flatten().map(owner).collect()
}

/// An acquire that waits for its lock.
fn waiting(client: &Client, body: Value) -> JoinHandle<Response> {
    let client = client.clone();
    tokio::spawn(async move { client.acquire(body).await })
}

/// Waiters for one resource, with the owners `{prefix}0`, `{prefix}1`, … in the order of the queue.
async fn line_up(client: &Client, resource: &str, prefix: &str, count: usize) -> Vec<JoinHandle<Response>> {
    let before = queue(client, resource).await.len();
    let mut waiters = Vec::new();
    for n in 0..count {
        let body = json!({
            "resource": resource, "owner": format!("{prefix}{n}"), "wait_ms": 60_000, "ttl_ms": 20_000,
        });
        waiters.push(waiting(client, body));
        eventually("the waiter queues", async || queue(client, resource).await.len() == before + n + 1).await;
    }
    waiters
}

async fn granted(waiter: JoinHandle<Response>) -> Value {
    let answer = waiter.await.expect("the waiter ends");
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json
}

/// The keys of a lease.
pub(crate) fn keys(lease: &Value) -> Vec<&str> {
    lease["keys"].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

async fn released(client: &Client, lease: &Value) {
    let answer = client.release(lease).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
}

async fn pause_ms(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

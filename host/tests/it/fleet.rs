//! Several proxies on one store: they use one set of policies, and there are never two holders.

use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use crate::harness::{Client, Kind, Proxy, Response, Settings, database, eventually, folder};
use crate::policies::{RENAMED, default_policy, keys, status, variant};

mod canary;
mod changes;
mod load;
mod members;
mod notifications;
mod pending;
mod relapse;
mod renaming;
mod sessions;
mod shadow;
mod signing;
mod writes;

/// The heartbeat interval. A silent proxy counts as gone after fifteen heartbeats.
const BEAT_MS: u64 = 250;

/// Proxies on one database, each with its own policy file.
struct Fleet {
    url: String,
    proxies: Vec<Proxy>,
    dirs: Vec<TempDir>,
}

impl Fleet {
    async fn start(kind: Kind, count: usize, component: &[u8]) -> Fleet {
        Fleet::start_with_beat(kind, count, component, BEAT_MS).await
    }

    async fn start_with_beat(kind: Kind, count: usize, component: &[u8], beat_ms: u64) -> Fleet {
        // Compiled before a test begins: that may take longer than the test's time-outs.
        LazyLock::force(&RENAMED);
        let mut fleet = Fleet { url: database(kind).await, proxies: Vec::new(), dirs: Vec::new() };
        for _ in 0..count {
            fleet.add_with_beat(component, "", beat_ms).await;
        }
        fleet.until_members(count).await;
        fleet
    }

    /// Adds a proxy whose file has this component; `more` is appended to its config.toml.
    async fn add(&mut self, component: &[u8], more: &str) -> &Proxy {
        self.add_with_beat(component, more, BEAT_MS).await
    }

    /// Adds a proxy with its own heartbeat interval, so that other proxies wait accordingly when it falls silent.
    async fn add_with_beat(&mut self, component: &[u8], more: &str, beat_ms: u64) -> &Proxy {
        let dir = folder();
        let proxy = start_with_beat(&self.url, dir.path(), component, more, beat_ms).await;
        proxy.until_ready().await;
        self.proxies.push(proxy);
        self.dirs.push(dir);
        self.proxies.last().expect("it was added")
    }

    async fn until_members(&self, count: usize) {
        for proxy in &self.proxies {
            until_members(proxy, count).await;
        }
    }

    /// Waits until each of these proxies uses this component and no other.
    async fn until_settled(&self, which: &[usize], digest: &Value) {
        for at in which {
            eventually("the proxy goes by the new policy", async || {
                let policy = status(&self.proxies[*at], "default").await;
                policy["digest"] == *digest && policy["fleet"]["phase"] == "settled"
            })
            .await;
        }
    }
}

async fn start(url: &str, dir: &Path, component: &[u8], more: &str) -> Proxy {
    start_with_beat(url, dir, component, more, BEAT_MS).await
}

async fn start_with_beat(url: &str, dir: &Path, component: &[u8], more: &str, beat_ms: u64) -> Proxy {
    let file = dir.join("policy.wasm");
    std::fs::write(&file, component).unwrap();
    let path = file.display();
    let sections = format!("[fleet]\nbeat_ms = {beat_ms}\n[policies.default]\npath = \"{path}\"\n{more}\n");
    Proxy::with(Settings { url: url.to_owned(), sections, ..Settings::default() }).await
}

async fn until_members(proxy: &Proxy, count: usize) {
    eventually(&format!("there are {count} proxies"), async || members(proxy).await.len() == count).await;
}

/// The proxies in `GET /v1/fleet` that may grant.
async fn members(proxy: &Proxy) -> Vec<Value> {
    let fleet = proxy.admin().get("/v1/fleet").await.json;
    let members = fleet["members"].as_array().cloned().unwrap_or_default();
    members.into_iter().filter(|member| member["state"] != "joining").collect()
}

/// Starts a push.
fn pushing(proxy: &Proxy, component: &[u8]) -> JoinHandle<Option<Response>> {
    let (admin, component) = (proxy.admin(), component.to_vec());
    tokio::spawn(async move { admin.try_send("PUT", "/v1/policies/default", component).await })
}

async fn pushed(proxy: &Proxy, component: &[u8]) -> Value {
    let answer = pushing(proxy, component).await.unwrap().expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json
}

async fn phase(proxy: &Proxy) -> Value {
    status(proxy, "default").await["fleet"]["phase"].clone()
}

/// The live policies of the proxies, identified by the keys that they give the resource.
async fn named(client: &Client, resource: &str) -> Value {
    let lease = client.lease(resource, 5_000).await;
    let named = json!(keys(&lease));
    assert_eq!(client.release(&lease).await.status, 200);
    named
}

async fn pause_ms(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

fn waiting(client: &Client, body: Value) -> JoinHandle<Response> {
    let client = client.clone();
    tokio::spawn(async move { client.acquire(body).await })
}

fn stop(proxy: &Proxy) {
    proxy.signal(Signal::STOP);
}

fn go_on(proxy: &Proxy) {
    proxy.signal(Signal::CONT);
}

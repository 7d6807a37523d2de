//! Guarded routes: neither the clients nor the application know of locks.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::harness::{Client, Kind, Proxy, Raw, Response, Settings, Upstream, database, eventually, parsed};

mod faults;
mod kept;
mod limits;
mod once;
mod plans;
mod policies;
mod proxying;
mod reload;
mod renaming;
mod tls;

/// A proxy in front of an application. In `config`, `GOOD` and `BAD` stand for the application's addresses.
struct Guarded {
    upstream: Upstream,
    proxy: Proxy,
}

/// The beginning of every configuration here.
const LISTEN: &str = "[[guard]]\nlisten = \"127.0.0.1:0\"\n";

impl Guarded {
    async fn start(kind: Kind, config: &str) -> Guarded {
        Guarded::on(&database(kind).await, config).await
    }

    async fn on(url: &str, config: &str) -> Guarded {
        let upstream = Upstream::start().await;
        let proxy = before(&upstream, url, config).await;
        Guarded { upstream, proxy }
    }

    fn client(&self) -> Client {
        self.proxy.guarded()
    }

    /// Sends a request in its own task.
    fn send(
        &self,
        method: &'static str,
        path: &'static str,
        headers: &'static [(&str, &str)],
    ) -> JoinHandle<Response> {
        let client = self.client();
        tokio::spawn(async move { client.send_with(method, path, headers, "").await })
    }

    /// Waits until the application has received `count` requests for a path.
    async fn until_served(&self, path: &str, count: u64) {
        eventually(&format!("{path} is asked for"), async || self.upstream.served(path).await >= count).await;
    }

    async fn outcomes(&self, outcome: &str) -> f64 {
        self.proxy.metric("lockkeeper_guard_requests_total", &[&format!("\"{outcome}\"")]).await
    }
}

async fn before(upstream: &Upstream, url: &str, config: &str) -> Proxy {
    let proxy = Proxy::with(Settings {
        url: url.to_owned(),
        sections: named(upstream, config),
        ..Settings::default()
    });
    let proxy = proxy.await;
    proxy.until_ready().await;
    proxy
}

fn named(upstream: &Upstream, config: &str) -> String {
    let (good, bad) = (format!("http://{}", upstream.good), format!("http://{}", upstream.bad));
    config.replace("GOOD", &good).replace("BAD", &bad)
}

/// A route that locks the path; `more` has further keys.
fn route(path: &str, more: &str) -> String {
    format!(
        "[[guard.routes]]\nmatch = {{ path = \"{path}\" }}\nupstream = \"GOOD\"\npolicy = \"default\"\n{more}\n"
    )
}

//! The lock systems that people use, each as a policy: what they do, and what they get wrong and the
//! proxy does not. `policies/README.md` says which settings make the proxy behave as which of them; the
//! tests of row S7 there are those with S7 in their names.

#![allow(non_snake_case)]

use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::{Client, Proxy, Settings, database, eventually, folder, own_server, sql};

mod examples;
mod failover;
mod fleets;
mod leases;
mod operations;
mod sessions;
mod values;

/// A proxy whose default policy has these settings.
async fn proxy(url: &str, policy: &str, settings: &str) -> Proxy {
    let sections =
        format!("[policies.default]\npath = \"builtin:{policy}\"\n[policies.default.settings]\n{settings}\n");
    Proxy::with(Settings { url: url.to_owned(), sections, ..Settings::default() }).await
}

/// Sections for a proxy that passes requests on to an application, under a policy of these settings; `more`
/// goes into every route.
fn guarded(policy: &str, upstreams: &[(&str, std::net::SocketAddr)], more: &str) -> String {
    let mut sections = format!("[policies.default]\n{policy}\n[[guard]]\nlisten = \"127.0.0.1:0\"\n");
    for (path, upstream) in upstreams {
        sections += &format!(
            "[[guard.routes]]\nmatch = {{ path = \"{path}\" }}\nupstream = \"http://{upstream}\"\n\
             policy = \"default\"\n{more}\n"
        );
    }
    sections
}

/// Waiters that are let in one after the other: enough of them that a herd is told from polls.
const CROWD: usize = 24;

/// What the proxy has asked of its store, polls and all.
async fn operations(proxy: &Proxy) -> f64 {
    proxy.metric("lockkeeper_store_batch_operations_sum", &[]).await
}

/// Fails where more than the next of [`CROWD`] waiters asked after each release: all of them would come to
/// 300 claims. A release and a claim are one handoff, and who is next polls until then: twice in the first
/// 70 ms or so, and more and more rarely after that.
fn assert_no_herd(operations: f64, took: Duration) {
    let handoffs = CROWD as f64;
    let most = handoffs * (2.0 + 2.0) + took.as_secs_f64() * 20.0;
    assert!(operations >= 2.0 * handoffs, "{operations} operations are not all that there were");
    assert!(operations <= most, "{operations} operations for {handoffs} handoffs within {took:?}");
}

/// How long the policy has had those who wait for a key sleep, of the decisions that are kept.
async fn sleeps_ms(client: &Client, key: &str) -> Vec<u64> {
    let shown = client.show(key).await;
    let decisions = shown["decisions"].as_array().expect("decisions").iter();
    let sleep = |decision: &Value| {
        let what = decision["what"].as_str()?.strip_prefix("ask again after ")?;
        what.strip_suffix(" ms")?.parse().ok()
    };
    decisions.filter_map(sleep).collect()
}

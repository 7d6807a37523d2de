//! Well-known lock systems, each as a policy: what they do, and the mistakes that they make and the proxy does not.
//! `policies/README.md` lists the settings for each of them. The tests of its row S7 have S7 in their names.

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

/// A proxy with these settings of the default policy.
async fn proxy(url: &str, policy: &str, settings: &str) -> Proxy {
    let sections =
        format!("[policies.default]\npath = \"builtin:{policy}\"\n[policies.default.settings]\n{settings}\n");
    Proxy::with(Settings { url: url.to_owned(), sections, ..Settings::default() }).await
}

/// Sections for a proxy that passes requests on to an application, under a policy with these settings; `more` is
/// added to every route.
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

/// The number of waiters that are served one after another. It is large enough to tell a herd from polls.
const CROWD: usize = 24;

/// The number of operations that the proxy has sent to its store, including polls.
async fn operations(proxy: &Proxy) -> f64 {
    proxy.metric("lockkeeper_store_batch_operations_sum", &[]).await
}

/// Fails if more waiters than the next one of [`CROWD`] asked after each release: a herd would make 300 claims. A
/// release and the next claim are one handoff. Until then the next waiter polls: about twice in the first 70 ms, and
/// then at growing intervals.
fn assert_no_herd(operations: f64, took: Duration) {
    let handoffs = CROWD as f64;
    let most = handoffs * (2.0 + 2.0) + took.as_secs_f64() * 20.0;
    assert!(operations >= 2.0 * handoffs, "{operations} operations are not all that there were");
    assert!(operations <= most, "{operations} operations for {handoffs} handoffs within {took:?}");
}

/// The sleeps that the policy has ordered for waiters of a key, from the decisions that are kept.
async fn sleeps_ms(client: &Client, key: &str) -> Vec<u64> {
    let shown = client.show(key).await;
    let decisions = shown["decisions"].as_array().expect("decisions").iter();
    let sleep = |decision: &Value| {
        let what = decision["what"].as_str()?.strip_prefix("ask again after ")?;
        what.strip_suffix(" ms")?.parse().ok()
    };
    decisions.filter_map(sleep).collect()
}

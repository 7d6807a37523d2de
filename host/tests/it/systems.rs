//! The lock systems that people use, each as a policy: what they do, and what they get wrong and the
//! proxy does not. `policies/README.md` says which settings make the proxy behave as which of them; the
//! tests of row S7 there are those with S7 in their names.

#![allow(non_snake_case)]

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

//! What the proxies of a run are configured with.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::Duration;

use super::super::faults::{BACKOFF, ORDERED, Settings, polling};
use super::super::options::{Options, POLICIES};
use super::TIMEOUT_MS;
use crate::config::{
    EngineLimits, Limits, PolicyConfig, PolicySigners, PolicySource, PushGuard, Route as PolicyRoute,
    SettingPlaces, StoreConfig, Wildcard,
};
use crate::policy::{Compiler, Engine, Policies};
use crate::telemetry::Metrics;

/// Settings that were edited in the files of proxies, by policy.
pub type Edited = BTreeMap<&'static str, Settings>;

/// The policies of a proxy that starts.
pub fn policies(limits: &Limits, options: &Options, edited: &Edited) -> Policies {
    // All runs share an engine, because it caches compiled components.
    static ENGINE: OnceLock<(Engine, Policies)> = OnceLock::new();
    let (engine, _) = ENGINE.get_or_init(|| {
        let of_engine =
            EngineLimits { instances: 4, time: Duration::from_secs(60), ..EngineLimits::default() };
        let engine =
            Engine::new(&of_engine, Compiler::InProcess).unwrap_or_else(|error| panic!("no engine: {error}"));
        let loaded = load(&engine, limits, options, edited);
        (engine, loaded)
    });
    load(engine, limits, options, edited)
}

fn load(engine: &Engine, limits: &Limits, options: &Options, edited: &Edited) -> Policies {
    let policy = |name: &&'static str| PolicyConfig {
        name: (*name).to_owned(),
        source: PolicySource::Builtin(if *name == BACKOFF { BACKOFF } else { "default" }.to_owned()),
        guard: PushGuard::default(),
        signers: PolicySigners::default(),
        setting_places: SettingPlaces::default(),
        settings: match *name {
            BACKOFF => polling(),
            name if edited.contains_key(name) => edited[name].table(),
            name => {
                let (global_order, delegate) = (options.in_order && name == ORDERED, options.delegate);
                Settings { global_order, delegate, ..Settings::of(name) }.table()
            }
        },
    };
    let configs: Vec<PolicyConfig> = POLICIES.iter().map(policy).collect();
    let loaded = Policies::load(engine, &configs, limits, &Metrics::default());
    loaded.unwrap_or_else(|error| panic!("{error:?}"))
}

/// Which policy decides about which resource.
pub fn routes() -> Vec<PolicyRoute> {
    let route = |name: &&str| PolicyRoute {
        resource: Wildcard::new(format!("{name}/*")),
        policy: (*name).to_owned(),
    };
    POLICIES.iter().map(route).collect()
}

/// The settings of the stores.
pub fn store_config() -> StoreConfig {
    StoreConfig {
        lanes: 2,
        renewal_lanes: 1,
        timeout: Duration::from_millis(TIMEOUT_MS.into()),
        clean_after: Duration::from_secs(2),
        ..StoreConfig::default()
    }
}

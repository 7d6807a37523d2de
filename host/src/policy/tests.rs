//! Valid and invalid components under the real engine.

mod modules;
mod outside;
mod refused;
mod running;
mod swapping;

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use serde_json::{Map, Value};

use super::*;
use crate::config::{
    EngineLimits, Limits, PolicyConfig, PolicySigners, PolicySource, PushGuard, SettingPlaces,
};
use crate::lock::record::HttpView;
use crate::lock::{Key, Mode, Primitive};
use crate::telemetry::Metrics;

/// A guest that misbehaves as the name of the requested resource says.
static BAD: LazyLock<Vec<u8>> = LazyLock::new(|| built("tests/guests/bad"));
/// An engine with a short suspension, shared because it reserves much address space.
static ENGINE: LazyLock<Engine> =
    LazyLock::new(|| Engine::new(&engine_limits(), Compiler::InProcess).unwrap());

fn engine_limits() -> EngineLimits {
    EngineLimits { faults_to_suspend: u32::MAX, ..EngineLimits::default() }
}

/// Builds a crate, given by its folder in this package.
fn built(folder: &str) -> Vec<u8> {
    let host = Path::new(env!("CARGO_MANIFEST_DIR"));
    lockkeeper_builder::build(&host.join(folder), Some(&host.join("../target/policies"))).unwrap()
}

fn table(settings: Value) -> Map<String, Value> {
    match settings {
        Value::Object(table) => table,
        other => panic!("{other} is no table"),
    }
}

fn builtin_config(name: &str, source: &str) -> PolicyConfig {
    PolicyConfig {
        name: name.into(),
        source: PolicySource::Builtin(source.into()),
        settings: Map::new(),
        setting_places: SettingPlaces::default(),
        guard: PushGuard::default(),
        signers: PolicySigners::default(),
    }
}

/// The default policy, live under the name `default`.
fn policies(engine: &Engine) -> Policies {
    let configs = [builtin_config("default", "default")];
    Policies::load(engine, &configs, &Limits::default(), &Metrics::default()).unwrap()
}

/// The bad guest, live, with settings under which it loads.
fn bad(engine: &Engine) -> Arc<Generation> {
    let policies = policies(engine);
    policies.commit(policies.prepare("default", &BAD, None).unwrap())
}

fn request(resource: &str) -> PlanRequest {
    PlanRequest { seed: 7, ..PlanRequest::plain(resource, "worker-1") }
}

fn temporary() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.wasm");
    (dir, path)
}

#[test]
fn the_manifests_of_the_shipped_policies_have_the_defaults_of_their_code() {
    for name in ["default", "fair-groups", "backoff"] {
        let component = builtin(name).unwrap();
        let manifest = Manifest::of(component).unwrap().unwrap();
        assert_eq!((manifest.name.as_str(), manifest.version.as_str()), (name, env!("CARGO_PKG_VERSION")));
        let defaults = manifest.settings.unwrap().defaults();
        assert!(!defaults.is_empty(), "{name}");
        let configured = |settings: &Map<String, Value>| {
            check::component_with_settings(&ENGINE, component, settings, &Limits::default()).unwrap().settings
        };
        assert_eq!(configured(&defaults), configured(&Map::new()), "{name}");
    }
}

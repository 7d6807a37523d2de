//! What `policy` does without a proxy: the only place where it calls the policy tools.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::cli::failure::Failure;
use crate::config::{EngineLimits, Limits};
use crate::policy;

/// Writes a policy's crate into a new folder of its name; that folder.
pub fn scaffold(name: &str) -> Result<PathBuf, Failure> {
    // Without a path in front: what is printed is typed again by people.
    policy::scaffold(name, Path::new(""), None).map_err(other)
}

/// Builds a policy's crate; the component, and where it goes by default: beside Cargo.toml, under the
/// crate's name.
pub fn build(dir: &Path) -> Result<(Vec<u8>, PathBuf), Failure> {
    let component = lockkeeper_builder::build(dir, None).map_err(other)?;
    let name = lockkeeper_builder::crate_name(dir).map_err(other)?;
    Ok((component, dir.join(name).with_extension("wasm")))
}

/// Checks a component as a proxy with default limits would; what it is found to be.
pub fn check(component: &[u8], settings: &str) -> Result<Value, Failure> {
    let settings: Map<String, Value> = serde_json::from_str(settings)
        .map_err(|error| Failure::Usage(format!("--settings is not a JSON object: {error}")))?;
    // One instance at a time: there is nobody else, and address space may be scarce.
    let engine = EngineLimits { instances: 1, ..EngineLimits::default() };
    let report = policy::check_file(component, &settings, &engine, &Limits::default())
        .map_err(|rejection| Failure::Refused(rejection.to_string()))?;
    serde_json::to_value(report).map_err(other)
}

fn other(error: impl std::fmt::Display) -> Failure {
    Failure::Other(error.to_string())
}

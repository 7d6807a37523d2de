//! What `policy` does without a proxy: the only place where the command line calls the policy tools.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::cli::failure::Failure;
use crate::config::{EngineLimits, Limits};
use crate::policy::{self, Report};

/// Writes a policy's crate into the working directory; the folder that was made.
pub fn scaffold(name: &str, sdk: Option<&Path>) -> Result<PathBuf, Failure> {
    policy::scaffold(name, Path::new(""), sdk).map_err(|error| Failure::Usage(error.to_string()))
}

/// Builds a policy's crate; the component, and where it goes by default.
pub fn build(dir: &Path) -> Result<(Vec<u8>, PathBuf), Failure> {
    let component =
        lockkeeper_builder::build(dir, None).map_err(|error| Failure::Other(error.to_string()))?;
    Ok((component, dir.join(format!("{}.wasm", package_name(dir)))))
}

/// Checks a component as a proxy with default limits would.
pub fn check(component: &[u8], settings: &str) -> Result<Report, Failure> {
    let settings: Map<String, Value> = serde_json::from_str(settings)
        .map_err(|error| Failure::Usage(format!("--settings is not a JSON object: {error}")))?;
    policy::check_file(component, &settings, &EngineLimits::default(), &Limits::default())
        .map_err(|rejection| Failure::Refused(rejection.to_string()))
}

/// The crate's name; the build has succeeded, so the manifest is there and well-formed.
fn package_name(dir: &Path) -> String {
    let manifest = std::fs::read_to_string(dir.join("Cargo.toml")).unwrap_or_default();
    let manifest: toml::Table = manifest.parse().unwrap_or_default();
    let name = manifest.get("package").and_then(|package| package.get("name")?.as_str());
    name.unwrap_or("policy").to_owned()
}

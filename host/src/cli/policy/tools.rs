//! What `policy` does without a proxy: the only place where it calls the policy tools.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::cli::failure::Failure;

/// Writes a policy's crate; the folder that was made.
pub fn scaffold(name: &str, dir: &Path) -> Result<PathBuf, Failure> {
    let _ = (name, dir);
    Err(unavailable("new"))
}

/// Builds a policy's crate; the component, and where it goes by default.
pub fn build(dir: &Path) -> Result<(Vec<u8>, PathBuf), Failure> {
    let _ = dir;
    Err(unavailable("build"))
}

/// Checks a component as a proxy with default limits would; what it is found to be.
pub fn check(component: &[u8], settings: &str) -> Result<Value, Failure> {
    let settings: Map<String, Value> = serde_json::from_str(settings)
        .map_err(|error| Failure::Usage(format!("--settings is not a JSON object: {error}")))?;
    let _ = (component, settings);
    Err(unavailable("check"))
}

fn unavailable(command: &str) -> Failure {
    Failure::Other(format!("this build of lockkeeper has no `policy {command}`"))
}

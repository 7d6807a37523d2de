//! Runs cargo for a policy crate, without inherited settings that would change the outcome.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::{BuildError, Named, TARGET};

/// The profile's name and settings. They are passed on the command line, so a crate outside the proxy's workspace
/// needs nothing in its Cargo.toml.
const PROFILE: &str = "policy";
const PROFILE_SETTINGS: [&str; 9] = [
    "inherits='release'",
    "opt-level=3",
    "lto='fat'",
    "codegen-units=1",
    "panic='abort'",
    "strip=true",
    "debug=false",
    "debug-assertions=false",
    "overflow-checks=true",
];

/// Variables of a build script or an outer cargo that would affect the inner cargo.
const CLEARED: [&str; 15] = [
    "RUSTFLAGS",
    "RUSTDOCFLAGS",
    "RUSTC_WRAPPER",
    "RUSTC_WORKSPACE_WRAPPER",
    "MAKEFLAGS",
    "TARGET",
    "HOST",
    "PROFILE",
    "OUT_DIR",
    "OPT_LEVEL",
    "DEBUG",
    "NUM_JOBS",
    "RUSTC_LINKER",
    "RUSTC_STAGE",
    "CLIPPY_ARGS",
];

/// The `CARGO_` variables about registries and the network, which are kept. All others are cleared.
const KEPT: [&str; 6] =
    ["CARGO_HOME", "CARGO_NET_", "CARGO_HTTP_", "CARGO_REGISTR", "CARGO_SOURCE_", "CARGO_TERM_"];

/// Builds the crate in `dir` and returns the path of its module.
pub(crate) fn build_module(dir: &Path, target_dir: Option<&Path>) -> Result<PathBuf, BuildError> {
    let manifest = dir.join("Cargo.toml");
    if !manifest.is_file() {
        return Err(BuildError::NoCrate { dir: dir.to_owned() });
    }
    let sysroot = sysroot()?;
    if !Path::new(&sysroot).join("lib/rustlib").join(TARGET).is_dir() {
        return Err(BuildError::TargetMissing);
    }
    let metadata = metadata(dir)?;
    let workspace = text(&metadata, "workspace_root");
    let target_dir = target_dir
        .map_or_else(|| Path::new(text(&metadata, "target_directory")).join("policies"), Path::to_owned);

    let mut command = cargo(dir);
    command.args(["build", "--lib", "--target", TARGET, "--profile", PROFILE]);
    command.args(["--message-format", "json-render-diagnostics", "--target-dir"]).arg(&target_dir);
    for setting in PROFILE_SETTINGS {
        command.args(["--config", &format!("profile.{PROFILE}.{setting}")]);
    }
    command.env("CARGO_ENCODED_RUSTFLAGS", rustc_flags(workspace, &sysroot));
    command.stderr(Stdio::inherit());
    let output = command.output().map_err(|source| spawn_error(&command, source))?;
    if !output.status.success() {
        return Err(BuildError::Compile { dir: dir.to_owned() });
    }
    let canonical = manifest.canonicalize().unwrap_or(manifest);
    module_of(&output.stdout, &canonical).ok_or_else(|| BuildError::NoModule { dir: dir.to_owned() })
}

/// The name and the version of the crate in `dir`.
pub(crate) fn named(dir: &Path) -> Result<Named, BuildError> {
    let manifest = dir.join("Cargo.toml");
    let manifest = manifest.canonicalize().map_err(|_| BuildError::NoCrate { dir: dir.to_owned() })?;
    let metadata = metadata(dir)?;
    let packages = metadata.get("packages").and_then(Value::as_array).into_iter().flatten();
    let found = packages.into_iter().find(|package| Path::new(text(package, "manifest_path")) == manifest);
    let none = || BuildError::Metadata { dir: dir.to_owned(), detail: "it has no [package]".to_owned() };
    let named = |package: &Value| Named {
        name: text(package, "name").to_owned(),
        version: text(package, "version").to_owned(),
    };
    found.map(named).ok_or_else(none)
}

/// The compiler flags. The stack of a policy is small, because the proxy must prepare its pages for each call. Paths
/// are remapped, so that panic messages do not contain the path of the checkout.
fn rustc_flags(workspace: &str, sysroot: &str) -> String {
    let cargo_home = std::env::var("CARGO_HOME")
        .ok()
        .or_else(|| Some(Path::new(&std::env::var("HOME").ok()?).join(".cargo").to_str()?.to_owned()));
    let mut flags = vec!["-Clink-arg=-zstack-size=65536".to_owned()];
    // If several mappings match, the last one counts, so the most specific one is last.
    let homes = [
        Some((workspace, "/policy")),
        Some((sysroot, "/rust")),
        cargo_home.as_deref().map(|home| (home, "/cargo")),
    ];
    flags.extend(homes.into_iter().flatten().map(|(from, to)| format!("--remap-path-prefix={from}={to}")));
    flags.join("\x1f")
}

fn metadata(dir: &Path) -> Result<Value, BuildError> {
    let mut command = cargo(dir);
    command.args(["metadata", "--format-version", "1", "--no-deps"]);
    let output = command.output().map_err(|source| spawn_error(&command, source))?;
    let fail = |detail: String| BuildError::Metadata { dir: dir.to_owned(), detail };
    if !output.status.success() {
        return Err(fail(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| fail(error.to_string()))
}

/// Finds the module of the crate with this manifest in cargo's messages.
fn module_of(messages: &[u8], manifest: &Path) -> Option<PathBuf> {
    let messages =
        messages.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice::<Value>(line).ok());
    messages
        .filter(|message| text(message, "reason") == "compiler-artifact")
        .filter(|message| Path::new(text(message, "manifest_path")) == manifest)
        .filter_map(|message| {
            let files = message.get("filenames")?.as_array()?.clone();
            files.iter().filter_map(Value::as_str).find(|file| file.ends_with(".wasm")).map(PathBuf::from)
        })
        .next_back()
}

fn sysroot() -> Result<String, BuildError> {
    let mut command = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    command.args(["--print", "sysroot"]);
    let output = command.output().map_err(|source| spawn_error(&command, source))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn cargo(dir: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(dir);
    for (name, _) in std::env::vars_os() {
        if leaks(&name) {
            command.env_remove(&name);
        }
    }
    command
}

fn leaks(name: &OsString) -> bool {
    let Some(name) = name.to_str() else { return false };
    CLEARED.contains(&name)
        || (name.starts_with("CARGO_") && !KEPT.iter().any(|kept| name.starts_with(kept)))
        || name.starts_with("DEP_")
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}

fn spawn_error(command: &Command, source: std::io::Error) -> BuildError {
    BuildError::Spawn { program: command.get_program().to_string_lossy().into_owned(), source }
}

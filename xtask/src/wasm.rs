//! The compilation target of policies.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::paths;

const TARGET: &str = "wasm32-unknown-unknown";

/// Adds the target to the toolchain where it is missing, and says what it did.
pub fn ensure() -> Result<String> {
    if installed()? {
        return Ok(format!("{TARGET} is there"));
    }
    let mut rustup = Command::new("rustup");
    let status = rustup.args(["target", "add", TARGET]).current_dir(paths::root()).status();
    let status = status.with_context(|| {
        format!("the Rust toolchain has no {TARGET} and there is no rustup to add it: install that target")
    })?;
    if !status.success() || !installed()? {
        bail!("`rustup target add {TARGET}` failed");
    }
    Ok(format!("{TARGET} was added"))
}

/// Asks the compiler, not rustup: a toolchain may come from elsewhere.
fn installed() -> Result<bool> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let out = Command::new(rustc).args(["--print", "sysroot"]).current_dir(paths::root()).output();
    let out = out.context("cannot run rustc")?;
    if !out.status.success() {
        bail!("rustc --print sysroot: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    let sysroot = PathBuf::from(String::from_utf8_lossy(&out.stdout).trim());
    Ok(sysroot.join("lib/rustlib").join(TARGET).join("lib").is_dir())
}

//! The compilers of policies in other languages than Rust, which the tests run.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{paths, steps};

/// Programs that the tests run, and the packages of Debian that have them.
const PROGRAMS: [(&str, &str); 5] =
    [("clang", "clang"), ("wasm-ld", "lld"), ("make", "make"), ("node", "nodejs"), ("npm", "npm")];

/// Installs the programs that are missing, if this process may install packages, and says what it did. The JavaScript compilers
/// come from the lock files of the templates.
pub fn ensure() -> Result<String> {
    let missing = missing();
    if missing.is_empty() {
        return Ok("all compilers are there".into());
    }
    let packages: Vec<&str> = missing.iter().map(|(_, package)| *package).collect();
    let install = ["install", "--yes", "--no-install-recommends"];
    let command = format!("apt-get {} {}", install.join(" "), packages.join(" "));
    if !is_root()? || paths::find_program("apt-get").is_none() {
        let programs: Vec<&str> = missing.iter().map(|(program, _)| *program).collect();
        bail!("the tests need {}: install them, on Debian with `sudo {command}`", programs.join(", "));
    }
    steps::status(Command::new("apt-get").arg("update"))?;
    let status = steps::status(Command::new("apt-get").args(install).args(&packages))?;
    if !status.success() || !self::missing().is_empty() {
        bail!("`{command}` failed");
    }
    Ok(format!("installed {}", packages.join(", ")))
}

fn is_root() -> Result<bool> {
    let id = Command::new("id").arg("-u").output().context("cannot run id")?;
    Ok(id.stdout.trim_ascii() == b"0")
}

fn missing() -> Vec<(&'static str, &'static str)> {
    PROGRAMS.into_iter().filter(|(program, _)| paths::find_program(program).is_none()).collect()
}

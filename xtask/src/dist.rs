//! `cargo xtask dist`: the program as it is put on other machines.

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::steps::{self, Progress};
use crate::{paths, sbom, wasm};

/// Builds the release program into target/dist, without symbols, and its symbols and the list of its crates beside it.
///
/// Needs `objcopy` (binutils). Debuggers, profilers and the program's own backtraces find the symbols if `lockkeeper.debug` is in
/// the folder of the program.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_: &Args) -> Result<ExitCode> {
    let mut progress = Progress::new(4);
    progress.next("checking the WebAssembly target and objcopy");
    wasm::ensure()?;
    if paths::find_program("objcopy").is_none() {
        bail!("this machine has no objcopy: install the package binutils");
    }
    progress.next("building the proxy (the first time 15 to 20 minutes on 2 cores)");
    let mut build = steps::cargo(&["build", "--release", "--package", "lockkeeper", "--bin", "lockkeeper"]);
    let built = steps::status(&mut build)?;
    if !built.success() {
        return Ok(ExitCode::from(steps::code(built)));
    }
    progress.next("moving the symbols into a file of their own");
    let dist = paths::target().join("dist");
    split(&paths::target().join("release/lockkeeper"), &dist)?;
    progress.next("listing the crates in the program");
    sbom::write(&dist)?;
    println!("{}", dist.join("lockkeeper").display());
    Ok(ExitCode::SUCCESS)
}

/// Writes a program without symbols to a folder, and beside it `<name>.debug` with the symbols.
fn split(program: &Path, dist: &Path) -> Result<()> {
    fs::create_dir_all(dist).with_context(|| format!("cannot create {}", dist.display()))?;
    let name = program.file_name().context("a program has a name")?;
    let symbols = Path::new(name).with_extension("debug");
    // The link is to a file in the folder that objcopy works in.
    let objcopy = |args: &[&str], target: &Path| {
        let mut command = Command::new("objcopy");
        let status = steps::status(command.args(args).arg(program).arg(target).current_dir(dist))?;
        if !status.success() {
            bail!("objcopy cannot write {}", dist.join(target).display());
        }
        Ok(())
    };
    objcopy(&["--only-keep-debug"], &symbols)?;
    objcopy(&["--strip-all", &format!("--add-gnu-debuglink={}", symbols.display())], Path::new(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stripped_program_runs_and_its_symbols_are_in_a_separate_file() {
        let dist = paths::target().join("dist-test");
        let this = std::env::current_exe().expect("a program");
        split(&this, &dist).expect("objcopy");
        let name = this.file_name().expect("a name");
        let (program, symbols) = (dist.join(name), dist.join(name).with_extension("debug"));
        let size = |path: &Path| path.metadata().expect("it was written").len();
        assert!(size(&program) < size(&this) * 3 / 4, "the symbols are gone");
        assert!(size(&symbols) > size(&this) / 10, "they are beside it");
        let out = Command::new(&program).arg("--list").output().expect("it runs");
        assert!(out.status.success());
        fs::remove_dir_all(&dist).expect("it is ours");
    }
}

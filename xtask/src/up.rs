//! `cargo xtask up`: from a clean clone to a proxy that serves.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};

use crate::settings::Settings;
use crate::steps::{self, Progress};
use crate::{paths, servers, wasm};

pub mod announce;

/// Builds everything, gets a MySQL server where none is found, and starts the proxy.
///
/// Prints the addresses and a first request when the proxy is ready, and runs until Ctrl-C. Data is
/// kept in `store.managed.data_dir` of config.toml. Works without root.
#[derive(clap::Args)]
pub struct Args {
    /// Build with optimisations: slower to build, faster to run.
    #[arg(long)]
    release: bool,
    /// The proxy's configuration; without it, config.toml at the top of the checkout.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let default = paths::root().join("config.toml");
    let config = args.config.clone().or_else(|| default.is_file().then_some(default));
    let settings = Settings::read(config.as_deref())?;
    let mut progress = Progress::new(4);

    progress.next("checking the WebAssembly target");
    wasm::ensure()?;

    progress.next("building the policies and the host (some minutes the first time)");
    let mut build = steps::cargo(&["build", "--package", "lockkeeper", "--bin", "lockkeeper"]);
    if args.release {
        build.arg("--release");
    }
    let built = steps::status(&mut build)?;
    if !built.success() {
        return Ok(ExitCode::from(steps::code(built)));
    }

    match settings.missing {
        None => progress.next("a database server is there, or the configuration names one"),
        Some(kind) => {
            progress.next("getting a database server");
            servers::ensure(kind, false)?;
        }
    }

    progress.next("starting the proxy");
    announce(&settings)?;
    let profile = if args.release { "release" } else { "debug" };
    serve(&paths::target().join(profile).join("lockkeeper"), config.as_deref())
}

/// Leaves a helper behind that waits until the proxy is ready and says so. The helper ends when
/// this process does.
fn announce(settings: &Settings) -> Result<()> {
    let this = std::env::current_exe().context("cannot find this program")?;
    let mut helper = Command::new(this);
    helper.args(["announce", "--api", &settings.api.to_string(), "--admin", &settings.admin.to_string()]);
    for guard in &settings.guards {
        helper.arg("--guard").arg(format!("{}://{}", guard.scheme, announce::reachable(guard.listen)));
    }
    helper.args(["--parent", &std::process::id().to_string()]);
    helper.stdin(Stdio::null()).spawn().context("cannot start the helper that waits for the proxy")?;
    Ok(())
}

/// Becomes the proxy: Ctrl-C, signals and the exit code are then its own.
fn serve(program: &Path, config: Option<&Path>) -> Result<ExitCode> {
    let mut proxy = Command::new(program);
    proxy.arg("serve");
    if let Some(config) = config {
        proxy.arg("--config").arg(config);
    }
    Err(proxy.exec()).with_context(|| format!("cannot start {}", program.display()))
}

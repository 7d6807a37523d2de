//! `cargo xtask up`: from a clean clone to a proxy that serves.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};

use crate::servers::Server;
use crate::settings::Settings;
use crate::steps::{self, Progress};
use crate::{paths, wasm};

pub mod announce;

/// Gets a database server where none is found, builds everything, and starts the proxy.
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
    /// The server that keeps the locks, instead of the configuration's `store.url`. One that runs needs no private one.
    #[arg(long, value_name = "mysql://USER:PASS@HOST:PORT/DATABASE")]
    store: Option<String>,
    /// The authorities that sign the certificate of this server: a PEM file, or `system`. Connections to it are then
    /// encrypted.
    #[arg(long, value_name = "FILE", requires = "store")]
    store_ca: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if let Some(what_to_do) = unsupported(std::env::consts::OS) {
        bail!("{what_to_do}");
    }
    let default = paths::root().join("config.toml");
    let config = args.config.clone().or_else(|| default.is_file().then_some(default));
    let settings = Settings::read(config.as_deref(), args.store.as_deref())?;
    let program = paths::target().join(if args.release { "release" } else { "debug" }).join("lockkeeper");
    let mut progress = Progress::new(4);

    progress.next("checking the WebAssembly target");
    wasm::ensure()?;

    // Before the build, so that a user who must install a server learns it at once.
    progress.next(&server_step(&settings.server));
    settings.server.ensure()?;

    progress.next(build_step(program.is_file(), args.release));
    let mut build = steps::cargo(&["build", "--package", "lockkeeper", "--bin", "lockkeeper"]);
    if args.release {
        build.arg("--release");
    }
    let built = steps::status(&mut build)?;
    if !built.success() {
        return Ok(ExitCode::from(steps::code(built)));
    }

    progress.next("starting the proxy (some seconds)");
    announce(&settings)?;
    serve(&program, config.as_deref(), args)
}

/// What to do on a system that the proxy cannot be built for.
fn unsupported(system: &str) -> Option<String> {
    let machine = match system {
        "linux" => return None,
        "macos" => {
            "install one with `brew install lima`, and run this command in `limactl start template://debian`"
        }
        _ => "run this command in a container or a virtual machine with Debian",
    };
    Some(format!("the proxy needs Linux (/proc, pidfd), and this is {system}: {machine}"))
}

fn server_step(server: &Server) -> String {
    match server {
        Server::Named => "the configuration names the database server".into(),
        Server::Installed(program) => format!("the proxy will start {}", program.display()),
        Server::Fetched(kind) => {
            format!("getting {} (once, about a minute)", kind.name())
        }
        Server::Missing(_) => "looking for a database server".into(),
    }
}

fn build_step(built_before: bool, release: bool) -> &'static str {
    match (built_before, release) {
        (true, _) => "building what has changed",
        (false, false) => "building the proxy (the first time 7 to 8 minutes on 2 cores)",
        (false, true) => "building the proxy (the first time 15 to 20 minutes on 2 cores)",
    }
}

/// Leaves a helper behind that waits until the proxy is ready and says so. The helper ends when
/// this process does.
fn announce(settings: &Settings) -> Result<()> {
    let this = std::env::current_exe().context("cannot find this program")?;
    let mut helper = Command::new(this);
    helper.args(["announce", "--api", &settings.api.to_string(), "--admin", &settings.admin.to_string()]);
    for guard in &settings.guards {
        helper.arg("--guard").arg(announce::url(guard.scheme, &guard.listen));
    }
    helper.args(["--parent", &std::process::id().to_string()]);
    helper.stdin(Stdio::null()).spawn().context("cannot start the helper that waits for the proxy")?;
    Ok(())
}

/// Becomes the proxy: Ctrl-C, signals and the exit code are then its own.
fn serve(program: &Path, config: Option<&Path>, args: &Args) -> Result<ExitCode> {
    let mut proxy = Command::new(program);
    proxy.arg("serve");
    if let Some(config) = config {
        proxy.arg("--config").arg(config);
    }
    if let Some(store) = &args.store {
        proxy.env("LOCKKEEPER_STORE_URL", store);
    }
    if let Some(authorities) = &args.store_ca {
        proxy.env("LOCKKEEPER_STORE_TLS_CA", authorities);
    }
    Err(proxy.exec()).with_context(|| format!("cannot start {}", program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_without_linux_learns_what_to_install() {
        assert_eq!(unsupported("linux"), None);
        assert!(unsupported("macos").is_some_and(|text| text.contains("brew install lima")));
        assert!(unsupported("freebsd").is_some_and(|text| text.contains("virtual machine")));
    }
}

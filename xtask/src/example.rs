//! `cargo xtask example`: one of the programs in examples/, with all that it needs.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::servers::Server;
use crate::{paths, servers, steps, wasm};

/// Runs an example: what goes wrong without the proxy, and that it does not with it.
///
/// Builds it and the proxy, and gets a server if there is none. Prints the numbers of both. Exit code 0:
/// the fault was there without the proxy, and was not there with it.
#[derive(clap::Args)]
pub struct Args {
    /// Its folder in examples/.
    name: String,
    /// The private server that it is run on; without it, the first that is found.
    #[arg(long, value_enum)]
    server: Option<servers::Kind>,
    /// A server that runs already, instead of a private one.
    #[arg(long, value_name = "mysql://USER:PASS@HOST:PORT/", conflicts_with = "server")]
    url: Option<String>,
    /// Print the numbers as JSON, too, in the last line.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let names = names()?;
    if !names.contains(&args.name) {
        bail!("there is no example `{}`; the examples are: {}", args.name, names.join(", "));
    }
    let program = format!("example-{}", args.name);
    let server = args.server.map_or("auto", servers::Kind::dir);
    Server::choose(args.url.as_deref().unwrap_or("managed"), server).ensure()?;
    wasm::ensure()?;
    // Together they are built with the same features, so that what both depend on is compiled once.
    let mut build = steps::cargo(&["build", "--package", "lockkeeper", "--package", "lockkeeper-examples"]);
    let built = steps::status(build.args(["--bin", "lockkeeper", "--bin", &program]))?;
    if !built.success() {
        return Ok(ExitCode::from(steps::code(built)));
    }
    let mut example = Command::new(paths::target().join("debug").join(program));
    example.args(["--server", server]).args(args.json.then_some("--json"));
    if let Some(url) = &args.url {
        example.args(["--url", url]);
    }
    // Its Ctrl-C and its exit code are then its own.
    Err(example.exec()).with_context(|| format!("cannot start {}", example.get_program().display()))
}

/// The folders with a program.
fn names() -> Result<Vec<String>> {
    let dir = paths::root().join("examples");
    let entries = std::fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let programs = entries.flatten().filter(|entry| entry.path().join("main.rs").is_file());
    let mut names: Vec<String> =
        programs.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

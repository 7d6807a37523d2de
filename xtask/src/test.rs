//! `cargo xtask test`: everything that CI checks, and nothing that it does not.

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::{paths, servers, steps, wasm};

/// Runs everything that CI checks: format, lints, tests on both real servers, documentation.
///
/// All steps are run even if one fails; the exit code is the first failing step's.
#[derive(clap::Args)]
pub struct Args {
    /// Run only the steps whose name contains this text.
    #[arg(value_name = "STEP")]
    only: Option<String>,
}

/// A check: it returns the exit code that it ended with.
type Check = Box<dyn Fn() -> Result<u8>>;

enum Outcome {
    Passed,
    /// Not run, and why.
    Skipped(&'static str),
    Failed(u8),
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let wanted = |name: &str| args.only.as_deref().is_none_or(|only| name.contains(only));
    let steps: Vec<_> = steps()?.into_iter().filter(|(name, _)| wanted(name)).collect();
    if steps.is_empty() {
        bail!("no step has that name; the steps are: {}", names()?.join(", "));
    }
    let mut results = Vec::new();
    for (at, (name, check)) in steps.iter().enumerate() {
        eprintln!("\n[{}/{}] {name}", at + 1, steps.len());
        let began = Instant::now();
        let outcome = outcome(check);
        let took = began.elapsed();
        eprintln!("{}", line(name, &outcome, took));
        results.push((name, outcome, took));
    }
    eprintln!("\nSummary");
    for (name, outcome, took) in &results {
        eprintln!("{}", line(name, outcome, *took));
    }
    let failed = results.iter().find_map(|(_, outcome, _)| match outcome {
        Outcome::Failed(code) => Some(*code),
        _ => None,
    });
    Ok(ExitCode::from(failed.unwrap_or(0)))
}

fn steps() -> Result<Vec<(String, Option<Check>)>> {
    let mut steps: Vec<(String, Option<Check>)> = vec![
        ("format".into(), Some(cargo(&["fmt", "--all", "--check"]))),
        ("wasm target".into(), Some(Box::new(|| wasm::ensure().map(|_| 0)))),
        ("servers".into(), Some(Box::new(servers_are_there))),
        ("lints".into(), Some(cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))),
        ("tests".into(), Some(cargo(&["test", "--workspace"]))),
        ("simulation".into(), Some(cargo(&SIMULATION))),
    ];
    for example in examples()? {
        let name = example.file_name().unwrap_or_default().to_string_lossy().into_owned();
        steps.push((format!("example {name}"), Some(Box::new(move || example_passes(&example)))));
    }
    steps.push(("documentation".into(), Some(Box::new(documentation))));
    let deny = paths::find_program("cargo-deny").map(|_| cargo(&["deny", "check", "advisories"]));
    steps.push(("advisories".into(), deny));
    Ok(steps)
}

/// Runs of new seeds; those of known seeds are among the tests.
const SIMULATION: [&str; 7] =
    ["test", "--workspace", "--lib", "--", "--ignored", "--nocapture", "simulation::"];

fn names() -> Result<Vec<String>> {
    Ok(steps()?.into_iter().map(|(name, _)| name).collect())
}

fn outcome(check: &Option<Check>) -> Outcome {
    let Some(check) = check else { return Outcome::Skipped("cargo-deny is not installed") };
    match check() {
        Ok(0) => Outcome::Passed,
        Ok(code) => Outcome::Failed(code),
        Err(error) => {
            eprintln!("error: {error:#}");
            Outcome::Failed(1)
        }
    }
}

fn line(name: &str, outcome: &Outcome, took: Duration) -> String {
    let (word, note) = match outcome {
        Outcome::Passed => ("passed", String::new()),
        Outcome::Skipped(why) => ("skipped", format!(" ({why})")),
        Outcome::Failed(code) => ("FAILED", format!(" (exit code {code})")),
    };
    format!("  {word:<8} {name:<28} {:>6.1} s{note}", took.as_secs_f32())
}

fn cargo(args: &[&str]) -> Check {
    let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
    Box::new(move || {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        run_command(&mut steps::cargo(&args))
    })
}

fn run_command(command: &mut Command) -> Result<u8> {
    Ok(steps::code(steps::status(command)?))
}

fn servers_are_there() -> Result<u8> {
    servers::ensure(servers::Kind::Mysql, false)?;
    servers::ensure(servers::Kind::Mariadb, false)?;
    Ok(0)
}

/// Crates in examples/, which are not in the workspace: they are built as a user would build them.
fn examples() -> Result<Vec<PathBuf>> {
    let dir = paths::root().join("examples");
    if !dir.is_dir() {
        return Ok(Vec::new());
    }
    let entries = std::fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    found.retain(|dir| dir.join("Cargo.toml").is_file());
    found.sort();
    Ok(found)
}

fn example_passes(dir: &std::path::Path) -> Result<u8> {
    let target = paths::target().join("examples");
    for args in [&["fmt", "--check"][..], &["test"][..]] {
        let code = run_command(steps::cargo(args).current_dir(dir).env("CARGO_TARGET_DIR", &target))?;
        if code != 0 {
            return Ok(code);
        }
    }
    Ok(0)
}

fn documentation() -> Result<u8> {
    let mut command = steps::cargo(&["doc", "--workspace", "--no-deps", "--document-private-items"]);
    // Modules say which of their private parts does what; those are documented here as well.
    run_command(command.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private_intra_doc_links"))
}

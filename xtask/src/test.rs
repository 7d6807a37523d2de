//! `cargo xtask test`: everything that CI checks, and nothing that it does not.

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::{deny, languages, paths, servers, steps, wasm};

/// Runs everything that CI checks: format, lints, tests on both real servers, documentation.
///
/// All steps are run even if one fails; the exit code is the first failing step's.
#[derive(clap::Args)]
pub struct Args {
    /// Run only the steps whose name contains this text.
    #[arg(value_name = "STEP")]
    only: Option<String>,
}

type Check = Box<dyn Fn() -> Result<Outcome>>;

/// How a check ended.
pub enum Outcome {
    /// What else there is to say of it, or nothing.
    Passed(String),
    /// Why nothing was checked.
    Skipped(&'static str),
    /// With this exit code.
    Failed(u8),
}

impl Outcome {
    fn of(code: u8) -> Outcome {
        if code == 0 { Outcome::Passed(String::new()) } else { Outcome::Failed(code) }
    }
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

fn steps() -> Result<Vec<(String, Check)>> {
    let mut steps: Vec<(String, Check)> = vec![
        ("format".into(), cargo(&["fmt", "--all", "--check"])),
        ("wasm target".into(), Box::new(|| wasm::ensure().map(|_| Outcome::of(0)))),
        ("servers".into(), Box::new(servers_are_there)),
        ("languages".into(), Box::new(|| languages::ensure().map(Outcome::Passed))),
        ("lints".into(), cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])),
        ("lints of fuzzing".into(), Box::new(fuzzing)),
        ("tests".into(), cargo(&["test", "--workspace", "--no-fail-fast"])),
        ("fairness".into(), cargo(&FAIRNESS)),
        ("simulation".into(), cargo(&SIMULATION)),
    ];
    for example in examples()? {
        let name = example.file_name().unwrap_or_default().to_string_lossy().into_owned();
        steps.push((format!("example {name}"), Box::new(move || example_passes(&example))));
    }
    steps.push(("documentation".into(), Box::new(documentation)));
    steps.push(("dependencies".into(), Box::new(deny::dependencies)));
    steps.push(("advisories".into(), Box::new(deny::advisories)));
    Ok(steps)
}

/// A test that compares times, and therefore runs when no other test does.
///
/// The selection is that of the tests: with another one, dependencies have other features, and all is compiled again.
const FAIRNESS: [&str; 7] =
    ["test", "--workspace", "--tests", "--", "--ignored", "--nocapture", "auth::abuse::an_abusive_client"];

/// Runs of new seeds; those of known seeds are among the tests.
const SIMULATION: [&str; 7] =
    ["test", "--workspace", "--lib", "--", "--ignored", "--nocapture", "simulation::"];

fn names() -> Result<Vec<String>> {
    Ok(steps()?.into_iter().map(|(name, _)| name).collect())
}

fn outcome(check: &Check) -> Outcome {
    check().unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        Outcome::Failed(1)
    })
}

fn line(name: &str, outcome: &Outcome, took: Duration) -> String {
    let (word, note) = match outcome {
        Outcome::Passed(note) if note.is_empty() => ("passed", String::new()),
        Outcome::Passed(note) => ("passed", format!(" ({note})")),
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

fn run_command(command: &mut Command) -> Result<Outcome> {
    Ok(Outcome::of(steps::code(steps::status(command)?)))
}

fn servers_are_there() -> Result<Outcome> {
    for kind in servers::Kind::OF_THE_TESTS {
        servers::ensure(kind, false)?;
    }
    Ok(Outcome::of(0))
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

fn example_passes(dir: &std::path::Path) -> Result<Outcome> {
    let target = paths::target().join("examples");
    for args in [&["fmt", "--check"][..], &["test"][..]] {
        let outcome = run_command(steps::cargo(args).current_dir(dir).env("CARGO_TARGET_DIR", &target))?;
        if let Outcome::Failed(_) = outcome {
            return Ok(outcome);
        }
    }
    Ok(Outcome::of(0))
}

/// Checks the code that `cargo xtask fuzz` runs, and that its Cargo.lock goes with the proxy's dependencies. The search itself
/// is not built: it needs minutes and a C++ compiler.
fn fuzzing() -> Result<Outcome> {
    let fetched = run_command(steps::cargo(&["fetch"]).current_dir(paths::root().join("fuzz")))?;
    if let Outcome::Failed(_) = fetched {
        return Ok(fetched);
    }
    let lints = ["clippy", "-p", "lockkeeper", "--lib", "--features", "fuzzing", "--", "-D", "warnings"];
    run_command(&mut steps::cargo(&lints))
}

fn documentation() -> Result<Outcome> {
    let mut command = steps::cargo(&["doc", "--workspace", "--no-deps", "--document-private-items"]);
    // Modules say which of their private parts does what; those are documented here as well.
    run_command(command.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private_intra_doc_links"))
}

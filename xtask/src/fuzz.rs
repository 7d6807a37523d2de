//! `cargo xtask fuzz`: the search for inputs that break a property of a parser.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};

use crate::{paths, steps, wasm};

/// Searches with libFuzzer for bytes that break a property of a parser (`host/src/fuzz.rs`).
///
/// Needs a C++ compiler. What the search has found stays in target/fuzz/corpus, and the next search begins with it. An input
/// that breaks a property is written to target/fuzz/findings.
#[derive(clap::Args)]
pub struct Args {
    /// Search with these properties; without a name, with all of them, one after the other.
    #[arg(value_name = "PROPERTY")]
    properties: Vec<String>,
    /// How long to search with each property.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_080))]
    minutes: u64,
    /// Try only this input, a file of target/fuzz/findings.
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
}

/// How long one input may take, in seconds.
const TIMEOUT_S: u64 = 20;
/// The longest input, in bytes.
const MAX_BYTES: usize = 2_048;

/// Counters of branches and comparisons, which libFuzzer reads: those that `cargo fuzz run --sanitizer none` sets.
const FLAGS: [&str; 6] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cllvm-args=-simplifycfg-branch-fold-threshold=0",
];

pub fn run(args: &Args) -> Result<ExitCode> {
    wasm::ensure()?;
    let program = build()?;
    let listed = Command::new(&program).env_remove("PROPERTY").output().context("cannot run the search")?;
    let known = String::from_utf8_lossy(&listed.stdout).lines().map(str::to_owned).collect::<Vec<_>>();
    let properties = if args.properties.is_empty() { &known } else { &args.properties };
    if let Some(unknown) = properties.iter().find(|name| !known.contains(name)) {
        bail!("no property has the name {unknown}; there are {}", known.join(", "));
    }
    if let Some(input) = &args.input {
        let [property] = &properties[..] else { bail!("--input needs the name of one property") };
        let input = std::path::absolute(input).context("--input")?;
        let tried = steps::status(Command::new(&program).arg(input).env("PROPERTY", property))?;
        return Ok(ExitCode::from(steps::code(tried)));
    }
    let searches =
        properties.iter().map(|property| Ok((property, search(&program, property, args.minutes)?)));
    let searches = searches.collect::<Result<Vec<_>>>()?;
    for (property, search) in &searches {
        println!("{property:<16} {search}");
    }
    Ok(ExitCode::from(u8::from(searches.iter().any(|(_, search)| search.finding.is_some()))))
}

/// Builds the search, and returns its program.
fn build() -> Result<PathBuf> {
    let (target, triple) = (paths::target().join("fuzz"), triple()?);
    // The target is named, so that the flags are not those of build scripts.
    let mut build = steps::cargo(&["build", "--release", "--target", &triple]);
    build.current_dir(paths::root().join("fuzz")).env("CARGO_TARGET_DIR", &target);
    build.env_remove("RUSTFLAGS").env("CARGO_ENCODED_RUSTFLAGS", FLAGS.join("\x1f"));
    if !steps::status(&mut build)?.success() {
        bail!("the search cannot be built");
    }
    Ok(target.join(triple).join("release").join("property"))
}

/// The compiler's name for this machine.
fn triple() -> Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).arg("-vV").output().context("cannot run rustc")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc does not say which machine it is for")?.to_owned())
}

/// What a search has found.
#[derive(Default)]
struct Search {
    executions: String,
    /// The branches that were reached at the start, and at the end.
    coverage: Option<(String, String)>,
    /// The input that breaks the property.
    finding: Option<String>,
}

fn search(program: &Path, property: &str, minutes: u64) -> Result<Search> {
    let folder = |name: &str| {
        let folder = paths::target().join("fuzz").join(name).join(property);
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        Ok::<_, anyhow::Error>(folder)
    };
    let (corpus, findings) = (folder("corpus")?, folder("findings")?);
    eprintln!("{property}: searching for {minutes} minutes");
    let mut command = Command::new(program);
    command.arg(format!("-max_total_time={}", minutes * 60)).arg(format!("-timeout={TIMEOUT_S}"));
    command.arg(format!("-max_len={MAX_BYTES}")).args(["-print_final_stats=1", "-rss_limit_mb=4096"]);
    command.arg(format!("-artifact_prefix={}/", findings.display())).arg(corpus).env("PROPERTY", property);
    let mut child =
        command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().context("cannot run the search")?;
    let mut found = Search::default();
    for line in BufReader::new(child.stderr.take().context("it has an output")?).split(b'\n') {
        found.read(&String::from_utf8_lossy(&line.context("cannot read the search's output")?));
    }
    child.wait().context("the search has no end")?;
    Ok(found)
}

impl Search {
    /// Takes a line of libFuzzer's output.
    fn read(&mut self, line: &str) {
        let after = |mark| line.split_once(mark).map(|(_, rest): (&str, &str)| first_word(rest));
        if let Some(coverage) = after(" cov: ") {
            let first = self.coverage.take().map_or_else(|| coverage.clone(), |(first, _)| first);
            self.coverage = Some((first, coverage));
        } else if let Some(executions) = after("stat::number_of_executed_units:") {
            self.executions = executions;
        } else if let Some(file) = after("Test unit written to ") {
            self.finding = Some(file);
        } else if !line.starts_with(['#', ' ']) && !line.starts_with("INFO:") && !line.starts_with("stat::") {
            eprintln!("{line}");
        }
    }
}

fn first_word(text: &str) -> String {
    text.split_whitespace().next().unwrap_or_default().to_owned()
}

impl std::fmt::Display for Search {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let none = || ("0".to_owned(), "0".to_owned());
        let (first, last) = self.coverage.clone().unwrap_or_else(none);
        write!(f, "{} inputs, {first} to {last} branches, ", self.executions)?;
        match &self.finding {
            None => write!(f, "none breaks it"),
            Some(file) => write!(f, "BROKEN by {file}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_a_search_tells_its_result() {
        let mut search = Search::default();
        for line in [
            "INFO: Seed: 1",
            "#2\tINITED cov: 120 ft: 130 corp: 1/1b exec/s: 0 rss: 50Mb",
            "#90\tNEW    cov: 135 ft: 150 corp: 2/9b lim: 8 exec/s: 0",
            "stat::number_of_executed_units: 4096",
        ] {
            search.read(line);
        }
        assert_eq!(search.to_string(), "4096 inputs, 120 to 135 branches, none breaks it");
        search.read("artifact_prefix='/f/'; Test unit written to /f/crash-1");
        assert!(search.to_string().ends_with("BROKEN by /f/crash-1"));
    }
}

//! `cargo xtask mutate`: faults that are put into the source on purpose, which the simulation has to find.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::steps::{self, Progress};
use crate::{paths, sim, wasm};

/// Breaks the program on purpose, in one place after the other, and checks that the simulation finds each fault.
///
/// The faults are in xtask/mutations.toml. They are put into a copy of the source, and each is searched for with
/// `cargo xtask sim`, from the same first seed on. One program has most of them, and is told by LOCKKEEPER_MUTATION
/// which one it is to have. What the searches print is kept in target/mutate/. Ends with exit code 1 where a fault was
/// not found.
#[derive(clap::Args)]
pub struct Args {
    /// Try only the mutations with these names.
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Search for this many minutes of processor time, for each mutation.
    #[arg(long, value_name = "M", default_value_t = 10.0)]
    minutes: f64,
    /// The first seed of each search.
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Print the names, and what each mutation breaks.
    #[arg(long)]
    list: bool,
}

/// A text in a source file, and what stands there instead.
#[derive(Debug, Deserialize)]
struct Mutation {
    name: String,
    /// What is wrong with the program then.
    breaks: String,
    /// From the top of the checkout.
    file: String,
    find: String,
    replace: String,
    /// The fault needs a program of its own.
    #[serde(default)]
    alone: bool,
}

/// In a replacement, stands for the condition that the program is told to have the fault.
const MUTATED: &str = "MUTATED";
const SWITCH: &str = r#"
pub(crate) fn is_mutated(name: &str) -> bool {
    use std::sync::LazyLock;
    static NAME: LazyLock<Option<String>> = LazyLock::new(|| std::env::var("LOCKKEEPER_MUTATION").ok());
    NAME.as_deref() == Some(name)
}
"#;
const LIBRARY: &str = "host/src/lib.rs";

/// One or several faults that are built together.
struct Program<'a> {
    name: String,
    mutations: Vec<&'a Mutation>,
    /// By file, from the top of the checkout: its text with the faults.
    files: BTreeMap<&'a str, String>,
}

/// What came of a search.
enum Finding {
    Found {
        seed: u64,
        took: Duration,
        what: String,
    },
    /// Before the first run.
    Unmet {
        condition: String,
    },
    /// A run did not come to its end.
    Endless,
    Missed {
        took: Duration,
    },
    NotBuilt,
}

impl Finding {
    fn is_found(&self) -> bool {
        matches!(self, Finding::Found { .. } | Finding::Unmet { .. } | Finding::Endless)
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut mutations = mutations()?;
    if let Some(unknown) = args.names.iter().find(|name| mutations.iter().all(|known| known.name != **name)) {
        bail!("no mutation is named {unknown}; see `cargo xtask mutate --list`");
    }
    mutations.retain(|mutation| args.names.is_empty() || args.names.contains(&mutation.name));
    if args.list {
        mutations.iter().for_each(|mutation| println!("{:<28} {}", mutation.name, mutation.breaks));
        return Ok(ExitCode::SUCCESS);
    }
    let findings = try_all(args, &mutations)?;
    println!("| mutation | in `host/src/` | found as | runs | after |\n| --- | --- | --- | --- | --- |");
    for (mutation, finding) in mutations.iter().zip(&findings) {
        let file = mutation.file.trim_start_matches("host/src/");
        println!("| {} | `{file}` | {} |", mutation.breaks, Columns(finding, args.seed));
    }
    let found = findings.iter().filter(|finding| finding.is_found()).count();
    eprintln!("{found} of {} mutations were found", findings.len());
    Ok(if found == findings.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Searches run beside the next build.
fn try_all(args: &Args, mutations: &[Mutation]) -> Result<Vec<Finding>> {
    let dir = paths::target().join("mutate");
    let source = dir.join("source");
    wasm::ensure()?;
    copy_source(&source)?;
    let programs = programs(mutations, |file| read(&source.join(file)))?;
    let mut progress = Progress::new(programs.len());
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let mut findings = BTreeMap::new();
    let mut searches: VecDeque<(&str, JoinHandle<Result<Finding>>)> = VecDeque::new();
    let mut finish = |(name, search): (_, JoinHandle<Result<Finding>>)| {
        let finding = search.join().unwrap_or_else(|_| bail!("the thread of a search has panicked"))?;
        findings.insert(name, finding);
        anyhow::Ok(())
    };
    for program in &programs {
        progress.next(&program.told());
        // One that cannot be built takes no others with it.
        let built = program.build(&dir, &source);
        if let Err(error) = &built {
            eprintln!("  {:<28} {error:#}", program.name);
        }
        for mutation in &program.mutations {
            if searches.len() >= cores
                && let Some(first) = searches.pop_front()
            {
                finish(first)?;
            }
            let search = match &built {
                Ok(binary) => {
                    let search = Search::begin(args, &dir, binary, &mutation.name)?;
                    thread::spawn(|| search.finish())
                }
                Err(_) => thread::spawn(|| Ok(Finding::NotBuilt)),
            };
            searches.push_back((&mutation.name, search));
        }
    }
    searches.into_iter().try_for_each(finish)?;
    let in_order = mutations.iter().filter_map(|mutation| findings.remove(&*mutation.name));
    Ok(in_order.collect())
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

/// One program for the faults that can be built together, and one for each of the others.
fn programs<'a>(
    mutations: &'a [Mutation],
    read: impl Fn(&str) -> Result<String>,
) -> Result<Vec<Program<'a>>> {
    let (alone, together): (Vec<_>, Vec<_>) = mutations.iter().partition(|mutation| mutation.alone);
    let mut programs = Vec::new();
    if !together.is_empty() {
        let files = BTreeMap::from([(LIBRARY, read(LIBRARY)? + SWITCH)]);
        let name = "together".to_owned();
        let mut program = Program { name, mutations: together.clone(), files };
        for mutation in together {
            program.change(mutation, &mutation.switched(), &read)?;
        }
        programs.push(program);
    }
    for mutation in alone {
        let (name, files) = (mutation.name.clone(), BTreeMap::new());
        let mut program = Program { name, mutations: vec![mutation], files };
        program.change(mutation, &mutation.replace, &read)?;
        programs.push(program);
    }
    Ok(programs)
}

impl<'a> Program<'a> {
    fn change(
        &mut self,
        mutation: &'a Mutation,
        replace: &str,
        read: impl Fn(&str) -> Result<String>,
    ) -> Result<()> {
        let text = match self.files.remove(&*mutation.file) {
            Some(text) => text,
            None => read(&mutation.file)?,
        };
        self.files.insert(&mutation.file, mutation.apply(&text, replace)?);
        Ok(())
    }

    fn told(&self) -> String {
        match &self.mutations[..] {
            [mutation] => format!("{}: {}", mutation.name, mutation.breaks),
            all => format!("{} faults in one program", all.len()),
        }
    }

    /// Where the program is.
    fn build(&self, dir: &Path, source: &Path) -> Result<PathBuf> {
        let mut before = Vec::new();
        for (file, text) in &self.files {
            let file = source.join(file);
            before.push((file.clone(), read(&file)?));
            fs::write(file, text)?;
        }
        let built = build(dir);
        for (file, text) in before {
            fs::write(file, text)?;
        }
        built?;
        let program = dir.join(&self.name);
        fs::copy(sim::program(&dir.join("target")), &program)
            .with_context(|| format!("cannot copy the program to {}", program.display()))?;
        Ok(program)
    }
}

/// Copies what belongs to the checkout. A file that is the same is left alone, so that it is not built again.
fn copy_source(to: &Path) -> Result<()> {
    let root = paths::root();
    let list = Command::new("git").args(["ls-files", "-z"]).current_dir(&root).output();
    let list = list.context("cannot run git")?;
    if !list.status.success() {
        bail!("git does not list the files of {}", root.display());
    }
    let names = String::from_utf8(list.stdout).context("a file has a name that is not UTF-8")?;
    for name in names.split_terminator('\0') {
        let (from, to) = (root.join(name), to.join(name));
        // Deleted, and not committed yet.
        let Ok(bytes) = fs::read(&from) else { continue };
        if fs::read(&to).is_ok_and(|there| there == bytes) {
            continue;
        }
        let folder = to.parent().unwrap_or(&to);
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        fs::write(&to, bytes).with_context(|| format!("cannot write {}", to.display()))?;
    }
    Ok(())
}

/// In a target folder of its own: the one of this checkout has programs without faults. Warnings are not shown: a fault
/// may leave something unused.
fn build(dir: &Path) -> Result<()> {
    let mut build = steps::cargo(&sim::BUILD);
    build.current_dir(dir.join("source")).env("CARGO_TARGET_DIR", dir.join("target"));
    let built = build.output().context("cannot run cargo")?;
    if !built.status.success() {
        bail!("the build failed:\n{}", String::from_utf8_lossy(&built.stderr));
    }
    Ok(())
}

/// A search that is under way.
struct Search {
    name: String,
    child: Child,
    began: Instant,
    limit: Duration,
    log: PathBuf,
}

/// How much longer than it was told a search may take: its last run may be a long one.
const LAST_RUN: Duration = Duration::from_secs(120);
/// A search may take this many times its processor time: builds and other searches run beside it.
const SHARES: u32 = 5;

impl Search {
    fn begin(args: &Args, dir: &Path, program: &Path, name: &str) -> Result<Search> {
        let log = dir.join(format!("{name}.txt"));
        let output = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut search = Command::new(program);
        search.env("LOCKKEEPER_MUTATION", name);
        search.args(["--no-shrink", "--minutes", &args.minutes.to_string()]);
        search.args(["--seed", &args.seed.to_string()]).env("RUST_BACKTRACE", "0");
        let child = search.stdout(output.try_clone()?).stderr(output).spawn();
        let child = child.with_context(|| format!("cannot run {}", program.display()))?;
        let limit = Duration::from_secs_f64(args.minutes * 60.0) * SHARES + LAST_RUN;
        Ok(Search { name: name.to_owned(), child, began: Instant::now(), limit, log })
    }

    fn finish(mut self) -> Result<Finding> {
        let ended = loop {
            if let Some(status) = self.child.try_wait()? {
                break Some(status);
            }
            if self.began.elapsed() > self.limit {
                self.child.kill()?;
                self.child.wait()?;
                break None;
            }
            thread::sleep(Duration::from_millis(100));
        };
        let log =
            fs::read_to_string(&self.log).with_context(|| format!("cannot read {}", self.log.display()))?;
        let finding = match ended {
            None => Finding::Endless,
            Some(status) if status.success() => Finding::Missed { took: worked(&log) },
            Some(_) => found(&log)
                .with_context(|| format!("the search ended in another way: see {}", self.log.display()))?,
        };
        eprintln!("  {:<28} {finding}", self.name);
        Ok(finding)
    }
}

/// Reads the seed and the broken promise from what a search that failed has printed.
fn found(log: &str) -> Option<Finding> {
    let what = log.lines().find_map(|line| line.strip_prefix("BROKEN: "))?;
    if let Some((condition, _)) = what.strip_prefix("the condition ").and_then(|rest| rest.split_once(' ')) {
        return Some(Finding::Unmet { condition: condition.to_owned() });
    }
    let seed = log.lines().find_map(|line| line.strip_prefix("seed ")?.split_once(" fails"))?.0;
    Some(Finding::Found { seed: seed.parse().ok()?, took: worked(log), what: what.to_owned() })
}

/// The processor time that the search has printed; zero where it has printed none.
fn worked(log: &str) -> Duration {
    let seconds = log.lines().find_map(|line| {
        let (_, rest) = line.split_once(" grants checked in ")?;
        rest.split_once(" s of one core")?.0.parse().ok()
    });
    Duration::from_secs(seconds.unwrap_or_default())
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::Found { seed, took, what } => {
                write!(f, "found with seed {seed} after {:.0} s: {what}", took.as_secs_f32())
            }
            Finding::Unmet { condition } => write!(f, "found: {condition}"),
            Finding::Endless => write!(f, "found: a run does not end"),
            Finding::Missed { took } => write!(f, "NOT FOUND in {:.0} s", took.as_secs_f32()),
            Finding::NotBuilt => write!(f, "cannot be built"),
        }
    }
}

/// The finding as columns of the table.
struct Columns<'a>(&'a Finding, u64);

impl fmt::Display for Columns<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Columns(finding, first) = self;
        match finding {
            Finding::Found { seed, took, what } => {
                let kind = what.split_once(':').map_or(what.as_str(), |(kind, _)| kind);
                write!(f, "{kind} | {} | {:.0} s", seed - first + 1, took.as_secs_f32())
            }
            Finding::Unmet { condition } => write!(f, "`{condition}` | 0 | |"),
            Finding::Endless => write!(f, "a run that does not end | |"),
            Finding::Missed { took } => write!(f, "**not found** | | {:.0} s", took.as_secs_f32()),
            Finding::NotBuilt => write!(f, "**not built** | |"),
        }
    }
}

impl Mutation {
    /// # Errors
    /// Where the text is not in the file, or is there more than once.
    fn apply(&self, text: &str, replace: &str) -> Result<String> {
        match text.matches(&self.find).count() {
            1 => Ok(text.replacen(&self.find, replace, 1)),
            times => {
                bail!("the mutation {} does not apply: its text is in {} {times} times", self.name, self.file)
            }
        }
    }

    /// The text that takes the place of `find` in a program that is told whether to have the fault.
    fn switched(&self) -> String {
        let is_on = format!("crate::is_mutated({:?})", self.name);
        let (find, replace) = (&*self.find, &*self.replace);
        if replace.contains(MUTATED) {
            return replace.replace(MUTATED, &is_on);
        }
        let either = |find: &str, replace: &str| format!("if {is_on} {{ {replace} }} else {{ {find} }}");
        for keyword in ["if ", "while "] {
            let condition = |text| str::strip_prefix(text, keyword)?.strip_suffix(" {");
            if let (Some(find), Some(replace)) = (condition(find), condition(replace)) {
                return format!("{keyword}({}) {{", either(find, replace));
            }
        }
        let binding = |text| str::strip_prefix(text, "let ")?.strip_suffix(';')?.split_once(" = ");
        match (binding(find), binding(replace)) {
            (Some((name, find)), Some((same, replace))) if name == same => {
                format!("let {name} = {};", either(find, replace))
            }
            _ if find.ends_with(';') => either(find, replace),
            _ => format!("({})", either(find, replace)),
        }
    }
}

fn mutations() -> Result<Vec<Mutation>> {
    #[derive(Deserialize)]
    struct All {
        mutation: Vec<Mutation>,
    }
    let file = paths::root().join("xtask/mutations.toml");
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let all: All = toml::from_str(&text).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(all.mutation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mutation_applies() {
        let mutations = mutations().expect("they can be read");
        let source = |file: &str| read(&paths::root().join(file));
        programs(&mutations, source).unwrap_or_else(|error| panic!("{error}"));
        for mutation in &mutations {
            let text = source(&mutation.file).expect("the file is there");
            let mutated = mutation.apply(&text, &mutation.replace).unwrap_or_else(|error| panic!("{error}"));
            assert_ne!(mutated, text, "{} changes nothing", mutation.name);
            let others = mutations.iter().filter(|other| other.name == mutation.name).count();
            assert_eq!(others, 1, "two mutations are named {}", mutation.name);
        }
    }

    #[test]
    fn the_output_of_the_simulation_is_parsed() {
        let log = "the first seed is 1\n12 seeds, 800 grants checked in 42 s of one core: 1143 a minute\n\
             seed 13 fails, fingerprint 0f\n\nBROKEN: two holders: a and b\n";
        let Some(Finding::Found { seed: 13, took, what }) = found(log) else { panic!("it is found") };
        assert_eq!((took, &*what), (Duration::from_secs(42), "two holders: a and b"));
        assert!(found("the first seed is 1\n").is_none());
        let log = "the first seed is 1\n\nBROKEN: the condition nothing_is_late is not met: it panics\n";
        let finding = found(log);
        assert!(matches!(finding, Some(Finding::Unmet { condition }) if condition == "nothing_is_late"));
    }
}

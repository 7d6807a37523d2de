//! Rules for the source: which modules may import which, which modules read the clock, and how long files and
//! functions may be.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// These modules import everything, and nothing imports them.
const TOP: [&str; 5] = ["app", "main", "lib", "simulation", "bin"];

/// Names that the lock core must not use.
const IMPURE: [&str; 10] = [
    "async ",
    ".await",
    "tokio",
    "mysql_async",
    "std::io",
    "std::net",
    "std::thread",
    "std::time",
    "rand::",
    "tracing",
];

const CLOCKS: [&str; 3] = ["Instant::now()", "SystemTime::now()", "clock_gettime"];

const LONGEST_FILE: usize = 600;
/// Files with more than [`LONGEST_FILE`] lines. Each should be split.
const LONG_FILES: [&str; 0] = [];

/// The limit for ninety-eight in a hundred functions, and the limit for all.
const LONGEST_FUNCTION: usize = 70;
const LONGEST_OF_ALL: usize = 150;

struct Source {
    /// The path from the root of the repository.
    path: String,
    text: String,
}

impl Source {
    /// The first folder or file below `host/src`.
    fn module(&self) -> Option<&str> {
        let below = self.path.strip_prefix("host/src/")?;
        below.split(['/', '.']).next()
    }

    /// The numbered lines without comments, up to the tests, which are at the end.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines = self.text.lines().enumerate().take_while(|(_, line)| !line.starts_with("mod tests {"));
        lines.map(|(n, line)| (n + 1, line.split("//").next().unwrap_or_default()))
    }

    /// Files of submodules that are only compiled for tests.
    fn test_files(&self) -> impl Iterator<Item = String> {
        let folder = self.path.trim_end_matches(".rs").trim_end_matches("/lib").to_owned();
        let after = self.text.split("#[cfg(test)]\nmod ").skip(1);
        after.map(move |rest| format!("{folder}/{}", first_word(rest)))
    }
}

fn sources() -> Vec<Source> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository");
    let mut sources = Vec::new();
    for folder in ["host", "policies", "sdk", "xtask", "examples"] {
        collect(top, &top.join(folder), &mut sources);
    }
    // They are generated.
    sources.retain(|source| !source.path.starts_with("sdk/src/bindings/"));
    assert!(sources.len() > 100, "only {} files were found", sources.len());
    sources
}

/// The sources of the host that are part of the program.
fn shipped() -> Vec<Source> {
    let mut sources = sources();
    let tests: Vec<String> = sources.iter().flat_map(Source::test_files).collect();
    sources.retain(|source| {
        let is_of = |test: &String| source.path.strip_prefix(test.as_str());
        let is_test = tests.iter().filter_map(is_of).any(|rest| rest.starts_with(['/', '.']));
        source.module().is_some() && !is_test
    });
    assert!(sources.len() > 60, "only {} files were found", sources.len());
    sources
}

fn collect(top: &Path, folder: &Path, sources: &mut Vec<Source>) {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    entries.sort_unstable();
    for path in entries {
        if path.is_dir() && !path.ends_with("target") {
            collect(top, &path, sources);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            let text = fs::read_to_string(&path).expect("a source");
            let path = path.strip_prefix(top).expect("below the top").to_string_lossy().into_owned();
            sources.push(Source { path, text });
        }
    }
}

/// The modules of this crate that a line names.
fn imports(line: &str) -> impl Iterator<Item = &str> {
    line.split("crate::").skip(1).flat_map(|rest| {
        let list = rest.strip_prefix('{').and_then(|list| list.split('}').next());
        list.unwrap_or(rest).split(if list.is_some() { ", " } else { "\n" }).map(first_word)
    })
}

fn first_word(text: &str) -> &str {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or_default()
}

fn found_none(what: &str, faults: &[String]) {
    assert!(faults.is_empty(), "{what}:\n{}", faults.join("\n"));
}

/// The modules of `host/src` and their imports, from ARCHITECTURE.md.
fn may_import() -> BTreeMap<String, BTreeSet<String>> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository");
    let text = fs::read_to_string(top.join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let (_, table) = text.split_once("\n| module | imports |").expect("a table of imports");
    let names = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<BTreeSet<_>>();
    let mut table_of = BTreeMap::new();
    for row in table.lines().skip(2).take_while(|row| row.starts_with('|')) {
        let cells: Vec<&str> = row.split('|').collect();
        for module in names(cells[1]) {
            table_of.insert(module, names(cells[2]));
        }
    }
    table_of
}

#[test]
fn modules_import_what_they_may() {
    let mut faults = Vec::new();
    let table = may_import();
    for source in shipped() {
        let Some(module) = source.module().filter(|name| !TOP.contains(name)) else { continue };
        let Some(allowed) = table.get(module) else {
            faults.push(format!(
                "{}: the module `{module}` is not in the table of ARCHITECTURE.md",
                source.path
            ));
            continue;
        };
        for (n, line) in source.code() {
            for imported in imports(line).filter(|name| *name != module && !allowed.contains(*name)) {
                faults.push(format!("{}:{n}: `{module}` imports `{imported}`", source.path));
            }
        }
    }
    found_none("modules that import what they may not", &faults);
}

#[test]
fn modules_have_no_circle() {
    let mut left = may_import();
    // A module is in no circle if it imports none of the remaining modules, or none of them imports it.
    loop {
        let is_free = |name: &String, imports: &BTreeSet<String>| {
            !imports.iter().any(|name| left.contains_key(name))
                || !left.values().any(|other| other.contains(name))
        };
        let Some(free) =
            left.iter().find(|(name, imports)| is_free(name, imports)).map(|(name, _)| name.clone())
        else {
            break;
        };
        left.remove(&free);
    }
    assert!(left.is_empty(), "these import each other: {left:?}");
}

#[test]
fn the_lock_core_is_pure() {
    let mut faults = Vec::new();
    for source in shipped().iter().filter(|source| source.module() == Some("lock")) {
        for (n, line) in source.code() {
            for word in IMPURE.iter().filter(|word| line.contains(**word)) {
                faults.push(format!("{}:{n}: `{word}`", source.path));
            }
        }
    }
    found_none("the lock core does more than decide", &faults);
}

#[test]
fn only_the_clock_reads_the_clock() {
    let mut faults = Vec::new();
    for source in shipped().iter().filter(|source| source.module() != Some("clock")) {
        for (n, line) in source.code() {
            // The runtime's own timers use the runtime's own clock.
            let line = line.replace("tokio::time::Instant::now()", "");
            for word in CLOCKS.iter().filter(|word| line.contains(**word)) {
                faults.push(format!("{}:{n}: `{word}`", source.path));
            }
        }
    }
    found_none("the clock is read outside clock.rs", &faults);
}

/// A simulation can only repeat a run if all random numbers come from it.
#[test]
fn one_module_gives_random_numbers() {
    let mut faults = Vec::new();
    let gives = |source: &&Source| !matches!(source.module(), Some("random" | "simulation" | "bin"));
    for source in shipped().iter().filter(gives) {
        let words = ["rand::random", "rand::rng", "use rand::"];
        for (n, line) in source.code().filter(|(_, line)| words.iter().any(|word| line.contains(word))) {
            faults.push(format!("{}:{n}: {}", source.path, line.trim()));
        }
    }
    found_none("random numbers from elsewhere than random.rs", &faults);
}

/// Tokio chooses at random which branch of a `select!` is tried first, and which reader of its `watch` continues
/// first. A simulation could not repeat such a choice.
#[test]
fn nothing_in_a_simulation_is_drawn_by_tokio() {
    const SIMULATED: [&str; 9] =
        ["peers", "fleet", "guard", "mysql", "policy", "service", "simulation", "store", "vital"];
    let mut faults = Vec::new();
    for source in shipped() {
        let is_simulated = source.module().is_some_and(|module| SIMULATED.contains(&module));
        let mut code = source.code().peekable();
        while let Some((n, line)) = code.next() {
            let is_drawn = is_simulated
                && line.contains("select! {")
                && code.peek().is_none_or(|(_, next)| next.trim() != "biased;");
            if is_drawn {
                faults.push(format!("{}:{n}: a `select!` that is not `biased`", source.path));
            }
            if ["watch::channel", "watch::Sender", "watch::Receiver"].iter().any(|word| line.contains(word)) {
                faults
                    .push(format!("{}:{n}: `tokio::sync::watch`, where `latest` has the order", source.path));
            }
        }
    }
    found_none("what a simulation cannot repeat", &faults);
}

#[test]
fn files_are_short() {
    let mut faults = Vec::new();
    for source in sources() {
        let lines = source.text.lines().count();
        match (lines > LONGEST_FILE, LONG_FILES.contains(&source.path.as_str())) {
            (true, false) => faults.push(format!("{}: {lines} lines", source.path)),
            (false, true) => faults.push(format!("{}: is short now; take it off the list", source.path)),
            _ => {}
        }
    }
    found_none(&format!("files over {LONGEST_FILE} lines"), &faults);
}

/// The lengths of a file's functions: from `fn` to the closing brace at the same indent.
fn functions(source: &Source) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let lines: Vec<&str> = source.text.lines().collect();
    for (n, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let is_function = code.starts_with("fn ") || code.contains(" fn ") && !code.starts_with("//");
        if !is_function || code.ends_with(';') || code.ends_with('}') {
            continue;
        }
        let closing = format!("{}}}", &line[..line.len() - code.len()]);
        if let Some(end) = lines[n..].iter().position(|line| *line == closing) {
            found.push((n + 1, end + 1));
        }
    }
    found
}

#[test]
fn functions_are_short() {
    let (mut all, mut long, mut longest) = (0, Vec::new(), 0);
    for source in sources() {
        for (line, length) in functions(&source) {
            all += 1;
            longest = longest.max(length);
            if length > LONGEST_FUNCTION {
                long.push(format!("{}:{line}: {length} lines", source.path));
            }
        }
    }
    assert!(all > 1_000, "only {all} functions were found");
    assert!(long.len() * 50 <= all, "{} of {all} functions are over 2 %:\n{}", long.len(), long.join("\n"));
    assert!(longest <= LONGEST_OF_ALL, "one of these is over {LONGEST_OF_ALL} lines:\n{}", long.join("\n"));
}

#[test]
fn imports_are_found() {
    let found: Vec<&str> = imports("use crate::{api, mysql::Store}; crate::clock::now()").collect();
    assert_eq!(found, ["api", "mysql", "clock"]);
}

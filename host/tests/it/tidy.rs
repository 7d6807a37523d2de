//! Rules for the source: which modules may import which, that files import each other in one direction, which
//! modules read the clock, and how long files and functions may be.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// These modules import everything, and nothing imports them.
const TOP: [&str; 6] = ["app", "main", "lib", "simulation", "fuzz", "bin"];

/// The first file of each circle of files that import each other. Each circle should be opened.
const CIRCLES: [&str; 9] = [
    "admin",
    "cli",
    "fleet",
    "guard",
    "policy",
    "simulation",
    "simulation::server",
    "store",
    "store::contract",
];

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
    for folder in ["host", "policies", "sdk", "xtask", "examples", "fuzz"] {
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
fn modules_import_only_what_the_architecture_allows() {
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
fn modules_form_no_import_circle() {
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

/// The files of the program by their module paths, such as `service::swap`; `lib.rs` has the empty path.
struct Files(BTreeMap<String, Paths>);

/// The paths that a file names.
#[derive(Default)]
struct Paths {
    /// The names that `use` brings into the file, with their paths.
    used: BTreeMap<String, String>,
    /// All paths, in the code and in `use`.
    all: BTreeSet<String>,
}

impl Files {
    fn read() -> Files {
        let mut files = BTreeMap::new();
        for source in shipped() {
            let path = source.path.trim_start_matches("host/src/").trim_end_matches(".rs").replace('/', "::");
            files.insert(path.replace("lib", ""), Paths::of(&source));
        }
        Files(files)
    }

    /// The file that has the thing that a path in the file `from` means; `None` if it is of another crate.
    fn file_of(&self, from: &str, path: &str) -> Option<String> {
        let mut at = from.to_owned();
        let mut rest = path;
        while !rest.is_empty() {
            let (word, after) = rest.split_once("::").unwrap_or((rest, ""));
            let inner = format!("{at}::{word}").trim_start_matches("::").to_owned();
            match word {
                "crate" => at.clear(),
                "self" => {}
                "super" => at = at.rsplit_once("::").map_or("", |(parent, _)| parent).to_owned(),
                _ if self.0.contains_key(&inner) => at = inner,
                _ => {
                    // The file may take the name from another one.
                    let used = self.0[&at].used.get(word).filter(|used| first_word(used) != word);
                    let Some(used) = used else { return (rest != path).then_some(at) };
                    return self.file_of(&at, format!("{used}::{after}").trim_end_matches("::"));
                }
            }
            rest = after;
        }
        Some(at)
    }

    fn imports_of(&self, file: &str) -> BTreeSet<String> {
        let found = self.0[file].all.iter().filter_map(|path| self.file_of(file, path));
        found.filter(|imported| imported != file).collect()
    }
}

/// Whether this can stand before `use`: not so in `pub enum Cause {`.
fn is_visibility(before: &str) -> bool {
    matches!(before, "" | "pub ") || (before.starts_with("pub(") && before.ends_with(") "))
}

impl Paths {
    fn of(source: &Source) -> Paths {
        let (mut paths, mut tree, mut is_for_tests) = (Paths::default(), String::new(), false);
        for (_, line) in source.code() {
            let line = line.trim();
            if let Some(rest) =
                line.split_once("use ").filter(|(before, _)| tree.is_empty() && is_visibility(before))
            {
                tree = rest.1.to_owned();
            } else if tree.is_empty() {
                let words = line.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
                let words = words.map(|word| word.trim_end_matches(':'));
                paths.all.extend(words.filter(|word| word.contains("::")).map(str::to_owned));
                is_for_tests = line == "#[cfg(test)]";
            } else {
                tree.push_str(line);
            }
            if tree.ends_with(';') {
                if !is_for_tests {
                    paths.add(tree.trim_end_matches(';'));
                }
                (tree, is_for_tests) = (String::new(), false);
            }
        }
        paths
    }

    /// Adds what a `use` names: `a::{b, c::{self, d}}` names `a::b`, `a::c` and `a::c::d`.
    fn add(&mut self, tree: &str) {
        let Some((before, list)) = tree.split_once('{') else {
            let (path, name) = tree.split_once(" as ").unwrap_or((tree, tree));
            let path = path.trim().trim_end_matches("::self");
            let name = name.trim().trim_end_matches("::self").rsplit("::").next().unwrap_or_default();
            self.used.insert(name.to_owned(), path.to_owned());
            self.all.insert(path.to_owned());
            return;
        };
        let (list, _) = list.rsplit_once('}').expect("a list ends");
        let mut depth = 0;
        let parts = list.split(|c| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            depth == 0 && c == ','
        });
        for part in parts.map(str::trim).filter(|part| !part.is_empty()) {
            self.add(&format!("{before}{part}"));
        }
    }
}

/// The files that a file imports, and those that they import.
fn reached_from<'a>(imports: &'a BTreeMap<&str, BTreeSet<String>>, file: &'a str) -> BTreeSet<&'a str> {
    let (mut reached, mut next) = (BTreeSet::new(), vec![file]);
    while let Some(file) = next.pop() {
        let found = imports[file].iter().map(String::as_str);
        next.extend(found.filter(|found| reached.insert(*found)));
    }
    reached
}

#[test]
fn files_form_no_unlisted_import_circle() {
    let files = Files::read();
    let imports: BTreeMap<&str, BTreeSet<String>> =
        files.0.keys().map(|file| (file.as_str(), files.imports_of(file))).collect();
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        imports.keys().map(|file| (*file, reached_from(&imports, file))).collect();
    let mut circles: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for file in reached.keys() {
        // A circle has the name of its first file.
        if let Some(first) = reached[file].iter().find(|other| reached[*other].contains(file)) {
            circles.entry(first).or_default().push(file);
        }
    }
    let new = circles.iter().filter(|(first, _)| !CIRCLES.contains(first));
    let mut faults: Vec<String> = new.map(|(_, circle)| circle.join(", ")).collect();
    let open = CIRCLES.iter().filter(|first| !circles.contains_key(*first));
    faults.extend(open.map(|first| format!("{first}: is in no circle now; take it off the list")));
    found_none("files that import each other", &faults);
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
fn only_one_module_draws_random_numbers() {
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
fn no_simulated_choice_is_drawn_by_tokio() {
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

#[test]
fn files_of_paths_are_found() {
    let file = |text: &str| Paths::of(&Source { path: String::new(), text: text.to_owned() });
    let files = Files(BTreeMap::from([
        ("a".to_owned(), file("mod b;\nmod c;\npub use b::{self, B as Name};")),
        ("a::b".to_owned(), file("use std::fmt;\nuse super::c::{\n    C,\n};\nfn f() { crate::a::A }")),
        ("a::c".to_owned(), file("#[cfg(test)]\nuse super::b::B;\nuse super::{Name, Other};")),
    ]));
    let imports = ["a", "a::b", "a::c"].map(|file| files.imports_of(file).into_iter().collect::<Vec<_>>());
    assert_eq!(imports, [vec!["a::b"], vec!["a", "a::c"], vec!["a", "a::b"]]);
}

/// `a/{b,c}.rs` as `a/b.rs` and `a/c.rs`.
fn spelled_out(path: &str) -> Vec<String> {
    let list = path.split_once('{').and_then(|(head, rest)| Some((head, rest.split_once('}')?)));
    let Some((head, (list, tail))) = list else { return vec![path.to_owned()] };
    list.split(',').flat_map(|item| spelled_out(&format!("{head}{item}{tail}"))).collect()
}

#[test]
fn files_that_architecture_names_exist() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository");
    let text = fs::read_to_string(top.join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let files: Vec<String> = sources().iter().map(|source| format!("/{}", source.path)).collect();
    let named =
        text.split('`').skip(1).step_by(2).filter(|word| word.ends_with(".rs") && !word.contains(' '));
    let named: BTreeSet<String> = named.flat_map(spelled_out).collect();
    assert!(named.len() > 100, "only {} files are named", named.len());
    let exists = |name: &&String| files.iter().any(|file| file.ends_with(&format!("/{name}")));
    let missing: Vec<String> = named.iter().filter(|name| !exists(name)).cloned().collect();
    found_none("ARCHITECTURE.md names files that do not exist", &missing);
}

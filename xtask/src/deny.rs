//! What the dependencies may be: cargo-deny checks each Cargo.lock of the checkout against .cargo/deny.toml.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};

use crate::test::Outcome;
use crate::{paths, steps};

/// The version of cargo-deny.
const VERSION: &str = "0.20.2";

/// The environment variable that names the folder of a copy of RustSec's advisories.
const COPY: &str = "LOCKKEEPER_ADVISORY_DB";

/// The folder in which cargo-deny looks for the advisories. Its name ends with a hash of their address.
const FOLDER: &str = "advisory-db-3157b0e258782691";

/// The age from which on a copy is called old.
const OLD: Duration = Duration::from_hours(30 * 24);

/// cargo-deny's lints about exceptions that a Cargo.lock does not need.
const UNUSED: [&str; 5] = [
    "advisory-not-detected",
    "license-exception-not-encountered",
    "license-not-encountered",
    "unmatched-skip",
    "unnecessary-skip",
];

/// Checks the licences and the sources of all dependencies, and that no banned crate is among them.
pub fn dependencies() -> Result<Outcome> {
    check(&["bans", "licenses", "sources"], |_| ())
}

/// Checks the dependencies against a copy of RustSec's advisories, if there is one.
pub fn advisories() -> Result<Outcome> {
    let usual = paths::target().join("advisory-db");
    let Some(copy) = copy(std::env::var_os(COPY).map(PathBuf::from), &usual)? else {
        eprintln!(
            "No advisories were checked: there is no copy of RustSec's database. This command gets one:\n  \
             git clone --depth 1 https://github.com/RustSec/advisory-db {}\n\
             If there is a copy in another folder, set {COPY} to that folder.",
            usual.display()
        );
        return Ok(Outcome::Skipped("not checked: there is no copy of the advisories"));
    };
    let (day, written) = newest(&copy)?;
    let note = note(&day, SystemTime::now().duration_since(written).unwrap_or_default());
    eprintln!("advisories in {}: {note}", copy.display());
    let copies = paths::target().join("tools/advisory-dbs");
    link(&copy, &copies)?;
    let outcome = check(&["advisories", "--allow", "index-failure"], |deny| {
        deny.env("LOCKKEEPER_ADVISORY_DBS", &copies);
    })?;
    Ok(if let Outcome::Passed(_) = outcome { Outcome::Passed(note) } else { outcome })
}

/// Runs cargo-deny on each Cargo.lock. The first code of a failure is the outcome's.
fn check(what: &[&str], options: impl Fn(&mut Command)) -> Result<Outcome> {
    let program = installed()?;
    let root = paths::root();
    let mut outcome = Outcome::Passed(String::new());
    for lock in lock_files(&root)? {
        eprintln!("{}", lock.strip_prefix(&root).unwrap_or(&lock).display());
        let mut deny = Command::new(&program);
        let manifest = lock.with_file_name("Cargo.toml");
        // The checks need the crates alone. Offline, cargo-deny fetches nothing else.
        if !steps::status(steps::cargo(&["fetch", "--quiet", "--manifest-path"]).arg(&manifest))?.success() {
            bail!("cargo cannot fetch the crates of {}", lock.display());
        }
        deny.current_dir(&root).args([
            "--locked",
            "--offline",
            "--config",
            ".cargo/deny.toml",
            "--manifest-path",
        ]);
        deny.arg(&manifest);
        options(&mut deny);
        deny.arg("check").args(what);
        // The workspace needs every exception. A policy needs few of them.
        let unused = if lock.parent() == Some(&root) { "--deny" } else { "--allow" };
        deny.args(UNUSED.iter().flat_map(|lint| [unused, lint]));
        let code = steps::code(steps::status(&mut deny)?);
        if code != 0 && matches!(outcome, Outcome::Passed(_)) {
            outcome = Outcome::Failed(code);
        }
    }
    Ok(outcome)
}

/// Installs cargo-deny into target/tools, unless this version is there, and returns the path of its program.
fn installed() -> Result<PathBuf> {
    let tools = paths::target().join("tools");
    let program = tools.join("bin/cargo-deny");
    if !program.is_file() {
        eprintln!("installing cargo-deny {VERSION} (once, 1 to 2 minutes on 2 cores)");
    }
    let build = tools.join("build");
    let mut install = steps::cargo(&["install", "--quiet", "cargo-deny", "--version", VERSION, "--root"]);
    install.arg(&tools).env("CARGO_TARGET_DIR", &build);
    // Its build takes longer than all its runs, so its build is the quickest one.
    install.args(["--profile", "dev"]).env("CARGO_PROFILE_DEV_DEBUG", "false").env("CARGO_INCREMENTAL", "0");
    if !steps::status(&mut install)?.success() {
        bail!("cargo cannot install cargo-deny {VERSION}");
    }
    match fs::remove_dir_all(&build) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", build.display()))
        }
        _ => Ok(program),
    }
}

/// The Cargo.lock files below a folder, without those in hidden folders and in cargo's target directories.
fn lock_files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
        for entry in entries.flatten() {
            let (name, path) = (entry.file_name(), entry.path());
            if name == "Cargo.lock" {
                found.push(path);
            } else if entry.file_type().is_ok_and(|kind| kind.is_dir())
                && !name.to_string_lossy().starts_with('.')
                // It is never distributed, and libFuzzer has a licence of its own.
                && name != "fuzz"
                && !path.join("CACHEDIR.TAG").exists()
            {
                folders.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The folder of the copy: the named one, or else the usual one, if there is one.
fn copy(named: Option<PathBuf>, usual: &Path) -> Result<Option<PathBuf>> {
    let copy = match named {
        Some(named) => named,
        None if usual.exists() => usual.to_owned(),
        None => return Ok(None),
    };
    // Without a .git of its own, git would look into the repository around the copy.
    if !copy.join("crates").is_dir() || !copy.join(".git").exists() {
        bail!(
            "{} is not a git checkout of RustSec's advisory-db; {COPY} can name another folder",
            copy.display()
        );
    }
    Ok(Some(std::path::absolute(copy)?))
}

/// When the newest commit of the copy was written: the day, and the time.
fn newest(copy: &Path) -> Result<(String, SystemTime)> {
    let mut git = Command::new("git");
    git.arg("--git-dir").arg(copy.join(".git")).args(["log", "-1", "--format=%cs %ct"]);
    let out = git.output().context("cannot run git")?;
    let text = String::from_utf8_lossy(&out.stdout);
    let parsed = text.trim().split_once(' ').and_then(|(day, seconds)| Some((day, seconds.parse().ok()?)));
    let Some((day, seconds)) = parsed else {
        bail!("git cannot read {}: {}", copy.display(), String::from_utf8_lossy(&out.stderr).trim());
    };
    Ok((day.to_owned(), SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)))
}

/// What is said of a copy of this day and age.
fn note(day: &str, age: Duration) -> String {
    let days = age.as_secs() / (24 * 60 * 60);
    let advice = if age > OLD { "; OLD: later advisories were not checked, get a newer copy" } else { "" };
    format!("a copy of {day}, {days} days old{advice}")
}

/// Puts the copy where cargo-deny looks for it.
fn link(copy: &Path, copies: &Path) -> Result<()> {
    let link = copies.join(FOLDER);
    fs::create_dir_all(copies)?;
    match fs::remove_file(&link) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => std::os::unix::fs::symlink(copy, &link),
    }
    .with_context(|| format!("cannot make the link {}", link.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_lock_file_outside_of_target_directories_is_found() {
        let files = lock_files(&paths::root()).expect("the checkout can be read");
        for file in ["Cargo.lock", "examples/tenant-policy/Cargo.lock", "host/tests/guests/bad/Cargo.lock"] {
            assert!(files.contains(&paths::root().join(file)), "{file} is not in {files:?}");
        }
        assert!(!files.iter().any(|file| file.starts_with(paths::target())), "{files:?}");
    }

    #[test]
    fn a_copy_that_is_named_must_be_a_git_checkout() {
        let nowhere = paths::root().join("nowhere");
        assert_eq!(copy(None, &nowhere).expect("no copy is no fault"), None);
        let faults = [copy(Some(nowhere.clone()), &nowhere), copy(None, &paths::root())];
        for fault in faults {
            let fault = fault.expect_err("it is no copy").to_string();
            assert!(fault.contains("is not a git checkout of RustSec's advisory-db"), "{fault}");
        }
    }

    #[test]
    fn a_copy_older_than_30_days_is_called_old() {
        let day = Duration::from_hours(24);
        assert_eq!(note("2026-08-21", 30 * day), "a copy of 2026-08-21, 30 days old");
        assert!(note("2026-08-21", 31 * day).contains("31 days old; OLD"));
    }
}

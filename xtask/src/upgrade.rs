//! `cargo xtask upgrade`: an earlier version and this one, beside each other on one store.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};

use crate::steps::{self, Progress};
use crate::{paths, servers, wasm};

/// Upgrades a fleet under load, from an earlier version to this one, and checks that no lock is lost or granted twice.
///
/// Builds the earlier commit from this repository's history, then runs the tests `upgrade::…` on MySQL and on MariaDB.
#[derive(clap::Args)]
pub struct Args {
    /// The commit to upgrade from; without it, the commit that CHANGELOG.md names for the version before this one.
    #[arg(long, value_name = "COMMIT")]
    from: Option<String>,
    /// Run only the tests whose name contains this text.
    #[arg(value_name = "TEST")]
    only: Option<String>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut progress = Progress::new(4);
    let from = match &args.from {
        Some(from) => from.clone(),
        None => earlier_commit(&paths::root().join("CHANGELOG.md"))?,
    };
    progress.next(&format!("reading commit {from}"));
    let source = paths::target().join("upgrade").join(&from);
    unpack(&from, &source)?;

    progress.next("building it (some minutes the first time)");
    wasm::ensure()?;
    let binary = build(&source)?;

    progress.next("getting the database servers");
    servers::ensure(servers::Kind::Mysql, false)?;
    servers::ensure(servers::Kind::Mariadb, false)?;

    progress.next("running this version beside it");
    let mut test = steps::cargo(&["test", "--package", "lockkeeper", "--test", "it", "--", "--ignored"]);
    test.arg(format!("upgrade::{}", args.only.as_deref().unwrap_or_default()));
    test.env("LOCKKEEPER_EARLIER", binary);
    Ok(ExitCode::from(steps::code(steps::status(&mut test)?)))
}

/// The commit of the newest version that has one: `## 0.1.0, commit 0ebc70a`.
fn earlier_commit(changelog: &Path) -> Result<String> {
    let text =
        fs::read_to_string(changelog).with_context(|| format!("cannot read {}", changelog.display()))?;
    let commit =
        |line: &str| line.strip_prefix("## ")?.split_once(", commit ").map(|(_, commit)| commit.to_owned());
    text.lines()
        .find_map(commit)
        .context("CHANGELOG.md names no commit of an earlier version; say one with --from")
}

/// Lays out the files of a commit, without touching the checkout.
fn unpack(commit: &str, dir: &Path) -> Result<()> {
    let root = paths::root();
    let known = Command::new("git")
        .args(["rev-parse", "--quiet", "--verify", &format!("{commit}^{{commit}}")])
        .current_dir(&root)
        .stdout(Stdio::null())
        .status()
        .context("cannot run git")?;
    if !known.success() {
        bail!("this repository has no commit {commit}; a shallow clone gets it with `git fetch --unshallow`");
    }
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let mut archive = Command::new("git")
        .args(["archive", "--format=tar", commit])
        .current_dir(&root)
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run git")?;
    let files = archive.stdout.take().context("git archive has no output")?;
    let unpacked =
        Command::new("tar").arg("-x").current_dir(dir).stdin(files).status().context("cannot run tar")?;
    if !archive.wait()?.success() || !unpacked.success() {
        bail!("cannot unpack commit {commit} into {}", dir.display());
    }
    Ok(())
}

/// Builds the program in a target folder of its own: the one of this checkout keeps this version's.
fn build(source: &Path) -> Result<PathBuf> {
    let target = paths::target().join("upgrade").join("target");
    let mut build = steps::cargo(&["build", "--package", "lockkeeper", "--bin", "lockkeeper"]);
    let built = steps::status(build.current_dir(source).env("CARGO_TARGET_DIR", &target))?;
    if !built.success() {
        bail!("the earlier version cannot be built in {}", source.display());
    }
    let binary = source.join("lockkeeper");
    fs::copy(target.join("debug").join("lockkeeper"), &binary)
        .with_context(|| format!("cannot copy the earlier version to {}", binary.display()))?;
    Ok(binary)
}

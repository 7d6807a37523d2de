//! Fetches packages with everything they need, with apt and a state folder of our own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::Kind;
use super::sources::{Machine, Source};

/// Packages that a server's package asks for and the server does not: scripts around it.
const UNUSED: [&str; 4] = ["perl", "libperl", "libgdbm", "libc-gconv-modules"];

/// Downloads a server's packages into `work` and returns the files to unpack. What an interrupted
/// run has downloaded is not downloaded again. apt checks signatures and digests.
pub fn fetch(machine: &Machine, kind: Kind, work: &Path) -> Result<Vec<PathBuf>> {
    let sources = machine.sources(kind)?;
    let config = prepare(work, &sources)?;
    let suites: Vec<&str> = sources.iter().flat_map(|source| &source.suites).map(String::as_str).collect();
    println!("{}: reading the package lists of {}", kind.dir(), suites.join(", "));
    apt_get(&config, &["update"]).context("apt cannot read the package lists")?;

    println!("{}: downloading {} and what it needs", kind.dir(), kind.packages().join(", "));
    let mut args = vec!["install", "--download-only", "--yes", "--no-install-recommends"];
    args.extend(kind.packages());
    apt_get(&config, &args).context("apt cannot download the packages")?;
    downloaded(&work.join("cache/archives"))
}

/// Lays out the private folders and writes the configuration that makes apt use them alone.
fn prepare(work: &Path, sources: &[Source]) -> Result<PathBuf> {
    for dir in ["state/lists/partial", "cache/archives/partial", "etc/none"] {
        let dir = work.join(dir);
        fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    let list: String = sources.iter().map(Source::stanza).collect();
    fs::write(work.join("etc/list.sources"), list)?;
    // Nothing is installed here, so apt takes nothing for granted, not even the C library.
    fs::write(work.join("state/status"), "")?;

    let at = |path: &str| work.join(path).display().to_string();
    let settings = [
        ("Dir::State", at("state")),
        ("Dir::State::lists", at("state/lists")),
        ("Dir::State::status", at("state/status")),
        ("Dir::Cache", at("cache")),
        ("Dir::Etc::sourcelist", at("etc/list.sources")),
        ("Dir::Etc::sourceparts", at("etc/none")),
        ("Dir::Etc::preferences", at("etc/no-preferences")),
        ("Dir::Etc::preferencesparts", at("etc/none")),
        ("Acquire::Languages", "none".into()),
        ("Acquire::Retries", "3".into()),
        // Not an installation: no lock of the system's, and no other user who could not write here.
        ("Debug::NoLocking", "true".into()),
        ("APT::Sandbox::User", "root".into()),
    ];
    // What the machine does after its own updates is not to be done after ours.
    let hooks = ["APT::Update", "DPkg"].into_iter().flat_map(|scope| {
        ["Pre-Invoke", "Post-Invoke", "Post-Invoke-Success"].map(|hook| format!("#clear {scope}::{hook};\n"))
    });
    let extras = ["DEP-11", "DEP-11-icons", "DEP-11-icons-small", "Contents-deb"]
        .map(|target| format!("Acquire::IndexTargets::deb::{target}::DefaultEnabled \"false\";\n"));
    let settings = settings.map(|(name, value)| format!("{name} \"{value}\";\n"));
    let config = work.join("etc/apt.conf");
    fs::write(&config, hooks.chain(extras).chain(settings).collect::<String>())?;
    Ok(config)
}

fn apt_get(config: &Path, args: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    command.arg("--config-file").arg(config).args(["--quiet", "--option", "APT::Update::Error-Mode=any"]);
    let out = command.args(args).env("LC_ALL", "C").output().context("cannot run apt-get")?;
    if !out.status.success() {
        bail!("apt-get {} failed:\n{}", args[0], tail(&out.stderr));
    }
    Ok(())
}

fn downloaded(archives: &Path) -> Result<Vec<PathBuf>> {
    let mut debs: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(archives)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.ends_with(".deb") && !UNUSED.iter().any(|unused| name.starts_with(unused)) {
            debs.push(path);
        }
    }
    debs.sort();
    Ok(debs)
}

/// The end of what a program said, enough to see why it failed.
pub fn tail(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}

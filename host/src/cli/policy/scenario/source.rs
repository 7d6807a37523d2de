//! Where the requests for a policy come from: scenario files, or a recording.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Map, Value};

use super::super::{read as bytes, tools};
use super::file::File;
use super::load::{self, MOST};
use crate::cli::failure::Failure;
use crate::config::Limits;
use crate::replay::{Arrival, Arrivals, Load};

/// The name of the folder of scenarios.
const FOLDER: &str = "scenarios";

/// The requests that a command asks policies about.
#[derive(Args, Debug)]
pub struct RequestArgs {
    /// Scenario files, or folders of them, with requests [default: the folder `scenarios` beside the component, or in the
    /// crate]
    #[arg(value_name = "SCENARIO")]
    scenarios: Vec<PathBuf>,
    /// Take the requests from this recording instead, which is recording.dir of a proxy
    #[arg(long, value_name = "DIR", conflicts_with = "scenarios")]
    recording: Option<PathBuf>,
    /// The policy whose recorded requests are meant [default: the only one of the recording]
    #[arg(long, value_name = "NAME", requires = "recording")]
    recorded_policy: Option<String>,
}

/// Some requests.
pub struct Source {
    /// The requests.
    pub load: Load,
    /// The settings of the policy that belong to them, if they say so.
    pub settings: Option<Map<String, Value>>,
    /// The limits of their locks.
    pub limits: Limits,
}

/// The requests, in the files or the recording where they are. `policy`: as the command line names it.
pub fn sources(policy: &str, args: &RequestArgs) -> Result<Vec<Source>, Failure> {
    if let Some(dir) = &args.recording {
        let recording = crate::recording::read(dir, args.recorded_policy.as_deref())
            .map_err(|error| Failure::Usage(error.to_string()))?;
        let settings = recording.generations.last().map(|last| last.settings.clone());
        let load = Load::of(&recording, Arrivals::Open, None);
        return Ok(vec![Source { load, settings, limits: recording.limits() }]);
    }
    let source = |path: PathBuf| {
        let file = read(&path)?;
        let load = asked(&file).map_err(|why| wrong(&path, &why))?;
        Ok(Source { load, settings: file.settings, limits: Limits::default() })
    };
    files(policy, &args.scenarios)?.into_iter().map(source).collect()
}

/// All requests of a file, also those that are planned only.
fn asked(file: &File) -> Result<Load, String> {
    let mut requests = load::script(file)?.load.requests;
    for case in &file.plan {
        requests.push(Arrival::planned(load::planned(case)?));
    }
    Ok(Load::made(requests, MOST, file.store.us))
}

/// The scenario files of the command line, or those that belong to the policy, in the order of their names.
pub fn files(policy: &str, given: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let path = Path::new(policy);
    let given = match (given, path.is_dir(), policy.starts_with("builtin:")) {
        ([], true, _) => vec![path.join(FOLDER)],
        ([], false, true) => {
            return Err(Failure::Usage(format!("{policy} has no scenarios: name a file or a folder")));
        }
        ([], false, false) => vec![path.parent().unwrap_or(Path::new("")).join(FOLDER)],
        (given, ..) => given.to_vec(),
    };
    let mut files = Vec::new();
    for path in given {
        if !path.is_dir() {
            files.push(path);
            continue;
        }
        let fail = |error| Failure::Other(format!("cannot read {}: {error}", path.display()));
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&path).map_err(fail)? {
            let entry = entry.map_err(fail)?.path();
            found.extend(Some(entry).filter(|entry| entry.extension().is_some_and(|end| end == "toml")));
        }
        found.sort();
        if found.is_empty() {
            return Err(Failure::Usage(format!("{} has no file *.toml", path.display())));
        }
        files.append(&mut found);
    }
    Ok(files)
}

/// Reads a scenario file.
pub fn read(path: &Path) -> Result<File, Failure> {
    let text = String::from_utf8(bytes(path)?).map_err(|_| wrong(path, "is not UTF-8"))?;
    toml::from_str(&text).map_err(|error| wrong(path, &error.to_string()))
}

/// What is wrong with a scenario file.
pub fn wrong(path: &Path, why: &str) -> Failure {
    Failure::Usage(format!("{}: {}", path.display(), why.trim_end()))
}

/// A policy of the command line: the folder of a crate, which is built, a component file, or `builtin:` and a name.
pub fn candidate(policy: &str, settings: Map<String, Value>) -> Result<tools::Candidate, Failure> {
    let folder = Path::new(policy);
    let (name, component) = match folder.is_dir() {
        false => tools::component(policy)?,
        true => {
            let (component, file) = tools::build(folder)?;
            (file.file_stem().unwrap_or_default().to_string_lossy().into_owned(), component)
        }
    };
    Ok(tools::Candidate { name, component, settings })
}

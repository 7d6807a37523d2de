//! The parts of `policy` that need no proxy. Only this file calls the policy tools.

use std::cell::RefCell;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use lockkeeper_builder::Named;
use serde_json::{Map, Value};
use wasmparser::{Parser, Payload};

use crate::cli::failure::Failure;
use crate::config::{EngineLimits, Limits};
use crate::lock::Key;
use crate::policy::{
    self, AnnotateError, Compiler, Digest, Engine, Generation, Language, MANIFEST_FILE, Manifest, Plan,
    PlanError, PlanRequest, RefusalResponse, Rejection, ResponseContention,
};
use crate::recording::Recording;
use crate::replay::{self, Arrivals, Load, PlanDiff, Planned, Plans, Replayed, Report};
use crate::telemetry::Metrics;

/// Writes a policy into a new folder of its name; that folder.
pub fn scaffold(name: &str, language: Language) -> Result<PathBuf, Failure> {
    // Without a path in front: what is printed is typed again by people.
    policy::scaffold(name, language, Path::new("")).map_err(other)
}

/// Makes a component of a core module; the component, and where it goes by default: beside the module, `NAME.wasm` for a
/// module `NAME.core.wasm`.
pub fn encode(module: &Path) -> Result<(Vec<u8>, PathBuf), Failure> {
    let component = policy::encode(&super::read(module)?)
        .map_err(|error| Failure::Refused(format!("{}: {error}", module.display())))?;
    let component = match manifest(&module.with_file_name(MANIFEST_FILE), None)? {
        Some(manifest) => manifest.annotate(&component).map_err(other)?,
        None => component,
    };
    let stem = module.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let name = stem.strip_suffix(".core").map_or_else(|| format!("{stem}.component"), str::to_owned);
    Ok((component, module.with_file_name(format!("{name}.wasm"))))
}

/// Builds a policy's crate; the component, and where it goes by default: beside Cargo.toml, under the
/// crate's name.
pub fn build(dir: &Path) -> Result<(Vec<u8>, PathBuf), Failure> {
    let component = lockkeeper_builder::build(dir, None).map_err(other)?;
    let of = lockkeeper_builder::named(dir).map_err(other)?;
    let file = dir.join(&of.name).with_extension("wasm");
    let manifest = manifest(&dir.join(MANIFEST_FILE), Some(&of))?.unwrap_or_else(|| of.into());
    Ok((manifest.annotate(&component).map_err(other)?, file))
}

/// The component with the manifest of a file.
pub fn annotated(component: &[u8], file: &Path) -> Result<Vec<u8>, Failure> {
    let missing = || Failure::Usage(format!("there is no {}", file.display()));
    let manifest = manifest(file, None)?.ok_or_else(missing)?;
    manifest.annotate(component).map_err(|error| Failure::Refused(error.to_string()))
}

fn manifest(file: &Path, of: Option<&Named>) -> Result<Option<Manifest>, Failure> {
    Manifest::read(file, of).map_err(|error| Failure::Usage(error.to_string()))
}

/// Checks a component as a proxy with default limits would; what it is found to be.
pub fn check(component: &[u8], settings: &Map<String, Value>) -> Result<Value, Failure> {
    let engine = alone(&EngineLimits::default())?;
    let report = policy::check_file(component, settings, &engine, &Limits::default())
        .map_err(|rejection| Failure::Refused(rejection.to_string()))?;
    serde_json::to_value(report).map_err(other)
}

/// What a component says of itself, and what it is known by.
pub struct Described {
    pub digest: String,
    pub manifest: Option<Manifest>,
    /// The names of the interfaces that it exports.
    pub exports: Vec<String>,
}

/// Reads what a component says of itself.
pub fn described(component: &[u8]) -> Result<Described, Failure> {
    if !is_component(component) {
        return Err(Failure::Refused(AnnotateError::NotAComponent.to_string()));
    }
    let manifest = Manifest::of(component).map_err(|error| {
        Failure::Refused(format!("the manifest of the component cannot be used: {error}"))
    })?;
    Ok(Described { digest: digest(component), manifest, exports: exports(component) })
}

/// The digest by which a proxy shows a component.
pub fn digest(bytes: &[u8]) -> String {
    Digest::of(bytes).to_string()
}

/// Whether the bytes begin as a component does.
pub fn is_component(bytes: &[u8]) -> bool {
    Parser::is_component(bytes)
}

/// The names that the outermost component exports, as far as it can be read.
fn exports(component: &[u8]) -> Vec<String> {
    let (mut depth, mut names) = (0, Vec::new());
    for payload in Parser::new(0).parse_all(component).map_while(Result::ok) {
        match payload {
            Payload::ModuleSection { .. } | Payload::ComponentSection { .. } => depth += 1,
            Payload::End(_) => depth -= 1,
            Payload::ComponentExportSection(exports) if depth == 0 => {
                names.extend(
                    exports.into_iter().map_while(Result::ok).map(|export| export.name.name.to_owned()),
                );
            }
            _ => {}
        }
    }
    names
}

/// A component with signatures.
pub struct Signed {
    pub component: Vec<u8>,
    /// How many signatures it has.
    pub count: usize,
}

/// Attaches the signatures in these files to a component.
pub fn signed(component: &[u8], files: &[PathBuf]) -> Result<Signed, Failure> {
    let mut component = component.to_vec();
    for file in files {
        let text = std::fs::read_to_string(file)
            .map_err(|error| Failure::Other(format!("cannot read {}: {error}", file.display())))?;
        component = policy::attach(&component, &text)
            .map_err(|error| Failure::Usage(format!("{}: {error}", file.display())))?;
    }
    let count = policy::Signed::of(&component).signatures.len();
    Ok(Signed { component, count })
}

/// What is asked of a component.
pub struct Question {
    /// What the policy is called.
    pub name: String,
    pub component: Vec<u8>,
    pub settings: Map<String, Value>,
    pub engine: EngineLimits,
    pub limits: Limits,
    pub request: PlanRequest,
}

/// What a component made of a request.
pub struct Tried {
    /// Its name and the beginning of its digest.
    pub by: String,
    pub plan: Plan,
    /// To the request without its lock; and whether it is the component's own.
    pub answer: Option<(RefusalResponse, bool)>,
}

/// Asks a component that a proxy with these limits would load for a plan and, if `is_contended`, for what
/// the request is answered without its lock.
pub fn try_request(question: &Question, is_contended: bool) -> Result<Tried, Failure> {
    let Question { name, component, settings, request, limits, .. } = question;
    let engine = alone(&question.engine)?;
    let generation = policy::load_file(name, component, settings, &engine, limits)
        .map_err(|rejection| Failure::Refused(rejection.to_string()))?;
    let plan = generation.plan(request).map_err(|error| match error {
        PlanError::Refused { reason } => Failure::Refused(format!("the policy refuses: {reason}")),
        PlanError::Fault(fault) => Failure::Fault(format!("{fault}; a proxy would refuse the request")),
    })?;
    let answer = match plan.keys.first().filter(|_| is_contended) {
        Some(key) => Some(contended(&generation, request, key, plan.wait_ms)?),
        None => None,
    };
    Ok(Tried { by: generation.id().to_string(), plan, answer })
}

/// As when another request holds the key, is the only one in front, and stays.
fn contended(
    generation: &Generation,
    request: &PlanRequest,
    key: &Key,
    waited_ms: u32,
) -> Result<(RefusalResponse, bool), Failure> {
    let key = key.clone();
    let holder = "another".to_owned();
    let contention = ResponseContention { key, holder, position: 1, waited_ms, retry_after_ms: 1_000 };
    match generation.response(request, &contention) {
        None => Ok((contention.fallback(), false)),
        Some(Ok(answer)) => Ok((answer, true)),
        Some(Err(fault)) => Err(Failure::Fault(format!("{fault}; a proxy would answer in its own words"))),
    }
}

/// A policy to replay requests under.
pub struct Candidate {
    /// The name of the policy.
    pub name: String,
    /// The bytes of the component.
    pub component: Vec<u8>,
    /// The settings.
    pub settings: Map<String, Value>,
}

impl Candidate {
    /// The same policy with these settings, if there are any.
    pub fn with(&self, settings: Option<&Map<String, Value>>) -> Candidate {
        let settings = settings.unwrap_or(&self.settings).clone();
        Candidate { name: self.name.clone(), component: self.component.clone(), settings }
    }
}

/// A policy in its sandbox, without a proxy around it.
pub struct Alone {
    engine: Engine,
    limits: Limits,
    /// What was loaded last: as long as it lives, the engine does not compile its component again.
    last: RefCell<Option<Arc<Generation>>>,
}

/// A policy that was loaded.
pub struct Loaded(Arc<Generation>);

impl Alone {
    /// A sandbox with the limits of a proxy, whose locks have these limits. A policy that fails often is asked again and
    /// again: each request counts.
    pub fn new(limits: Limits) -> Result<Alone, Failure> {
        let engine = Engine::new(&Alone::engine(), Compiler::Child(Metrics::default())).map_err(other)?;
        Ok(Alone { engine, limits, last: RefCell::default() })
    }

    /// As [`Alone::new`], and measures what the calls cost.
    pub fn measured(limits: Limits) -> Result<Alone, Failure> {
        let engine =
            Engine::measured(&Alone::engine(), Compiler::Child(Metrics::default())).map_err(other)?;
        Ok(Alone { engine, limits, last: RefCell::default() })
    }

    fn engine() -> EngineLimits {
        EngineLimits { faults_to_suspend: u32::MAX, instances: 2, ..EngineLimits::default() }
    }

    /// What the calls since the last time have cost.
    pub fn take_costs(&self) -> Vec<policy::Cost> {
        self.engine.take_costs()
    }

    /// Loads a policy.
    pub fn load(&self, candidate: &Candidate) -> Result<Loaded, Failure> {
        let Candidate { name, component, settings } = candidate;
        let loaded = policy::load_file(name, component, settings, &self.engine, &self.limits);
        let loaded = loaded.map_err(|rejection| Failure::Refused(format!("{name}: {rejection}")))?;
        let loaded = Arc::new(loaded);
        self.last.replace(Some(loaded.clone()));
        Ok(Loaded(loaded))
    }
}

impl Loaded {
    /// The name of the policy, and the beginning of its digest.
    pub fn id(&self) -> &str {
        self.0.id()
    }

    /// What the policy answers to a request.
    pub fn plan(&self, request: &PlanRequest) -> Planned {
        Planned::of(self.0.plan(request), |_| {})
    }

    /// The names of the hooks that the policy exports.
    pub fn hooks(&self) -> Vec<&'static str> {
        self.0.hooks()
    }

    /// How the plans of another policy for these requests differ from those of this one. Also returns the first fault of
    /// each.
    pub fn compared(&self, other: &Loaded, load: &Load) -> (PlanDiff, [Option<String>; 2]) {
        let (before, after) = both(|| Plans::of(&self.0, load), || Plans::of(&other.0, load));
        (PlanDiff::new(load, &before, &after), [before.fault, after.fault])
    }

    /// Runs requests under the policy.
    pub fn run(&self, load: &Load) -> (Plans, replay::Run) {
        let plans = Plans::of(&self.0, load);
        let run = replay::run(load, &self.0, &plans, None);
        (plans, run)
    }
}

/// What is replayed.
pub struct Replay<'a> {
    pub recording: &'a Recording,
    /// The policy to compare with.
    pub before: Candidate,
    pub after: Candidate,
    pub arrivals: Arrivals,
    /// How long the store takes, if not as recorded.
    pub store_us: Option<u64>,
    /// What a reader of the report has to know.
    pub notes: Vec<String>,
}

/// Replays recorded requests under two policies. `group`: the group of each request, by its place.
pub fn replay(replay: Replay<'_>, group: impl Fn(usize) -> String) -> Result<Report, Failure> {
    let Replay { recording, before, after, arrivals, store_us, mut notes } = replay;
    let load = Load::of(recording, arrivals, store_us);
    let alone = Alone::new(recording.limits())?;
    let (Loaded(before), Loaded(after)) = (alone.load(&before)?, alone.load(&after)?);
    let (planned, next) = both(|| Plans::of(&before, &load), || Plans::of(&after, &load));
    let (ran, next_ran) = both(
        || replay::run(&load, &before, &planned, None),
        || replay::run(&load, &after, &next, Some(&planned)),
    );
    let other = planned.unlike(&recording.asks);
    if other > 0 {
        let all = recording.asks.len();
        notes.push(format!("{other} of {all} recorded plans are others than those of {}", before.id()));
    }
    if ran.guessed > 0 {
        notes.push(format!("{} leases have no recorded end: they were held as long as others", ran.guessed));
    }
    let before = Replayed { id: before.id().to_string(), plans: &planned, run: &ran };
    let after = Replayed { id: after.id().to_string(), plans: &next, run: &next_ran };
    Ok(Report::new(&load, &before, &after, group, notes))
}

/// Does both at the same time.
fn both<A: Send, B: Send>(one: impl FnOnce() -> A + Send, two: impl FnOnce() -> B) -> (A, B) {
    thread::scope(|scope| {
        let one = scope.spawn(one);
        let two = two();
        (one.join().unwrap_or_else(|panic| resume_unwind(panic)), two)
    })
}

/// The component of a file, or of `builtin:` and a name; and what it is called.
pub fn component(source: &str) -> Result<(String, Vec<u8>), Failure> {
    if let Some(name) = source.strip_prefix("builtin:") {
        let unknown = || Failure::Usage(Rejection::NoBuiltin { name: name.to_owned() }.to_string());
        return Ok((name.to_owned(), policy::builtin(name).ok_or_else(unknown)?.to_vec()));
    }
    let file = Path::new(source);
    let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Ok((name, super::read(file)?))
}

/// One instance at a time: there is nobody else, and address space may be scarce.
fn alone(engine: &EngineLimits) -> Result<Engine, Failure> {
    let limits = EngineLimits { instances: 1, ..engine.clone() };
    Engine::new(&limits, Compiler::Child(Metrics::default())).map_err(other)
}

fn other(error: impl std::fmt::Display) -> Failure {
    Failure::Other(error.to_string())
}

//! Policies: WebAssembly components that decide how locks behave.
//!
//! A [`Generation`] is one (component, settings) pair that passed every check. A call of a hook runs a fresh instance
//! under limits, on the caller's thread, in microseconds. [`Policies`] holds the live generation of each policy by
//! name. This module depends neither on MySQL nor on the queues.

mod bindings;
mod budget;
mod builtin;
mod canary;
mod check;
mod compiler;
mod encode;
mod engine;
pub(crate) mod form;
mod generation;
mod generations;
mod hooks;
mod manifest;
mod module;
mod observer;
mod push_guard;
mod rejection;
mod scaffold;
mod signature;

use std::collections::BTreeMap;
use std::path::PathBuf;

pub use builtin::builtin;
pub use canary::{Canary, CanaryGuard, CanarySeen, CanaryTerms, Overlay, Place, SideSeen};
pub use check::{Report, check_file, load_file};
pub use compiler::Compiler;
pub use compiler::child::{COMMAND as COMPILER_COMMAND, CompileArgs, run as run_compiler};
pub use encode::{EncodeError, encode};
pub use engine::{Cost, Engine, EngineError};
pub use generation::Generation;
pub use generations::{ActivePolicy, Policies, Prepared};
pub use hooks::Hook;
pub use hooks::backoff::{Backoff, Contention};
pub use hooks::fairness::{GroupView, QueueView, WaiterView};
pub use hooks::naming::{Again, OnLoss, Plan, PlanError, PlanRequest};
pub use hooks::reads::ReadPart;
pub use hooks::renewal::{Expiring, Renewal};
pub use hooks::response::{RefusalResponse, ResponseContention};
pub use manifest::{AnnotateError, FILE as MANIFEST_FILE, Manifest, ManifestError, SettingFault};
pub use module::Digest;
pub use observer::{Observed, Observer};
pub use rejection::Rejection;
pub use scaffold::{Language, ScaffoldError, scaffold};
pub use signature::{AttachError, Signed, attach};

use crate::config::{PolicyConfig, PolicySource};

/// The WIT package of this proxy, with its version.
const PACKAGE: &str = "lockkeeper:policy@0.1.0";

/// The files of the policies that are loaded from files, by the policy's name.
pub fn files(configs: &[PolicyConfig]) -> BTreeMap<String, PathBuf> {
    let file = |config: &PolicyConfig| match &config.source {
        PolicySource::File(path) => Some((config.name.clone(), path.clone())),
        PolicySource::Builtin(_) => None,
    };
    configs.iter().filter_map(file).collect()
}

/// A failed call of a policy. Counted by policy, hook and [`FaultKind::as_str`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("policy hook {hook}: {kind}: {detail}", hook = hook.as_str(), kind = kind.as_str())]
pub struct Fault {
    /// The hook that was called.
    pub hook: Hook,
    /// How the call failed.
    pub kind: FaultKind,
    /// The details, for an operator.
    pub detail: String,
}

/// How a policy's call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FaultKind {
    /// The call exceeded its fuel or its time.
    Time,
    /// The call asked for more memory than its limit.
    Memory,
    /// The call exceeded its stack.
    Stack,
    /// Any other trap.
    Trap,
    /// The answer exceeded the size limit, or its type does not allow it (invalid UTF-8).
    Answer,
    /// The answer was well-formed but invalid: an empty key, an index out of range.
    Value,
    /// The policy failed so often in a row that the proxy did not call it.
    Suspended,
}

/// The state of a policy and of its live generation.
#[derive(Clone, Debug, serde::Serialize)]
pub struct PolicyStatus {
    /// The policy's name.
    pub name: String,
    /// `sha256:` and 64 hex digits.
    pub digest: String,
    /// The number of the live generation, which increases with every load since the proxy started.
    pub generation: u64,
    /// The settings table of the live generation.
    pub settings: serde_json::Value,
    /// The hooks that the component exports.
    pub hooks: Vec<&'static str>,
    /// What the component says of itself, without its settings.
    pub manifest: Option<Manifest>,
    /// What `plan` reads of a request, by the names of the WIT package; `None` if the component does not say.
    pub reads: Option<Vec<String>>,
    /// When this generation went live, in microseconds since 1970.
    pub since_us: u64,
    /// The digest that a rollback would restore, from the fleet's record.
    pub previous: Option<String>,
    /// The last refused load, or the last fault.
    pub last_error: Option<String>,
    /// The number of faults since this generation went live.
    pub faults: u64,
    /// What this proxy has seen of a canary, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub canary: Option<CanarySeen>,
}

impl FaultKind {
    /// A stable slug for metrics and answers.
    pub fn as_str(&self) -> &'static str {
        match self {
            FaultKind::Time => "time",
            FaultKind::Memory => "memory",
            FaultKind::Stack => "stack",
            FaultKind::Trap => "trap",
            FaultKind::Answer => "answer",
            FaultKind::Value => "value",
            FaultKind::Suspended => "suspended",
        }
    }
}

#[cfg(test)]
mod tests;

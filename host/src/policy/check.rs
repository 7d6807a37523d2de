//! All checks between a file and a live policy: its form, its settings, and trial requests.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::hooks::reads::Reads;
use super::manifest::Manifest;
use super::module::Module;
use super::{Engine, Fault, Generation, Hook, Rejection, hooks};
use crate::config::Limits;
use crate::lock::Key;
use crate::telemetry::Metrics;

/// The result of `lockkeeper policy check`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Report {
    /// `sha256:` and 64 hex digits.
    pub digest: String,
    /// The size of the component.
    pub bytes: usize,
    /// The hooks that the component exports.
    pub hooks: Vec<&'static str>,
    /// What the component says of itself.
    pub manifest: Option<Manifest>,
    /// What `plan` reads of a request, by the names of the WIT package; `None` if the component does not say.
    pub reads: Option<Vec<String>>,
    /// Findings that do not prevent loading but deserve attention.
    pub notes: Vec<String>,
}

/// A compiled module that accepted its settings and answered the trial requests.
pub(super) struct Checked {
    pub(super) module: Arc<Module>,
    /// The result of `configure` for the settings.
    pub(super) settings: Vec<u8>,
    pub(super) reads: Reads,
    pub(super) notes: Vec<String>,
}

/// Checks a component like a load in the proxy.
///
/// # Errors
/// Why the proxy would refuse it.
pub fn check_file(
    component: &[u8],
    settings: &Map<String, Value>,
    engine: &Engine,
    limits: &Limits,
) -> Result<Report, Rejection> {
    let checked = component_with_settings(engine, component, settings, limits)?;
    let module = &checked.module;
    Ok(Report {
        digest: module.digest().to_string(),
        bytes: component.len(),
        hooks: exported(module),
        manifest: module.manifest().cloned(),
        reads: module.has(Hook::Reads).then(|| checked.reads.names()),
        notes: checked.notes,
    })
}

/// Loads a component, under the name `name`, as it would be live in a proxy, to call it without a proxy.
///
/// # Errors
/// Why the proxy would refuse it.
pub fn load_file(
    name: &str,
    component: &[u8],
    settings: &Map<String, Value>,
    engine: &Engine,
    limits: &Limits,
) -> Result<Generation, Rejection> {
    let checked = component_with_settings(engine, component, settings, limits)?;
    Ok(Generation::new(name, 1, settings.clone(), checked, limits.clone(), Metrics::default()))
}

/// Checks the form, the settings and the trial requests of a component.
pub(super) fn component_with_settings(
    engine: &Engine,
    component: &[u8],
    settings: &Map<String, Value>,
    limits: &Limits,
) -> Result<Checked, Rejection> {
    module_with_settings(Module::compile(engine, component)?, settings, limits)
}

/// Checks the settings and the trial requests of a module.
pub(super) fn module_with_settings(
    module: Arc<Module>,
    settings: &Map<String, Value>,
    limits: &Limits,
) -> Result<Checked, Rejection> {
    let settings = hooks::settings::configure(&module, settings)?;
    let reads = Reads::of(&module, &settings)?;
    let key = Key::new("trial/1").unwrap_or_else(|| unreachable!("it is a key"));
    let notes = Trial { module: &module, settings: &settings, reads: &reads, limits, key }.run()?;
    Ok(Checked { module, settings, reads, notes })
}

pub(super) fn exported(module: &Module) -> Vec<&'static str> {
    Hook::ALL.into_iter().filter(|hook| module.has(*hook)).map(|hook| hook.as_str()).collect()
}

/// A component on trial, and what its hooks are asked with.
pub(super) struct Trial<'a> {
    pub(super) module: &'a Module,
    pub(super) settings: &'a [u8],
    pub(super) reads: &'a Reads,
    pub(super) limits: &'a Limits,
    /// The key of the trial requests.
    pub(super) key: Key,
}

impl Trial<'_> {
    /// Asks every hook that the component exports. A fault refuses the policy.
    fn run(&self) -> Result<Vec<String>, Rejection> {
        let mut notes = Vec::new();
        for hook in Hook::ALL.into_iter().filter(|hook| self.module.has(*hook)) {
            notes.extend((hook.definition().try_out)(self)?);
        }
        Ok(notes)
    }

    /// Asks a hook the same question twice. `what` names the question.
    pub(super) fn twice<R: std::fmt::Debug>(
        &self,
        what: &'static str,
        ask: impl Fn() -> Result<R, Fault>,
    ) -> Result<R, Rejection> {
        let failed = |fault| Rejection::SelfTest { trial: what, fault };
        let first = ask().map_err(failed)?;
        let second = ask().map_err(failed)?;
        // The generated types do not implement equality, but their debug form shows every field.
        if format!("{first:?}") == format!("{second:?}") {
            Ok(first)
        } else {
            Err(Rejection::Nondeterministic { trial: what })
        }
    }
}

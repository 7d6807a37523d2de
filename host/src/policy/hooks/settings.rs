//! `settings.configure`: checks the settings when the policy is loaded.

use serde_json::{Map, Value};

use super::{Definition, Hook, shortened};
use crate::policy::Rejection;
use crate::policy::module::Module;

pub(super) const HOOK: Definition = Definition {
    hook: Hook::Configure,
    name: "configure",
    interface: "settings",
    function: "configure",
    // It was called before the trial: its answer is what the other hooks get.
    try_out: |_| Ok(Vec::new()),
};

/// The bytes that the other hooks get as their settings.
pub(crate) fn configure(module: &Module, settings: &Map<String, Value>) -> Result<Vec<u8>, Rejection> {
    if !module.has(Hook::Configure) {
        return if settings.is_empty() { Ok(Vec::new()) } else { Err(Rejection::NoSettings) };
    }
    let table = Value::Object(settings.clone());
    let faults = module.manifest().map(|manifest| manifest.faults_of(&table)).unwrap_or_default();
    if !faults.is_empty() {
        return Err(Rejection::SettingFaults { faults });
    }
    let table = table.to_string();
    match module.ask(Hook::Configure, (table.as_str(),)) {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(message)) => Err(Rejection::Settings { message: shortened(message) }),
        Err(fault) => Err(Rejection::Configure(fault)),
    }
}

//! A compiled component, and the call of a hook.

use std::sync::Arc;

use bytes::Bytes;
use sha2::{Digest as _, Sha256};
use wasmtime::component::{Component, ComponentExportIndex, ComponentNamedList, InstancePre, Lift, Lower};

use super::budget::Budget;
use super::manifest::Manifest;
use super::{Engine, Fault, FaultKind, Hook, Rejection};

/// A compiled component; generations that differ only in their settings share it.
pub(super) struct Module {
    engine: Engine,
    instance: InstancePre<Budget>,
    digest: Digest,
    /// The bytes of the component, for other proxies.
    component: Bytes,
    /// The exported functions, at the indexes of their hooks.
    functions: [Option<ComponentExportIndex>; Hook::ALL.len()],
    manifest: Option<Manifest>,
}

/// The SHA-256 of a component.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `component`.
    pub fn of(component: &[u8]) -> Digest {
        Digest(Sha256::digest(component).into())
    }

    /// The first 12 hex digits.
    pub fn short(&self) -> String {
        self.0[..6].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// `sha256:` and 64 hex digits.
impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("sha256:")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl Module {
    /// Checks the form of a component and compiles it, which takes 0.1 s or more, unless the same component is in use
    /// already.
    pub(super) fn compile(engine: &Engine, component: &[u8]) -> Result<Arc<Module>, Rejection> {
        let digest = Digest::of(component);
        engine.module((digest, component), |compiled| Module::of(engine, (digest, component), compiled))
    }

    fn of(
        engine: &Engine,
        (digest, component): (Digest, &[u8]),
        compiled: &Component,
    ) -> Result<Arc<Module>, Rejection> {
        let broken = |error: wasmtime::Error| Rejection::Broken { detail: format!("{error:#}") };
        let instance = engine.linker().instantiate_pre(compiled).map_err(broken)?;
        let functions = Hook::ALL.map(|hook| function(compiled, hook));
        if functions[Hook::Plan as usize].is_none() {
            return Err(Rejection::Broken { detail: "it exports no `naming.plan`".to_owned() });
        }
        let manifest =
            Manifest::of(component).map_err(|error| Rejection::Manifest { detail: error.to_string() })?;
        Ok(Arc::new(Module {
            functions,
            manifest,
            digest,
            component: Bytes::copy_from_slice(component),
            engine: engine.clone(),
            instance,
        }))
    }

    pub(super) fn digest(&self) -> Digest {
        self.digest
    }

    /// What the component says of itself.
    pub(super) fn manifest(&self) -> Option<&Manifest> {
        self.manifest.as_ref()
    }

    pub(super) fn component(&self) -> &Bytes {
        &self.component
    }

    pub(super) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(super) fn has(&self, hook: Hook) -> bool {
        self.functions[hook as usize].is_some()
    }

    /// Calls a hook. Its file gives `params` and `Answer` the types of the WIT file; others are a fault.
    pub(super) fn ask<Params, Answer>(&self, hook: Hook, params: Params) -> Result<Answer, Fault>
    where
        Params: ComponentNamedList + Lower,
        (Answer,): ComponentNamedList + Lift,
    {
        let Some(function) = &self.functions[hook as usize] else {
            return Err(Fault { hook, kind: FaultKind::Trap, detail: "the hook is absent".to_owned() });
        };
        self.engine.call(&self.instance, hook, |store, instance| {
            let function = instance.get_typed_func::<Params, (Answer,)>(&mut *store, function)?;
            Ok(function.call(store, params)?.0)
        })
    }
}

fn function(component: &Component, hook: Hook) -> Option<ComponentExportIndex> {
    let interface = component.get_export_index(None, hook.definition().export())?;
    component.get_export_index(Some(&interface), hook.definition().function)
}

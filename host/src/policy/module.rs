//! A compiled component, and the typed calls of its hooks.

use std::sync::Arc;

use bytes::Bytes;
use sha2::{Digest as _, Sha256};
use wasmtime::component::{Component, Instance, InstancePre};

use super::bindings::{backoff, fairness, naming, renewal, response, settings, types};
use super::budget::Budget;
use super::{Engine, Fault, Hook, Rejection, form};

/// A compiled component; generations that differ only in their settings share it.
pub(super) struct Module {
    engine: Engine,
    instance: InstancePre<Budget>,
    digest: Digest,
    /// The bytes of the component, for other proxies.
    component: Bytes,
    naming: naming::GuestIndices,
    fairness: Option<fairness::GuestIndices>,
    backoff: Option<backoff::GuestIndices>,
    renewal: Option<renewal::GuestIndices>,
    response: Option<response::GuestIndices>,
    settings: Option<settings::GuestIndices>,
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
        engine.module(digest, || {
            form::check(component, engine.limits())?;
            Module::compile_anew(engine, digest, component)
        })
    }

    fn compile_anew(engine: &Engine, digest: Digest, component: &[u8]) -> Result<Arc<Module>, Rejection> {
        let broken = |error: wasmtime::Error| Rejection::Broken { detail: format!("{error:#}") };
        let compiled = Component::from_binary(engine.wasmtime(), component).map_err(broken)?;
        let instance = engine.linker().instantiate_pre(&compiled).map_err(broken)?;
        Ok(Arc::new(Module {
            naming: naming::GuestIndices::new(&instance).map_err(broken)?,
            fairness: fairness::GuestIndices::new(&instance).ok(),
            backoff: backoff::GuestIndices::new(&instance).ok(),
            renewal: renewal::GuestIndices::new(&instance).ok(),
            response: response::GuestIndices::new(&instance).ok(),
            settings: settings::GuestIndices::new(&instance).ok(),
            digest,
            component: Bytes::copy_from_slice(component),
            engine: engine.clone(),
            instance,
        }))
    }

    pub(super) fn digest(&self) -> Digest {
        self.digest
    }

    pub(super) fn component(&self) -> &Bytes {
        &self.component
    }

    pub(super) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(super) fn has(&self, hook: Hook) -> bool {
        match hook {
            Hook::Plan => true,
            Hook::Choose => self.fairness.is_some(),
            Hook::Backoff => self.backoff.is_some(),
            Hook::Renewal => self.renewal.is_some(),
            Hook::Response => self.response.is_some(),
            Hook::Configure => self.settings.is_some(),
        }
    }

    pub(super) fn plan(
        &self,
        settings: &[u8],
        request: &types::Request,
    ) -> Result<Result<naming::LockPlan, naming::Refusal>, Fault> {
        self.call(Hook::Plan, |store, instance| {
            self.naming.load(&mut *store, instance)?.call_plan(store, settings, request)
        })
    }

    pub(super) fn choose(&self, settings: &[u8], queue: &fairness::Queue) -> Option<Result<u32, Fault>> {
        let hook = self.fairness.as_ref()?;
        Some(self.call(Hook::Choose, |store, instance| {
            hook.load(&mut *store, instance)?.call_choose(store, settings, queue)
        }))
    }

    pub(super) fn backoff(
        &self,
        settings: &[u8],
        contention: &backoff::Contention,
    ) -> Option<Result<backoff::Decision, Fault>> {
        let hook = self.backoff.as_ref()?;
        Some(self.call(Hook::Backoff, |store, instance| {
            hook.load(&mut *store, instance)?.call_contended(store, settings, contention)
        }))
    }

    pub(super) fn renewal(
        &self,
        settings: &[u8],
        expiring: &renewal::Expiring,
    ) -> Option<Result<renewal::Decision, Fault>> {
        let hook = self.renewal.as_ref()?;
        Some(self.call(Hook::Renewal, |store, instance| {
            hook.load(&mut *store, instance)?.call_due(store, settings, expiring)
        }))
    }

    pub(super) fn response(
        &self,
        settings: &[u8],
        request: &types::Request,
        contention: &response::Contention,
    ) -> Option<Result<response::Answer, Fault>> {
        let hook = self.response.as_ref()?;
        Some(self.call(Hook::Response, |store, instance| {
            hook.load(&mut *store, instance)?.call_contended(store, settings, request, contention)
        }))
    }

    /// The bytes that the other hooks get, or the policy's reason for refusing the settings.
    pub(super) fn configure(&self, table: &str) -> Option<Result<Result<Vec<u8>, String>, Fault>> {
        let hook = self.settings.as_ref()?;
        Some(self.call(Hook::Configure, |store, instance| {
            hook.load(&mut *store, instance)?.call_configure(store, table)
        }))
    }

    fn call<R>(
        &self,
        hook: Hook,
        ask: impl FnOnce(&mut wasmtime::Store<Budget>, &Instance) -> wasmtime::Result<R>,
    ) -> Result<R, Fault> {
        self.engine.call(&self.instance, hook, ask)
    }
}

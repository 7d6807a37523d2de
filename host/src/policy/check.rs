//! All checks between a file and a live policy: its form, its settings, and trial requests.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::module::Module;
use super::{
    Contention, Engine, Expiring, Fault, FaultKind, Generation, GroupView, Hook, HttpView, PlanRequest,
    QueueView, Rejection, ResponseContention, WaiterView, bindings, clamp,
};
use crate::config::{EngineLimits, Limits};
use crate::lock::{Key, Mode};
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
    /// Findings that do not prevent loading but deserve attention.
    pub notes: Vec<String>,
}

/// A compiled module that accepted its settings and answered the trial requests.
pub(super) struct Checked {
    pub(super) module: Arc<Module>,
    /// The result of `configure` for the settings.
    pub(super) settings: Vec<u8>,
    pub(super) notes: Vec<String>,
}

/// Checks a component like a load in the proxy.
///
/// # Errors
/// Why the proxy would refuse it.
pub fn check_file(
    component: &[u8],
    settings: &Map<String, Value>,
    engine: &EngineLimits,
    limits: &Limits,
) -> Result<Report, Rejection> {
    let checked = checked_file(component, settings, engine, limits)?;
    let module = &checked.module;
    Ok(Report {
        digest: module.digest().to_string(),
        bytes: component.len(),
        hooks: hooks(module),
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
    engine: &EngineLimits,
    limits: &Limits,
) -> Result<Generation, Rejection> {
    let checked = checked_file(component, settings, engine, limits)?;
    Ok(Generation::new(name, 1, settings.clone(), checked, limits.clone(), Metrics::default()))
}

fn checked_file(
    component: &[u8],
    settings: &Map<String, Value>,
    engine: &EngineLimits,
    limits: &Limits,
) -> Result<Checked, Rejection> {
    let engine = Engine::new(engine).map_err(|error| Rejection::Broken { detail: error.to_string() })?;
    component_with_settings(&engine, component, settings, limits)
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
    let settings = configure(&module, settings)?;
    let notes = try_out(&module, &settings, limits)?;
    Ok(Checked { module, settings, notes })
}

pub(super) fn hooks(module: &Module) -> Vec<&'static str> {
    Hook::ALL.into_iter().filter(|hook| module.has(*hook)).map(|hook| hook.as_str()).collect()
}

fn configure(module: &Module, settings: &Map<String, Value>) -> Result<Vec<u8>, Rejection> {
    let table = Value::Object(settings.clone()).to_string();
    match module.configure(&table) {
        None if settings.is_empty() => Ok(Vec::new()),
        None => Err(Rejection::NoSettings),
        Some(Ok(Ok(bytes))) => Ok(bytes),
        Some(Ok(Err(message))) => Err(Rejection::Settings { message: clamp::reason(message) }),
        Some(Err(fault)) => Err(Rejection::Configure(fault)),
    }
}

/// Calls every hook twice. A fault refuses the policy, except invalid plans for only some of the requests: the policy
/// may expect resource names that the trial requests do not have.
fn try_out(module: &Module, settings: &[u8], limits: &Limits) -> Result<Vec<String>, Rejection> {
    let mut notes = Vec::new();
    let mut invalid_answer = None;
    let requests = requests();
    for (trial, request) in &requests {
        let asked = bindings::request(request);
        let answer = twice(trial, || module.plan(settings, &asked))?;
        let Ok(plan) = answer else { continue };
        if let Err(detail) = clamp::plan(plan, limits) {
            notes.push(format!("{trial}: {detail}; such requests will be refused"));
            invalid_answer = Some((*trial, Fault { hook: Hook::Plan, kind: FaultKind::Value, detail }));
        }
    }
    if let Some((trial, fault)) = invalid_answer.filter(|_| notes.len() == requests.len()) {
        return Err(Rejection::SelfTest { trial, fault });
    }
    try_out_others(module, settings)?;
    Ok(notes)
}

fn try_out_others(module: &Module, settings: &[u8]) -> Result<(), Rejection> {
    let [.., (_, guarded)] = &requests();
    let Some(key) = Key::new("trial/1") else { return Ok(()) };
    let queue = bindings::queue(&queue(&key));
    asked_twice("a queue of three", || module.choose(settings, &queue))?;
    let contention = bindings::contention(&contention(&key));
    asked_twice("a key held elsewhere", || module.backoff(settings, &contention))?;
    let expiring = bindings::expiring(&expiring(&key));
    asked_twice("a lease near its end", || module.renewal(settings, &expiring))?;
    let (request, contention) = (bindings::request(guarded), bindings::refused(&refused(&key)));
    asked_twice("a guarded request without its lock", || module.response(settings, &request, &contention))
}

fn asked_twice<R: std::fmt::Debug>(
    trial: &'static str,
    mut ask: impl FnMut() -> Option<Result<R, Fault>>,
) -> Result<(), Rejection> {
    if let Some(first) = ask() {
        let mut first = Some(first);
        twice(trial, || first.take().or_else(&mut ask).unwrap_or_else(|| unreachable!("the hook is there")))?;
    }
    Ok(())
}

fn twice<R: std::fmt::Debug>(
    trial: &'static str,
    mut ask: impl FnMut() -> Result<R, Fault>,
) -> Result<R, Rejection> {
    let failed = |fault| Rejection::SelfTest { trial, fault };
    let first = ask().map_err(failed)?;
    let second = ask().map_err(failed)?;
    // The generated types do not implement equality, but their debug form shows every field.
    if format!("{first:?}") == format!("{second:?}") {
        Ok(first)
    } else {
        Err(Rejection::Nondeterministic { trial })
    }
}

fn requests() -> [(&'static str, PlanRequest); 5] {
    let plain = PlanRequest {
        resource: "trial/1".to_owned(),
        owner: "trial".to_owned(),
        mode: Mode::Exclusive,
        ttl_ms: None,
        wait_ms: None,
        labels: Vec::new(),
        http: None,
        seed: 1,
    };
    let labels = [("tenant", "acme"), ("group", "blue"), ("rank", "1")];
    let labelled = PlanRequest {
        ttl_ms: Some(5_000),
        wait_ms: Some(1_000),
        labels: labels.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
        ..plain.clone()
    };
    let shared = PlanRequest { resource: "trial/ä".to_owned(), mode: Mode::Shared, ..labelled.clone() };
    let guarded =
        PlanRequest { resource: "/trial/1".to_owned(), http: Some(Arc::new(http())), ..plain.clone() };
    let permits = PlanRequest { mode: Mode::Permits { count: 1, limit: 0 }, ..labelled.clone() };
    [
        ("a plain request", plain),
        ("a request with labels", labelled),
        ("a shared one", shared),
        ("permits", permits),
        ("a guarded request", guarded),
    ]
}

fn http() -> HttpView {
    let pairs = |pairs: &[(&str, &str)]| {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    };
    HttpView {
        method: "POST".to_owned(),
        path: "/trial/1".to_owned(),
        captures: pairs(&[("id", "1")]),
        query: pairs(&[("page", "2")]),
        headers: pairs(&[("idempotency-key", "trial-1"), ("x-tenant", "acme")]),
        // Cut off, as on a route that shows only some bytes.
        body: br#"{"id": 1, "items": [{"sku": "A-7"}], "note": "tri"#.to_vec(),
    }
}

fn queue(key: &Key) -> QueueView {
    let waiter = |group: &str, rank, waited_ms| WaiterView {
        rank,
        group: group.into(),
        weight: 1,
        owner: "trial".into(),
        mode: Mode::Exclusive,
        waited_ms,
        labels: Arc::from([]),
    };
    let share = |group: &str, waiting| GroupView { group: group.into(), waiting, recent_grants: waiting };
    QueueView {
        key: key.clone(),
        waiters: vec![waiter("a", 0, 30), waiter("b", 0, 20), waiter("a", 1, 10)],
        groups: vec![share("a", 2), share("b", 1)],
        seed: 1,
    }
}

fn contention(key: &Key) -> Contention {
    Contention {
        key: key.clone(),
        attempt: 2,
        waited_ms: 20,
        wait_left_ms: 1_000,
        holder_left_ms: 500,
        holder: "other".to_owned(),
        waiters: 1,
        last_sleep_ms: 10,
        labels: Arc::from([]),
        seed: 1,
    }
}

fn expiring(key: &Key) -> Expiring {
    Expiring {
        key: key.clone(),
        owner: "trial".to_owned(),
        ttl_ms: 10_000,
        renewals: 3,
        held_ms: 20_000,
        max_hold_ms: 60_000,
        waiters: 1,
        client_alive: true,
        labels: Arc::from([]),
    }
}

fn refused(key: &Key) -> ResponseContention {
    ResponseContention {
        key: key.clone(),
        holder: "other".to_owned(),
        position: 2,
        waited_ms: 100,
        retry_after_ms: 1_000,
    }
}

//! The engine that runs all policies: its limits, its clock, and a single call.

use std::sync::{Arc, Condvar, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use wasmtime::component::{Component, Instance, InstancePre, Linker};
use wasmtime::{Config, EngineWeak, InstanceAllocationStrategy, PoolingAllocationConfig, Store};

use super::budget::{Budget, MAX_CORE_INSTANCES, MAX_MEMORIES, MAX_TABLE_ELEMENTS, MAX_TABLES};
use super::compiler::{self, Compilations, Compiler};
use super::module::{Digest, Module};
use super::{Fault, Hook, Rejection};
use crate::clock;
use crate::config::EngineLimits;
use crate::mutex::Mutex;
use crate::vital;

/// How much of an instance's memory stays mapped between calls and is only zeroed.
const KEEP_RESIDENT_BYTES: usize = 256 * 1024;
/// The number of ticks that measure a call's time limit.
const TICKS: u32 = 5;
/// After this many ticks at which no call was running, the ticker rests until the next call.
const IDLE_TICKS: u32 = 100;

/// Runs policies under limits. Cheap to clone.
#[derive(Clone)]
pub struct Engine(Arc<Inner>);

/// This machine cannot run policies.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot make ready {instances} policy instances: {detail}; lower `engine.instances`, or lift a limit on address space"
)]
pub struct EngineError {
    instances: u32,
    detail: String,
}

struct Inner {
    engine: wasmtime::Engine,
    linker: Linker<Budget>,
    limits: EngineLimits,
    slots: Arc<Slots>,
    compilations: Compilations,
    /// The compiled modules that are in use.
    modules: Mutex<Vec<Weak<Module>>>,
    /// What the calls have cost, if they are measured.
    costs: Option<Mutex<Vec<Cost>>>,
    _ticker: Ticker,
}

/// What a call has cost.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// What was called.
    pub hook: Hook,
    /// How long it took, with a fresh instance, in microseconds.
    pub us: u64,
    /// How much fuel it used. The same call uses the same fuel each time.
    pub fuel: u64,
}

impl Engine {
    /// Reserves the instances and starts the clock.
    ///
    /// # Errors
    /// The address space for the instances cannot be reserved.
    pub fn new(limits: &EngineLimits, compiler: Compiler) -> Result<Engine, EngineError> {
        Engine::with(limits, compiler, None)
    }

    /// As [`Engine::new`], and measures each call for [`Engine::take_costs`].
    ///
    /// # Errors
    /// Those of [`Engine::new`].
    pub fn measured(limits: &EngineLimits, compiler: Compiler) -> Result<Engine, EngineError> {
        Engine::with(limits, compiler, Some(Mutex::default()))
    }

    fn with(
        limits: &EngineLimits,
        compiler: Compiler,
        costs: Option<Mutex<Vec<Cost>>>,
    ) -> Result<Engine, EngineError> {
        let fail = |detail: String| EngineError { instances: limits.instances, detail };
        let engine = wasmtime::Engine::new(&config(limits)).map_err(|error| fail(format!("{error:#}")))?;
        let slots = Arc::new(Slots::new(limits.instances));
        let ticker = Ticker::start(engine.weak(), Arc::clone(&slots), limits.time / TICKS)
            .map_err(|error| fail(error.to_string()))?;
        Ok(Engine(Arc::new(Inner {
            linker: Linker::new(&engine),
            engine,
            limits: limits.clone(),
            slots,
            compilations: Compilations::new(compiler, limits),
            modules: Mutex::default(),
            costs,
            _ticker: ticker,
        })))
    }

    /// What the calls since the last time have cost; empty if they are not measured.
    pub fn take_costs(&self) -> Vec<Cost> {
        self.0.costs.as_ref().map(|costs| std::mem::take(&mut *costs.lock())).unwrap_or_default()
    }

    /// The limits of this engine.
    pub fn limits(&self) -> &EngineLimits {
        &self.0.limits
    }

    /// The module of a component. If no module of the same component is in use, the component is compiled, and `make` makes
    /// the module of it.
    pub(super) fn module(
        &self,
        (digest, component): (Digest, &[u8]),
        make: impl FnOnce(&Component) -> Result<Arc<Module>, Rejection>,
    ) -> Result<Arc<Module>, Rejection> {
        let Inner { engine, limits, compilations, .. } = &*self.0;
        let modules = || self.0.modules.lock();
        let known = || modules().iter().filter_map(Weak::upgrade).find(|module| module.digest() == digest);
        if let Some(known) = known() {
            return Ok(known);
        }
        let _turn = compilations.turn(limits, component)?;
        // The same component may have been compiled meanwhile.
        if let Some(known) = known() {
            return Ok(known);
        }
        let made = make(&compilations.compile(engine, limits, component)?)?;
        let mut modules = modules();
        modules.retain(|module| module.strong_count() > 0);
        modules.push(Arc::downgrade(&made));
        Ok(made)
    }

    /// An empty linker, because policies import nothing.
    pub(super) fn linker(&self) -> &Linker<Budget> {
        &self.0.linker
    }

    /// Runs `ask` on a fresh instance under the limits. Waits if all instances are in use.
    pub(super) fn call<R>(
        &self,
        policy: &InstancePre<Budget>,
        hook: Hook,
        ask: impl FnOnce(&mut Store<Budget>, &Instance) -> wasmtime::Result<R>,
    ) -> Result<R, Fault> {
        let limits = &self.0.limits;
        let half_us = u64::try_from(limits.time.as_micros() / 2).unwrap_or(u64::MAX);
        let _slot = self.0.slots.take();
        let began = self.0.costs.as_ref().map(|_| clock::now());
        let mut store = Store::new(&self.0.engine, Budget::new(limits.memory_bytes, half_us));
        store.limiter(|budget| budget);
        store.set_hostcall_fuel(limits.max_answer_bytes);
        // One tick more than half, because the current tick has already begun.
        store.set_epoch_deadline(u64::from(TICKS / 2 + 1));
        store.epoch_deadline_callback(|mut store| Ok(store.data_mut().at_tick()));
        let answer = store
            .set_fuel(limits.fuel)
            .and_then(|()| policy.instantiate(&mut store))
            .and_then(|instance| ask(&mut store, &instance));
        if let (Some(costs), Some(began)) = (&self.0.costs, began) {
            let fuel = limits.fuel.saturating_sub(store.get_fuel().unwrap_or(limits.fuel));
            costs.lock().push(Cost { hook, us: clock::now().us_since(began), fuel });
        }
        answer.map_err(|error| store.data().fault(hook, &error))
    }
}

fn config(limits: &EngineLimits) -> Config {
    let mut pool = PoolingAllocationConfig::new();
    let instances = limits.instances;
    pool.total_component_instances(instances)
        .total_core_instances(instances * MAX_CORE_INSTANCES)
        .total_memories(instances * MAX_MEMORIES)
        .total_tables(instances * MAX_TABLES)
        .max_core_instances_per_component(MAX_CORE_INSTANCES)
        .max_memories_per_component(MAX_MEMORIES)
        .max_memories_per_module(MAX_MEMORIES)
        .max_tables_per_component(MAX_TABLES)
        .max_tables_per_module(MAX_TABLES)
        .table_elements(MAX_TABLE_ELEMENTS)
        .max_memory_size(limits.memory_bytes)
        .linear_memory_keep_resident(KEEP_RESIDENT_BYTES)
        .pagemap_scan(wasmtime::Enabled::Auto)
        .table_keep_resident(8 * 1024)
        .max_unused_warm_slots(instances);
    let mut config = compiler::settings();
    config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    config
}

/// Counts the free instances, because the pool returns an error instead of waiting when it is empty.
struct Slots {
    all: u32,
    uses: Mutex<Uses>,
    freed: Condvar,
    /// The ticker rests, and is to go on or to stop.
    wake: Condvar,
}

struct Uses {
    free: u32,
    /// Whether the ticker is running.
    ticks: bool,
    /// Whether the ticker is to stop.
    stops: bool,
}

struct Slot<'a>(&'a Slots);

impl Slots {
    fn new(all: u32) -> Slots {
        let uses = Mutex::new(Uses { free: all, ticks: true, stops: false });
        Slots { all, uses, freed: Condvar::new(), wake: Condvar::new() }
    }

    fn take(&self) -> Slot<'_> {
        let uses = self.uses.lock();
        let mut uses =
            self.freed.wait_while(uses, |uses| uses.free == 0).unwrap_or_else(PoisonError::into_inner);
        uses.free -= 1;
        if !uses.ticks {
            uses.ticks = true;
            self.wake.notify_one();
        }
        Slot(self)
    }

    /// Called at each tick, with the number of ticks in a row at which no call was running. Returns that number for the next
    /// tick, and `None` if the ticker is to stop. Waits for the next call if the number is high.
    fn tick(&self, idle: u32) -> Option<u32> {
        let mut uses = self.uses.lock();
        let idle = if uses.free == self.all { idle + 1 } else { 0 };
        if idle <= IDLE_TICKS {
            return (!uses.stops).then_some(idle);
        }
        uses.ticks = false;
        let resting = |uses: &mut Uses| !uses.ticks && !uses.stops;
        let uses = self.wake.wait_while(uses, resting).unwrap_or_else(PoisonError::into_inner);
        (!uses.stops).then_some(0)
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.0.uses.lock().free += 1;
        self.0.freed.notify_one();
    }
}

/// Advances the engine's epoch until it is dropped, except while it rests. It runs on its own thread, so that a busy runtime
/// cannot keep a policy from being stopped.
struct Ticker {
    slots: Arc<Slots>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    fn start(engine: EngineWeak, slots: Arc<Slots>, every: Duration) -> std::io::Result<Ticker> {
        let every = every.max(Duration::from_micros(500));
        let used = Arc::clone(&slots);
        let thread = std::thread::Builder::new().name("policy-ticker".into()).spawn(move || {
            vital::run("the clock of the policies", || {
                let mut idle = Some(0);
                while let Some(ticks) = idle {
                    std::thread::sleep(every);
                    let Some(engine) = engine.upgrade() else { return };
                    engine.increment_epoch();
                    // Nothing of the engine may be kept while the ticker rests.
                    drop(engine);
                    idle = used.tick(ticks);
                }
            });
        })?;
        Ok(Ticker { slots, thread: Some(thread) })
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.slots.uses.lock().stops = true;
        self.slots.wake.notify_one();
        if let Some(thread) = self.thread.take() {
            // The thread ends after one tick at most, and cannot have panicked.
            let _ = thread.join();
        }
    }
}

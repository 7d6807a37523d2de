//! Compiles components: in a child process that ends at its limits, one component at a time.
//!
//! The compiler's time and memory depend on the component, and a component comes from an operator, or from whoever has
//! taken an operator's token. So a proxy neither parses nor compiles it in its own process. It starts its own program as a
//! child ([`process`]), which checks the form of the component and compiles it under limits ([`child`]), and loads the
//! result. A waiter for the compiler has a place in a short queue, and leaves it after a while ([`Turns`]). The results are
//! kept on disk, if `engine.cache_dir` names a folder ([`artifacts`]).

mod artifacts;
pub(super) mod child;
mod process;
mod turns;

use std::time::Duration;

use wasmtime::Config;
use wasmtime::component::Component;

use super::{Rejection, builtin, form};
use crate::clock;
use crate::config::EngineLimits;
use crate::telemetry::Metrics;
use artifacts::{Artifacts, Name};
use turns::{Turn, Turns};

/// Where components are compiled.
pub enum Compiler {
    /// In this process, without limits on time and memory: for simulations and for tests of the library, whose program has
    /// no command that compiles.
    InProcess,
    /// In a child process, which is this program again. The compilations are measured.
    Child(Metrics),
}

/// A compiler, and the callers that wait for it.
pub(super) struct Compilations {
    compiler: Compiler,
    turns: Turns,
    artifacts: Option<Artifacts>,
}

impl Compilations {
    pub(super) fn new(compiler: Compiler, limits: &EngineLimits) -> Compilations {
        Compilations { compiler, turns: Turns::default(), artifacts: Artifacts::of(limits) }
    }

    /// Waits until no other component is being compiled. `None` if the compilation needs no turn.
    pub(super) fn turn(
        &self,
        limits: &EngineLimits,
        component: &[u8],
    ) -> Result<Option<Turn<'_>>, Rejection> {
        let Some(metrics) = self.in_child(component) else { return Ok(None) };
        let turn = self.turns.take(process::longest(limits));
        turn.map(Some).inspect_err(|busy| metrics.policies.compilation(busy.as_str()))
    }

    /// Checks the form of a component and compiles it, unless it was compiled before and is on disk.
    pub(super) fn compile(
        &self,
        engine: &wasmtime::Engine,
        limits: &EngineLimits,
        component: &[u8],
    ) -> Result<Component, Rejection> {
        let Some(metrics) = self.in_child(component) else {
            return compiled_here(engine, limits, component);
        };
        let kept = self.artifacts.as_ref().map(|artifacts| (artifacts, Name::of(component, engine, limits)));
        if let Some((artifacts, name)) = &kept
            && let Some(artifact) = artifacts.read(name)
        {
            match loaded(engine, &artifact) {
                Ok(component) => {
                    metrics.policies.compilation("from_cache");
                    return Ok(component);
                }
                Err(rejection) => {
                    tracing::warn!(%rejection, "a compiled policy is not used; it is compiled again");
                }
            }
        }
        let begin = clock::now();
        let artifact = process::compile(component, limits);
        let took = Duration::from_micros(clock::now().us_since(begin));
        metrics.policies.compilation(artifact.as_ref().map_or_else(Rejection::as_str, |_| "compiled"));
        metrics.policies.compiled_in(took);
        let artifact = artifact?;
        let component = loaded(engine, &artifact)?;
        if let Some((artifacts, name)) = &kept {
            artifacts.write(name, &artifact);
        }
        Ok(component)
    }

    /// The metrics of the compilation of `component`, if it is compiled in a child process.
    fn in_child(&self, component: &[u8]) -> Option<&Metrics> {
        match &self.compiler {
            Compiler::InProcess => None,
            // The components of this program are as trustworthy as the program.
            Compiler::Child(metrics) => (!builtin::is_builtin(component)).then_some(metrics),
        }
    }
}

fn compiled_here(
    engine: &wasmtime::Engine,
    limits: &EngineLimits,
    component: &[u8],
) -> Result<Component, Rejection> {
    form::check(component, limits)?;
    Component::from_binary(engine, component).map_err(|error| broken(&error))
}

fn loaded(engine: &wasmtime::Engine, artifact: &[u8]) -> Result<Component, Rejection> {
    // SAFETY: the bytes are an artifact of wasmtime's compiler, as `deserialize` demands. They come from a child process
    // over a pipe that nothing else can write to. The child is this very program (`/proc/self/exe`), it has ended with the
    // status that says that it has written a whole artifact, and it has made the artifact with `Engine::precompile_component`
    // and the settings below. Or they come from a file that a process of the same user has written with such bytes, in a
    // folder that no other user can write to, and a digest says that it is whole (`artifacts`). Another process of that user
    // could replace the program as well. wasmtime itself compares the version and these settings.
    let component = unsafe { Component::deserialize(engine, artifact) };
    component.map_err(|error| broken(&error))
}

fn broken(error: &wasmtime::Error) -> Rejection {
    Rejection::Broken { detail: format!("{error:#}") }
}

/// The settings of the compiler. A component that was compiled with them runs in every engine that has them.
pub(super) fn settings() -> Config {
    let mut config = Config::new();
    config
        .consume_fuel(true)
        .epoch_interruption(true)
        // The same input gives the same answer on every machine.
        .cranelift_nan_canonicalization(true)
        .relaxed_simd_deterministic(true)
        .wasm_component_model(true);
    config
}

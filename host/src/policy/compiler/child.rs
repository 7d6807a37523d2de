//! The child process that compiles one component.
//!
//! It reads the component from its standard input, and writes the artifact to its standard output. If the component is
//! refused, it writes the [`Rejection`] as JSON instead. The exit code says which of them it is.

use std::io::{self, Read as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use rustix::process::{self, Pid, Resource, Rlimit, Signal};

use super::{broken, form, settings};
use crate::config::EngineLimits;
use crate::policy::Rejection;

/// The hidden command that starts this program as a compiler.
pub const COMMAND: &str = "compile-a-policy";
/// The output is an artifact.
pub(super) const COMPILED: u8 = 0;
/// The output is a rejection.
pub(super) const REFUSED: u8 = 3;
/// The whole environment of the child. Its allocator reserves address space in steps of 32 MiB, rather than 1 GiB at its
/// start, because the address space is limited.
pub(super) const ENVIRONMENT: [(&str, &str); 1] = [("MIMALLOC_ARENA_RESERVE", "32768")];
/// How nice the child is to the proxy, which shares the processors with it.
const NICE: i32 = 5;

/// The arguments of the child: the limits of its work.
#[derive(Args, Debug)]
pub struct CompileArgs {
    /// The process that has started the child.
    #[arg(long)]
    parent: i32,
    /// `engine.max_component_bytes`.
    #[arg(long)]
    max_component_bytes: usize,
    /// `engine.memory_bytes`.
    #[arg(long)]
    memory_bytes: usize,
    /// `engine.compile_memory_bytes`.
    #[arg(long)]
    compile_memory_bytes: u64,
    /// `engine.compile_time_s`.
    #[arg(long)]
    compile_time_s: u64,
}

impl CompileArgs {
    pub(super) fn of(limits: &EngineLimits) -> CompileArgs {
        CompileArgs {
            parent: process::getpid().as_raw_nonzero().get(),
            max_component_bytes: limits.max_component_bytes,
            memory_bytes: limits.memory_bytes,
            compile_memory_bytes: limits.compile_memory_bytes,
            compile_time_s: limits.compile_time.as_secs(),
        }
    }

    /// The arguments as text, which clap reads again.
    pub(super) fn to_args(&self) -> [String; 5] {
        [
            format!("--parent={}", self.parent),
            format!("--max-component-bytes={}", self.max_component_bytes),
            format!("--memory-bytes={}", self.memory_bytes),
            format!("--compile-memory-bytes={}", self.compile_memory_bytes),
            format!("--compile-time-s={}", self.compile_time_s),
        ]
    }

    fn limits(&self) -> EngineLimits {
        EngineLimits {
            max_component_bytes: self.max_component_bytes,
            memory_bytes: self.memory_bytes,
            compile_memory_bytes: self.compile_memory_bytes,
            compile_time: Duration::from_secs(self.compile_time_s),
            ..EngineLimits::default()
        }
    }
}

/// Runs the child: limits itself, and compiles what it reads.
pub fn run(args: &CompileArgs) -> ExitCode {
    match answer(args) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn answer(args: &CompileArgs) -> io::Result<u8> {
    let limits = args.limits();
    restrict(args, &limits)?;
    let mut component = Vec::new();
    io::stdin().take(limits.max_component_bytes as u64 + 1).read_to_end(&mut component)?;
    let (code, output) = match artifact(&component, &limits) {
        Ok(artifact) => (COMPILED, artifact),
        Err(rejection) => (REFUSED, serde_json::to_vec(&rejection)?),
    };
    io::stdout().write_all(&output)?;
    io::stdout().flush()?;
    Ok(code)
}

/// Limits this process. It ends with its parent, even if the parent is killed.
fn restrict(args: &CompileArgs, limits: &EngineLimits) -> io::Result<()> {
    process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // The parent may have ended before.
    if process::getppid() != Pid::from_raw(args.parent) {
        return Err(io::Error::other("the proxy has ended"));
    }
    limit(Resource::Core, 0)?;
    limit(Resource::As, address_space()?.saturating_add(limits.compile_memory_bytes))?;
    limit(Resource::Cpu, limits.compile_time.as_secs())?;
    // The proxy comes first, for the processors and when the machine runs out of memory. Neither is needed to compile.
    let _ = process::nice(NICE);
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    Ok(())
}

/// Limits a resource, unless this process has a lower limit already.
fn limit(resource: Resource, most: u64) -> io::Result<()> {
    let maximum = process::getrlimit(resource).maximum;
    let current = maximum.map_or(most, |maximum| maximum.min(most));
    process::setrlimit(resource, Rlimit { current: Some(current), maximum })?;
    Ok(())
}

/// The address space that this process has now, in bytes: most of it is the program.
fn address_space() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| io::Error::other("/proc/self/status has no VmSize"))
}

fn artifact(component: &[u8], limits: &EngineLimits) -> Result<Vec<u8>, Rejection> {
    form::check(component, limits)?;
    // On one processor: the others are for the proxy.
    let engine =
        wasmtime::Engine::new(settings().parallel_compilation(false)).map_err(|error| broken(&error))?;
    engine.precompile_component(component).map_err(|error| {
        if error.downcast_ref::<wasmtime::OutOfMemory>().is_some() {
            // As where Rust's allocator has no memory, which the parent tells from a component that cannot be compiled.
            std::alloc::handle_alloc_error(std::alloc::Layout::for_value(component));
        }
        broken(&error)
    })
}

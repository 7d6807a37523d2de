//! Tasks that the process rests on: if one of them panics, the process ends.
//!
//! A proxy without its loop, or without a lane, would look alive and answer nobody. One that has ended keeps no lock
//! from anybody: its leases live on, and other proxies renew, release and grant. So a panic is not survived here.
//! What serves one client alone is no such task: its panic ends one connection.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};

use futures_util::FutureExt;
use tokio::task::{JoinError, JoinHandle};

#[cfg(any(test, feature = "simulation"))]
pub mod process;

/// What a Rust program that panics ends with.
const EXIT_PANIC: i32 = 101;

/// Spawns a task on the current runtime. `name` says what is gone with it.
pub fn spawn<T: Send + 'static>(
    name: &'static str,
    task: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    tokio::spawn(watched(name, task))
}

/// The task, for who spawns it otherwise.
pub fn watched<T>(name: &'static str, task: impl Future<Output = T>) -> impl Future<Output = T> {
    of_this_process(async move {
        match AssertUnwindSafe(task).catch_unwind().await {
            Ok(done) => done,
            Err(panic) => end(name, &*panic),
        }
    })
}

/// Spawns a task that the process does not rest on: its panic ends nothing else.
pub fn detach<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(of_this_process(scheduled(task)))
}

/// Runs what takes long beside the tasks.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    #[cfg(any(test, feature = "simulation"))]
    if crate::clock::simulated::now().is_some() {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work).await
}

/// A simulation has several processes.
#[cfg(any(test, feature = "simulation"))]
pub use process::in_process as of_this_process;

/// A simulation has a scheduler of its own.
#[cfg(any(test, feature = "simulation"))]
pub use process::scheduled;

#[cfg(not(any(test, feature = "simulation")))]
pub fn scheduled<F: Future>(task: F) -> F {
    task
}

#[cfg(not(any(test, feature = "simulation")))]
pub fn of_this_process<F: Future>(task: F) -> F {
    task
}

/// The same for what runs on a thread of its own.
pub fn run<T>(name: &'static str, work: impl FnOnce() -> T) -> T {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done,
        Err(panic) => end(name, &*panic),
    }
}

fn end(name: &str, panic: &(dyn Any + Send)) -> ! {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text");
    tracing::error!("{name} has panicked ({text}): the proxy ends, and its leases live on for their time");
    std::process::exit(EXIT_PANIC)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const CHILD: &str = "LOCKKEEPER_TEST_VITAL";

    /// Run again by the test below, in a process of its own.
    #[tokio::test]
    async fn child() {
        match std::env::var(CHILD).as_deref() {
            Ok("task") => drop(spawn("the loop", async { panic!("a broken loop") }).await),
            Ok("thread") => {
                drop(std::thread::spawn(|| run("the ticker", || panic!("{}", "a broken ticker"))).join());
            }
            _ => assert_eq!((spawn("a task", async { 1 }).await.unwrap(), run("work", || 2)), (1, 2)),
        }
    }

    #[test]
    fn a_panic_ends_the_process() {
        for how in ["task", "thread"] {
            let mut again = Command::new(std::env::current_exe().unwrap());
            let ended = again.args(["--exact", "vital::tests::child"]).env(CHILD, how).output().unwrap();
            assert_eq!(ended.status.code(), Some(EXIT_PANIC), "{how}: {ended:?}");
        }
    }
}

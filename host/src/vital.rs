//! Tasks that the process cannot run without: if one of them panics, the process ends.
//!
//! A proxy without its event loop or a lane would appear to run, but answer no request. A proxy that has ended
//! blocks no lock: its leases live on, and other proxies renew, release and grant them. So the process does not
//! survive such a panic. A task that serves a single client is not vital: its panic ends one connection.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};

use futures_util::FutureExt;
use tokio::task::{JoinError, JoinHandle};

#[cfg(any(test, feature = "simulation"))]
pub mod process;

/// The exit code of a Rust program that panics.
const EXIT_PANIC: i32 = 101;

/// Spawns a vital task on the current runtime. `name` describes the task in the log.
pub fn spawn<T: Send + 'static>(
    name: &'static str,
    task: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    tokio::spawn(watched(name, task))
}

/// Makes a task vital that is spawned in another way.
pub fn watched<T>(name: &'static str, task: impl Future<Output = T>) -> impl Future<Output = T> {
    of_this_process(async move {
        match AssertUnwindSafe(task).catch_unwind().await {
            Ok(done) => done,
            Err(panic) => end(name, &*panic),
        }
    })
}

/// Spawns a task that is not vital: its panic ends nothing else.
pub fn detach<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(of_this_process(scheduled(task)))
}

/// Runs long work on a thread for blocking work.
///
/// # Errors
/// If the work panics.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    #[cfg(any(test, feature = "simulation"))]
    if crate::clock::simulated::now().is_some() {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work).await
}

/// In a simulation, which has several processes: the task as a part of the process that spawns it.
#[cfg(any(test, feature = "simulation"))]
pub use process::in_process as of_this_process;

/// In a simulation, which has a scheduler of its own: the task with a possibly late start.
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

/// Runs vital work on a thread of its own.
pub fn run<T>(name: &'static str, work: impl FnOnce() -> T) -> T {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done,
        Err(panic) => end(name, &*panic),
    }
}

fn end(name: &str, panic: &(dyn Any + Send)) -> ! {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text");
    tracing::error!("{name} has panicked ({text}): the proxy ends; its leases last until they expire");
    std::process::exit(EXIT_PANIC)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const CHILD: &str = "LOCKKEEPER_TEST_VITAL";

    /// The test below runs this one again in a separate process.
    #[tokio::test]
    async fn a_child_process_that_panics() {
        match std::env::var(CHILD).as_deref() {
            Ok("task") => drop(spawn("the loop", async { panic!("a broken loop") }).await),
            Ok("thread") => {
                drop(std::thread::spawn(|| run("the ticker", || panic!("{}", "a broken ticker"))).join());
            }
            _ => assert_eq!((spawn("a task", async { 1 }).await.unwrap(), run("work", || 2)), (1, 2)),
        }
    }

    #[test]
    fn a_panic_in_vital_work_ends_the_process() {
        for how in ["task", "thread"] {
            let mut again = Command::new(std::env::current_exe().unwrap());
            let ended = again
                .args(["--exact", "vital::tests::a_child_process_that_panics"])
                .env(CHILD, how)
                .output()
                .unwrap();
            assert_eq!(ended.status.code(), Some(EXIT_PANIC), "{how}: {ended:?}");
        }
    }
}

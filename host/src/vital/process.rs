//! The simulated process of one proxy, which can be killed and paused.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::Notify;

use crate::clock;
use crate::lock::Instant;
use crate::mutex::Mutex;
use crate::random;

thread_local! {
    /// The process of the task that is running now.
    static CURRENT: RefCell<Option<Arc<Process>>> = const { RefCell::new(None) };
}

/// A group of tasks that run, pause and die together.
pub struct Process {
    state: Mutex<State>,
    died: Notify,
    /// How late its tasks start at most, in milliseconds.
    late_ms: u32,
}

#[derive(Default)]
struct State {
    is_dead: bool,
    is_paused: bool,
    pauses: u64,
    /// When the process was last resumed; `None` before the first pause.
    resumed: Option<Instant>,
    /// The wakers of all tasks that wait for something.
    wakers: Vec<Waker>,
}

impl Process {
    /// A process of whose tasks one in ten starts up to `late_ms` milliseconds late.
    pub fn new(late_ms: u32) -> Process {
        Process { state: Mutex::default(), died: Notify::new(), late_ms }
    }

    /// Ends all tasks of the process at once.
    pub fn kill(&self) {
        self.state.lock().is_dead = true;
        self.wake();
        self.died.notify_waiters();
    }

    /// Stops all tasks until [`Process::resume`].
    pub fn pause(&self) {
        let mut state = self.state.lock();
        state.is_paused = true;
        state.pauses += 1;
    }

    /// How often it has been paused.
    pub fn pauses(&self) -> u64 {
        self.state.lock().pauses
    }

    /// Whether the process is paused.
    pub fn is_paused(&self) -> bool {
        self.state.lock().is_paused
    }

    /// Whether the process is paused, or was paused less than `ms` milliseconds ago.
    pub fn was_paused_within(&self, ms: u32) -> bool {
        let state = self.state.lock();
        state.is_paused || state.resumed.is_some_and(|at| at.plus_ms(ms) > clock::now())
    }

    /// Continues all tasks.
    pub fn resume(&self) {
        {
            let mut state = self.state.lock();
            state.is_paused = false;
            state.resumed = Some(clock::now());
        }
        self.wake();
    }

    /// Whether the process was killed.
    pub fn is_dead(&self) -> bool {
        self.state.lock().is_dead
    }

    fn wake(&self) {
        let wakers = std::mem::take(&mut self.state.lock().wakers);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Runs a task in this process, as for a client. Returns `None` if the process dies before the task ends.
    pub async fn run<T: Send + 'static>(
        self: &Arc<Process>,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let died = self.died.notified();
        tokio::pin!(died);
        died.as_mut().enable();
        if self.is_dead() {
            return None;
        }
        let task = self.enter(|| in_process(task));
        let task = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(task));
        tokio::select! {
            biased;
            () = died => None,
            done = task => done.ok(),
        }
    }

    /// Calls `start` in this process: tasks that it spawns belong to the process.
    pub fn enter<T>(self: &Arc<Process>, start: impl FnOnce() -> T) -> T {
        let before = CURRENT.replace(Some(self.clone()));
        let started = start();
        CURRENT.set(before);
        started
    }
}

/// Delays the start of some tasks in a simulation, as a busy scheduler does.
pub async fn scheduled<F: Future>(task: F) -> F::Output {
    let late_ms = CURRENT.with_borrow(|process| process.as_ref().map_or(0, |process| process.late_ms));
    if late_ms > 0 && random::within(0..10_u32) == 0 {
        tokio::time::sleep(Duration::from_millis(random::within(1..=late_ms.into()))).await;
    }
    task.await
}

/// Makes the task a part of the process that spawns it.
pub fn in_process<F: Future>(task: F) -> InProcess<F> {
    InProcess { process: CURRENT.with_borrow(Clone::clone), task: Some(Box::pin(task)) }
}

/// A task of a process: it does not run while the process is paused.
pub struct InProcess<F> {
    process: Option<Arc<Process>>,
    /// `None` after the task has ended or was killed.
    task: Option<Pin<Box<F>>>,
}

impl<F: Future> Future for InProcess<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let Some(process) = self.process.clone() else {
            return self.task.as_mut().map_or(Poll::Pending, |task| task.as_mut().poll(cx));
        };
        {
            let mut state = process.state.lock();
            if !state.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
                state.wakers.push(cx.waker().clone());
            }
            if state.is_paused && !state.is_dead {
                return Poll::Pending;
            }
        }
        let before = CURRENT.replace(Some(process.clone()));
        let polled = if process.is_dead() {
            self.task = None;
            Poll::Pending
        } else {
            self.task.as_mut().map_or(Poll::Pending, |task| task.as_mut().poll(cx))
        };
        CURRENT.set(before);
        if polled.is_ready() {
            self.task = None;
            process.state.lock().wakers.retain(|waker| !waker.will_wake(cx.waker()));
        }
        polled
    }
}

//! Keeps the server running. It has a thread of its own, so that it works without a runtime and while a
//! runtime shuts down.

use std::process::ChildStdin;
use std::sync::{Arc, Condvar, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::command_line::CommandLine;
use super::folder::Folder;
use super::guardian::Guardian;
use super::leftover;
use crate::clock;
use crate::mutex::Mutex;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// A server that ran longer than this is restarted after the shortest pause.
const STABLE_US: u64 = 60_000_000;

/// Runs the server, and restarts it when it ends.
pub struct Supervisor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    stopping: bool,
    /// The server has answered once. From now on it is restarted when it ends.
    ready: bool,
    line: Option<ChildStdin>,
    pid: Option<u32>,
    /// Set when no server runs and none will be started: the reason.
    over: Option<String>,
}

impl Supervisor {
    /// Starts the server, on a thread of its own.
    pub fn start(command: CommandLine, folder: Folder) -> Supervisor {
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let name = "managed-server".to_owned();
        let spawned = std::thread::Builder::new().name(name).spawn(move || theirs.run(&command, &folder));
        let thread = match spawned {
            Ok(thread) => Some(thread),
            Err(error) => {
                shared.state.lock().over = Some(error.to_string());
                None
            }
        };
        Supervisor { shared, thread }
    }

    /// The server's process; `None` while none runs.
    pub fn pid(&self) -> Option<u32> {
        self.shared.state.lock().pid
    }

    /// Why no server runs and none will be started.
    pub fn over(&self) -> Option<String> {
        self.shared.state.lock().over.clone()
    }

    /// Notes that the server has answered.
    pub fn ready(&self) {
        self.shared.state.lock().ready = true;
    }

    /// Stops the server and waits until it is gone.
    pub async fn stop(&mut self) {
        self.shared.let_go();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed, and there is nothing left to stop.
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.shared.let_go();
    }
}

impl Shared {
    fn let_go(&self) {
        let mut state = self.state.lock();
        state.stopping = true;
        state.line = None;
        self.changed.notify_all();
    }

    fn run(&self, command: &CommandLine, folder: &Folder) {
        let mut pause = FIRST_PAUSE;
        loop {
            let began = clock::now();
            let why = self.serve_once(command, folder);
            if clock::now().us_since(began) > STABLE_US {
                pause = FIRST_PAUSE;
            }
            if !self.again(&why, pause) {
                break;
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
            // The guardian may have been killed without its server.
            if let Err(error) = leftover::stop_all(folder).and_then(|()| folder.tidy()) {
                tracing::error!(%error, "the private server cannot be restarted yet");
            }
        }
    }

    /// Runs the server until it ends. Returns the reason.
    fn serve_once(&self, command: &CommandLine, folder: &Folder) -> String {
        let mut guardian = match Guardian::spawn(command, folder) {
            Ok(guardian) => guardian,
            Err(error) => return error.to_string(),
        };
        {
            let mut state = self.state.lock();
            state.pid = Some(guardian.pid);
            state.line = guardian.line.take().filter(|_| !state.stopping);
        }
        let ended = guardian.wait();
        let mut state = self.state.lock();
        state.pid = None;
        state.line = None;
        match ended {
            Ok(status) => format!("it ended with {status}"),
            Err(error) => error.to_string(),
        }
    }

    /// Whether to restart the server. Pauses before.
    fn again(&self, why: &str, pause: Duration) -> bool {
        let mut state = self.state.lock();
        if state.stopping || !state.ready {
            state.over = Some(why.to_owned());
            return false;
        }
        tracing::warn!(why, pause_ms = pause.as_millis() as u64, "restarting the private server");
        let waited = self.changed.wait_timeout_while(state, pause, |state| !state.stopping);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if state.stopping {
            state.over = Some(why.to_owned());
        }
        !state.stopping
    }
}

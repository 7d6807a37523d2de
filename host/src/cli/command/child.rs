//! The command under a lock, with all processes that it starts.

use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{ExitStatus, Stdio};

use rustix::process::{
    Pid, Signal, WaitOptions, getpgrp, getpid, kill_current_process_group, set_child_subreaper, waitpgid,
    waitpid,
};
use tokio::signal::unix::{self, SignalKind, signal};

use super::group::{Group, LOOK_EVERY};
use super::guard::Guard;
use super::passing::Passing;
use super::terminal::{Terminal, has_shell};
use crate::cli::failure::Failure;
use crate::cli::output;
use crate::clock;
use crate::lock::Instant;

/// A command in a process group of its own. Dropping it kills the group.
pub struct Child {
    group: Group,
    /// Notifies that a child process has ended, was stopped, or was continued.
    changes: unix::Signal,
    /// The command's exit code and the time of its end, if it has ended.
    ended: Option<(u8, Instant)>,
    /// Whether the whole group has ended.
    is_gone: bool,
    told_that_some_work_on: bool,
    output: Option<Passing>,
    terminal: Option<Terminal>,
    guard: Option<Guard>,
    /// The time at which the guard ends the command, as last told to the guard.
    kill_at: Instant,
}

/// A change in the state of the command.
#[derive(Debug, PartialEq, Eq)]
pub enum Change {
    Stopped(Signal),
    Continued,
    /// The command has ended with this code, and its process group is empty.
    Ended(u8),
}

/// What to do with the command's standard output.
#[derive(Clone, Copy, Debug)]
pub enum Output {
    Passed,
    /// Pass the output on, and keep at most this many of its first bytes.
    StoredValue(usize),
}

/// How long processes of the group may outlive the command before a message says that the lock waits for them.
const SAID_AFTER_MS: u32 = 1_000;

impl Child {
    /// Starts a command. The guard ends it at `kill_at`, unless [`Child::may_live_until`] sets a later time.
    pub fn spawn(
        command: &[String],
        environment: &[(&str, String)],
        output: Output,
        kill_at: Instant,
    ) -> Result<Child, Failure> {
        let Some((program, args)) = command.split_first() else {
            return Err(Failure::Usage("there is no command".to_owned()));
        };
        let no_guard = |error| Failure::Other(format!("cannot guard the command: {error}"));
        let changes = signal(SignalKind::child()).map_err(no_guard)?;
        let guard = Guard::start().map_err(no_guard)?;
        // Orphaned processes of the command become children of this process, so that it can see the end of the group.
        let _ = set_child_subreaper(Some(getpid()));
        let mut builder = std::process::Command::new(program);
        builder.args(args).envs(environment.iter().map(|(name, value)| (name, value)));
        builder.process_group(0);
        if matches!(output, Output::StoredValue(_)) {
            builder.stdout(Stdio::piped());
        }
        let introduced = guard.introduce(&mut builder, kill_at);
        let terminal = Terminal::open();
        // After the introduction: a command that Ctrl-Z stops this early is known to the guard.
        if let Some(terminal) = terminal.as_ref().filter(|terminal| terminal.is_for_the_command()) {
            terminal.give_from_the_start(&mut builder);
        }
        let spawned = introduced.and_then(|()| builder.spawn());
        let mut process = match spawned {
            Ok(process) => process,
            Err(error) => {
                guard.dismiss();
                if let Some(terminal) = &terminal {
                    terminal.take_back(getpgrp());
                }
                // The exit codes that shells use.
                let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
                return Err(Failure::Command { what: format!("cannot run `{program}`: {error}"), code });
            }
        };
        let group = Group(Pid::from_child(&process));
        let mut child = Child {
            group,
            changes,
            ended: None,
            is_gone: false,
            told_that_some_work_on: false,
            output: None,
            terminal,
            guard: Some(guard),
            kill_at,
        };
        if let (Output::StoredValue(max), Some(pipe)) = (output, process.stdout.take()) {
            let passing = Passing::start(pipe, max);
            child.output = Some(passing.map_err(|error| Failure::Other(format!("no pipe: {error}")))?);
        }
        Ok(child)
    }

    /// Tells the guard until when the command may live, even if this process hangs or dies. Returns false if the
    /// previous time has passed: then the guard ends the command.
    pub fn may_live_until(&mut self, kill_at: Instant) -> bool {
        if self.may_have_been_killed() {
            return false;
        }
        self.kill_at = kill_at;
        if let Some(guard) = &mut self.guard {
            guard.tell(self.group, kill_at);
        }
        true
    }

    /// Whether the guard may have ended the command by now.
    pub fn may_have_been_killed(&self) -> bool {
        clock::now() >= self.kill_at
    }

    /// The copied output, if it is kept. Call this after the command has ended.
    pub fn output(&mut self) -> Option<Passing> {
        self.output.take()
    }

    /// Waits for the next change. Cancel-safe.
    pub async fn change(&mut self) -> Result<Change, Failure> {
        loop {
            if let Some(change) = self.look()? {
                return Ok(change);
            }
            if self.ended.is_none() {
                self.changes.recv().await;
            } else {
                // The kernel does not report the end of processes that are not our children, so poll.
                tokio::time::sleep(LOOK_EVERY).await;
                self.say_that_some_work_on();
            }
        }
    }

    fn look(&mut self) -> Result<Option<Change>, Failure> {
        let cannot_wait = |error| Failure::Other(format!("cannot wait for the command: {error}"));
        if self.ended.is_none() {
            let options = WaitOptions::NOHANG | WaitOptions::UNTRACED | WaitOptions::CONTINUED;
            let Some((_, status)) = waitpid(Some(self.group.0), options).map_err(cannot_wait)? else {
                return Ok(None);
            };
            if let Some(signal) = status.stopping_signal() {
                return Ok(Some(Change::Stopped(Signal::from_named_raw(signal).unwrap_or(Signal::STOP))));
            }
            if status.continued() {
                return Ok(Some(Change::Continued));
            }
            self.ended = Some((code_of(ExitStatus::from_raw(status.as_raw())), clock::now()));
        }
        self.reap();
        let Some((code, _)) = self.ended.filter(|_| self.is_gone) else { return Ok(None) };
        Ok(Some(Change::Ended(code)))
    }

    /// Reaps the processes that have ended, and records whether the group is empty.
    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = waitpgid(self.group.0, WaitOptions::NOHANG) {
            if pid == self.group.0 {
                self.ended = Some((code_of(ExitStatus::from_raw(status.as_raw())), clock::now()));
            }
        }
        if !self.is_gone && self.group.is_gone() {
            self.is_gone = true;
            if let Some(terminal) = &self.terminal {
                terminal.take_back(self.group.0);
            }
            if let Some(output) = &self.output {
                output.end();
            }
            if let Some(guard) = self.guard.take() {
                guard.dismiss();
            }
        }
    }

    fn say_that_some_work_on(&mut self) {
        let is_long = |(_, since)| clock::now().ms_since(since) >= SAID_AFTER_MS;
        if !self.told_that_some_work_on && self.ended.is_some_and(is_long) {
            self.told_that_some_work_on = true;
            output::aside(
                "the command has ended, but processes that it started work on; the lock is held until they have ended"
                    .to_owned(),
            );
        }
    }

    /// Passes a signal on to the command's process group.
    pub fn signal(&self, signal: Signal) {
        if self.is_gone {
            return;
        }
        if signal == Signal::CONT
            && let Some(terminal) = &self.terminal
            && terminal.is_for_the_command()
        {
            terminal.give(self.group.0);
        }
        self.group.signal(signal);
    }

    /// Handles a stop of the command by `signal`, as a shell does for a job. If the command only wanted the terminal
    /// and may have it, the command is continued. Otherwise this process and its own job are stopped as well, so that
    /// the shell gets the terminal back. When the shell continues them, the command goes on.
    pub fn stopped(&self, signal: Signal) {
        let Some(terminal) = &self.terminal else { return };
        if matches!(signal, Signal::TTIN | Signal::TTOU) && terminal.give(self.group.0) {
            self.group.signal(Signal::CONT);
            return;
        }
        let was_in_front = terminal.has(self.group.0);
        terminal.take_back(self.group.0);
        if signal == Signal::STOP {
            // Somebody stopped only the command.
        } else if has_shell() {
            let _ = kill_current_process_group(Signal::TSTP);
        } else if was_in_front && signal == Signal::TSTP {
            // No shell could continue the command, so Ctrl-Z has no effect, as without this program.
            terminal.give(self.group.0);
            self.group.signal(Signal::CONT);
        }
    }

    /// Sends TERM, and KILL at `kill_at`. Returns whether the command and its group are gone.
    pub async fn stop(&mut self, kill_at: Instant) -> bool {
        let group = self.group;
        group.stop(kill_at, || self.reap()).await && self.is_gone
    }
}

impl Drop for Child {
    /// A command must not outlive the process that watches its lease.
    fn drop(&mut self) {
        self.reap();
        if !self.is_gone {
            // The guard makes sure that the group ends.
            self.group.signal(Signal::KILL);
            if let Some(terminal) = &self.terminal {
                terminal.take_back(self.group.0);
            }
        }
    }
}

/// The exit code; 128 + n if signal n ended the process.
fn code_of(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

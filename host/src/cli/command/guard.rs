//! A process that ends the command if this process cannot.
//!
//! The guard reads a pipe that only this process writes to. The pipe tells it the command's process group and the
//! time to kill the group at, again after each renewal. So the command ends before its lease even if this process
//! hangs or is stopped. If this process is killed, the pipe closes, and the guard stops the group. The guard has a
//! process group of its own: signals to the command or to this process do not end it.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};

use rustix::process::{Pid, Signal, getpid};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::signal::unix::{SignalKind, signal};

use super::group::Group;
use super::lease::sleep_until;
use crate::clock;
use crate::lock::Instant;

/// The hidden command that starts this program as a guard.
pub const COMMAND: &str = "guard-a-command";
/// The guard's name in the process list.
const NAME: &str = "lockkeeper-guard";
/// The time between TERM and KILL, if the lease lasts long enough.
const GRACE_MS: u32 = 5_000;

/// The guard's process, as its parent sees it.
pub struct Guard {
    process: Child,
    line: ChildStdin,
}

impl Guard {
    /// Starts a guard.
    pub fn start() -> io::Result<Guard> {
        // The running program, even if its path now has another file.
        let mut command = Command::new("/proc/self/exe");
        command.arg0(NAME).arg(COMMAND).process_group(0).current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut process = command.spawn()?;
        let line = process.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(Guard { process, line })
    }

    /// Makes the command's process tell the guard its group and `kill_at`, after fork and before exec. So the guard
    /// knows the command from its first instruction.
    pub fn introduce(&self, command: &mut Command, kill_at: Instant) -> io::Result<()> {
        let line = self.line.as_fd().try_clone_to_owned()?;
        // SAFETY: the code between fork and exec neither allocates nor takes locks. It formats into an array and
        // makes two system calls.
        unsafe {
            command.pre_exec(move || {
                let mut text = [0; 64];
                let mut rest = &mut text[..];
                writeln!(rest, "{} {}", getpid().as_raw_nonzero(), kill_at.0)?;
                let unused = rest.len();
                rustix::io::write(&line, &text[..64 - unused])?;
                Ok(())
            });
        }
        Ok(())
    }

    /// Tells the guard until when the group may live. A guard that is gone is replaced.
    pub fn tell(&mut self, group: Group, kill_at: Instant) {
        let line = format!("{} {}\n", group.0.as_raw_nonzero(), kill_at.0);
        if self.line.write_all(line.as_bytes()).is_ok() {
            return;
        }
        if let Ok(mut guard) = Guard::start()
            && guard.line.write_all(line.as_bytes()).is_ok()
        {
            let _ = self.process.wait();
            *self = guard;
        }
    }

    /// Ends the guard, because the group has ended.
    pub fn dismiss(mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Runs the guard process until the group has ended.
pub fn run() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime else { return ExitCode::FAILURE };
    runtime.block_on(guard());
    // A read may still block a thread of its own.
    runtime.shutdown_background();
    ExitCode::SUCCESS
}

async fn guard() {
    let kinds = [SignalKind::hangup(), SignalKind::interrupt(), SignalKind::quit(), SignalKind::terminate()];
    let _heard_and_left_alone = kinds.map(|kind| signal(kind).ok());
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    let mut guarded: Option<(Group, Instant)> = None;
    loop {
        let kill_at = guarded.map_or(Instant(u64::MAX), |(_, kill_at)| kill_at);
        tokio::select! {
            line = lines.next_line() => match line {
                Ok(Some(line)) => guarded = parsed(&line).or(guarded),
                _ => break,
            },
            () = sleep_until(kill_at) => {
                let Some((group, _)) = guarded else { continue };
                group.signal(Signal::KILL);
                break;
            }
        }
    }
    if let Some((group, kill_at)) = guarded {
        group.stop(kill_at.min(clock::now().plus_ms(GRACE_MS)), || ()).await;
    }
}

fn parsed(line: &str) -> Option<(Group, Instant)> {
    let (group, kill_at) = line.split_once(' ')?;
    Some((Group(Pid::from_raw(group.parse().ok()?)?), Instant(kill_at.parse().ok()?)))
}

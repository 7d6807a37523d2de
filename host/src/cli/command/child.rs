//! The command that runs under a lock, with all the processes it starts.

use std::io::{self, IsTerminal, Write as _};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process_group};
use tokio::io::AsyncReadExt as _;
use tokio::process::ChildStdout;
use tokio::task::JoinHandle;

use crate::cli::failure::Failure;
use crate::clock;
use crate::lock::Instant;

pub struct Child {
    process: tokio::process::Child,
    /// What it has printed so far, where that is kept.
    output: Option<JoinHandle<(Vec<u8>, bool)>>,
    pid: Option<Pid>,
    /// At a terminal the command stays in our group: in one of its own it could not read.
    has_group: bool,
}

/// What becomes of the command's standard output.
#[derive(Clone, Copy, Debug)]
pub enum Output {
    Passed,
    /// Passed on, and its first bytes kept, at most so many.
    Kept(usize),
}

/// How often a group that was told to stop is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

impl Child {
    pub fn spawn(
        command: &[String],
        environment: &[(&str, String)],
        output: Output,
    ) -> Result<Child, Failure> {
        let Some((program, args)) = command.split_first() else {
            return Err(Failure::Usage("there is no command".to_owned()));
        };
        let has_group = !io::stdin().is_terminal();
        let mut builder = std::process::Command::new(program);
        builder.args(args).envs(environment.iter().map(|(name, value)| (name, value)));
        if has_group {
            builder.process_group(0);
        }
        if matches!(output, Output::Kept(_)) {
            builder.stdout(Stdio::piped());
        }
        let mut process = tokio::process::Command::from(builder).spawn().map_err(|error| {
            // As shells do.
            let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
            Failure::Command { what: format!("cannot run `{program}`: {error}"), code }
        })?;
        let pid = process.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let output = match output {
            Output::Kept(max) => process.stdout.take().map(|pipe| tokio::spawn(pass_on(pipe, max))),
            Output::Passed => None,
        };
        Ok(Child { process, output, pid, has_group })
    }

    /// What was kept of the output, and whether there was more. Waits until nobody can print any more.
    pub async fn output(&mut self) -> (String, bool) {
        let Some(output) = self.output.take() else { return (String::new(), false) };
        let (kept, cut) = output.await.unwrap_or_default();
        (String::from_utf8_lossy(&kept).into_owned(), cut)
    }

    /// The exit code, 128 + n where signal n ended it. Safe to drop and call again.
    pub async fn wait(&mut self) -> Result<u8, Failure> {
        let status = self.process.wait().await;
        status.map(code_of).map_err(|error| Failure::Other(format!("cannot wait for the command: {error}")))
    }

    /// Sends a signal to the command and all of its group. That it is gone already is fine.
    pub fn signal(&self, signal: Signal) {
        let Some(pid) = self.pid else { return };
        let sent = if self.has_group {
            kill_process_group(pid, signal)
        } else if self.process.id().is_some() {
            kill_process(pid, signal)
        } else {
            Ok(())
        };
        if let Err(error) = sent
            && error != rustix::io::Errno::SRCH
        {
            eprintln!("lockkeeper: cannot signal the command: {error}");
        }
    }

    /// TERM, and at `kill_at` KILL. Returns when the command and its group are gone.
    pub async fn stop(&mut self, kill_at: Instant) {
        self.signal(Signal::TERM);
        while clock::now() < kill_at {
            let _ = tokio::time::timeout(LOOK_EVERY, self.process.wait()).await;
            if self.is_gone() {
                return;
            }
            tokio::time::sleep(LOOK_EVERY.min(Duration::from_micros(kill_at.us_since(clock::now())))).await;
        }
        self.signal(Signal::KILL);
        let _ = self.process.wait().await;
    }

    fn is_gone(&self) -> bool {
        let leader_gone = self.process.id().is_none();
        let group_gone = match self.pid {
            Some(pid) if self.has_group => test_kill_process_group(pid).is_err(),
            _ => true,
        };
        leader_gone && group_gone
    }
}

/// Copies the pipe to our own output. The first `max` bytes, and whether there were more.
async fn pass_on(mut pipe: ChildStdout, max: usize) -> (Vec<u8>, bool) {
    let (mut kept, mut cut) = (Vec::new(), false);
    let mut buffer = [0; 8_192];
    loop {
        let read = match pipe.read(&mut buffer).await {
            Ok(0) | Err(_) => return (kept, cut),
            Ok(read) => &buffer[..read],
        };
        // That nobody reads on is no reason to stop the command.
        let _ = io::stdout().write_all(read).and_then(|()| io::stdout().flush());
        let room = (max - kept.len()).min(read.len());
        kept.extend_from_slice(&read[..room]);
        cut |= room < read.len();
    }
}

fn code_of(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Child {
        let command = ["sh", "-c", script].map(str::to_owned);
        Child::spawn(&command, &[("LOCKKEEPER_TOKEN", "17".to_owned())], Output::Passed).unwrap()
    }

    #[tokio::test]
    async fn codes_are_passed_on() {
        assert_eq!(shell("exit 7").wait().await.unwrap(), 7);
        assert_eq!(shell("kill -9 $$").wait().await.unwrap(), 137);
        assert_eq!(shell("test $LOCKKEEPER_TOKEN = 17").wait().await.unwrap(), 0);
        let missing = Child::spawn(&["/nowhere/at-all".to_owned()], &[], Output::Passed).err().unwrap();
        assert_eq!(missing.code_of_run(), 127);
        let no_program = Child::spawn(&["/etc/passwd".to_owned()], &[], Output::Passed).err().unwrap();
        assert_eq!(no_program.code_of_run(), 126);
    }

    #[tokio::test]
    async fn term_ends_a_command_that_listens() {
        let mut child = shell("sleep 30 & sleep 30");
        let begun = clock::now();
        child.stop(clock::now().plus_ms(10_000)).await;
        assert!(clock::now().ms_since(begun) < 5_000);
        assert!(child.is_gone());
    }

    #[tokio::test]
    async fn kill_ends_a_command_that_does_not() {
        let mut child = shell("trap '' TERM; sleep 30; sleep 30");
        tokio::time::sleep(Duration::from_millis(200)).await;
        let begun = clock::now();
        child.stop(begun.plus_ms(300)).await;
        let took = clock::now().ms_since(begun);
        assert!((300..5_000).contains(&took), "{took}");
    }
}

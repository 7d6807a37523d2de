//! Commands that are run as steps, each named and timed.

use std::process::{Command, ExitStatus};
use std::time::Instant;

use anyhow::{Context, Result};

use crate::paths;

/// Says how far a piece of work is: `[2/4] building … ` and the time since it began.
pub struct Progress {
    began: Instant,
    total: usize,
    step: usize,
}

impl Progress {
    pub fn new(total: usize) -> Progress {
        Progress { began: Instant::now(), total, step: 0 }
    }

    pub fn next(&mut self, what: &str) {
        self.step += 1;
        eprintln!("[{}/{}] {:>4} s  {what}", self.step, self.total, self.began.elapsed().as_secs());
    }
}

/// Cargo, as this program was started by, in the checkout and with the same target directory.
pub fn cargo(args: &[&str]) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    // A relative one counts from the folder that the user is in.
    // With the versions in Cargo.lock, and no others.
    command.arg("--locked").args(args).current_dir(paths::root()).env("CARGO_TARGET_DIR", paths::target());
    // What cargo told this program about itself is not for the builds that it starts: build scripts
    // that look at it would run again whenever the caller changes.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&*name);
        }
    }
    command
}

/// Runs a command with this terminal.
pub fn status(command: &mut Command) -> Result<ExitStatus> {
    command.status().with_context(|| format!("cannot run {}", command.get_program().display()))
}

/// A command's exit code; a signal counts as the shell counts it.
pub fn code(status: ExitStatus) -> u8 {
    use std::os::unix::process::ExitStatusExt;
    let signal = || status.signal().map(|signal| 128 + signal);
    let code = status.code().or_else(signal).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

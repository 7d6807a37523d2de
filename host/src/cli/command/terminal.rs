//! The terminal of a command: who reads it and whom Ctrl-C and Ctrl-Z reach.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::AsRawFd;

use rustix::process::{Pid, getpgid, getpgrp, getppid, getsid, test_kill_process_group};

/// The controlling terminal, which has one process group in its foreground.
pub struct Terminal(File);

impl Terminal {
    /// `None`: there is none.
    pub fn open() -> Option<Terminal> {
        File::options().read(true).write(true).open("/dev/tty").ok().map(Terminal)
    }

    /// Whether the command has the terminal from its start. Where input or output go elsewhere, a program that
    /// stands beside this one in a pipeline may need it, as `less` does; then the command has it from
    /// when it asks for it.
    pub fn is_for_the_command(&self) -> bool {
        io::stdin().is_terminal() && io::stdout().is_terminal() && self.has(getpgrp())
    }

    /// Whether a group is in the foreground.
    pub fn has(&self, group: Pid) -> bool {
        foreground(&self.0) == Some(group)
    }

    /// Puts the command's group into the foreground if this process is there; whether the group is there now.
    pub fn give(&self, group: Pid) -> bool {
        if self.has(getpgrp()) {
            set_foreground(&self.0, group);
        }
        self.has(group)
    }

    /// Puts this process into the foreground again, unless somebody else than the command is there.
    pub fn take_back(&self, group: Pid) {
        let is_the_commands =
            |foreground| foreground == group || test_kill_process_group(foreground).is_err();
        if foreground(&self.0).is_some_and(is_the_commands) {
            set_foreground(&self.0, getpgrp());
        }
    }
}

/// The process group in the foreground.
fn foreground(terminal: &File) -> Option<Pid> {
    // SAFETY: the descriptor is open, and the call takes nothing else.
    Pid::from_raw(unsafe { libc::tcgetpgrp(terminal.as_raw_fd()) })
        .filter(|group| group.as_raw_nonzero().get() > 0)
}

/// That it fails changes nothing for the lock. A group in the background that does this would be stopped by TTOU;
/// where the signal is blocked it may. The command inherits nothing of that.
fn set_foreground(terminal: &File, group: Pid) {
    // SAFETY: both sets are initialised by the calls that get them first, the descriptor is open, and the calls
    // are defined for any thread.
    unsafe {
        let (mut ttou, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigemptyset(&raw mut ttou);
        libc::sigaddset(&raw mut ttou, libc::SIGTTOU);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const ttou, &raw mut before);
        libc::tcsetpgrp(terminal.as_raw_fd(), group.as_raw_nonzero().get());
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
    }
}

/// Whether somebody could see this process group stopped, and continue it: a parent of ours in
/// another group of this session, which is a shell. The kernel stops no group that has none.
pub fn has_shell() -> bool {
    let (Ok(session), group) = (getsid(None), getpgrp()) else { return false };
    let mut ancestor = getppid();
    while let Some(pid) = ancestor {
        if getsid(Some(pid)) != Ok(session) {
            return false;
        }
        if getpgid(Some(pid)) != Ok(group) {
            return true;
        }
        ancestor = parent(pid);
    }
    false
}

fn parent(pid: Pid) -> Option<Pid> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    Pid::from_raw(rest.split(' ').nth(1)?.parse().ok()?)
}

//! The terminal of a command: which process group reads it and gets Ctrl-C and Ctrl-Z.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::process::{Pid, getpgid, getpgrp, getppid, getsid, test_kill_process_group};

/// The controlling terminal, which has one foreground process group.
pub struct Terminal(File);

impl Terminal {
    /// Opens the terminal. `None` if there is none.
    pub fn open() -> Option<Terminal> {
        File::options().read(true).write(true).open("/dev/tty").ok().map(Terminal)
    }

    /// Whether the command has the terminal from its start. If input or output is redirected, another program of the
    /// pipeline, such as `less`, may need the terminal. Then the command gets the terminal when it asks for it.
    pub fn is_for_the_command(&self) -> bool {
        io::stdin().is_terminal() && io::stdout().is_terminal() && self.has(getpgrp())
    }

    /// Moves the group of a command that starts a group to the foreground before the command itself begins, if this process
    /// is there then. Ctrl-Z and Ctrl-C therefore reach the command from its first instruction on.
    pub fn give_from_the_start(&self, command: &mut Command) {
        let (terminal, ours) = (self.0.as_raw_fd(), getpgrp());
        // SAFETY: the code between fork and exec makes system calls only. The descriptor closes at exec, not before.
        unsafe {
            command.pre_exec(move || {
                // This process handles the signals of the keyboard. Its handlers must not take them in the command.
                for signal in [libc::SIGINT, libc::SIGQUIT] {
                    let mut action: libc::sigaction = std::mem::zeroed();
                    if libc::sigaction(signal, std::ptr::null(), &raw mut action) == 0
                        && action.sa_sigaction != libc::SIG_IGN
                    {
                        libc::signal(signal, libc::SIG_DFL);
                    }
                }
                if foreground(terminal) == Some(ours) {
                    set_foreground(terminal, getpgrp());
                }
                Ok(())
            });
        }
    }

    /// Whether a group is in the foreground.
    pub fn has(&self, group: Pid) -> bool {
        foreground(self.0.as_raw_fd()) == Some(group)
    }

    /// Moves the command's group to the foreground if this process is there. Returns whether the group is there now.
    pub fn give(&self, group: Pid) -> bool {
        if self.has(getpgrp()) {
            set_foreground(self.0.as_raw_fd(), group);
        }
        self.has(group)
    }

    /// Moves this process back to the foreground, unless another living group than the command's is there.
    pub fn take_back(&self, group: Pid) {
        let is_the_commands =
            |foreground| foreground == group || test_kill_process_group(foreground).is_err();
        if foreground(self.0.as_raw_fd()).is_some_and(is_the_commands) {
            set_foreground(self.0.as_raw_fd(), getpgrp());
        }
    }
}

/// The foreground process group.
fn foreground(terminal: RawFd) -> Option<Pid> {
    // SAFETY: the descriptor is open, and the call takes no other arguments.
    Pid::from_raw(unsafe { libc::tcgetpgrp(terminal) }).filter(|group| group.as_raw_nonzero().get() > 0)
}

/// Sets the foreground group. A failure does not matter for the lock. TTOU stops a background group that does this,
/// so the signal is blocked during the call. The command does not inherit the blocked signal.
fn set_foreground(terminal: RawFd, group: Pid) {
    // SAFETY: the calls that receive the sets initialise them first, the descriptor is open, and the calls are
    // defined for any thread.
    unsafe {
        let (mut ttou, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigemptyset(&raw mut ttou);
        libc::sigaddset(&raw mut ttou, libc::SIGTTOU);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const ttou, &raw mut before);
        libc::tcsetpgrp(terminal, group.as_raw_nonzero().get());
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
    }
}

/// Whether a shell could see this process group stop and could continue it: a parent of ours in another group of this
/// session. The kernel does not stop a group without such a parent.
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

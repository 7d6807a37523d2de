//! The process group of a command: the command and the processes that it started.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};

use crate::clock;
use crate::lock::Instant;

/// The poll interval for the end of a group.
pub const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A killed process may still be inside a system call. After this time, stop waiting for it.
const KILLED_WITHIN_MS: u32 = 10_000;

/// A process group. Its number is not reused while the group has members, so a signal reaches this group or none.
#[derive(Clone, Copy)]
pub struct Group(pub Pid);

impl Group {
    /// Sends a signal to the group. A group that is gone is not an error.
    pub fn signal(self, signal: Signal) {
        let _ = kill_process_group(self.0, signal);
    }

    /// Whether the group is empty: it has not even a process that has ended and was not reaped.
    pub fn is_gone(self) -> bool {
        test_kill_process_group(self.0) == Err(rustix::io::Errno::SRCH)
    }

    /// Sends TERM, and KILL at `kill_at`. Returns whether the group is gone. `look` is called before each check.
    pub async fn stop(self, kill_at: Instant, mut look: impl FnMut()) -> bool {
        self.signal(Signal::TERM);
        // A stopped process handles TERM only when it is continued.
        self.signal(Signal::CONT);
        if self.gone_by(kill_at, &mut look).await {
            return true;
        }
        self.signal(Signal::KILL);
        self.gone_by(clock::now().plus_ms(KILLED_WITHIN_MS), &mut look).await
    }

    async fn gone_by(self, limit: Instant, look: &mut impl FnMut()) -> bool {
        loop {
            look();
            if self.is_gone() {
                return true;
            }
            let now = clock::now();
            if now >= limit {
                return false;
            }
            tokio::time::sleep(LOOK_EVERY.min(Duration::from_micros(limit.us_since(now)))).await;
        }
    }
}

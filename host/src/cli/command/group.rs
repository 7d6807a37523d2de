//! The process group of a command: the command and what it started.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};

use crate::clock;
use crate::lock::Instant;

/// How often a group is looked at of which it matters whether it has ended.
pub const LOOK_EVERY: Duration = Duration::from_millis(20);
/// After KILL a process may still be within a call of the kernel; after this it is not waited for.
const KILLED_WITHIN_MS: u32 = 10_000;

/// The number of a group is nobody else's while the group has members, so a signal reaches it or nobody.
#[derive(Clone, Copy)]
pub struct Group(pub Pid);

impl Group {
    /// That it is gone already is fine.
    pub fn signal(self, signal: Signal) {
        let _ = kill_process_group(self.0, signal);
    }

    /// Nobody is left, not even one that has ended and was not waited for.
    pub fn is_gone(self) -> bool {
        test_kill_process_group(self.0) == Err(rustix::io::Errno::SRCH)
    }

    /// TERM, and at `kill_at` KILL. Whether the group is gone. `look` is called before each look at it.
    pub async fn stop(self, kill_at: Instant, mut look: impl FnMut()) -> bool {
        self.signal(Signal::TERM);
        // A process that is stopped handles TERM once it goes on.
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

//! Until when this proxy may write leases.

use tokio::sync::Notify;

use crate::clock;
use crate::lock::{Instant, ServerTime};
use crate::mutex::Mutex;

/// The membership of this proxy in its fleet. A store without a fleet may always write.
pub struct Membership {
    until: Mutex<Until>,
    renewed: Notify,
}

#[derive(Clone, Copy)]
struct Until {
    server: ServerTime,
    own: Instant,
    lost: bool,
    life: u64,
    latest: Instant,
}

/// The membership as seen by leases that are only in this process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Rises whenever this proxy ceases to be a member. The others may have used other keys since.
    pub life: u64,
    /// Until when this proxy is a member, on our own clock.
    pub until: Instant,
    /// The latest value that `until` ever had.
    pub latest: Instant,
}

impl Membership {
    const CLOSED: Until =
        Until { server: ServerTime(0), own: Instant(0), lost: false, life: 0, latest: Instant(0) };

    /// Of a store without a fleet.
    pub fn new() -> Membership {
        let (server, own) = (ServerTime(u64::MAX), Instant(u64::MAX));
        let always = Until { server, own, latest: own, ..Membership::CLOSED };
        Membership { until: Mutex::new(always), renewed: Notify::new() }
    }

    /// See [`crate::store::registry::Registry::allow`].
    pub fn allow(&self, until: Option<(ServerTime, Instant)>) {
        {
            let mut now = self.until.lock();
            let (life, latest) = (now.life, now.latest);
            *now = match until {
                Some((server, own)) => Until { server, own, lost: false, life, latest: latest.max(own) },
                None => Until { lost: true, life: life + 1, latest, ..Membership::CLOSED },
            };
        }
        self.renewed.notify_waiters();
    }

    /// Forbids writes until this proxy has joined. Operations wait until then.
    pub fn close(&self) {
        *self.until.lock() = Membership::CLOSED;
    }

    /// Whether the membership was lost, so that waiting claims may have been planned by policies that are not
    /// live any more.
    pub fn is_lost(&self) -> bool {
        self.until.lock().lost
    }

    /// The last moment of the server's clock at which this proxy may write.
    pub fn until(&self) -> ServerTime {
        self.until.lock().server
    }

    /// The same on our own clock. Other proxies may count this proxy as gone some time after it.
    pub fn until_own(&self) -> Instant {
        self.until.lock().own
    }

    /// The current membership.
    pub fn standing(&self) -> Standing {
        let Until { life, own, latest, .. } = *self.until.lock();
        Standing { life, until: own, latest }
    }

    /// Whether a write has a chance. The server decides.
    pub fn may_write(&self) -> bool {
        clock::now() < self.until_own()
    }

    /// Waits until [`Membership::may_write`].
    pub async fn opened(&self) {
        loop {
            let renewed = self.renewed.notified();
            if self.may_write() {
                return;
            }
            renewed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_may_write_without_a_fleet_and_otherwise_only_as_a_member() {
        let membership = Membership::new();
        assert!(membership.may_write());
        membership.close();
        assert!(!membership.may_write() && !membership.is_lost());
        membership.allow(None);
        assert!(!membership.may_write() && membership.is_lost());
        assert_eq!(membership.until(), ServerTime(0));
        let until = clock::now().plus_ms(60_000);
        membership.allow(Some((ServerTime(9), until)));
        assert!(membership.may_write());
        assert_eq!(membership.until(), ServerTime(9));
        assert_eq!(membership.standing(), Standing { life: 1, until, latest: until });
        membership.allow(None);
        assert_eq!(membership.standing(), Standing { life: 2, until: Instant(0), latest: until });
    }
}

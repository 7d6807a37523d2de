//! Until when this proxy may write leases.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::clock;
use crate::lock::{Instant, ServerTime};

/// A store that belongs to no fleet may always write.
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

/// What the leases that are known to this process alone go by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Rises whenever this proxy ceases to be a member: the others may have gone by other keys since.
    pub life: u64,
    /// Until when this proxy is a member, on our own clock.
    pub until: Instant,
    /// The latest that `until` has ever been.
    pub latest: Instant,
}

impl Membership {
    const CLOSED: Until =
        Until { server: ServerTime(0), own: Instant(0), lost: false, life: 0, latest: Instant(0) };

    pub fn new() -> Membership {
        let (server, own) = (ServerTime(u64::MAX), Instant(u64::MAX));
        let always = Until { server, own, latest: own, ..Membership::CLOSED };
        Membership { until: Mutex::new(always), renewed: Notify::new() }
    }

    /// See [`crate::store::registry::Registry::allow`].
    pub fn allow(&self, until: Option<(ServerTime, Instant)>) {
        {
            let mut now = self.lock();
            let (life, latest) = (now.life, now.latest);
            *now = match until {
                Some((server, own)) => Until { server, own, lost: false, life, latest: latest.max(own) },
                None => Until { lost: true, life: life + 1, latest, ..Membership::CLOSED },
            };
        }
        self.renewed.notify_waiters();
    }

    /// Nothing is written before this proxy has joined; what comes waits for that.
    pub fn close(&self) {
        *self.lock() = Membership::CLOSED;
    }

    /// Whether claims that wait were planned by what may be over.
    pub fn is_lost(&self) -> bool {
        self.lock().lost
    }

    /// Nothing is to be written past this moment of the server's clock.
    pub fn until(&self) -> ServerTime {
        self.lock().server
    }

    /// The same on our own clock. The others may count this proxy as gone some time after it.
    pub fn until_own(&self) -> Instant {
        self.lock().own
    }

    pub fn standing(&self) -> Standing {
        let Until { life, own, latest, .. } = *self.lock();
        Standing { life, until: own, latest }
    }

    /// Whether it makes sense to ask: the server has the last word.
    pub fn may_write(&self) -> bool {
        clock::now() < self.until_own()
    }

    /// Waits until it does.
    pub async fn opened(&self) {
        loop {
            let renewed = self.renewed.notified();
            if self.may_write() {
                return;
            }
            renewed.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Until> {
        self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_without_a_fleet_always_writes() {
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

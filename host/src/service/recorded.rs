//! Tracks the leases of recorded requests until they end.

use crate::lock::maps::BoundedMap;
use crate::lock::{Instant, Key, LeaseRef, Token};

/// How many leases there are at most. Beyond that, the oldest one has no end in the recording.
const MOST: usize = 1 << 20;

/// The leases of recorded requests. Without a recording, there are none, and nothing is looked up.
pub(super) struct RecordedLeases {
    by_name: BoundedMap<Name, Lease>,
    /// A lease that is taken away is known by its nonce.
    names: BoundedMap<u64, Name>,
    is_used: bool,
}

/// The first key of a lease, and its token.
type Name = (Key, Token);

#[derive(Clone, Copy)]
struct Lease {
    nonce: u64,
    granted: Instant,
    /// When its client last released it, or a level of it. The end is known only when the store has answered.
    released: Option<Instant>,
}

impl Default for RecordedLeases {
    fn default() -> RecordedLeases {
        RecordedLeases { by_name: BoundedMap::new(MOST), names: BoundedMap::new(MOST), is_used: false }
    }
}

impl RecordedLeases {
    /// A recorded request was granted this lease. An owner that has it already keeps it.
    pub fn granted(&mut self, nonce: u64, name: Name, now: Instant) {
        self.is_used = true;
        if self.by_name.get(&name).is_none() {
            self.names.insert(nonce, name.clone());
            self.by_name.insert(name, Lease { nonce, granted: now, released: None });
        }
    }

    /// A client gives up a lease, or a level of it.
    pub fn released(&mut self, lease: &LeaseRef, now: Instant) {
        let Some(token) = lease.token.filter(|_| self.is_used) else { return };
        let name = (lease.keys[0].clone(), token);
        if let Some(known) = self.by_name.remove(&name) {
            self.names.remove(&known.nonce);
            self.names.insert(known.nonce, name.clone());
            self.by_name.insert(name, Lease { released: Some(now), ..known });
        }
    }

    /// A lease has ended. Returns how long its client used it, in microseconds, if it is recorded.
    pub fn ended(&mut self, key: &Key, token: Token, now: Instant) -> Option<(Name, u64)> {
        if !self.is_used {
            return None;
        }
        let name = (key.clone(), token);
        let Lease { nonce, granted, released } = self.by_name.remove(&name)?;
        self.names.remove(&nonce);
        Some((name, released.unwrap_or(now).us_since(granted)))
    }

    /// As [`RecordedLeases::ended`], for a lease that was taken away. `None` as well if its client has released it: then the
    /// end is still to come.
    pub fn gone(&mut self, nonce: u64, now: Instant) -> Option<(Name, u64)> {
        let name = self.names.get(&nonce)?;
        self.by_name.get(name).filter(|lease| lease.released.is_none())?;
        let (key, token) = name.clone();
        self.ended(&key, token, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(token: u64) -> Name {
        (Key::new("a").expect("a key"), Token(token))
    }

    #[test]
    fn a_lease_ends_when_its_client_released_its_last_level() {
        let mut leases = RecordedLeases::default();
        leases.granted(7, name(1), Instant(100));
        leases.granted(7, name(1), Instant(150));
        let (key, token) = name(1);
        let lease = LeaseRef { keys: [key.clone()].into(), nonce: 7, token: Some(token), principal: None };
        leases.released(&lease, Instant(200));
        leases.released(&lease, Instant(300));
        assert_eq!(leases.ended(&key, token, Instant(400)), Some((name(1), 200)));
        assert_eq!(leases.gone(7, Instant(500)), None);
    }

    #[test]
    fn a_lease_that_is_taken_away_leaves_nothing_behind() {
        let mut leases = RecordedLeases::default();
        leases.granted(7, name(1), Instant(100));
        assert_eq!(leases.gone(7, Instant(400)), Some((name(1), 300)));
        let (key, token) = name(1);
        assert_eq!(leases.ended(&key, token, Instant(500)), None);
    }
}

//! Decides which server is used, and what must change in a server's record before that server may grant
//! leases. Pure: probes and records in, decisions out.
//!
//! - Without a server in use: [`choose`] a server, see [`is_patient`].
//! - With a server in use, after each round of probes: move to its [`successor`], if there is one.
//! - With a new connection to a server: the server may lack grants of another server ([`Arrival::gap`]). If so,
//!   and if the last probes do not show the contrary ([`Arrival::settle`]), write the [`NextRecord`].

use std::cmp::Reverse;
use std::time::Duration;

use super::identity::{FRESH, Identity, InUseHeartbeat};
use crate::lock::{Instant, Token};
use crate::mysql::sql::LATEST_FLOOR;

/// How long the server may be away before a server that lacks its last epoch is chosen: one that was left
/// behind or never replicated, not promoted.
const PATIENCE: Duration = Duration::from_secs(10);

/// Added to the longest lease after a change of the server, in microseconds, because clocks differ.
const QUARANTINE_MARGIN_US: u64 = 1_000_000;
/// The same with several servers. By then every proxy that can see the new server has left the old one, which
/// may still accept writes. It covers a probe round, the probe, a transaction, and clock differences.
const FAILOVER_MARGIN_US: u64 = 6_000_000;

/// The gap between the tokens of two epochs if the clock cannot separate them.
const EPOCH_TOKENS: u64 = 1 << 40;
/// How far tokens are ahead of the server's clock at most, in microseconds, once a floor was taken from the
/// clock. So a server that replaces another one begins above every token given out, even if it lacks the
/// last writes.
const AHEAD_US: u64 = 5_000_000;

/// What a probe of a server has found.
#[derive(Clone, Debug)]
pub struct ServerStatus {
    /// The identity of the server, or why it cannot be used and what to do about it.
    pub identity: Result<String, String>,
    /// `None` if the server has no tables.
    pub record: Option<Identity>,
}

/// The last probe of a server, or why there was none.
pub type Probe = Result<ServerStatus, String>;

/// Whether the server that was used last may still come back, so that [`choose`] waits for it or for a server
/// that replicated from it. `fresh_until` is the end of its last heartbeat.
pub fn is_patient(now: Instant, fresh_until: Instant) -> bool {
    now < fresh_until.plus_us(PATIENCE.as_micros() as u64)
}

/// Chooses the server whose record has the highest floor. Among equals: the server that its own record names
/// before servers that replicated this record, then the last used, then the first. While `patient`, a server
/// that lacks the epoch of `known` is not chosen.
pub fn choose(probes: &[Probe], known: Option<&Identity>, last: usize, patient: bool) -> Option<usize> {
    let usable = probes.iter().enumerate().filter_map(|(index, probe)| {
        let status = probe.as_ref().ok()?;
        let identity = status.identity.as_ref().ok()?;
        let record = status.record.as_ref();
        let lacks = |known: &Identity| {
            record.is_none_or(|record| record.server != known.server && record.floor <= known.floor)
        };
        if patient && known.is_some_and(lacks) {
            return None;
        }
        let is_own = record.is_some_and(|record| record.server == *identity);
        let floor = record.map_or(0, |record| record.floor);
        Some((floor, is_own, index == last, Reverse(index)))
    });
    usable.max().map(|(_, _, _, Reverse(index))| index)
}

/// The server that was chosen after the server `current`: by another proxy, unseen by this one. If the record
/// of the later server has reached the server in use, the two records are equal.
pub fn successor(probes: &[Probe], current: usize) -> Option<usize> {
    let record = |probe: &Probe| probe.as_ref().ok().and_then(|status| status.record.clone());
    let ours = record(&probes[current])?;
    let is_later = |index: &usize| {
        let theirs = record(&probes[*index]);
        let identity = probes[*index].as_ref().ok().and_then(|status| status.identity.as_ref().ok());
        theirs.is_some_and(|theirs| {
            let is_own = *index != current && identity == Some(&theirs.server);
            is_own && (theirs == ours || (theirs.server != ours.server && theirs.floor > ours.floor))
        })
    };
    (0..probes.len()).find(is_later)
}

/// The servers other than `index` that may have been in use since `record` was written: those that were not
/// probed, and those whose record is later.
pub fn maybe_ahead(probes: &[Probe], index: usize, record: &Identity) -> Vec<usize> {
    let is_behind = |probe: &Probe| match probe {
        Ok(ServerStatus { record: None, .. }) => true,
        // It replicated this record from here, unless this server has lost it since.
        Ok(ServerStatus { record: Some(theirs), .. }) if theirs.server == record.server => {
            theirs.floor <= record.floor
        }
        Ok(ServerStatus { record: Some(theirs), .. }) => record.epoch > 0 && theirs.floor < record.floor,
        Err(_) => false,
    };
    (0..probes.len()).filter(|other| *other != index && !is_behind(&probes[*other])).collect()
}

/// The highest epoch and the highest floor among the probed records.
pub fn highest(probes: &[Probe]) -> Highest {
    let mut highest = Highest::default();
    probes.iter().flatten().filter_map(|status| status.record.as_ref()).for_each(|it| highest.note(it));
    highest
}

/// The highest epoch and the highest floor that are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Highest {
    epoch: u64,
    floor: u64,
}

impl Highest {
    fn note(&mut self, record: &Identity) {
        self.epoch = self.epoch.max(record.epoch);
        self.floor = self.floor.max(record.floor);
    }
}

/// What another server may have given out that this server does not know of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gap {
    /// Tokens, but no leases yet.
    Tokens,
    /// Leases.
    Leases,
}

/// What a proxy knows when it has connected to a server.
pub struct Arrival<'a> {
    /// The identity of the server.
    pub server: &'a str,
    /// The server that the tables were used on last, by their own record.
    pub recorded: &'a Identity,
    /// The identity of the server that this process was connected to before.
    pub known: Option<&'a Identity>,
    /// Given if another server may have been in use meanwhile.
    pub heartbeat: Option<&'a InUseHeartbeat>,
    /// Whether `store.url` names no other server.
    pub is_single: bool,
    /// The longest lease, in microseconds.
    pub longest_us: u64,
}

/// What is to be written to the record of a server before that server may grant leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextRecord {
    /// The epoch.
    pub epoch: u64,
    /// The token floor; new tokens are above it.
    pub floor: u64,
    /// How long no lease is granted, in microseconds.
    pub wait_us: u64,
}

impl Arrival<'_> {
    /// Whether the tables belong to this server, as far as the record and this process know.
    fn is_current(&self) -> bool {
        let recorded = self.recorded;
        if recorded.server != self.server {
            return false;
        }
        match self.known {
            None => true,
            // The record lacks what this process has seen: the server has lost writes, or was left behind at a
            // fail-over. If the recorded floor is higher, another proxy has already handled that.
            Some(known) if known.server != recorded.server => recorded.floor > known.floor,
            Some(known) => recorded.epoch >= known.epoch && recorded.floor >= known.floor,
        }
    }

    /// What this server may lack, before the other servers are asked; `None` if it lacks nothing.
    pub fn gap(&self) -> Option<Gap> {
        if !self.is_current() {
            return Some(Gap::Leases);
        }
        // A proxy that took another server into use waited at least this long before it granted a lease.
        let first_lease = Duration::from_micros(self.longest_us + QUARANTINE_MARGIN_US);
        match self.heartbeat?.age() {
            Some(age) if age < FRESH => None,
            Some(age) if age < first_lease => Some(Gap::Tokens),
            _ => Some(Gap::Leases),
        }
    }

    /// What this server lacks, and why. `maybe_ahead` are the addresses of the servers that may have been in
    /// use meanwhile ([`maybe_ahead`]). A server that was only out of use lacks nothing if there are none.
    pub fn settle(&self, maybe_ahead: &[&str]) -> Option<(Gap, String)> {
        let gap = self.gap()?;
        let why = if self.is_current() {
            if maybe_ahead.is_empty() {
                return None;
            }
            format!(
                "it was out of use, and locks may have been granted meanwhile on {}, which cannot be \
                 reached; remove a server that is gone for good from store.url",
                maybe_ahead.join(", ")
            )
        } else {
            match self.known {
                Some(known) if self.recorded.server == self.server => {
                    format!("it lacks grants of {}", known.server)
                }
                _ => format!("its tables were last used on {}", self.recorded.server),
            }
        };
        Some((gap, why))
    }

    /// The record that closes the gap: new tokens are above every token that another server can have given
    /// out. With [`Gap::Leases`], a new epoch begins, and no lease is granted while a lease of another server
    /// may run. `now_us` is the time on the server's clock.
    ///
    /// # Errors
    /// If no tokens are left.
    pub fn next_record(&self, gap: Gap, mut highest: Highest, now_us: u64) -> Result<NextRecord, String> {
        self.known.into_iter().chain([self.recorded]).for_each(|record| highest.note(record));
        let margin_us = if self.is_single { QUARANTINE_MARGIN_US } else { FAILOVER_MARGIN_US };
        let (epoch, wait_us) = match gap {
            Gap::Leases => (highest.epoch + 1, self.longest_us + margin_us),
            Gap::Tokens => (self.recorded.epoch, 0),
        };
        let floor = next_floor(highest.floor, now_us);
        if epoch > Token::MAX_EPOCH || floor > Token::floor_of_epoch(Token::MAX_EPOCH).0 {
            return Err(format!("the server has changed {epoch} times: fencing tokens are used up"));
        }
        Ok(NextRecord { epoch, floor, wait_us })
    }
}

/// A floor above every token that was given out above `highest`. The time plus [`AHEAD_US`] is such a floor,
/// because a key has less than one grant a microsecond; so it is also above the tokens of servers that cannot
/// be asked. If the clock may have been set back, [`EPOCH_TOKENS`] tokens are skipped instead.
fn next_floor(highest: u64, now_us: u64) -> u64 {
    let next = now_us.saturating_add(AHEAD_US);
    if highest + 1_000_000 < next && now_us < LATEST_FLOOR { next } else { highest + EPOCH_TOKENS }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(server: &str, floor: u64) -> Identity {
        Identity { server: server.to_owned(), epoch: u64::from(floor > 0), floor }
    }

    fn status(identity: &str, record: Option<Identity>) -> Probe {
        Ok(ServerStatus { identity: Ok(identity.to_owned()), record })
    }

    fn replica(record: Identity) -> Probe {
        Ok(ServerStatus { identity: Err("read-only".to_owned()), record: Some(record) })
    }

    fn gone() -> Probe {
        Err("refused".to_owned())
    }

    #[test]
    fn the_writable_server_with_the_highest_record_is_chosen() {
        let zombie = status("a", Some(record("a", 5)));
        let primary = status("b", Some(record("b", 9)));
        assert_eq!(choose(&[zombie.clone(), primary], None, 0, false), Some(1));
        assert_eq!(choose(&[zombie, replica(record("b", 9))], None, 1, false), Some(0));
        assert_eq!(choose(&[gone(), replica(record("b", 9))], None, 0, false), None);
    }

    #[test]
    fn equal_records_prefer_the_named_server_then_the_last_used_then_the_first() {
        let writable_replica = status("a", Some(record("b", 5)));
        let primary = status("b", Some(record("b", 5)));
        assert_eq!(choose(&[writable_replica, primary], None, 0, false), Some(1));
        let empty = [status("a", None), status("b", None)];
        assert_eq!(choose(&empty, None, 1, false), Some(1));
        assert_eq!(choose(&empty, None, 0, false), Some(0));
    }

    #[test]
    fn a_server_that_lacks_the_last_epoch_is_chosen_only_after_a_wait() {
        let known = record("b", 9);
        let behind = [status("a", Some(record("a", 5))), gone()];
        assert_eq!(choose(&behind, Some(&known), 1, true), None);
        assert_eq!(choose(&behind, Some(&known), 1, false), Some(0));
        let promoted = [status("a", Some(record("b", 8))), gone()];
        assert_eq!(choose(&promoted, Some(&known), 1, true), Some(0), "it has it, but for the last writes");
        let heartbeat_end = Instant(4_000_000);
        assert!(
            is_patient(Instant(13_999_999), heartbeat_end) && !is_patient(Instant(14_000_000), heartbeat_end)
        );
    }

    #[test]
    fn a_server_whose_record_names_another_server_is_left_for_that_server() {
        let usable = |server: &str, record: Identity| status(server, Some(record));
        for (probes, next) in [
            ([usable("a", record("a", 5)), usable("b", record("a", 5))], None),
            ([usable("a", record("b", 5)), usable("b", record("b", 5))], Some(1)),
            ([usable("a", record("a", 5)), usable("b", record("b", 6))], Some(1)),
            ([usable("a", record("b", 5)), gone()], None),
            ([usable("a", record("b", 5)), replica(record("b", 5))], None),
            ([gone(), usable("b", record("b", 9))], None),
        ] {
            assert_eq!(successor(&probes, 0), next, "{probes:?}");
        }
    }

    #[test]
    fn a_server_out_of_sight_may_have_been_in_use() {
        let ours = record("a", 5);
        for (other, fine) in [
            (gone(), false),
            (status("b", None), true),
            (replica(record("a", 5)), true),
            (replica(record("a", 6)), false),
            (replica(record("b", 4)), true),
            (replica(record("b", 6)), false),
        ] {
            let ahead = maybe_ahead(&[gone(), other.clone()], 0, &ours);
            assert_eq!(ahead.is_empty(), fine, "{other:?}");
        }
    }

    #[test]
    fn a_new_floor_is_above_every_token_that_may_have_been_granted() {
        let day_us = 86_400_000_000;
        let now = 20_000 * day_us;
        let next = now + AHEAD_US;
        assert_eq!(next_floor(0, now), next);
        assert_eq!(next_floor(next - day_us, now), next);
        assert_eq!(next_floor(next, now), next + EPOCH_TOKENS, "at the same time as before");
        assert_eq!(next_floor(now + day_us, now), now + day_us + EPOCH_TOKENS, "the clock was set back");
        assert_eq!(next_floor(7, u64::MAX), 7 + EPOCH_TOKENS, "the clock is out of its mind");
    }

    const LONGEST_US: u64 = 60_000_000;

    fn arrival<'a>(recorded: &'a Identity, known: Option<&'a Identity>) -> Arrival<'a> {
        Arrival { server: "a", recorded, known, heartbeat: None, is_single: true, longest_us: LONGEST_US }
    }

    #[test]
    fn a_server_with_an_old_or_foreign_record_may_lack_leases() {
        for (recorded, known, gap) in [
            (record("a", 5), None, None),
            (record("a", 5), Some(record("a", 5)), None),
            (record("a", 5), Some(record("a", 6)), Some(Gap::Leases)),
            (record("a", 5), Some(record("b", 5)), Some(Gap::Leases)),
            (record("a", 6), Some(record("b", 5)), None),
            (record("b", 5), None, Some(Gap::Leases)),
            (record("b", 5), Some(record("b", 5)), Some(Gap::Leases)),
        ] {
            let arrival = arrival(&recorded, known.as_ref());
            assert_eq!(arrival.gap(), gap, "{recorded:?} {known:?}");
            assert_eq!(arrival.settle(&["b:1"]).map(|(gap, _)| gap), gap);
        }
    }

    #[test]
    fn a_server_out_of_use_may_lack_writes_only_if_another_server_may_be_ahead() {
        let recorded = record("a", 5);
        let now_us = 1_000_000_000;
        for (ago_us, gap) in [
            (1_000_000, None),
            (4_000_000, Some(Gap::Tokens)),
            (LONGEST_US + 999_999, Some(Gap::Tokens)),
            (LONGEST_US + 1_000_000, Some(Gap::Leases)),
        ] {
            let heartbeat = InUseHeartbeat { used_us: now_us - ago_us, now_us };
            let arrival =
                Arrival { heartbeat: Some(&heartbeat), is_single: false, ..arrival(&recorded, None) };
            assert_eq!(arrival.gap(), gap, "{ago_us}");
            assert_eq!(arrival.settle(&[]), None, "{ago_us}");
            let settled = arrival.settle(&["b:1", "c:1"]);
            assert_eq!(settled.as_ref().map(|(gap, _)| *gap), gap, "{ago_us}");
            assert!(settled.is_none_or(|(_, why)| why.contains("b:1, c:1")), "{ago_us}");
        }
        let foreign = record("b", 5);
        assert!(arrival(&foreign, None).settle(&[]).is_some_and(|(_, why)| why.contains("last used on b")));
        let known = record("b", 9);
        assert!(
            arrival(&recorded, Some(&known)).settle(&[]).is_some_and(|(_, why)| why.contains("grants of b"))
        );
    }

    #[test]
    fn a_new_epoch_is_above_every_known_epoch_and_waits_for_the_longest_lease() {
        let now_us = 1_700_000_000_000_000;
        let (recorded, known) = (record("b", 5), Identity { epoch: 3, ..record("b", 9) });
        let probed = highest(&[gone(), replica(Identity { epoch: 2, ..record("c", 12) }), status("a", None)]);
        assert_eq!(probed, Highest { epoch: 2, floor: 12 });
        let alone = arrival(&recorded, Some(&known));
        let floor = now_us + AHEAD_US;
        let next = alone.next_record(Gap::Leases, probed, now_us);
        assert_eq!(next, Ok(NextRecord { epoch: 4, floor, wait_us: LONGEST_US + 1_000_000 }));
        let among = Arrival { is_single: false, ..alone };
        let next = among.next_record(Gap::Leases, probed, now_us);
        assert_eq!(next, Ok(NextRecord { epoch: 4, floor, wait_us: LONGEST_US + 6_000_000 }));
        let next = among.next_record(Gap::Tokens, probed, now_us);
        assert_eq!(next, Ok(NextRecord { epoch: 1, floor, wait_us: 0 }));
        let last = Highest { epoch: Token::MAX_EPOCH, floor: 0 };
        assert!(among.next_record(Gap::Leases, last, now_us).is_err_and(|why| why.contains("used up")));
    }
}

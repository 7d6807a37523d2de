//! The servers of `store.url`. All connections of this process use the same one.
//!
//! A single server leaves nothing to choose. Of several servers, at most one may be writable at a time; the
//! operator must ensure that. This module does the rest:
//!
//! - It chooses the server whose record has the highest floor: the server that last granted leases. A
//!   promoted replica has the record of the server that it replicated from.
//! - A connection belongs to one server generation. When another server is chosen, all connections are given
//!   up.
//! - Every [`ROUND`], all servers are probed (see [`prober`](super::prober)). The probe renews the in-use
//!   heartbeat of the server in use. If another server was chosen later, the proxy moves to it. The nodes of
//!   a Galera cluster share one record, which names the chosen node.
//! - A server whose heartbeat is older than [`FRESH`](super::identity::FRESH) may have been out of use while another server granted
//!   leases. `schema` finds out before a connection to it may be used.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::fault::Fault;
use super::identity::Identity;
use super::wire::{Target, Wire};
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::Instant;

/// The time between two probe rounds.
pub const ROUND: Duration = Duration::from_secs(1);
/// How long the server may be away before a server that lacks its last epoch is chosen: one that was left
/// behind or never replicated, not promoted.
const PATIENCE: Duration = Duration::from_secs(10);

/// One server of `store.url`.
pub struct Endpoint {
    pub target: Target,
    pub database: String,
    /// The name that operators know the server by, without the password.
    pub address: String,
}

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

/// The servers of `store.url`, their last probes, and the choice among them.
pub struct Servers {
    endpoints: Vec<Endpoint>,
    /// One round of probes runs at a time. A call that comes during a round takes its result.
    pub round: tokio::sync::Mutex<Round>,
    /// Rises whenever another server is chosen.
    generation: AtomicU64,
    /// Until when the heartbeat of the server in use is fresh, on our own clock; 0 before it was read.
    fresh_until: AtomicU64,
    state: Mutex<State>,
}

/// The last round of probes.
pub struct Round {
    /// The connections are kept from one round to the next.
    pub wires: Vec<Option<Wire>>,
    /// When the round began.
    pub began: Instant,
}

struct State {
    /// The server in use; `None` while the proxy looks for one.
    current: Option<usize>,
    /// The server of the current generation.
    last: usize,
    probes: Vec<Probe>,
}

/// The server generation that a connection belongs to.
#[derive(Clone)]
pub struct ServerInUse {
    servers: Arc<Servers>,
    pub index: usize,
    pub generation: u64,
}

impl Servers {
    /// None of several servers is chosen yet; a single one is.
    pub fn new(endpoints: Vec<Endpoint>) -> Servers {
        let probes = endpoints.iter().map(|_| Err("not probed yet".to_owned())).collect();
        let current = (endpoints.len() == 1).then_some(0);
        Servers {
            round: tokio::sync::Mutex::new(Round {
                wires: endpoints.iter().map(|_| None).collect(),
                began: Instant(0),
            }),
            endpoints,
            generation: AtomicU64::new(1),
            fresh_until: AtomicU64::new(0),
            state: Mutex::new(State { current, last: 0, probes }),
        }
    }

    /// All servers, in the order of `store.url`.
    pub fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// Whether there is only one server.
    pub fn is_single(&self) -> bool {
        self.endpoints.len() == 1
    }

    /// All addresses, for operators.
    pub fn addresses(&self) -> String {
        self.endpoints.iter().map(|endpoint| &*endpoint.address).collect::<Vec<_>>().join(", ")
    }

    /// The server in use and its generation, once a connection has found that it may be used.
    pub fn in_use(&self) -> Option<(usize, u64)> {
        let state = self.lock();
        let marked = self.fresh_until.load(Ordering::Relaxed) > 0;
        state.current.filter(|_| marked).map(|index| (index, self.generation.load(Ordering::Relaxed)))
    }

    /// Takes the results of a probe round.
    pub fn note(&self, probes: Vec<Probe>) {
        self.lock().probes = probes;
    }

    /// Moves to a server that was chosen after the server in use: by another proxy, unseen by this one. If
    /// the record of the later server has reached the server in use, the two records are equal.
    pub fn reconsider(&self) {
        let mut state = self.lock();
        let Some(current) = state.current else { return };
        let record = |probe: &Probe| probe.as_ref().ok().and_then(|status| status.record.clone());
        let Some(ours) = record(&state.probes[current]) else { return };
        let later = |index: &usize| {
            let theirs = record(&state.probes[*index]);
            let identity =
                state.probes[*index].as_ref().ok().and_then(|status| status.identity.as_ref().ok());
            theirs.is_some_and(|theirs| {
                let is_own = *index != current && identity == Some(&theirs.server);
                is_own && (theirs == ours || (theirs.server != ours.server && theirs.floor > ours.floor))
            })
        };
        let found = (0..self.endpoints.len()).find(later);
        if let Some(index) = found {
            self.take(&mut state, index);
        }
    }

    /// The highest floor and the highest epoch among the probed records.
    pub fn highest(&self) -> (u64, u64) {
        let state = self.lock();
        let records = state.probes.iter().flatten().filter_map(|status| status.record.as_ref());
        records.fold((0, 0), |(floor, epoch), it| (floor.max(it.floor), epoch.max(it.epoch)))
    }

    /// Whether every other server was probed and has not been in use since `record` was written. The error
    /// lists the addresses of the servers that may have been.
    pub fn others_are_behind(&self, index: usize, record: &Identity) -> Result<(), String> {
        let state = self.lock();
        let behind = |probe: &Probe| match probe {
            Ok(ServerStatus { record: None, .. }) => true,
            // It replicated this record from here, unless this server has lost it since.
            Ok(ServerStatus { record: Some(theirs), .. }) if theirs.server == record.server => {
                theirs.floor <= record.floor
            }
            Ok(ServerStatus { record: Some(theirs), .. }) => record.epoch > 0 && theirs.floor < record.floor,
            Err(_) => false,
        };
        let others = (0..self.endpoints.len()).filter(|other| *other != index);
        let ahead = others.filter(|other| !behind(&state.probes[*other]));
        let ahead: Vec<&str> = ahead.map(|other| &*self.endpoints[other].address).collect();
        if ahead.is_empty() { Ok(()) } else { Err(ahead.join(", ")) }
    }

    /// Notes until when the heartbeat of the server in use is fresh.
    pub fn extend(&self, generation: u64, until: Instant) {
        let _state = self.lock();
        if self.generation.load(Ordering::Relaxed) == generation {
            self.fresh_until.fetch_max(until.0, Ordering::Relaxed);
        }
    }

    pub(super) fn current(self: &Arc<Servers>) -> Option<ServerInUse> {
        let state = self.lock();
        let generation = self.generation.load(Ordering::Relaxed);
        state.current.map(|index| ServerInUse { servers: self.clone(), index, generation })
    }

    pub(super) fn elect(&self, known: Option<&Identity>) -> Result<(), Fault> {
        let mut state = self.lock();
        if state.current.is_some() {
            return Ok(());
        }
        let fresh_until = Instant(self.fresh_until.load(Ordering::Relaxed));
        let patient = clock::now() < fresh_until.plus_us(PATIENCE.as_micros() as u64);
        match choose(&state.probes, known, state.last, patient) {
            Some(index) => {
                self.take(&mut state, index);
                Ok(())
            }
            None => Err(Fault::Broken { why: self.no_primary(&state.probes), slug: "no_primary" }),
        }
    }

    fn take(&self, state: &mut State, index: usize) {
        state.current = Some(index);
        if state.last != index {
            let (from, to) = (&self.endpoints[state.last].address, &self.endpoints[index].address);
            reached(Branch::OtherServer);
            tracing::warn!(from, to, "another MySQL server is in use now");
            state.last = index;
            self.fresh_until.store(0, Ordering::Relaxed);
            self.generation.fetch_add(1, Ordering::Release);
        }
    }

    fn no_primary(&self, probes: &[Probe]) -> String {
        let reasons = self.endpoints.iter().zip(probes).map(|(endpoint, probe)| {
            let why = match probe {
                Err(why) | Ok(ServerStatus { identity: Err(why), .. }) => why,
                Ok(_) => "it lacks grants of the last primary; the proxy waits for that server",
            };
            format!("{}: {why}", endpoint.address)
        });
        let reasons = reasons.collect::<Vec<_>>().join("; ");
        format!("no server of store.url can be used; promote one, or start the primary again ({reasons})")
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ServerInUse {
    /// The server.
    pub fn endpoint(&self) -> &Endpoint {
        &self.servers.endpoints[self.index]
    }

    /// Fails if this connection must not be used any more: another server is in use, or the heartbeat is not
    /// fresh.
    pub fn check(&self) -> Result<(), Fault> {
        if self.servers.is_single() {
            return Ok(());
        }
        if self.servers.generation.load(Ordering::Acquire) != self.generation {
            let why = format!("the MySQL server at {} is not in use any more", self.endpoint().address);
            return Err(Fault::Broken { why, slug: "moved" });
        }
        if clock::now().0 > self.servers.fresh_until.load(Ordering::Relaxed) {
            let why = format!(
                "the MySQL server at {} could not be reached for a while; probing again",
                self.endpoint().address
            );
            reached(Branch::OutOfSight);
            return Err(Fault::Broken { why, slug: "out_of_sight" });
        }
        Ok(())
    }

    /// Call this if the server cannot be connected to. The next connection looks for another server.
    pub fn leave(&self) {
        let mut state = self.servers.lock();
        if !self.servers.is_single() && self.servers.generation.load(Ordering::Relaxed) == self.generation {
            state.current = None;
        }
    }
}

/// Chooses the server whose record has the highest floor. Among equals: the server that its own record names
/// before servers that replicated this record, then the last used, then the first. While `patient`, a server
/// that lacks the epoch of `known` is not chosen.
fn choose(probes: &[Probe], known: Option<&Identity>, last: usize, patient: bool) -> Option<usize> {
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
        Some((floor, is_own, index == last, std::cmp::Reverse(index)))
    });
    usable.max().map(|(_, _, _, std::cmp::Reverse(index))| index)
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

    fn two_servers() -> Servers {
        let endpoint = |address: &str| Endpoint {
            target: Target::Address(mysql_async::Opts::default()),
            database: String::new(),
            address: address.to_owned(),
        };
        Servers::new(vec![endpoint("a:1"), endpoint("b:1")])
    }

    #[test]
    fn the_highest_record_is_chosen() {
        let zombie = status("a", Some(record("a", 5)));
        let primary = status("b", Some(record("b", 9)));
        assert_eq!(choose(&[zombie.clone(), primary], None, 0, false), Some(1));
        assert_eq!(choose(&[zombie, replica(record("b", 9))], None, 1, false), Some(0));
        assert_eq!(choose(&[gone(), replica(record("b", 9))], None, 0, false), None);
    }

    #[test]
    fn among_equals_the_one_that_is_named_then_the_last_then_the_first() {
        let writable_replica = status("a", Some(record("b", 5)));
        let primary = status("b", Some(record("b", 5)));
        assert_eq!(choose(&[writable_replica, primary], None, 0, false), Some(1));
        let empty = [status("a", None), status("b", None)];
        assert_eq!(choose(&empty, None, 1, false), Some(1));
        assert_eq!(choose(&empty, None, 0, false), Some(0));
    }

    #[test]
    fn what_lacks_the_last_epoch_is_waited_with() {
        let known = record("b", 9);
        let behind = [status("a", Some(record("a", 5))), gone()];
        assert_eq!(choose(&behind, Some(&known), 1, true), None);
        assert_eq!(choose(&behind, Some(&known), 1, false), Some(0));
        let promoted = [status("a", Some(record("b", 8))), gone()];
        assert_eq!(choose(&promoted, Some(&known), 1, true), Some(0), "it has it, but for the last writes");
    }

    #[test]
    fn a_server_whose_record_names_another_one_is_left_for_that() {
        let usable = |server: &str, record: Identity| status(server, Some(record));
        for (probes, used) in [
            ([usable("a", record("a", 5)), usable("b", record("a", 5))], 0),
            ([usable("a", record("b", 5)), usable("b", record("b", 5))], 1),
            ([usable("a", record("a", 5)), usable("b", record("b", 6))], 1),
            ([usable("a", record("b", 5)), gone()], 0),
            ([usable("a", record("b", 5)), replica(record("b", 5))], 0),
        ] {
            let servers = two_servers();
            servers.lock().current = Some(0);
            servers.note(probes.to_vec());
            servers.reconsider();
            assert_eq!(servers.lock().current, Some(used), "{probes:?}");
        }
    }

    #[test]
    fn whoever_is_out_of_sight_may_have_been_in_use() {
        let servers = two_servers();
        let ours = record("a", 5);
        for (other, fine) in [
            (gone(), false),
            (status("b", None), true),
            (replica(record("a", 5)), true),
            (replica(record("a", 6)), false),
            (replica(record("b", 4)), true),
            (replica(record("b", 6)), false),
        ] {
            servers.note(vec![gone(), other.clone()]);
            assert_eq!(servers.others_are_behind(0, &ours).is_ok(), fine, "{other:?}");
        }
    }
}

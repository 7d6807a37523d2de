//! The server in use and its generation, the last probes of all servers, and until when the server in use has
//! been seen. [`election`] decides on them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::election::{self, Highest, Probe, ServerStatus};
use super::identity::Identity;
use crate::clock::{self, AtomicInstant};
use crate::coverage::{Branch, reached};
use crate::lock::Instant;
use crate::mutex::Mutex;
use crate::mysql::session::fault::Fault;
use crate::mysql::session::wire::{Target, Wire};

/// The time between two probe rounds.
pub const ROUND: Duration = Duration::from_secs(1);
/// One server of `store.url`.
pub struct Endpoint {
    pub target: Target,
    pub database: String,
    /// The name that operators know the server by, without the password.
    pub address: String,
}

/// The servers of `store.url`, their last probes, and the choice among them.
pub struct Servers {
    endpoints: Vec<Endpoint>,
    /// One round of probes runs at a time. A call that comes during a round takes its result.
    pub round: tokio::sync::Mutex<Round>,
    /// Rises whenever another server is chosen.
    generation: AtomicU64,
    /// Until when the heartbeat of the server in use is fresh, on our own clock, once it was read.
    fresh_until: AtomicInstant,
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
            fresh_until: AtomicInstant::new(None),
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
        let state = self.state.lock();
        let marked = self.fresh_until.get().is_some();
        state.current.filter(|_| marked).map(|index| (index, self.generation.load(Ordering::Relaxed)))
    }

    /// Takes the results of a probe round.
    pub fn note(&self, probes: Vec<Probe>) {
        self.state.lock().probes = probes;
    }

    /// Moves to the server that was chosen after the server in use, if there is one.
    pub fn reconsider(&self) {
        let mut state = self.state.lock();
        let Some(current) = state.current else { return };
        if let Some(index) = election::successor(&state.probes, current) {
            self.take(&mut state, index);
        }
    }

    /// The highest epoch and the highest floor among the probed records.
    pub fn highest(&self) -> Highest {
        election::highest(&self.state.lock().probes)
    }

    /// The addresses of the other servers that may have been in use since `record` was written.
    pub fn maybe_ahead(&self, index: usize, record: &Identity) -> Vec<&str> {
        let ahead = election::maybe_ahead(&self.state.lock().probes, index, record);
        ahead.into_iter().map(|other| &*self.endpoints[other].address).collect()
    }

    /// Notes until when the heartbeat of the server in use is fresh.
    pub fn extend(&self, generation: u64, until: Instant) {
        let _state = self.state.lock();
        if self.generation.load(Ordering::Relaxed) == generation {
            self.fresh_until.postpone(until);
        }
    }

    /// The server in use, which may not have been found usable yet.
    pub fn current(self: &Arc<Servers>) -> Option<ServerInUse> {
        let state = self.state.lock();
        let generation = self.generation.load(Ordering::Relaxed);
        state.current.map(|index| ServerInUse { servers: self.clone(), index, generation })
    }

    /// Chooses a server, unless one is in use.
    ///
    /// # Errors
    /// If no server can be used.
    pub fn elect(&self, known: Option<&Identity>) -> Result<(), Fault> {
        let mut state = self.state.lock();
        if state.current.is_some() {
            return Ok(());
        }
        let fresh_until = self.fresh_until.get();
        let patient = fresh_until.is_some_and(|until| election::is_patient(clock::now(), until));
        match election::choose(&state.probes, known, state.last, patient) {
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
            self.fresh_until.clear();
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
        if self.servers.fresh_until.get().is_none_or(|until| clock::now() > until) {
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
        let mut state = self.servers.state.lock();
        if !self.servers.is_single() && self.servers.generation.load(Ordering::Relaxed) == self.generation {
            state.current = None;
        }
    }
}

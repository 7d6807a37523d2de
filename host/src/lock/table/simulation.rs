//! Simulates the lock table alone: two tables on one store, with random events in virtual time. The promises are
//! checked after each step. A thousand runs take half a second. The checks see every claim that a table sends,
//! whereas a client notices only that it waits.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::entry::Entry;
use super::limits::STORE_RETRY_MS;
use super::*;
use crate::lock::maps::{HashMap, HashSet};
use crate::lock::record::{
    self, BatchId, Claim, Env, GlobalTicket, HeldBy, Holder, NextWaiter, Op, Outcome, Record, Records,
    Release, Tag, Tried,
};
use crate::lock::{Instant, Key, LeaseRef, Mode, ServerTime, Token};

mod clients;
mod lanes;
mod random;

use random::Random;

pub(super) const PROXIES: usize = 2;
const KEYS: usize = 3;
const STEPS: usize = 60;
const OWNERS: u64 = 6;
/// No waiter waits for so long while all keys are free, in milliseconds. A remaining place or turn of another
/// waiter lasts 5 s; a waiter asks within 2 s after that.
const STUCK_MS: u32 = 10_000;
/// The longest time from a waiter's deadline to its answer, in milliseconds. After its deadline a waiter may be
/// asked for three times: when it joins the global queue; as the next waiter, or to look for a lease of its
/// own; and to look for a lease that was granted since then. The store retries a batch for 70 ms at most, and a
/// batch and its answer take 6 ms on the way.
const LATE_MS: u32 = 228;
/// How far the store's clock is ahead of the proxies' clocks, in microseconds.
pub(super) const SERVER_AHEAD_US: u64 = 1_700_000_000_000_000;

/// A future event.
#[derive(Debug)]
enum Due {
    /// A client acts.
    Client,
    Apply {
        proxy: usize,
        sent: Sent,
        lost: bool,
    },
    /// A batch whose answer was lost is retried.
    Again {
        proxy: usize,
        batch: Vec<Sent>,
    },
    Tell {
        proxy: usize,
        event: Event,
    },
}

/// A group on its way to the store.
#[derive(Debug)]
struct Sent {
    ticket: SubmissionId,
    ops: Vec<Op>,
    asked_at: Instant,
    tried: Option<Tried>,
}

/// A client's belief that it holds a lease.
#[derive(Debug)]
pub(super) struct Belief {
    lease: LeaseRef,
    tokens: Vec<Token>,
    mode: Mode,
    is_once: bool,
    from: Instant,
    until: Instant,
    levels: u32,
    /// The ids of the requests that were granted this lease, each of which is one level.
    requests: HashSet<Box<str>>,
}

/// A waiter that has not been answered.
#[derive(Debug)]
pub(super) struct Open {
    asked: Instant,
    deadline: Instant,
    claim: Claim,
}

pub(super) struct Sim {
    random: Random,
    trace: bool,
    pub(super) now: Instant,
    serial: u64,
    due: BTreeMap<(Instant, u64), Due>,
    pub(super) proxies: Vec<Table>,
    last_apply: Vec<Instant>,
    pub(super) store: BTreeMap<Key, Record>,
    pub(super) beliefs: HashMap<u64, Belief>,
    /// Waiters that have not been answered.
    pub(super) open: HashMap<(usize, WaiterId), Open>,
    /// Claims with a request id, which clients may repeat, with their ranks and tickets.
    asked: Vec<(Claim, i32, u64)>,
    /// The keys that an answered submission has freed and that another proxy waits for.
    freed: HashMap<(usize, SubmissionId), Vec<Key>>,
    /// The keys of the notifications for the last event.
    notified: Vec<Key>,
    /// The attempts of the claims that are on their way to the store, by proxy and submission.
    under_way: HashMap<(usize, SubmissionId), Vec<Option<u64>>>,
    /// Releases that have not been answered: their leases and attempts.
    open_releases: HashMap<(usize, ReleaseId), (u64, u64)>,
    /// The attempts of commits, which do not go through the tables.
    open_commits: HashMap<SubmissionId, u64>,
    /// The attempts of releases and commits that were applied.
    carried_out: HashSet<u64>,
    /// The attempts of the claims whose grant or refusal was reported to a table.
    answered: HashSet<u64>,
    /// The last batch id of each proxy's connection.
    batch_ids: Vec<BatchId>,
    /// Leases that were reported to a client: they may outlast the run, unless they were released.
    delivered: HashSet<u64>,
    released: HashSet<u64>,
    /// Leases that their client released: a later answer does not revive them.
    given_up: HashSet<u64>,
    last_token: HashMap<Key, Token>,
    /// From this moment on, only waiters of other proxies keep a key from being granted.
    free_from: HashMap<Key, Instant>,
    /// The number of grants of each proxy.
    pub(super) grants: [u64; PROXIES],
    /// How many of 100 claims are for several keys, and how many have a request id.
    several_percent: u64,
    with_id_percent: u64,
    /// Whether calls of the store fail, answers get lost, and running proxies are counted as gone.
    pub(super) has_faults: bool,
    fault_until: Instant,
    /// A policy's choice is being applied.
    chosen: bool,
    /// Each waiter has a copy of both as its charge.
    charged: [Arc<()>; 2],
}

pub(super) fn key(n: u64) -> Key {
    Key::new(&format!("k{n}")).expect("a short key")
}

/// One run, which follows from its seed. Returns how many leases were granted. `tells_all`: print all events.
///
/// # Panics
/// If a promise is broken.
pub fn run(seed: u64, tells_all: bool) -> u64 {
    Sim::new(seed, tells_all).run()
}

impl Sim {
    pub(super) fn new(seed: u64, trace: bool) -> Sim {
        let mut random = Random::new(seed);
        let (several_percent, with_id_percent) = if random.chance(25) { (60, 80) } else { (20, 30) };
        Sim {
            random,
            trace,
            now: Instant(1_000_000),
            serial: 0,
            due: BTreeMap::new(),
            proxies: (0..PROXIES).map(|_| Table::new()).collect(),
            last_apply: vec![Instant(0); PROXIES],
            store: BTreeMap::new(),
            beliefs: HashMap::default(),
            open: HashMap::default(),
            asked: Vec::new(),
            freed: HashMap::default(),
            notified: Vec::new(),
            under_way: HashMap::default(),
            open_releases: HashMap::default(),
            open_commits: HashMap::default(),
            carried_out: HashSet::default(),
            answered: HashSet::default(),
            batch_ids: (0..PROXIES as u64).map(|writer| BatchId { writer, at: ServerTime(0) }).collect(),
            delivered: HashSet::default(),
            released: HashSet::default(),
            given_up: HashSet::default(),
            last_token: HashMap::default(),
            free_from: HashMap::default(),
            grants: [0; PROXIES],
            several_percent,
            with_id_percent,
            has_faults: true,
            fault_until: Instant(0),
            chosen: false,
            charged: Default::default(),
        }
    }

    fn run(mut self) -> u64 {
        let mut at = self.now;
        for _ in 0..STEPS {
            at = at.plus_us(self.random.below(6_000));
            self.schedule(at, Due::Client);
        }
        while self.step() {}
        self.check_end();
        self.grants.iter().sum()
    }

    /// Processes the next event. Returns false if there is none.
    pub(super) fn step(&mut self) -> bool {
        let Some(next) = self.next_moment() else { return false };
        self.now = self.now.max(next);
        match self.due.first_key_value() {
            Some(((at, _), _)) if *at <= self.now => {
                if let Some((_, due)) = self.due.pop_first() {
                    self.happen(due);
                }
            }
            _ => self.timeouts(),
        }
        self.check();
        self.check_progress();
        self.check_charges();
        true
    }

    fn next_moment(&self) -> Option<Instant> {
        let timers = self.proxies.iter().filter_map(Table::poll_timeout);
        timers.chain(self.due.keys().map(|(at, _)| *at).next()).min()
    }

    fn schedule(&mut self, at: Instant, due: Due) {
        self.serial += 1;
        self.due.insert((at.max(self.now), self.serial), due);
    }

    fn happen(&mut self, due: Due) {
        if self.trace {
            println!("{:>9} {due:?}", self.now.0);
        }
        match due {
            Due::Client => self.client(),
            Due::Tell { proxy, event } => self.tell(proxy, event),
            Due::Apply { proxy, sent, lost } => self.apply(proxy, sent, lost),
            Due::Again { proxy, batch } => self.again(proxy, batch),
        }
    }

    fn timeouts(&mut self) {
        self.chosen = false;
        for proxy in 0..PROXIES {
            self.proxies[proxy].handle_timeout(self.now);
            self.perform(proxy);
        }
    }

    fn tell(&mut self, proxy: usize, event: Event) {
        self.chosen = matches!(event, Event::Chosen { .. });
        if let Event::Completed { ticket, result } = &event {
            let asked = self.under_way.remove(&(proxy, *ticket)).unwrap_or_default();
            let outcomes = result.iter().flat_map(|answer| &answer.outcomes);
            let is_answer = |outcome: &Outcome| matches!(outcome, Outcome::Granted(_) | Outcome::Held(_));
            let answered = asked.into_iter().zip(outcomes).filter(|(_, outcome)| is_answer(outcome));
            self.answered.extend(answered.filter_map(|(attempt, _)| attempt));
        }
        let freed = match &event {
            Event::Completed { ticket, .. } => self.freed.remove(&(proxy, *ticket)).unwrap_or_default(),
            _ => Vec::new(),
        };
        self.notified.clear();
        self.proxies[proxy].handle_event(event, self.now);
        self.perform(proxy);
        let untold = freed.iter().find(|key| !self.notified.contains(key));
        assert!(untold.is_none(), "{untold:?} was released, and the proxy that waits for it is not notified");
    }

    fn perform(&mut self, proxy: usize) {
        while let Some(action) = self.proxies[proxy].poll_action() {
            if self.trace {
                println!("{:>9}   {proxy} {action:?}", self.now.0);
            }
            match action {
                Action::Submit { ticket, ops } => self.submit(proxy, ticket, ops),
                Action::Choose { key, choice, candidates, .. } => {
                    let n = self.random.below(candidates.len() as u64 + 1) as usize;
                    let waiter = candidates.get(n).map(|candidate| candidate.waiter);
                    let at = self.now.plus_us(self.random.below(2_000));
                    self.schedule(at, Due::Tell { proxy, event: Event::Chosen { key, choice, waiter } });
                }
                // A waiter whose client has gone has no policy to ask.
                Action::Backoff { waiter, .. } if !self.open.contains_key(&(proxy, waiter)) => {}
                Action::Backoff { waiter, key, contention } => {
                    let decision = match self.random.below(10) {
                        0 => Next::GiveUp { reason: "enough".into() },
                        1..3 => Next::WakeUp,
                        _ => Next::Poll {
                            after_ms: (self.random.below(40) as u32) << contention.attempt.min(5),
                        },
                    };
                    let at = self.now.plus_us(self.random.below(2_000));
                    self.schedule(at, Due::Tell { proxy, event: Event::Backoff { waiter, key, decision } });
                }
                Action::Finish { waiter, verdict } => self.finished(proxy, waiter, verdict),
                Action::Released { id, result } => {
                    let open = self.open_releases.remove(&(proxy, id));
                    let (nonce, attempt) = open.expect("a release answered twice");
                    let told_lost = result == Ok(Outcome::Lost);
                    assert!(!told_lost || !self.carried_out.contains(&attempt), "{nonce} was released");
                    if result == Ok(Outcome::Released { levels_left: 0 }) {
                        self.released.insert(nonce);
                    }
                }
                Action::NotifyPeer { key, next_waiter } => self.notify_peer(proxy, key, &next_waiter),
                Action::Gone { .. } | Action::Note(_) => {}
            }
        }
    }

    /// Notifications get lost or come late, and a proxy that does not answer may still be running.
    fn notify_peer(&mut self, proxy: usize, key: Key, next_waiter: &NextWaiter) {
        let at = self.now.plus_us(self.random.below(3_000));
        self.notified.push(key.clone());
        let peer: usize = next_waiter.proxy.parse().expect("proxies are named by their numbers");
        let (proxy, event) = match self.random.below(10) {
            _ if peer == proxy => (proxy, Event::Orphan { key, next_waiter: next_waiter.clone() }),
            0..2 => return,
            2..4 if self.has_faults => (proxy, Event::PeerGone { peer: next_waiter.proxy.clone(), key }),
            _ => (peer, Event::Wake(key)),
        };
        self.schedule(at, Due::Tell { proxy, event });
    }

    fn submit(&mut self, proxy: usize, ticket: SubmissionId, ops: Vec<Op>) {
        let mut attempts = Vec::with_capacity(ops.len());
        for op in &ops {
            if let Op::Acquire(claim) = op {
                self.check_order(proxy, claim);
            }
            let attempt = match op {
                Op::Acquire(claim) | Op::Rejoin(claim) => Some(claim.attempt),
                _ => None,
            };
            // A refused attempt may be undone late, and a granted lease may have been released.
            let is_new = attempt.is_none_or(|attempt| !self.answered.contains(&attempt));
            assert!(is_new, "an attempt that was answered is asked for again: {op:?}");
            attempts.push(attempt);
        }
        self.under_way.insert((proxy, ticket), attempts);
        let asked_at = self.now;
        let delay = self.random.below(3_000);
        // A lane answers in order.
        let at = self.now.plus_us(delay).max(self.last_apply[proxy]);
        self.last_apply[proxy] = at;
        let lost = self.has_faults && (self.random.chance(5) || self.now < self.fault_until);
        self.schedule(at, Due::Apply { proxy, sent: Sent { ticket, ops, asked_at, tried: None }, lost });
    }

    /// Checks that no waiter for this key alone is passed over by one of the same or a worse rank, if its
    /// policy leaves the order to arrival.
    fn check_order(&self, proxy: usize, claim: &Claim) {
        let table = &self.proxies[proxy];
        let find = |entry: &&Entry| entry.waiter.claim.attempt == claim.attempt;
        let Some(mine) = table.waiters.values().find(find) else { return };
        // The store decides the order in the global queue.
        if claim.mode != Mode::Exclusive || claim.global.is_some() || self.chosen {
            return;
        }
        for key in &*claim.keys {
            let chooser = table.queue(key, self.now).iter().any(|queued| {
                table.waiters.get(&queued.waiter).is_some_and(|entry| entry.waiter.asks_choice)
            });
            let ahead = table.queues[key].ahead_of(mine.place).next();
            assert!(chooser || ahead.is_none(), "{ahead:?} was passed over at {key}");
        }
    }

    fn finished(&mut self, proxy: usize, waiter: WaiterId, verdict: Verdict) {
        let open = self.open.remove(&(proxy, waiter));
        let Some(Open { asked, deadline, claim }) = open else {
            panic!("{waiter:?} was answered twice, or after it left")
        };
        let late = self.now.ms_since(deadline);
        assert!(late < LATE_MS, "{waiter:?} was answered {late} ms late");
        assert!(claim.keep_ms.is_some() || !matches!(verdict, Verdict::Done(_)), "{waiter:?} wanted a lease");
        if let (Verdict::Contended { holder, .. }, Some(request)) = (&verdict, &claim.request) {
            let has_it = |belief: &Belief| belief.requests.contains(request) && belief.from <= asked;
            let is_own = |holder: &HeldBy| holder.request.as_ref() == Some(request);
            let is_own = holder.as_ref().is_some_and(is_own) || self.beliefs.values().any(has_it);
            assert!(!is_own, "{waiter:?} is refused for a lease of its own");
        }
        if let Verdict::Granted { grant, keys, attempt, asked_at, .. } = verdict {
            if self.random.chance(5) {
                let ttl_ms = claim.ttl_ms;
                let event = Event::Undelivered { nonce: grant.nonce, keys, attempt, ttl_ms };
                self.schedule(self.now, Due::Tell { proxy, event });
                return;
            }
            self.grants[proxy] += 1;
            assert_eq!(keys.len(), grant.tokens.len());
            self.delivered.insert(grant.nonce);
            if self.given_up.contains(&grant.nonce) {
                return;
            }
            let until = asked_at.plus_us(grant.left_us);
            let lease = LeaseRef { keys, nonce: grant.nonce, token: Some(grant.tokens[0]), principal: None };
            let belief = self.beliefs.entry(grant.nonce).or_insert_with(|| Belief {
                lease,
                tokens: grant.tokens.clone(),
                mode: claim.mode,
                is_once: claim.keep_ms.is_some(),
                from: self.now,
                until,
                levels: 0,
                requests: HashSet::default(),
            });
            assert_eq!(belief.tokens, grant.tokens, "one lease with two tokens");
            if claim.request.is_none_or(|request| belief.requests.insert(request)) {
                belief.levels += 1;
            }
            belief.until = belief.until.max(until);
        }
    }

    /// Checks that the clients that count on a key may hold it together.
    fn check(&mut self) {
        let now = self.now;
        self.beliefs.retain(|_, belief| belief.until > now);
        for n in 0..KEYS as u64 {
            let key = key(n);
            let holders: Vec<&Belief> =
                self.beliefs.values().filter(|b| b.lease.keys.contains(&key)).collect();
            let exclusive = holders.iter().any(|holder| holder.mode == Mode::Exclusive);
            assert!(!exclusive || holders.len() == 1, "{key} has {holders:?}");
            let shared = holders.iter().filter(|holder| holder.mode == Mode::Shared).count();
            assert!(shared == 0 || shared == holders.len(), "{key} mixes {holders:?}");
            let permits: u32 = holders.iter().map(|h| permits(h.mode)).sum();
            assert!(permits <= 3, "{key} has {permits} permits out");
        }
    }

    /// Checks that each lease occupies the limits of its client.
    fn check_charges(&self) {
        let leases = self.proxies.iter().flat_map(|table| table.leases.iter());
        for (_, lease) in leases {
            assert!(lease.charge.is_some(), "{lease:?}");
        }
    }

    /// Checks that no waiter is stuck while its keys are free.
    fn check_progress(&self) {
        let free_from = self.free_from.values().max().copied().unwrap_or_default().max(self.fault_until);
        let waiters = self.proxies.iter().flat_map(|table| table.waiters.values());
        for entry in waiters.filter(|entry| !entry.cancelled) {
            let beside_ms = self.now.ms_since(free_from.max(entry.arrived));
            assert!(beside_ms < STUCK_MS, "all keys have been free for {beside_ms} ms: {entry:?}");
        }
    }

    /// Checks that every client was answered and nothing was leaked.
    fn check_end(&self) {
        assert!(self.open.is_empty(), "never answered: {:?}", self.open);
        assert!(self.open_releases.is_empty(), "releases never answered");
        assert!(self.open_commits.is_empty(), "commits never answered");
        for table in &self.proxies {
            assert!(table.waiters.is_empty() && table.in_flight.is_empty(), "the table is busy: {table:?}");
            assert!(table.queues.is_empty(), "queues are left: {:?}", table.queues);
            assert_eq!(table.leases.len(), 0);
        }
        let charged = self.charged.each_ref().map(Arc::strong_count);
        assert_eq!(charged, [1, 1], "clients are charged for nothing: {:?}", self.proxies);
        // A grant that ends before its undoing would be retried is left to end.
        let end = ServerTime(self.now.0 + SERVER_AHEAD_US).plus_ms(STORE_RETRY_MS + 10);
        for (key, record) in &self.store {
            let told = |h: &Holder| self.delivered.contains(&h.nonce) && !self.released.contains(&h.nonce);
            let leaked = |h: &&Holder| h.until > end && !told(h);
            let leak = record.holders.iter().find(leaked);
            assert!(leak.is_none(), "{key} is still held: {leak:?}");
        }
    }
}

fn permits(mode: Mode) -> u32 {
    match mode {
        Mode::Permits { count, .. } => count,
        _ => 0,
    }
}

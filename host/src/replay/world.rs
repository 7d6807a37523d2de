//! A run: the lock table of the product, a store in memory, and the clients of a recording, in virtual time.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::exclusion::{Overlaps, excludes};
use super::load::{Arrival, Load};
use super::plans::{Planned, Plans};
use crate::lock::record::{
    self, Claim, Env, GlobalTicket, Left, Op, Origin, Outcome, Record, Records, Release, Tag,
};
use crate::lock::table::{
    Action, Answered, Candidate, Charge, Contention, Event, GroupShare, Next, ReleaseId, SubmissionId, Table,
    Verdict, Waiter, WaiterId, built_in_backoff,
};
use crate::lock::{Call, Instant, Key, LeaseRef, ServerTime, Token};
use crate::policy::{self, Generation, GroupView, Hook, Plan, QueueView, WaiterView};

/// When a run begins: no time is 0.
const BEGINS_US: u64 = 1_000_000;
/// By how much the store's clock is ahead, in microseconds.
const AHEAD_US: u64 = 1_700_000_000_000_000;
/// How long a hook takes: mostly the way to another thread and back, in microseconds. Meanwhile the table goes on.
const HOOK_US: u64 = 50;
/// How long a client pauses at least between two requests, in microseconds.
const LEAST_PAUSE_US: u64 = 100;
/// The most renewals of a lease that are simulated one by one.
const RENEWALS: u64 = 1_000;

/// What became of the requests.
#[derive(Debug)]
pub struct Run {
    /// One for each request that was sent, in the order in which they arrived.
    pub done: Vec<Done>,
    /// How many calls of hooks failed, by hook and kind. The plans are counted in [`Plans::faults`].
    pub faults: BTreeMap<(&'static str, &'static str), u64>,
    /// The first of these faults, in words.
    pub fault: Option<String>,
    /// How many leases were granted whose hold the recording does not have.
    pub guessed: u64,
    /// How many leases ended while their holders still used them.
    pub outlived: u64,
    /// Leases that were held at the same time, although the other policy excludes that.
    pub overlaps: Overlaps,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The place of the request in the load.
    pub n: usize,
    /// `granted`, `left` if the client had left, or the type of the error.
    pub outcome: &'static str,
    /// When it arrived, in microseconds since the first request.
    pub at_us: u64,
    /// The time from the arrival to the answer, in microseconds.
    pub waited_us: u64,
    /// How long its lease was used, in microseconds.
    pub used_us: u64,
    /// Whether its lease ended while it was used.
    pub is_outlived: bool,
}

/// The names of the outcomes.
pub const OUTCOMES: [&str; 10] = [
    "granted",
    "contended",
    "done",
    "left",
    "policy_fault",
    "refused",
    "store_unavailable",
    "too_many_holders",
    "too_many_waiters",
    "wrong_call",
];

/// Runs the requests under a policy that answers `plans` to them. `beside`: the plans of another policy, by which requests
/// exclude each other.
pub fn run(load: &Load, generation: &Generation, plans: &Plans, beside: Option<&Plans>) -> Run {
    let mut world = World {
        load,
        generation,
        plans,
        beside,
        now: Instant(BEGINS_US),
        table: Table::new(),
        records: HashMap::new(),
        due: BTreeMap::new(),
        serial: 0,
        of: Vec::new(),
        done: Vec::new(),
        arrived: Vec::new(),
        holders: HashMap::new(),
        leases: HashMap::new(),
        run: Run {
            done: Vec::new(),
            faults: BTreeMap::new(),
            fault: None,
            guessed: 0,
            outlived: 0,
            overlaps: Overlaps::default(),
        },
    };
    world.run_all();
    let World { of, done, run, .. } = world;
    let overlaps = run.overlaps.between(|sent| of[sent]);
    Run { done: done.into_iter().flatten().collect(), overlaps, ..run }
}

/// Something that happens later.
enum Due {
    Arrive(usize),
    /// The client of a request leaves, if it has no answer.
    Leave(usize),
    /// The store decides, and its answer takes some more time.
    Decide {
        ticket: SubmissionId,
        ops: Vec<Op>,
        asked_at: Instant,
        then_us: u64,
    },
    Answer {
        ticket: SubmissionId,
        answered: Answered,
    },
    /// A hook has answered.
    Tell(Event),
    Renew {
        n: usize,
        until: Instant,
    },
    /// The holder has done its work.
    Release(usize),
    /// The lease ends, unless it was renewed.
    Expire(usize),
}

/// A granted request that uses its lease.
struct Holder {
    nonce: u64,
    keys: Arc<[Key]>,
    token: Token,
    ttl_ms: u32,
    /// When the lease ends.
    until: Instant,
    /// Until when the holder uses it, unless it ends before.
    needed_until: Instant,
    /// When the proxy no longer renews it.
    renewed_until: Instant,
}

struct World<'a> {
    load: &'a Load,
    generation: &'a Generation,
    plans: &'a Plans,
    beside: Option<&'a Plans>,
    now: Instant,
    table: Table,
    records: HashMap<Key, Record>,
    due: BTreeMap<(Instant, u64), Due>,
    serial: u64,
    /// Of each request that was sent, which one of the load it is. With closed arrivals, a request may be sent again.
    of: Vec<usize>,
    done: Vec<Option<Done>>,
    arrived: Vec<u64>,
    holders: HashMap<usize, Holder>,
    /// The requests that use a lease, by its nonce; several if an owner has it several times.
    leases: HashMap<u64, Vec<usize>>,
    run: Run,
}

impl World<'_> {
    fn run_all(&mut self) {
        let requests = &self.load.requests;
        let mut first = (0..requests.len()).filter(|n| requests[*n].is_first).peekable();
        loop {
            let arrival = first.peek().map(|n| Instant(BEGINS_US + requests[*n].at_us));
            let due = self.due.first_key_value().map(|((at, _), _)| *at);
            let timer = self.table.poll_timeout();
            let Some(now) = [arrival, due, timer].into_iter().flatten().min() else { return };
            self.now = self.now.max(now);
            if arrival == Some(now) {
                first.next().into_iter().for_each(|n| self.arrive(n));
            } else if due == Some(now) {
                let due = self.due.pop_first();
                due.into_iter().for_each(|(_, due)| self.happen(due));
            } else {
                self.table.handle_timeout(self.now);
                self.act();
            }
        }
    }

    fn plan(&self, n: usize) -> Option<&Arc<Plan>> {
        self.plans.all[self.of[n]].plan()
    }

    fn later(&mut self, at: Instant, due: Due) {
        self.serial += 1;
        self.due.insert((at, self.serial), due);
    }

    fn tell(&mut self, event: Event) {
        self.table.handle_event(event, self.now);
        self.act();
    }

    fn happen(&mut self, due: Due) {
        match due {
            Due::Arrive(n) => self.arrive(n),
            Due::Leave(n) => {
                if self.done[n].is_none() {
                    self.tell(Event::Cancel(waiter_id(n)));
                    self.end(n, "left");
                }
            }
            Due::Decide { ticket, ops, asked_at, then_us } => {
                let outcomes = self.decide(&ops);
                let answered = Answered { outcomes, asked_at, now: self.server_now() };
                self.later(self.now.plus_us(then_us), Due::Answer { ticket, answered });
            }
            Due::Answer { ticket, answered } => {
                self.tell(Event::Completed { ticket, result: Ok(answered) });
            }
            Due::Tell(event) => self.tell(event),
            Due::Renew { n, until } => self.renew(n, until),
            Due::Release(n) => self.release(n),
            Due::Expire(n) => {
                if self.holders.get(&n).is_some_and(|holder| holder.until <= self.now) {
                    self.gone(n);
                }
            }
        }
    }

    /// The request `of` of the load is sent.
    fn arrive(&mut self, of: usize) {
        let n = self.of.len();
        self.of.push(of);
        self.arrived.push(self.now.0);
        self.done.push(None);
        let plan = match &self.plans.all[of] {
            Planned::Plan(plan) => plan.clone(),
            Planned::Refused(_) => return self.end(n, "refused"),
            Planned::Fault => return self.end(n, "policy_fault"),
        };
        if !plan.primitive.takes(self.load.requests[of].call) {
            return self.end(n, "wrong_call");
        }
        if let Some(us) = self.load.requests[of].leaves_us {
            self.later(self.now.plus_us(us), Due::Leave(n));
        }
        let waiter = self.waiter(n, &plan);
        self.tell(Event::Enqueue(Box::new(waiter)));
    }

    fn waiter(&self, n: usize, plan: &Plan) -> Waiter {
        let request = &self.load.requests[self.of[n]].request;
        let number = n as u64 + 1;
        let global = GlobalTicket { number, rank: plan.rank, joined: None, returns: false };
        let claim = Claim {
            keys: plan.keys.clone(),
            proxy: "replay".into(),
            waits: plan.wait_ms > 0,
            any: plan.any,
            attempt: number,
            owner: request.owner.as_str().into(),
            request: None,
            fingerprint: 0,
            mode: plan.mode,
            ttl_ms: plan.ttl_ms,
            at_least_ms: plan.lock_at_least_ms,
            delay_ms: plan.lock_delay_ms,
            reentrant: plan.reentrant,
            keep_ms: plan.keep_ms,
            global: plan.global_order.then_some(global),
            delegable: None,
            tag: Tag::default(),
        };
        Waiter {
            id: waiter_id(n),
            claim,
            rank: plan.rank,
            group: plan.group.clone(),
            wait_ms: plan.wait_ms,
            max_waiters: plan.max_waiters,
            asks_choice: self.generation.has(Hook::Choose) && !plan.global_order,
            asks_backoff: self.generation.has(Hook::Backoff),
            seed: request.seed,
            charge: Charge::default(),
        }
    }

    /// The request has its answer, or its client has left.
    fn end(&mut self, n: usize, outcome: &'static str) {
        let (at_us, waited_us) = (self.arrived[n] - BEGINS_US, self.now.0 - self.arrived[n]);
        self.done[n] =
            Some(Done { n: self.of[n], outcome, at_us, waited_us, used_us: 0, is_outlived: false });
        if outcome != "granted" {
            self.go_on(n);
        }
    }

    /// The owner of a request that is over sends its next one.
    fn go_on(&mut self, n: usize) {
        let Arrival { next, until_us, .. } = &self.load.requests[self.of[n]];
        let Some((next, pause_us)) = *next else { return };
        // Otherwise a client that is refused at once would ask for ever at the same moment.
        let at = self.now.plus_us(pause_us.max(LEAST_PAUSE_US));
        let is_over = at.0 - BEGINS_US > *until_us || self.of.len() >= self.load.most;
        if !is_over {
            self.later(at, Due::Arrive(next));
        }
    }

    fn act(&mut self) {
        while let Some(action) = self.table.poll_action() {
            match action {
                Action::Submit { ticket, ops } => {
                    let takes_us = self.load.store.takes_us(self.now.0 - BEGINS_US, ticket.0);
                    let at = self.now.plus_us(takes_us / 2);
                    self.later(at, Due::Decide { ticket, ops, asked_at: self.now, then_us: takes_us / 2 });
                }
                Action::Choose { key, choice, candidates, groups } => {
                    let waiter = self.choose(&key, choice, &candidates, groups);
                    self.later(self.now.plus_us(HOOK_US), Due::Tell(Event::Chosen { key, choice, waiter }));
                }
                Action::Backoff { waiter, key, contention } => {
                    let decision = self.back_off(waiter, &key, contention);
                    self.later(
                        self.now.plus_us(HOOK_US),
                        Due::Tell(Event::Backoff { waiter, key, decision }),
                    );
                }
                Action::Finish { waiter, verdict } => self.finish((waiter.0 - 1) as usize, verdict),
                Action::NotifyPeer { key, next_waiter } => {
                    self.table.handle_event(Event::Orphan { key, next_waiter }, self.now);
                }
                Action::Gone { nonce } => {
                    let users = self.leases.remove(&nonce);
                    users.into_iter().flatten().for_each(|n| self.gone(n));
                }
                Action::Released { .. } | Action::Note(_) => {}
            }
        }
    }

    fn server_now(&self) -> ServerTime {
        ServerTime(self.now.0 + AHEAD_US)
    }

    fn decide(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let env = Env::certain(self.server_now());
        let mut records = Records::default();
        let mut keys: Vec<Key> = ops.iter().flat_map(Op::keys).cloned().collect();
        keys.sort_unstable();
        keys.dedup();
        for key in &keys {
            records.insert(key.clone(), self.records.remove(key));
        }
        let outcomes = ops.iter().map(|op| record::apply(&mut records, op, &env)).collect();
        for key in keys {
            if let Some(record) = records.take(&key) {
                self.records.insert(key, record);
            }
        }
        outcomes
    }

    fn choose(
        &mut self,
        key: &Key,
        choice: u64,
        candidates: &[Candidate],
        groups: Vec<GroupShare>,
    ) -> Option<WaiterId> {
        let view = |candidate: &Candidate| {
            let n = (candidate.waiter.0 - 1) as usize;
            let plan = self.plan(n)?;
            Some(WaiterView {
                rank: plan.rank,
                group: plan.group.clone(),
                weight: plan.weight,
                owner: self.load.requests[self.of[n]].request.owner.as_str().into(),
                mode: plan.mode,
                waited_ms: candidate.waited_ms,
                labels: plan.labels.clone().into(),
            })
        };
        let waiters: Vec<WaiterView> = candidates.iter().filter_map(view).collect();
        let groups = groups.into_iter().map(GroupView::from);
        let queue = QueueView { key: key.clone(), waiters, groups: groups.collect(), seed: seed(choice) };
        match self.generation.choose(&queue)? {
            Ok(n) => candidates.get(n).map(|candidate| candidate.waiter),
            Err(fault) => {
                self.fault(&fault);
                None
            }
        }
    }

    fn back_off(&mut self, waiter: WaiterId, key: &Key, contention: Contention) -> Next {
        self.serial += 1;
        let seed = seed(self.serial);
        let built_in = built_in_backoff(contention.attempt, seed);
        let plan = self.plan((waiter.0 - 1) as usize);
        let labels = plan.map(|plan| plan.labels.clone()).unwrap_or_default().into();
        let view = policy::Contention::of(key.clone(), contention, labels, seed);
        match self.generation.backoff(&view) {
            Some(Ok(decision)) => decision.into(),
            Some(Err(fault)) => {
                self.fault(&fault);
                built_in
            }
            None => built_in,
        }
    }

    fn fault(&mut self, fault: &policy::Fault) {
        *self.run.faults.entry((fault.hook.as_str(), fault.kind.as_str())).or_default() += 1;
        self.run.fault.get_or_insert_with(|| fault.to_string());
    }

    fn finish(&mut self, n: usize, verdict: Verdict) {
        let (grant, keys, asked_at) = match verdict {
            Verdict::Granted { grant, keys, asked_at, .. } => (grant, keys, asked_at),
            Verdict::Contended { .. } => return self.end(n, "contended"),
            Verdict::Done(_) => return self.end(n, "done"),
            Verdict::TooManyWaiters { .. } => return self.end(n, "too_many_waiters"),
            Verdict::Full => return self.end(n, "too_many_holders"),
            Verdict::RequestReused { .. } | Verdict::Unavailable { .. } | Verdict::ShuttingDown => {
                return self.end(n, "store_unavailable");
            }
        };
        self.end(n, "granted");
        let (hold, is_guess) = self.load.hold(self.of[n]);
        self.run.guessed += u64::from(is_guess);
        let ttl_ms = self.plan(n).map_or(0, |plan| plan.ttl_ms);
        let until = asked_at.plus_us(grant.left_us);
        let (token, needed_until) = (grant.tokens[0], self.now.plus_us(hold.us));
        // A client of the API renews by itself.
        let is_guarded = self.load.requests[self.of[n]].call == Call::Guard;
        let max_hold_ms = self.plan(n).filter(|_| is_guarded).map_or(u32::MAX, |plan| plan.max_hold_ms);
        let renewed_until = self.now.plus_ms(max_hold_ms);
        let holder = Holder { nonce: grant.nonce, keys, token, ttl_ms, until, needed_until, renewed_until };
        self.later(until, Due::Expire(n));
        self.holders.insert(n, holder);
        self.leases.entry(grant.nonce).or_default().push(n);
        if let Some(beside) = self.beside {
            let excluding = |m: &usize| excludes(self.load, beside, self.of[n], self.of[*m]);
            if let Some(plan) = beside.all[self.of[n]].plan() {
                self.run.overlaps.begin(n, plan, excluding);
            }
        }
        let until = needed_until;
        if hold.renews {
            let first = asked_at.plus_us(u64::from(ttl_ms) * 500).max(self.now);
            self.later(first, Due::Renew { n, until });
        }
        if hold.is_released {
            self.later(until, Due::Release(n));
        }
    }

    fn renew(&mut self, n: usize, until: Instant) {
        let Some(Holder { nonce, keys, token, ttl_ms, renewed_until, .. }) = self.holders.get(&n) else {
            return;
        };
        if self.now >= until.min(*renewed_until) {
            return;
        }
        let (nonce, ttl_us) = (*nonce, u64::from(*ttl_ms) * 1_000);
        let lease = LeaseRef { keys: keys.clone(), nonce, token: Some(*token), principal: None };
        let left_us = until.us_since(self.now);
        // Many renewals of a long hold change nothing but its end.
        let period_us = (ttl_us / 2).max(left_us / RENEWALS).max(1_000);
        let ttl_ms = u32::try_from(ttl_us.max(period_us * 2) / 1_000).unwrap_or(u32::MAX);
        let outcomes = self.decide(&[Op::Renew { lease, ttl_ms: Some(ttl_ms) }]);
        self.later(self.now.plus_us(period_us), Due::Renew { n, until });
        let [Outcome::Renewed { left_us }] = outcomes[..] else { return self.tell(Event::Lost { nonce }) };
        let until = self.now.plus_us(left_us);
        for n in self.leases.get(&nonce).into_iter().flatten() {
            if let Some(holder) = self.holders.get_mut(n) {
                holder.until = holder.until.max(until);
            }
        }
        self.later(until, Due::Expire(n));
        self.tell(Event::Renewed { nonce, until });
    }

    fn release(&mut self, n: usize) {
        let Some(Holder { nonce, keys, token, .. }) = self.holders.remove(&n) else { return };
        if let Some(others) = self.leases.get_mut(&nonce) {
            others.retain(|other| *other != n);
        }
        self.stops(n);
        let is_once = self.plan(n).is_some_and(|plan| plan.keep_ms.is_some());
        let outcome = is_once.then(|| Left { value: "null".into(), origin: Origin::Api });
        let lease = LeaseRef { keys, nonce, token: Some(token), principal: None };
        let release = Release { lease, attempt: (1 << 40) + n as u64, outcome };
        self.tell(Event::Release { id: ReleaseId(n as u64), release });
    }

    /// The lease of a request is over or lost.
    fn gone(&mut self, n: usize) {
        if let Some(holder) = self.holders.remove(&n) {
            let is_outlived = self.now < holder.needed_until;
            self.run.outlived += u64::from(is_outlived);
            self.stops(n);
            if let Some(done) = &mut self.done[n] {
                done.is_outlived = is_outlived;
            }
        }
    }

    /// The holder no longer uses its lease.
    fn stops(&mut self, n: usize) {
        if let Some(plan) = self.beside.and_then(|beside| beside.all[self.of[n]].plan()) {
            self.run.overlaps.end(n, plan);
        }
        if let Some(done) = &mut self.done[n] {
            done.used_us = self.now.0 - BEGINS_US - done.at_us - done.waited_us;
        }
        self.go_on(n);
    }
}

fn waiter_id(n: usize) -> WaiterId {
    WaiterId(n as u64 + 1)
}

/// Random bits that are the same in each run.
fn seed(n: u64) -> u32 {
    let mixed = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ (mixed >> 31)) as u32
}

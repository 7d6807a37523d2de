//! The primitive `row`: the lock of a row, in a transaction that stays open as long as the lease.
//!
//! Each lease that MySQL must know about uses one connection. The number of these connections is bounded, and
//! nothing else uses them, so that row locks cannot starve other work. Rows are locked with NOWAIT: waiters wait
//! in the proxy, in order. A missing row is created first. Shared holders of one proxy share one lock, which is
//! FOR SHARE, so that shared holders of other proxies can have theirs at the same time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::MissedTickBehavior;

use super::slot::{Counter, Freed, Locked, RowLockRequest, Slot, Strength};
use super::tokens::{Counted, tokens_for};
use super::{CERTAIN_US, Common, SILENCE_US, SWEEP, SessionLocks, certain_until, moment};
use crate::clock;
use crate::config::StoreConfig;
use crate::coverage::{Branch, reached};
use crate::lock::maps::{HashMap, HashSet};
use crate::lock::record::{Op, Outcome};
use crate::lock::{Instant, Key, Mode, Space, Token};
use crate::mysql::context::Context;
use crate::mysql::pipeline::queue::{Job, LATE};
use crate::mysql::session::fault::Fault;
use crate::mysql::session::link::Link;
use crate::mysql::store::MysqlStore;
use crate::store::Reply;
use crate::store::local_records::{DecisionInputs, LocalRecords};
use crate::vital;

/// How long a claim waits for a connection, in microseconds.
const PATIENCE_US: u64 = 500_000;
/// The number of connections that are kept for later locks.
const SPARE: usize = 4;

/// The guard of a key: the transaction of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guard {
    slot: u64,
    strength: Strength,
}

impl Guard {
    /// Whether the row lock is strong enough for the operation.
    fn is_fit(&self, op: &Op) -> bool {
        let reads = matches!(op, Op::Acquire(claim) if claim.mode == Mode::Shared);
        reads || self.strength == Strength::Exclusive
    }
}

/// Row locks on the server of a [`MysqlStore`].
pub type Row = SessionLocks<Guard>;

impl SessionLocks<Guard> {
    /// Starts the task, which ends with the store. At most `row_connections` of `config` hold locks at a
    /// time.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn new(store: &MysqlStore, config: &StoreConfig) -> Row {
        let (row, incoming) = SessionLocks::open(Space::Row, store, config.max_queued);
        let (events, happened) = unbounded_channel();
        let coordinator = Coordinator {
            context: row.context.clone(),
            common: row.common.clone(),
            counter: Arc::default(),
            events,
            connections: config.row_connections,
            waiting: VecDeque::new(),
            resting: Vec::new(),
            busy: HashSet::default(),
            slots: HashMap::default(),
            spare: Vec::new(),
            opening: 0,
            serial: 0,
        };
        store.spawn("row locks", coordinator.run(incoming, happened));
        row
    }
}

/// The reports of the connections' tasks.
enum Event {
    Locked {
        slot: u64,
        batch: SessionBatch,
        result: Result<Locked, Fault>,
    },
    Counted {
        batch: SessionBatch,
        result: Result<Counted, Fault>,
    },
    Freed {
        slot: u64,
        result: Result<Freed, Fault>,
    },
    /// The result is the moment at which the session was asked.
    Beat {
        slot: u64,
        link: Link,
        result: Result<Instant, Fault>,
    },
}

/// A group with the outcomes that are already decided. They stay decided if the group has to wait or the
/// server does not answer.
struct SessionBatch {
    job: Job,
    decided: Vec<Outcome>,
    /// Times in `decided` count from then.
    began: Instant,
}

/// A group that waits.
struct Waiting {
    batch: SessionBatch,
    /// Since when it has waited for a connection.
    no_room: Option<Instant>,
}

/// The task that decides. It spawns other tasks that talk to the server.
struct Coordinator {
    context: Arc<Context>,
    common: Arc<Common<Guard>>,
    counter: Arc<Counter>,
    events: UnboundedSender<Event>,
    connections: usize,
    waiting: VecDeque<Waiting>,
    /// Batches that failed, until the next sweep.
    resting: Vec<SessionBatch>,
    /// Keys with work in progress on the server. Other operations on them wait.
    busy: HashSet<Key>,
    slots: HashMap<u64, Slot>,
    spare: Vec<Link>,
    /// The number of connections on which a task tries to lock rows.
    opening: usize,
    serial: u64,
}

impl SessionBatch {
    fn new(job: Job) -> SessionBatch {
        SessionBatch { job, decided: Vec::new(), began: clock::now() }
    }
}

impl Coordinator {
    async fn run(mut self, mut incoming: UnboundedReceiver<Job>, mut happened: UnboundedReceiver<Event>) {
        let mut sweep = tokio::time::interval(SWEEP);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = self.context.stop.cancelled() => break,
                // Before the jobs, which may never end.
                _ = sweep.tick() => self.sweep(),
                Some(event) = happened.recv() => self.happened(event),
                job = incoming.recv() => match job {
                    Some(job) => self.waiting.push_back(Waiting { batch: SessionBatch::new(job), no_room: None }),
                    None => break,
                },
            }
            self.pump();
        }
        let ended = self.common.lose(|_| true);
        tracing::info!(leases = ended, "the sessions of the row locks end with the proxy");
    }

    /// Starts the waiting groups whose keys no earlier group uses.
    fn pump(&mut self) {
        let mut blocked = self.busy.clone();
        for waiting in std::mem::take(&mut self.waiting) {
            let job = &waiting.batch.job;
            let keys = || job.ops.iter().flat_map(Op::keys);
            let is_free = !keys().any(|key| blocked.contains(key));
            if !job.responder.is_open() {
                continue;
            }
            blocked.extend(keys().cloned());
            if is_free {
                self.start(waiting);
            } else {
                self.waiting.push_back(waiting);
            }
        }
    }

    fn inputs(&self, above: Token, grants_from: Instant) -> DecisionInputs {
        self.common.inputs(&self.context, above, grants_from, clock::now())
    }

    /// Decides what needs nothing from the server, and spawns a task for the rest.
    fn start(&mut self, waiting: Waiting) {
        let Waiting { batch: SessionBatch { mut job, mut decided, mut began }, no_room } = waiting;
        let inputs = self.inputs(Token::default(), Instant::default());
        if decided.is_empty() {
            began = inputs.own;
        }
        let mut wanted: Vec<Key> = Vec::new();
        let mut strength = Strength::Shared;
        let mut any = false;
        {
            let mut held = self.common.held();
            for op in &job.ops[decided.len()..] {
                let fit = |guard: &Guard| guard.is_fit(op);
                let inputs = inputs_for(op, inputs, &self.slots, &held);
                match held.try_apply(op, &inputs, fit) {
                    Some(outcome) => decided.push(outcome),
                    None => break,
                }
            }
            for op in &job.ops[decided.len()..] {
                let Op::Acquire(claim) = op else { continue };
                if claim.mode != Mode::Shared {
                    strength = Strength::Exclusive;
                }
                any |= claim.any;
                wanted.extend(claim.keys.iter().filter(|key| !held.has(key)).cloned());
            }
        }
        job.responder.sent |= !decided.is_empty();
        wanted.sort_unstable();
        wanted.dedup();
        let all_decided = decided.len() == job.ops.len();
        let batch = SessionBatch { job, decided, began };
        if all_decided {
            return self.finish(batch, Token::default(), Instant::default());
        }
        let open = &batch.job.ops[batch.decided.len()..];
        let tokens = tokens_for(open.iter());
        let claimed = open.iter().flat_map(Op::keys).cloned().collect();
        if !wanted.is_empty() && self.slots.len() + self.opening >= self.connections {
            return self.wait_for_room(batch, no_room);
        }
        let Some(signs) = self.ask_guards(&batch) else {
            return self.waiting.push_back(Waiting { batch, no_room });
        };
        match wanted.is_empty() {
            true => self.count(batch, (tokens, claimed), signs),
            false => self.lock(batch, RowLockRequest { keys: wanted, any, strength, tokens, claimed }, signs),
        }
    }

    /// Asks the sessions that already guard keys of the batch for a sign of life, because a grant on such a
    /// session would not show that it has ended. `None` while one of their connections is in use.
    fn ask_guards(&mut self, batch: &SessionBatch) -> Option<Vec<oneshot::Receiver<bool>>> {
        let open = batch.job.ops[batch.decided.len()..].iter();
        let mut guards = self.slots_of(open.flat_map(Op::keys));
        guards.retain(|id| self.slots.get(id).is_some_and(|slot| slot.parked_until.is_none()));
        if guards.iter().any(|id| self.slots.get(id).is_some_and(|slot| slot.link.is_none())) {
            return None;
        }
        reached(Branch::GuardsAsked);
        Some(guards.into_iter().filter_map(|id| self.beat(id)).collect())
    }

    /// Asks the slot's session for a sign of life. The receiver tells whether there was one. `None` while the
    /// connection is in use.
    fn beat(&mut self, id: u64) -> Option<oneshot::Receiver<bool>> {
        let mut link = self.slots.get_mut(&id)?.link.take()?;
        let events = self.events.clone();
        let (tell, sign) = oneshot::channel();
        vital::spawn("the heartbeat of a row lock", async move {
            let result = Slot::beat(&mut link).await;
            let lives = result.is_ok();
            // Before the receivers are told, so that they find the slot up to date.
            let _ = events.send(Event::Beat { slot: id, link, result });
            let _ = tell.send(lives);
        });
        Some(sign)
    }

    /// Waits for a connection to become free. If none does, the error tells what is short.
    fn wait_for_room(&mut self, mut batch: SessionBatch, since: Option<Instant>) {
        let now = clock::now();
        let since = since.unwrap_or(now);
        if now.us_since(since) < PATIENCE_US {
            return self.waiting.push_back(Waiting { batch, no_room: Some(since) });
        }
        let most = self.connections;
        let why = format!("all {most} connections for row locks are in use (store.row_connections)");
        batch.job.responder.give_up(&why);
    }

    fn count(
        &mut self,
        batch: SessionBatch,
        (tokens, claimed): (u64, Vec<Key>),
        signs: Vec<oneshot::Receiver<bool>>,
    ) {
        self.busy.extend(batch.job.ops.iter().flat_map(Op::keys).cloned());
        let (context, counter, events) = (self.context.clone(), self.counter.clone(), self.events.clone());
        let limit = batch.job.responder.left();
        vital::spawn("the count of tokens", async move {
            let counting = confirmed(counter.next(&context, tokens, &claimed), signs);
            let result = tokio::time::timeout(limit, counting).await;
            let result = result.unwrap_or_else(|_| Err(Fault::timeout("a number for a token")));
            let _ = events.send(Event::Counted { batch, result });
        });
    }

    fn lock(&mut self, batch: SessionBatch, request: RowLockRequest, signs: Vec<oneshot::Receiver<bool>>) {
        self.busy.extend(batch.job.ops.iter().flat_map(Op::keys).cloned());
        self.opening += 1;
        self.serial += 1;
        let slot = self.serial;
        let link = self.spare.pop();
        let (context, counter, events) = (self.context.clone(), self.counter.clone(), self.events.clone());
        let limit = batch.job.responder.left();
        vital::spawn("the acquisition of a row lock", async move {
            let locking = confirmed(Slot::lock(&context, &counter, link, request), signs);
            let result = tokio::time::timeout(limit, locking).await;
            let result = result.unwrap_or_else(|_| Err(Fault::timeout("a row lock")));
            let _ = events.send(Event::Locked { slot, batch, result });
        });
    }

    fn happened(&mut self, event: Event) {
        match event {
            Event::Locked { slot, batch, result } => {
                self.opening -= 1;
                self.unbusy(&batch);
                match result {
                    Ok(locked) => self.locked(slot, batch, locked),
                    Err(fault) => self.failed(batch, &fault),
                }
            }
            Event::Counted { batch, result } => {
                self.unbusy(&batch);
                match result {
                    Ok((above, from)) => self.finish(batch, above, from),
                    Err(fault) => self.failed(batch, &fault),
                }
            }
            Event::Freed { slot, result } => {
                let slot = self.slots.remove(&slot);
                for key in slot.iter().flat_map(|slot| &slot.keys) {
                    self.busy.remove(key);
                }
                // After a failure the session is gone, and its locks with it.
                if let Ok(Freed { link: Some(link) }) = result {
                    self.keep(link);
                }
                if let Some(mut slot) = slot {
                    slot.tell_released(None);
                }
            }
            Event::Beat { slot, link, result } => {
                match result {
                    Ok(heard) => {
                        if let Some(slot) = self.slots.get_mut(&slot) {
                            slot.heard = heard;
                        }
                    }
                    Err(fault) => self.lost(slot, &fault),
                }
                if let Some(slot) = self.slots.get_mut(&slot) {
                    slot.link = Some(link);
                }
                self.free_if_idle(slot);
            }
        }
    }

    fn unbusy(&mut self, batch: &SessionBatch) {
        for key in batch.job.ops.iter().flat_map(Op::keys) {
            self.busy.remove(key);
        }
    }

    fn locked(&mut self, slot: u64, batch: SessionBatch, locked: Locked) {
        let Locked { link, keys, strength, heard, counted } = locked;
        self.common.time.calibrate(link.sample.now, link.sample.after);
        let Some((above, from)) = counted else {
            // Another session has one of the rows.
            self.keep(link);
            return self.finish(batch, Token::default(), Instant::default());
        };
        for key in &keys {
            self.common.held().insert(key.clone(), Guard { slot, strength });
        }
        self.slots.insert(slot, Slot::new(link, keys, heard));
        self.finish(batch, above, from);
        self.free_if_idle(slot);
    }

    fn keep(&mut self, link: Link) {
        if self.spare.len() < SPARE {
            self.spare.push(link);
        } else {
            vital::detach(link.close());
        }
    }

    /// The connection failed before anything was locked. The batch is tried again as long as its client
    /// waits.
    fn failed(&mut self, mut batch: SessionBatch, fault: &Fault) {
        self.context.metrics.store.error(fault.slug());
        tracing::debug!("could not ask for a row lock: {fault}");
        match fault {
            Fault::Rejected { why } => batch.job.responder.give_up(why),
            // This limits how often a server that is gone is asked.
            _ => self.resting.push(batch),
        }
    }

    /// Decides the rest of the group, and answers as soon as the released keys are free.
    fn finish(&mut self, batch: SessionBatch, above: Token, grants_from: Instant) {
        let SessionBatch { job: Job { ops, mut responder, .. }, mut decided, began } = batch;
        let inputs = self.inputs(above, grants_from);
        self.context.metrics.store.batch(ops.len(), Duration::from_micros(inputs.own.us_since(began)));
        // If the client does not wait any more, the operations are not carried out.
        if responder.is_open() {
            responder.sent = true;
            let mut held = self.common.held();
            for op in &ops[decided.len()..] {
                let inputs = inputs_for(op, inputs, &self.slots, &held);
                decided.push(held.apply(op, &inputs, |guard| guard.is_fit(op)));
            }
        }
        // Some operations were decided before the server was asked, so times count from then.
        let reply = Reply { outcomes: decided, asked_at: began, now: inputs.now };
        let slots = self.slots_of(ops.iter().flat_map(Op::keys));
        let freeing: Vec<u64> = slots.into_iter().filter(|slot| self.free_if_idle(*slot)).collect();
        match freeing.first().and_then(|slot| self.slots.get_mut(slot)) {
            Some(slot) => slot.told_when_free.push((responder, reply)),
            None => responder.answer(Ok(reply)),
        }
    }

    fn slots_of<'a>(&self, keys: impl Iterator<Item = &'a Key>) -> Vec<u64> {
        let held = self.common.held();
        let mut slots: Vec<u64> = keys.filter_map(|key| held.guard(key)).map(|guard| guard.slot).collect();
        slots.sort_unstable();
        slots.dedup();
        slots
    }

    /// Ends the slot's transaction if no key of it is held. Returns whether it ends, now or as soon as its
    /// connection is not in use. If it does not end, another client got a key after a release that waits for
    /// the end, so the release is answered.
    fn free_if_idle(&mut self, id: u64) -> bool {
        let (own, now) = moment(&self.common.time);
        let Some(slot) = self.slots.get_mut(&id) else { return false };
        let mut held = self.common.held();
        let is_over = slot.parked_until.is_some_and(|certain| certain <= own);
        let is_idle = slot.keys.iter().all(|key| held.is_idle(key, now));
        // A task in progress relies on the guard.
        let is_wanted = slot.link.is_some() && slot.keys.iter().any(|key| self.busy.contains(key));
        if is_wanted || !(is_idle || is_over) {
            slot.tell_released(None);
            return false;
        }
        let Some(link) = slot.link.take() else { return true };
        let keys_of_slot = |guard: &Guard| guard.slot == id;
        match slot.parked_until {
            Some(_) => drop(held.lose(now, keys_of_slot)),
            None => drop(held.take_if_idle(slot.keys.iter(), now, keys_of_slot)),
        }
        self.busy.extend(slot.keys.iter().cloned());
        let (events, is_parked) = (self.events.clone(), slot.parked_until.is_some());
        vital::spawn("the release of a row lock", async move {
            let result = match is_parked {
                true => {
                    link.close().await;
                    Ok(Freed { link: None })
                }
                false => Slot::free(link).await,
            };
            let _ = events.send(Event::Freed { slot: id, result });
        });
        true
    }

    /// Call this if the slot's session cannot be used any more.
    fn lost(&mut self, id: u64, fault: &Fault) {
        let Some(slot) = self.slots.get_mut(&id) else { return };
        slot.tell_released(None);
        let rests_on_it = |guard: &Guard| guard.slot == id;
        let lost = if fault.ended_session() {
            reached(Branch::RowsLost);
            self.slots.remove(&id);
            self.common.lose(rests_on_it)
        } else {
            reached(Branch::ParkedRows);
            let certain = certain_until(&self.context, slot.heard);
            slot.parked_until = Some(certain);
            self.common.end(certain, rests_on_it)
        };
        self.context.metrics.store.error(fault.slug());
        tracing::warn!(leases = lost, "lost the session of a row lock: {fault}");
    }

    /// Ends slots whose leases have ended, answers expired groups, and checks that the sessions are still
    /// there.
    fn sweep(&mut self) {
        let own = clock::now();
        let rested = std::mem::take(&mut self.resting).into_iter();
        self.waiting.extend(rested.map(|batch| Waiting { batch, no_room: None }));
        for waiting in &mut self.waiting {
            waiting.batch.job.responder.expire(own, LATE);
        }
        for slot in self.slots.values_mut() {
            slot.tell_released(Some(own));
        }
        let ids: Vec<u64> = self.slots.keys().copied().collect();
        for id in ids {
            if self.free_if_idle(id) {
                continue;
            }
            let is_silent =
                |slot: &Slot| own.us_since(slot.heard) >= SILENCE_US && slot.parked_until.is_none();
            if self.slots.get(&id).is_some_and(is_silent) {
                drop(self.beat(id));
            }
        }
    }
}

/// The result of the work, if all the sessions gave a sign of life.
async fn confirmed<T>(
    work: impl Future<Output = Result<T, Fault>>,
    signs: Vec<oneshot::Receiver<bool>>,
) -> Result<T, Fault> {
    let result = work.await?;
    for sign in signs {
        if !sign.await.unwrap_or(false) {
            let why = "the session that held the row has ended".to_owned();
            return Err(Fault::Conflict { why });
        }
    }
    Ok(result)
}

/// The inputs for one operation. The server surely keeps a session only for some time after its last sign of
/// life.
fn inputs_for(
    op: &Op,
    inputs: DecisionInputs,
    slots: &HashMap<u64, Slot>,
    held: &LocalRecords<Guard>,
) -> DecisionInputs {
    let guards = op.keys().iter().filter_map(|key| held.guard(key));
    let heard = guards.filter_map(|guard| slots.get(&guard.slot)).map(|slot| slot.heard).min();
    let certain_until = heard.map_or(Instant(u64::MAX), |heard| heard.plus_us(CERTAIN_US));
    DecisionInputs { certain_until: certain_until.min(inputs.certain_until), ..inputs }
}

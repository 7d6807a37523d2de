//! The event loop: events go to the [`Table`], and its actions to the store, the policies and the callers.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::context::ServiceContext;
use super::history::{History, What};
use super::in_flight::ClaimsInFlight;
use super::message::{Msg, Pending, Swap, WaiterReply};
use super::recorded::RecordedLeases;
use super::shadow::Shadows;
use super::swap;
use super::tag;
use super::views::{Notice, NoticeKind};
use super::why::{KeyView, Waiting};
use crate::clock;
use crate::lock::maps::{BoundedMap, HashMap};
use crate::lock::record::{Claim, NextWaiter, Op, Outcome};
use crate::lock::table::{
    Action, Answered, Candidate, Contention, Event, GroupShare, Note, Queued, ReleaseId, SubmissionId, Table,
    Unheard, Verdict, Waiter, WaiterId,
};
use crate::lock::{Key, Token};
use crate::policy::{self, GroupView, QueueView, WaiterView};
use crate::random;
use crate::store::{Reply, StoreError};
use crate::vital;

/// How many messages the loop takes before it checks its timers again.
const BURST: usize = 256;
/// How many request ids are remembered.
const REQUESTS: usize = 65_536;

/// The state of the loop.
pub(super) struct EventLoop {
    shared: Arc<ServiceContext>,
    table: Table,
    pending: HashMap<WaiterId, Pending>,
    releases: HashMap<ReleaseId, oneshot::Sender<Result<Outcome, String>>>,
    /// The tasks that keep a lease alive, by its nonce; several if the owner acquired it again.
    holds: HashMap<u64, Vec<oneshot::Sender<()>>>,
    shadows: Shadows,
    /// Recent request ids with their fingerprints, to detect an id that is reused for another request. The store
    /// detects reuse for the same keys on any proxy.
    requests: BoundedMap<Box<str>, u64>,
    history: History,
    recorded: RecordedLeases,
    draining: Option<oneshot::Sender<()>>,
    in_flight: ClaimsInFlight,
    serial: u64,
}

impl EventLoop {
    pub fn new(shared: Arc<ServiceContext>) -> EventLoop {
        EventLoop {
            shared,
            table: Table::new(),
            pending: HashMap::default(),
            releases: HashMap::default(),
            holds: HashMap::default(),
            shadows: Shadows::default(),
            requests: BoundedMap::new(REQUESTS),
            history: History::default(),
            recorded: RecordedLeases::default(),
            draining: None,
            in_flight: ClaimsInFlight::default(),
            serial: 0,
        }
    }

    pub async fn run(mut self, mut messages: mpsc::UnboundedReceiver<Msg>) {
        loop {
            let due = self.table.poll_timeout().unwrap_or(clock::now().plus_ms(3_600_000));
            tokio::select! {
                biased;
                message = messages.recv() => match message {
                    Some(message) => self.take(message),
                    None => return,
                },
                () = clock::sleep_until(due) => {}
            }
            for _ in 0..BURST {
                let Ok(message) = messages.try_recv() else { break };
                self.take(message);
            }
            self.table.handle_timeout(clock::now());
            self.act();
            self.shared.metrics.leases.waiting(self.table.waiting());
            self.shared.metrics.leases.held(self.table.held());
            if !self.table.busy()
                && let Some(reply) = self.draining.take()
            {
                let _ = reply.send(());
            }
        }
    }

    fn take(&mut self, message: Msg) {
        match message {
            Msg::Acquire { waiter, pending } => self.acquire(waiter, pending),
            Msg::Cancel(id) => {
                self.pending.remove(&id);
                self.handle(Event::Cancel(id));
            }
            Msg::Undelivered { nonce, keys, attempt, ttl_ms } => {
                let _never_told = self.recorded.gone(nonce, clock::now());
                self.handle(Event::Undelivered { nonce, keys, attempt, ttl_ms });
            }
            Msg::Release { release, reply } => {
                self.serial += 1;
                let id = ReleaseId(self.serial);
                self.recorded.released(&release.lease, clock::now());
                self.releases.insert(id, reply);
                self.handle(Event::Release { id, release });
            }
            Msg::Completed { ticket, result } => {
                self.in_flight.ended(ticket, result.is_ok());
                let answered = |reply: Reply| Answered {
                    outcomes: reply.outcomes,
                    asked_at: reply.asked_at,
                    now: reply.now,
                };
                let unheard = |error: StoreError| Unheard { sent: error.was_sent(), why: error.why() };
                if let Ok(reply) = &result {
                    self.shared.recorder.answered(reply.asked_at);
                }
                let result = result.map(answered).map_err(unheard);
                self.handle(Event::Completed { ticket, result });
            }
            Msg::Chosen { key, choice, waiter, by } => {
                self.history.note(&key, by, What::Chose { waiter });
                self.handle(Event::Chosen { key, choice, waiter });
            }
            Msg::Backoff { waiter, key, decision, by } => {
                self.history.note(&key, by, What::BackedOff(decision.clone()));
                self.handle(Event::Backoff { waiter, key, decision });
            }
            Msg::Renewed { nonce, until } => self.handle(Event::Renewed { nonce, until }),
            Msg::NotFound(lease) if self.table.knows_as(&lease) => {
                self.handle(Event::Lost { nonce: lease.nonce });
            }
            Msg::NotFound(_) => {}
            Msg::Lost(nonces) => nonces.into_iter().for_each(|nonce| self.handle(Event::Lost { nonce })),
            // The lease may have ended while the message was on its way.
            Msg::Held { nonce, granted_here: true, over } if !self.table.knows(nonce) => {
                let _ = over.send(());
            }
            Msg::Held { nonce, over, .. } => {
                let holds = self.holds.entry(nonce).or_default();
                holds.retain(|other| !other.is_closed());
                holds.push(over);
            }
            Msg::Left { nonce } => {
                if let Some(holds) = self.holds.get_mut(&nonce) {
                    holds.retain(|other| !other.is_closed());
                    if holds.is_empty() {
                        self.holds.remove(&nonce);
                    }
                }
            }
            Msg::Taken(key) => {
                self.notice(&key, NoticeKind::Forced, "", None);
                self.handle(Event::Taken(key));
            }
            Msg::Wake(key) => {
                self.shared.store.outdated(&key);
                self.handle(Event::Wake(key));
            }
            Msg::PeerGone { peer, key } => self.handle(Event::PeerGone { peer, key }),
            Msg::Decided { key, by, what } => self.history.note(&key, by, what),
            Msg::View { key, reply } => {
                let (decisions, holds) = (self.history.of(&key), self.history.holds(&key));
                let _ = reply.send(KeyView { queue: self.queue(&key), holds, decisions });
            }
            Msg::Waiting { key, reply } => {
                let _ = reply.send(self.table.queue_len(&key) as u32);
            }
            Msg::Swap(swap) => self.swap(swap),
            Msg::Settle(reply) => self.in_flight.await_all(reply),
            Msg::ShadowOver { nonce } => {
                self.shadows.remove(nonce);
                self.shared.named.lock().lease_over(!self.shadows.is_empty());
            }
            Msg::Drain { reply } => {
                self.handle(Event::Shutdown);
                self.draining = Some(reply);
            }
        }
    }

    fn handle(&mut self, event: Event) {
        self.table.handle_event(event, clock::now());
        self.act();
    }

    fn acquire(&mut self, mut waiter: Box<Waiter>, pending: Pending) {
        let active = self.shared.policies.active(pending.generation.name());
        if active.is_some_and(|active| active.version() != pending.version) {
            let _ = pending.reply.send(WaiterReply::Replan);
            return;
        }
        if self.reuses_request(&waiter.claim) {
            let verdict = Verdict::RequestReused { ended: false };
            let _ = pending.reply.send(WaiterReply::Verdict(verdict));
            return;
        }
        if let Err(why) = self.shadows.admit(pending.generation.name(), &mut waiter.claim) {
            let _ = pending.reply.send(WaiterReply::NotYet { why });
            return;
        }
        let what =
            What::Planned { mode: waiter.claim.mode, ttl_ms: waiter.claim.ttl_ms, wait_ms: waiter.wait_ms };
        self.history.note(&waiter.claim.keys[0], pending.generation.id().clone(), what);
        self.pending.insert(waiter.id, pending);
        self.handle(Event::Enqueue(waiter));
    }

    /// Whether the claim has the request id of an earlier claim that asked for something else. Remembers the id.
    fn reuses_request(&mut self, claim: &Claim) -> bool {
        let Some(request) = &claim.request else { return false };
        match self.requests.get(request) {
            Some(fingerprint) => *fingerprint != claim.fingerprint,
            None => {
                self.requests.insert(request.clone(), claim.fingerprint);
                false
            }
        }
    }

    fn act(&mut self) {
        while let Some(action) = self.table.poll_action() {
            self.perform(action);
        }
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Submit { ticket, ops } => self.submit(ticket, ops),
            Action::Choose { key, choice, candidates, groups } => {
                self.choose(key, choice, &candidates, groups);
            }
            Action::Backoff { waiter, key, contention } => self.back_off(waiter, key, contention),
            Action::Finish { waiter, verdict } => self.finish(waiter, verdict),
            Action::Released { id, result } => {
                if let Some(reply) = self.releases.remove(&id) {
                    let _ = reply.send(result);
                }
            }
            Action::NotifyPeer { key, next_waiter } => self.notify_peer(key, next_waiter),
            Action::Gone { nonce } => {
                // Taken away: there is no note of it.
                if let Some((name, held_us)) = self.recorded.gone(nonce, clock::now()) {
                    self.shared.recorder.ended(name, "lost", held_us);
                }
                for over in self.holds.remove(&nonce).into_iter().flatten() {
                    let _ = over.send(());
                }
            }
            Action::Note(note) => self.noted(note),
        }
    }

    fn notify_peer(&mut self, key: Key, next_waiter: NextWaiter) {
        if next_waiter.proxy == self.shared.proxy {
            return self.table.handle_event(Event::Orphan { key, next_waiter }, clock::now());
        }
        let peer = next_waiter.proxy;
        let (inbox, name, freed) = (self.shared.inbox.clone(), peer.clone(), key.clone());
        let gone = Box::new(move || drop(inbox.send(Msg::PeerGone { peer: name, key: freed })));
        self.shared.peers.notify(&peer, &key, gone);
    }

    fn submit(&mut self, ticket: SubmissionId, ops: Vec<Op>) {
        self.in_flight.began(ticket, &ops);
        let inbox = self.shared.inbox.clone();
        let done = Box::new(move |result| {
            let _ = inbox.send(Msg::Completed { ticket, result });
        });
        self.shared.store.submit(ops, self.shared.store_deadline(), done);
    }

    /// Asks the policy outside the loop, because it may use its full time limit.
    fn choose(&self, key: Key, choice: u64, candidates: &[Candidate], groups: Vec<GroupShare>) {
        let ids: Vec<WaiterId> = candidates.iter().map(|candidate| candidate.waiter).collect();
        let generation = ids.first().and_then(|id| self.pending.get(id)).map(|p| p.generation.clone());
        let waiters = candidates.iter().filter_map(|candidate| self.waiter_view(&key, candidate)).collect();
        let groups = groups.into_iter().map(GroupView::from);
        let view = QueueView { key: key.clone(), waiters, groups: groups.collect(), seed: random::number() };
        let mut answer = self.answer(Msg::Chosen { key, choice, waiter: None, by: built_in() });
        vital::detach(async move {
            let asked = generation.as_ref().filter(|_| view.waiters.len() == ids.len());
            let Some(Ok(n)) = asked.and_then(|generation| generation.choose(&view)) else { return };
            if let (Some(generation), Some(Msg::Chosen { waiter, by, .. })) = (asked, &mut answer.message) {
                (*waiter, *by) = (ids.get(n).copied(), generation.id().clone());
            }
        });
    }

    fn waiter_view(&self, key: &Key, candidate: &Candidate) -> Option<WaiterView> {
        let pending = self.pending.get(&candidate.waiter)?;
        let waiter = self.table.waiter(candidate.waiter)?;
        debug_assert!(waiter.claim.keys.contains(key));
        Some(WaiterView {
            rank: waiter.rank,
            group: waiter.group.clone(),
            weight: pending.weight,
            owner: waiter.claim.owner.clone(),
            mode: waiter.claim.mode,
            waited_ms: candidate.waited_ms,
            labels: pending.labels.clone(),
        })
    }

    fn back_off(&self, waiter: WaiterId, key: Key, contention: Contention) {
        let seed = random::number();
        let decision = crate::lock::table::built_in_backoff(contention.attempt, seed);
        let mut answer = self.answer(Msg::Backoff { waiter, key: key.clone(), decision, by: built_in() });
        let Some(pending) = self.pending.get(&waiter) else { return };
        let generation = pending.generation.clone();
        let view = policy::Contention::of(key, contention, pending.labels.clone(), seed);
        vital::detach(async move {
            let Some(Ok(next)) = generation.backoff(&view) else { return };
            if let Some(Msg::Backoff { decision, by, .. }) = &mut answer.message {
                (*decision, *by) = (next.into(), generation.id().clone());
            }
        });
    }

    /// Sends `message` when dropped, unless it was replaced by a better answer.
    fn answer(&self, message: Msg) -> Told {
        Told { message: Some(message), inbox: self.shared.inbox.clone() }
    }

    fn finish(&mut self, id: WaiterId, verdict: Verdict) {
        let Some(pending) = self.pending.remove(&id) else {
            // Its caller left before the answer arrived.
            return self.shared.undelivered(verdict, self.shared.limits.max_ttl_ms);
        };
        let lease = match &verdict {
            Verdict::Granted { grant, keys, .. } if pending.is_recorded => {
                Some((grant.nonce, (keys[0].clone(), grant.tokens[0])))
            }
            _ => None,
        };
        if let Err(WaiterReply::Verdict(verdict)) = pending.reply.send(WaiterReply::Verdict(verdict)) {
            return self.shared.undelivered(verdict, self.shared.limits.max_ttl_ms);
        }
        if let Some((nonce, name)) = lease {
            self.recorded.granted(nonce, name, clock::now());
        }
    }

    /// Counts the end of a lease, remembers how long it lasted, and records it. `how`: `released`, `handed_off`, `expired` or `lost`.
    fn lease_ended(&mut self, key: &Key, token: Token, how: &'static str, held_ms: u32) {
        self.shared.metrics.leases.ended(how, Duration::from_millis(u64::from(held_ms)));
        self.history.held(key, held_ms);
        if let Some((name, held_us)) = self.recorded.ended(key, token, clock::now()) {
            let how = if how == "handed_off" { "released" } else { how };
            self.shared.recorder.ended(name, how, held_us);
        }
    }

    fn noted(&mut self, note: Note) {
        match note {
            Note::Granted { key, owner, token, from_release } => {
                let kind = if from_release { NoticeKind::HandedOff } else { NoticeKind::Granted };
                self.notice(&key, kind, &owner, Some(token));
            }
            Note::Released { key, owner, token, held_ms, handed_off } => {
                let how = if handed_off { "handed_off" } else { "released" };
                self.lease_ended(&key, token, how, held_ms);
                if !handed_off {
                    self.notice(&key, NoticeKind::Released, &owner, Some(token));
                }
            }
            Note::Expired { key, owner, token, held_ms } => {
                self.lease_ended(&key, token, "expired", held_ms);
                self.notice(&key, NoticeKind::Expired, &owner, Some(token));
            }
            Note::Lost { key, owner, token, held_ms } => {
                self.lease_ended(&key, token, "lost", held_ms);
                self.notice(&key, NoticeKind::Lost, &owner, Some(token));
            }
        }
    }

    fn notice(&self, key: &Key, kind: NoticeKind, owner: &str, token: Option<Token>) {
        if self.shared.notices.receiver_count() > 0 {
            let at_us = clock::wall_us();
            let (key, owner, text) = (key.clone(), owner.into(), OnceLock::new());
            let _ = self.shared.notices.send(Arc::new(Notice { key, kind, owner, token, at_us, text }));
        }
    }

    fn queue(&self, key: &Key) -> Vec<Waiting> {
        let waiting = |queued: Queued| {
            let (waiter, pending) = (self.table.waiter(queued.waiter)?, self.pending.get(&queued.waiter));
            let Waiter { claim, rank, group, wait_ms, .. } = waiter;
            Some(Waiting {
                queued,
                claim: claim.clone(),
                rank: *rank,
                group: group.clone(),
                wait_ms: *wait_ms,
                reads: pending.and_then(|pending| pending.generation.parts_read(&tag::request_of(claim))),
            })
        };
        self.table.queue(key, clock::now()).into_iter().filter_map(waiting).collect()
    }

    fn swap(&mut self, swap: Swap) {
        for (waiter, claim) in swap::apply(swap, &self.shared, &self.table, &mut self.shadows) {
            match claim {
                Some(claim) => self.handle(Event::Replan { waiter, claim }),
                None => {
                    self.handle(Event::Cancel(waiter));
                    if let Some(pending) = self.pending.remove(&waiter) {
                        let _ = pending.reply.send(WaiterReply::Replan);
                    }
                }
            }
        }
    }
}

/// A message that is sent to the loop when this is dropped. A queue does not move until a question about it is
/// answered, so the answer must come even if the task that asks panics.
struct Told {
    message: Option<Msg>,
    inbox: mpsc::UnboundedSender<Msg>,
}

impl Drop for Told {
    fn drop(&mut self) {
        if let Some(message) = self.message.take() {
            let _ = self.inbox.send(message);
        }
    }
}

/// The name of the author of decisions that no policy made.
fn built_in() -> Arc<str> {
    "built-in".into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panicking_policy_task_still_delivers_its_default_answer() {
        let (inbox, mut messages) = mpsc::unbounded_channel();
        let key = Key::new("k").expect("it is a key");
        let answer =
            Told { message: Some(Msg::Chosen { key, choice: 7, waiter: None, by: built_in() }), inbox };
        let task = tokio::spawn(async move {
            let _answer = answer;
            panic!("as a policy's engine might");
        });
        assert!(task.await.is_err());
        assert!(matches!(messages.recv().await, Some(Msg::Chosen { choice: 7, waiter: None, .. })));
    }
}

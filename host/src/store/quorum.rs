//! The primitive `quorum`: leases on several independent stores, of which a majority decides.
//!
//! A group is sent to all members at once and answered as soon as the answers decide it, without waiting for
//! members that are slow or gone. A claim is sent first to one member, which is the same for all proxies, and to
//! the other members after that member has granted it. So one of several simultaneous claims gets all members;
//! otherwise the claims would divide the members among them. A claim that no majority grants is undone on every
//! member that may have granted it. The token of a grant is the highest one that a member gave. The members of the
//! majority are raised to that token before the grant is reported. Any two majorities have a member in common, so
//! the next grant has a higher token. After a grant of permits, the permits of the key are counted again
//! ([`permits`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::registry::NO_MEMBER;
use super::space_adapter::SpaceAdapter;
use super::{Done, Health, Page, Reply, Store, StoreError, StoreFuture, Stored};
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::record::{Claim, Denial, Grant, Op, Outcome};
use crate::lock::{Instant, Key, LeaseRef, ServerTime, Space, Token};
use crate::mutex::Mutex;
use crate::random;
use crate::vital;

mod count;
mod permits;
mod views;

use count::{Ballot, Count};
use permits::Room;

/// One store of a quorum.
pub struct Member {
    /// The member's name in the configuration.
    pub name: String,
    /// The store; its keys are in [`Space::Table`].
    pub store: Arc<dyn Store>,
}

/// Returns the moment until which this proxy may write leases, according to its membership of a fleet. The
/// members are servers without knowledge of the fleet.
pub type Allowed = Arc<dyn Fn() -> Instant + Send + Sync>;

/// Several stores, of which a majority decides.
pub struct Quorum {
    members: Arc<[Member]>,
    allowed: Allowed,
    /// How long an undecided group waits for missing answers.
    patience: Duration,
}

/// The answer of one member to a group, with the index of the member.
type Vote = (usize, Result<Reply, StoreError>);

/// A group that was sent to the members.
struct Round {
    group: Vec<Op>,
    asked_at: Instant,
    votes: UnboundedReceiver<Vote>,
    /// One for each operation.
    ballots: Vec<Ballot>,
    now: ServerTime,
    why: String,
    /// The members that are asked after the first one has answered.
    rest: Option<Arc<Rest>>,
}

/// The members that a claim is sent to in the second step.
struct Rest {
    members: Arc<[Member]>,
    first: usize,
    deadline: Instant,
    /// The group and the channel for the answers; `None` after these members have been asked, or if they are
    /// not to be asked.
    open: Mutex<Option<(Vec<Op>, UnboundedSender<Vote>)>>,
    /// These members are not asked: the refusal of the first member is the answer.
    refused: AtomicBool,
}

impl Quorum {
    /// `members`: at least three, each a server that fails independently. `patience`: how long to wait for an
    /// answer that could still decide a group.
    pub fn new(members: Vec<Member>, patience: Duration, allowed: Allowed) -> Quorum {
        let moved = |member: Member| {
            let store = SpaceAdapter { store: member.store, inside: Space::Table, outside: Space::Quorum };
            Member { name: member.name, store: Arc::new(store) }
        };
        Quorum { members: members.into_iter().map(moved).collect(), allowed, patience }
    }

    /// Asks every available member, in the order of the calls.
    fn ask(&self, group: &[Op], deadline: Instant, renewal: bool) -> Round {
        let (tell, votes) = unbounded_channel();
        let round = Round::new(group.to_vec(), self.members.len(), votes);
        for (n, member) in self.members.iter().enumerate() {
            vote(member, n, group.to_vec(), deadline, renewal, &tell);
        }
        round
    }

    /// Asks one member first. If it refuses all claims of a group because of recent holders, its refusal is the
    /// answer, unless a claim may already have its lease: this member may not know that lease. Otherwise the
    /// other members are asked when the first one answers, so that they also get the groups in the order of the
    /// calls.
    fn ask_claims(&self, group: Vec<Op>, deadline: Instant) -> Round {
        let (tell, votes) = unbounded_channel();
        let first = self.first(&group[0].keys()[0]);
        let open = Mutex::new(Some((group.clone(), tell.clone())));
        let (members, refused) = (self.members.clone(), AtomicBool::new(false));
        let rest = Arc::new(Rest { members, first, deadline, open, refused });
        let mut round = Round::new(group.clone(), self.members.len(), votes);
        round.rest = Some(rest.clone());
        let is_new = |op: &Op| matches!(op, Op::Acquire(claim) if !claim.may_have_its_lease());
        let are_new = group.iter().all(is_new);
        let young_us = 2 * self.patience.min(LONGEST_CLAIM).as_micros() as u64 + YOUNG_US;
        let done = Box::new(move |result: Result<Reply, StoreError>| {
            let is_refused = result.as_ref().is_ok_and(|reply| are_new && is_refused(reply, young_us));
            if is_refused && rest.leave() {
                reached(Branch::FirstRefuses);
                rest.refused.store(true, Ordering::SeqCst);
            }
            let _ = tell.send((first, result));
            rest.ask();
        });
        self.members[first].store.submit(group, deadline, done);
        round
    }

    /// The member that claims of the key are sent to first: among the available members it is the same on every
    /// proxy.
    fn first(&self, key: &Key) -> usize {
        let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        let place = key.as_str().bytes().fold(0xCBF2_9CE4_8422_2325, hash) as usize;
        let members = self.members.len();
        let in_order = (0..members).map(|n| (place % members + n) % members);
        let is_there = |n: &usize| matches!(self.members[*n].store.health(), Health::Ready { .. });
        in_order.clone().find(is_there).unwrap_or(place % members)
    }

    fn run(&self, group: Vec<Op>, deadline: Instant, renewal: bool, done: Done) {
        let allowed = (self.allowed)();
        if allowed <= clock::now() {
            return done(Err(StoreError::Unsent { why: NO_MEMBER.to_owned() }));
        }
        // The members check the deadline by their clocks, so a proxy that is paused now writes nothing when it
        // continues.
        let deadline = deadline.min(allowed);
        let only_claims = group.iter().all(|op| matches!(op, Op::Acquire(_)));
        let round = match only_claims && !group.is_empty() {
            true => self.ask_claims(group, deadline),
            false => self.ask(&group, deadline, renewal),
        };
        let (members, patience) = (self.members.clone(), self.patience);
        vital::spawn(
            "a round of a quorum",
            async move { done(round.decide(&members, patience, deadline).await) },
        );
    }
}

/// How long to wait for the first member before the others are asked.
const FIRST_LIMIT: Duration = Duration::from_millis(500);
/// The longest time for which a claim is assumed to be in flight.
const LONGEST_CLAIM: Duration = Duration::from_secs(5);
/// Added to the time after which the first member's holder is no longer assumed to be a claim in flight, in
/// microseconds.
const YOUNG_US: u64 = 500_000;
/// When to retry if other claims are made at the same time, in microseconds.
const PAUSE_US: std::ops::Range<u64> = 20_000..200_000;
const LONGEST_PAUSE_US: u64 = 1_000_000;

/// Whether all claims were refused because of recent holders: these holders already have the other members, or
/// are asking them. An older holder may be a remainder that the other members have already released.
fn is_refused(reply: &Reply, young_us: u64) -> bool {
    reply.outcomes.iter().all(|outcome| age_us(outcome, reply.now).is_some_and(|age_us| age_us < young_us))
}

/// How long the holder that blocks the claim has existed, in microseconds.
fn age_us(outcome: &Outcome, now: ServerTime) -> Option<u64> {
    match outcome {
        Outcome::Held(Denial { holder: Some(holder), .. }) => Some(now.us_since(holder.since)),
        _ => None,
    }
}

/// Completes the refusal of the first member. A holder that also has the majority blocks the claim until its
/// end. A holder without the majority may still get it or give up: the older it is, the longer the pause before
/// the next try may be.
async fn refused(members: &[Member], patience: Duration, outcome: Outcome, now: ServerTime) -> Outcome {
    let pause_us = age_us(&outcome, now).unwrap_or(0).clamp(2 * PAUSE_US.start, LONGEST_PAUSE_US);
    let Outcome::Held(denial) = outcome else { return outcome };
    let holds = |stored: &Stored| stored.record.holders.iter().any(|holder| holder.until > stored.now);
    let seen = views::read(members, patience.min(FIRST_LIMIT), &denial.key).await;
    if seen.is_ok_and(|seen| seen.is_some_and(|stored| holds(&stored))) {
        return Outcome::Held(denial);
    }
    let free_in_us = denial.free_in_us.min(random::within(PAUSE_US.start..=pause_us));
    Outcome::Held(Denial { free_in_us, ..denial })
}

/// A reference to a lease whose members have not agreed on its token yet.
fn any_token(keys: &[Key], nonce: u64) -> LeaseRef {
    LeaseRef { keys: keys.into(), nonce, token: None, principal: None }
}

fn vote(
    member: &Member,
    n: usize,
    ops: Vec<Op>,
    deadline: Instant,
    renewal: bool,
    tell: &UnboundedSender<Vote>,
) {
    let tell = tell.clone();
    if let Health::Unavailable { why } = member.store.health() {
        let _ = tell.send((n, Err(StoreError::Unsent { why })));
        return;
    }
    let done: Done = Box::new(move |result| drop(tell.send((n, result))));
    match <[Op; 1]>::try_from(ops) {
        Ok([op]) if renewal => member.store.submit_renewal(op, deadline, done),
        Ok(ops) => member.store.submit(ops.into(), deadline, done),
        Err(ops) => member.store.submit(ops, deadline, done),
    }
}

impl Rest {
    /// Asks these members, unless they have been asked or are not to be asked.
    fn ask(&self) {
        let Some((group, tell)) = self.take() else { return };
        reached(Branch::OthersAsked);
        for (n, member) in self.members.iter().enumerate().filter(|(n, _)| *n != self.first) {
            vote(member, n, group.clone(), self.deadline, false, &tell);
        }
    }

    /// Ensures that these members are not asked. Returns whether they had not been asked before.
    fn leave(&self) -> bool {
        self.take().is_some()
    }

    fn take(&self) -> Option<(Vec<Op>, UnboundedSender<Vote>)> {
        self.open.lock().take()
    }
}

impl Round {
    fn new(group: Vec<Op>, members: usize, votes: UnboundedReceiver<Vote>) -> Round {
        let ballots = group.iter().map(|op| Ballot::new(op, Count { members })).collect();
        let (now, why) = (ServerTime::default(), String::new());
        Round { group, asked_at: clock::now(), votes, ballots, now, why, rest: None }
    }

    async fn decide(
        mut self,
        members: &Arc<[Member]>,
        patience: Duration,
        deadline: Instant,
    ) -> Result<Reply, StoreError> {
        if let Some(refusal) = self.collect(members, patience).await {
            let (now, mut outcomes) = (refusal.now, Vec::new());
            for outcome in refusal.outcomes {
                outcomes.push(refused(members, patience, outcome, now).await);
            }
            return Ok(Reply { outcomes, asked_at: self.asked_at, now });
        }
        let (asked_at, now) = (self.asked_at, self.now);
        let mut outcomes = Vec::with_capacity(self.group.len());
        for (op, ballot) in self.group.iter().zip(&mut self.ballots) {
            let mut outcome = ballot.outcome(op, random::within(PAUSE_US));
            if let (Op::Acquire(_) | Op::Rejoin(_), Some(Outcome::Granted(grant))) = (op, &mut outcome) {
                let lease = any_token(op.keys(), grant.nonce);
                if let Some(lowest) = ballot.lowest(grant.nonce).filter(|_| grant.repeated) {
                    widen(members, &lease, &lowest, ballot, deadline);
                }
                if !raise(members, lease, &grant.tokens, ballot, patience, deadline).await {
                    outcome = None;
                }
            }
            if let (Op::Acquire(claim) | Op::Rejoin(claim), Some(Outcome::Granted(grant))) = (op, &outcome) {
                let is_new = matches!(op, Op::Acquire(_)) && !grant.repeated;
                match permits::recount(members, patience, claim, grant.nonce).await {
                    Room::Enough => {}
                    Room::Taken(denial) if is_new => outcome = Some(Outcome::Held(denial)),
                    // An earlier answer may have told a client of the lease, so it is not undone.
                    Room::Taken(_) | Room::Unknown => outcome = None,
                }
            }
            // A claim that is not decided is sent again with the same attempt, or abandoned. If it were undone
            // now, that could arrive after a later grant.
            if let (Op::Acquire(claim), Some(said)) = (op, &outcome)
                && !matches!(said, Outcome::Granted(_))
            {
                reached(Branch::Undone);
                undo(members, ballot, claim, deadline);
            }
            outcomes.push(outcome.ok_or_else(|| self.why.clone()));
        }
        let outcomes: Result<Vec<Outcome>, String> = outcomes.into_iter().collect();
        if let Ok(outcomes) = &outcomes {
            self.lift_the_late(members, outcomes, deadline);
        }
        match outcomes {
            Ok(outcomes) => Ok(Reply { outcomes, asked_at, now }),
            Err(why) => Err(StoreError::Unavailable { why: format!("no majority: {why}") }),
        }
    }

    /// Raises members that grant after the majority was reported to its token as well. Then they can replace a
    /// member of the majority. Nothing waits for this.
    fn lift_the_late(self, members: &Arc<[Member]>, outcomes: &[Outcome], deadline: Instant) {
        let told = self.group.into_iter().zip(outcomes).map(|(op, outcome)| match outcome {
            Outcome::Granted(grant) => Some((op.keys().into(), grant.clone())),
            _ => None,
        });
        let told: Vec<Option<(Arc<[Key]>, Grant)>> = told.collect();
        let (members, mut votes) = (members.clone(), self.votes);
        vital::detach(async move {
            while let Some((n, result)) = votes.recv().await {
                for (outcome, told) in result.iter().flat_map(|reply| &reply.outcomes).zip(&told) {
                    if let (Outcome::Granted(late), Some((keys, grant))) = (outcome, told)
                        && late.nonce == grant.nonce
                        && late.tokens != grant.tokens
                    {
                        let op = Op::Raise {
                            lease: any_token(keys, grant.nonce),
                            tokens: Some(grant.tokens.clone()),
                        };
                        reached(Branch::LiftedLate);
                        members[n].store.submit(vec![op], deadline, Box::new(|_| {}));
                    }
                }
            }
        });
    }

    /// Counts answers until they decide every operation, or until the wait for missing answers is over. Returns
    /// the first member's answer if no other member is asked.
    async fn collect(&mut self, members: &[Member], patience: Duration) -> Option<Reply> {
        let limit = tokio::time::sleep(patience);
        let mut waits_for_first = self.rest.is_some();
        let hurry = tokio::time::sleep(FIRST_LIMIT.min(patience));
        tokio::pin!(limit, hurry);
        let mut silent: Vec<bool> = vec![true; members.len()];
        while !self.ballots.iter().all(Ballot::is_decided) {
            let (n, result) = tokio::select! {
                biased;
                vote = self.votes.recv() => match vote {
                    Some(vote) => vote,
                    None => break,
                },
                () = &mut limit, if !waits_for_first => break,
                () = &mut hurry, if waits_for_first => {
                    waits_for_first = false;
                    if let Some(rest) = &self.rest {
                        reached(Branch::FirstIsSlow);
                        rest.ask();
                    }
                    limit.set(tokio::time::sleep(patience));
                    continue;
                }
            };
            // The other members have just been asked.
            if std::mem::take(&mut waits_for_first) {
                limit.set(tokio::time::sleep(patience));
            }
            silent[n] = false;
            if self.rest.as_ref().is_some_and(|rest| rest.refused.load(Ordering::SeqCst)) {
                return result.ok();
            }
            match result {
                Ok(reply) => {
                    self.now = self.now.max(reply.now);
                    for (ballot, outcome) in self.ballots.iter_mut().zip(reply.outcomes) {
                        ballot.count(n, outcome);
                    }
                }
                Err(error) => {
                    self.note(&members[n].name, &error.to_string());
                    let sent = error.was_sent();
                    self.ballots.iter_mut().for_each(|ballot| ballot.count_failure(n, sent));
                }
            }
        }
        let silent = silent.iter().zip(members).filter(|(silent, _)| **silent);
        let silent: Vec<String> = silent.map(|(_, member)| member.name.clone()).collect();
        for name in silent {
            self.note(&name, "did not answer in time");
        }
        None
    }

    fn note(&mut self, name: &str, why: &str) {
        if !self.why.is_empty() {
            self.why.push_str("; ");
        }
        self.why.push_str(&format!("stores.{name}: {why}"));
    }
}

/// Raises the majority to the highest token among it. Returns whether a majority then has that token.
async fn raise(
    members: &[Member],
    lease: LeaseRef,
    tokens: &[Token],
    ballot: &Ballot,
    patience: Duration,
    deadline: Instant,
) -> bool {
    let (mut there, behind) = ballot.at_token(lease.nonce, tokens);
    if ballot.is_majority(there) {
        return true;
    }
    reached(Branch::Lifted);
    let (tell, mut votes) = unbounded_channel();
    for n in behind {
        let op = Op::Raise { lease: lease.clone(), tokens: Some(tokens.to_vec()) };
        vote(&members[n], n, vec![op], deadline, false, &tell);
    }
    drop(tell);
    let raised = tokio::time::timeout(patience, async {
        while let Some((_, result)) = votes.recv().await {
            let raised = result.is_ok_and(|reply| matches!(reply.outcomes[..], [Outcome::Renewed { .. }]));
            there += usize::from(raised);
            if ballot.is_majority(there) {
                return true;
            }
        }
        false
    });
    raised.await.unwrap_or(false)
}

/// Lets the members that gave the lease higher tokens also accept the lowest one, because the client may have
/// been told of it at its first call. Nothing waits for this; later requests to these members come after it.
fn widen(members: &[Member], lease: &LeaseRef, lowest: &[Token], ballot: &Ballot, deadline: Instant) {
    let (_, above) = ballot.at_token(lease.nonce, lowest);
    for n in above {
        let op = Op::Raise { lease: lease.clone(), tokens: Some(lowest.to_vec()) };
        members[n].store.submit(vec![op], deadline, Box::new(|_| {}));
    }
}

/// How long to wait for the members whose token floors are raised.
const RAISE_LIMIT: Duration = Duration::from_secs(5);

/// Raises the token floors of all members that answer. Returns the highest floor of a majority.
async fn raise_floors(members: &[Member], least: Option<Token>) -> Result<Token, StoreError> {
    let (tell, mut raised) = unbounded_channel();
    for member in members {
        let (tell, answer) = (tell.clone(), member.store.raise_tokens(least));
        vital::detach(async move { drop(tell.send(answer.await)) });
    }
    drop(tell);
    let (count, mut highest, mut there) = (Count { members: members.len() }, Token::default(), 0);
    let majority = tokio::time::timeout(RAISE_LIMIT, async {
        while let Some(raised) = raised.recv().await {
            if let Ok(floor) = raised {
                (highest, there) = (highest.max(floor), there + 1);
            }
            if count.is_majority(there) {
                return true;
            }
        }
        false
    });
    match majority.await {
        Ok(true) => Ok(highest),
        _ => {
            Err(StoreError::Unavailable { why: "the quorum has no majority to raise its tokens".to_owned() })
        }
    }
}

/// Undoes a refused claim on every member that may have granted it, including members that have not answered
/// yet. The store retries this for as long as the lease may last. Nothing waits for it: when it arrives, the
/// waiter may have been granted the same keys by another attempt.
fn undo(members: &[Member], ballot: &Ballot, claim: &Claim, deadline: Instant) {
    for member in ballot.unsure() {
        let abandon = Op::Abandon { keys: claim.keys.clone(), attempt: claim.attempt };
        let until = deadline.plus_ms(claim.ttl_ms).plus_ms(UNDO_MS);
        members[member].store.submit(vec![abandon], until, Box::new(|_| {}));
    }
}

/// How much longer than the lease the undoing is retried, because clocks differ, in milliseconds.
const UNDO_MS: u32 = 1_000;

impl Store for Quorum {
    fn submit(&self, group: Vec<Op>, deadline: Instant, done: Done) {
        self.run(group, deadline, false, done);
    }

    fn submit_renewal(&self, op: Op, deadline: Instant, done: Done) {
        self.run(vec![op], deadline, true, done);
    }

    fn list(
        &self,
        prefix: String,
        after: Option<Key>,
        limit: usize,
    ) -> StoreFuture<Result<Page, StoreError>> {
        let (members, patience) = (self.members.clone(), self.patience);
        Box::pin(async move { views::list(&members, patience, &prefix, after.as_ref(), limit).await })
    }

    fn read(&self, key: Key) -> StoreFuture<Result<Option<Stored>, StoreError>> {
        let (members, patience) = (self.members.clone(), self.patience);
        Box::pin(async move { views::read(&members, patience, &key).await })
    }

    /// Ready if a majority is ready; warns of the members that are not, and of what the members warn of.
    fn health(&self) -> Health {
        let (mut ready, mut gone, mut warnings) = (0, Vec::new(), Vec::new());
        for member in &*self.members {
            let of_it = |why: String| format!("stores.{}: {why}", member.name);
            match member.store.health() {
                Health::Ready { warnings: more, .. } => {
                    ready += 1;
                    warnings.extend(more.into_iter().map(of_it));
                }
                Health::Unavailable { why } => gone.push(of_it(why)),
            }
        }
        if !(Count { members: self.members.len() }).is_majority(ready) {
            return Health::Unavailable { why: gone.join("; ") };
        }
        Health::Ready {
            server: format!("{ready} of {}", self.members.len()),
            warnings: [gone, warnings].concat(),
        }
    }

    fn lacks(&self, space: Space) -> Option<String> {
        (space != Space::Quorum).then(|| format!("{space:?} is not a space of the quorum"))
    }

    /// The members have clocks of their own. So a majority is first raised above the tokens that it gave, and
    /// then to the highest floor among it. Every later majority has a member in common with it.
    fn raise_tokens(&self, least: Option<Token>) -> StoreFuture<Result<Token, StoreError>> {
        let members = self.members.clone();
        Box::pin(async move {
            let highest = raise_floors(&members, least).await?;
            raise_floors(&members, Some(highest)).await
        })
    }

    fn outdated(&self, key: &Key) {
        self.members.iter().for_each(|member| member.store.outdated(key));
    }

    fn forget(&self) {
        self.members.iter().for_each(|member| member.store.forget());
    }
}

#[cfg(test)]
mod tests;

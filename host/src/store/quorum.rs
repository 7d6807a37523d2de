//! The primitive `quorum`: leases on several independent stores, of which the majority counts.
//!
//! Each group goes to all members at once and is answered as soon as the answers that are there decide it:
//! a member that is slow or gone is not waited for. A claim that the majority does not grant is undone
//! wherever it may have been granted. A grant's token is the highest that a member gave, and the members
//! of the majority are raised to it before it is told: two majorities have a member in common, so
//! whoever comes next is above it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::moved::Moved;
use super::registry::NO_MEMBER;
use super::{Answer, Done, Health, Page, Reply, Store, StoreError, Stored};
use crate::clock;
use crate::lock::record::{Grant, Op, Outcome};
use crate::lock::{Instant, Key, LeaseRef, ServerTime, Space, Token};
use crate::vital;

mod count;
mod views;

use count::{Ballot, Count};

/// One of the stores.
pub struct Member {
    pub name: String,
    /// Its keys are those of [`Space::Table`].
    pub store: Arc<dyn Store>,
}

/// Until when this proxy may write leases, which its membership of a fleet says. The members are servers
/// that know of no fleet.
pub type Allowed = Arc<dyn Fn() -> Instant + Send + Sync>;

/// Several stores, of which the majority counts.
pub struct Quorum {
    members: Arc<[Member]>,
    allowed: Allowed,
    /// How long an undecided group waits for those who have not answered.
    patience: Duration,
}

/// What one member said of a group.
type Vote = (usize, Result<Reply, StoreError>);

/// A group that all members have been asked for.
struct Round {
    group: Vec<Op>,
    asked_at: Instant,
    votes: UnboundedReceiver<Vote>,
    /// One for each operation.
    ballots: Vec<Ballot>,
    now: ServerTime,
    why: String,
}

impl Quorum {
    /// `members`: three at least, each a server that fails by itself. `patience`: how long an answer that
    /// could still decide a group is waited for.
    pub fn new(members: Vec<Member>, patience: Duration, allowed: Allowed) -> Quorum {
        let moved = |member: Member| {
            let store = Moved { store: member.store, inside: Space::Table, outside: Space::Quorum };
            Member { name: member.name, store: Arc::new(store) }
        };
        Quorum { members: members.into_iter().map(moved).collect(), allowed, patience }
    }

    /// Asks every member that is there, in the order of the calls.
    fn ask(&self, group: Vec<Op>, deadline: Instant, renewal: bool) -> Round {
        let (tell, votes) = unbounded_channel();
        let count = Count { members: self.members.len() };
        let ballots = group.iter().map(|op| Ballot::new(op, count)).collect();
        let asked_at = clock::now();
        for (n, member) in self.members.iter().enumerate() {
            vote(member, n, group.clone(), deadline, renewal, &tell);
        }
        Round { group, asked_at, votes, ballots, now: ServerTime::default(), why: String::new() }
    }

    fn run(&self, group: Vec<Op>, deadline: Instant, renewal: bool, done: Done) {
        let allowed = (self.allowed)();
        if allowed <= clock::now() {
            return done(Err(StoreError::Unavailable { why: NO_MEMBER.to_owned() }));
        }
        // The members check it by their clocks: a proxy that is paused now writes nothing when it goes on.
        let deadline = deadline.min(allowed);
        let round = self.ask(group, deadline, renewal);
        let (members, patience) = (self.members.clone(), self.patience);
        vital::spawn(
            "a round of a quorum",
            async move { done(round.decide(&members, patience, deadline).await) },
        );
    }
}

/// A lease whose members have not agreed on its token yet.
fn any_token(keys: &[Key], nonce: u64) -> LeaseRef {
    LeaseRef { keys: keys.into(), nonce, token: Token::ANY }
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
        let _ = tell.send((n, Err(StoreError::Unavailable { why })));
        return;
    }
    let done: Done = Box::new(move |result| drop(tell.send((n, result))));
    match <[Op; 1]>::try_from(ops) {
        Ok([op]) if renewal => member.store.submit_renewal(op, deadline, done),
        Ok(ops) => member.store.submit(ops.into(), deadline, done),
        Err(ops) => member.store.submit(ops, deadline, done),
    }
}

impl Round {
    async fn decide(
        mut self,
        members: &Arc<[Member]>,
        patience: Duration,
        deadline: Instant,
    ) -> Result<Reply, StoreError> {
        self.collect(members, patience).await;
        let (asked_at, now) = (self.asked_at, self.now);
        let mut outcomes = Vec::with_capacity(self.group.len());
        for (op, ballot) in self.group.iter().zip(&mut self.ballots) {
            let mut outcome = ballot.outcome(op);
            if let (Op::Acquire(_) | Op::Rejoin(_), Some(Outcome::Granted(grant))) = (op, &mut outcome) {
                let lease = any_token(op.keys(), grant.nonce);
                if !raise(members, lease, &grant.tokens, ballot, patience, deadline).await {
                    outcome = None;
                }
            }
            if let Op::Acquire(claim) = op
                && !matches!(outcome, Some(Outcome::Granted(_)))
                && ballot.may_be_granted()
            {
                undo(members, &Op::Abandon { keys: claim.keys.clone(), attempt: claim.attempt }, deadline);
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

    /// Members that grant when the majority has been told of already are lifted to its token, too: they can
    /// stand in for one of it then. Nobody waits for it.
    fn lift_the_late(self, members: &Arc<[Member]>, outcomes: &[Outcome], deadline: Instant) {
        let told = self.group.into_iter().zip(outcomes).map(|(op, outcome)| match outcome {
            Outcome::Granted(grant) => Some((op.keys().into(), grant.clone())),
            _ => None,
        });
        let told: Vec<Option<(Arc<[Key]>, Grant)>> = told.collect();
        let (members, mut votes) = (members.clone(), self.votes);
        tokio::spawn(async move {
            while let Some((n, result)) = votes.recv().await {
                for (outcome, told) in result.iter().flat_map(|reply| &reply.outcomes).zip(&told) {
                    if let (Outcome::Granted(late), Some((keys, grant))) = (outcome, told)
                        && late.nonce == grant.nonce
                        && late.tokens != grant.tokens
                    {
                        let op =
                            Op::Raise { lease: any_token(keys, grant.nonce), tokens: grant.tokens.clone() };
                        members[n].store.submit(vec![op], deadline, Box::new(|_| {}));
                    }
                }
            }
        });
    }

    /// Takes in answers until they decide every operation, or those that lack take too long.
    async fn collect(&mut self, members: &[Member], patience: Duration) {
        let limit = tokio::time::sleep(patience);
        tokio::pin!(limit);
        let mut silent: Vec<bool> = vec![true; members.len()];
        while !self.ballots.iter().all(Ballot::is_decided) {
            let (n, result) = tokio::select! {
                vote = self.votes.recv() => match vote {
                    Some(vote) => vote,
                    None => break,
                },
                () = &mut limit => break,
            };
            silent[n] = false;
            match result {
                Ok(reply) => {
                    self.now = self.now.max(reply.now);
                    for (ballot, outcome) in self.ballots.iter_mut().zip(reply.outcomes) {
                        ballot.count(n, outcome);
                    }
                }
                Err(error) => {
                    self.note(&members[n].name, &error.to_string());
                    self.ballots.iter_mut().for_each(Ballot::count_failure);
                }
            }
        }
        let silent = silent.iter().zip(members).filter(|(silent, _)| **silent);
        let silent: Vec<String> = silent.map(|(_, member)| member.name.clone()).collect();
        for name in silent {
            self.note(&name, "has not answered in time");
        }
    }

    fn note(&mut self, name: &str, why: &str) {
        if !self.why.is_empty() {
            self.why.push_str("; ");
        }
        self.why.push_str(&format!("stores.{name}: {why}"));
    }
}

/// Lifts the majority to the highest token among them. Whether a majority has it then.
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
    let (tell, mut votes) = unbounded_channel();
    for n in behind {
        let op = Op::Raise { lease: lease.clone(), tokens: tokens.to_vec() };
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

/// How long the members are waited for whose floors are raised.
const RAISE_LIMIT: Duration = Duration::from_secs(5);

/// Raises the floors of all members that answer: the highest of a majority.
async fn raise_floors(members: &[Member], least: Option<Token>) -> Result<Token, StoreError> {
    let (tell, mut raised) = unbounded_channel();
    for member in members {
        let (tell, answer) = (tell.clone(), member.store.raise_tokens(least));
        tokio::spawn(async move { drop(tell.send(answer.await)) });
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

/// Takes a claim back wherever it may have been granted, also from those who have not answered yet: they
/// run what they are asked in order. Nobody waits for it.
fn undo(members: &[Member], abandon: &Op, deadline: Instant) {
    for member in members {
        member.store.submit(vec![abandon.clone()], deadline.plus_ms(UNDO_MS), Box::new(|_| {}));
    }
}

/// How much longer than the claim itself its undoing is tried.
const UNDO_MS: u32 = 5_000;

impl Store for Quorum {
    fn submit(&self, group: Vec<Op>, deadline: Instant, done: Done) {
        self.run(group, deadline, false, done);
    }

    fn submit_renewal(&self, op: Op, deadline: Instant, done: Done) {
        self.run(vec![op], deadline, true, done);
    }

    fn list(&self, prefix: String, after: Option<Key>, limit: usize) -> Answer<Result<Page, StoreError>> {
        let (members, patience) = (self.members.clone(), self.patience);
        Box::pin(async move { views::list(&members, patience, &prefix, after.as_ref(), limit).await })
    }

    fn read(&self, key: Key) -> Answer<Result<Option<Stored>, StoreError>> {
        let (members, patience) = (self.members.clone(), self.patience);
        Box::pin(async move { views::read(&members, patience, &key).await })
    }

    /// Ready with a majority; warns of those that are not.
    fn health(&self) -> Health {
        let mut ready = 0;
        let mut warnings = Vec::new();
        for member in &*self.members {
            match member.store.health() {
                Health::Ready { .. } => ready += 1,
                Health::Unavailable { why } => warnings.push(format!("stores.{}: {why}", member.name)),
            }
        }
        match (Count { members: self.members.len() }).is_majority(ready) {
            true => Health::Ready { server: format!("{ready} of {}", self.members.len()), warnings },
            false => Health::Unavailable { why: warnings.join("; ") },
        }
    }

    fn lacks(&self, space: Space) -> Option<String> {
        (space != Space::Quorum).then(|| format!("{space:?} is not kept by a quorum"))
    }

    /// The members go by clocks of their own. So a majority is raised above what it gave, and then to what is
    /// highest among it: later ones have one of them in common with it.
    fn raise_tokens(&self, least: Option<Token>) -> Answer<Result<Token, StoreError>> {
        let members = self.members.clone();
        Box::pin(async move {
            let highest = raise_floors(&members, least).await?;
            raise_floors(&members, Some(highest)).await
        })
    }

    fn forget(&self) {
        self.members.iter().for_each(|member| member.store.forget());
    }
}

#[cfg(test)]
mod tests;

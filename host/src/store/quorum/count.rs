//! Decides when the answers of some members determine the answer of the quorum. Pure.

use crate::lock::Token;
use crate::lock::record::{Cause, Grant, Op, Outcome};

/// How many members there are.
#[derive(Clone, Copy, Debug)]
pub struct Count {
    pub members: usize,
}

impl Count {
    /// Whether `some` members are a majority.
    pub fn is_majority(self, some: usize) -> bool {
        some * 2 > self.members
    }
}

/// The answers to one operation so far.
#[derive(Debug)]
pub struct Ballot {
    count: Count,
    asks: Asks,
    /// The attempt of a claim.
    attempt: Option<u64>,
    votes: Vec<Vote>,
    failures: usize,
    /// Members that were asked and have not refused: they may have applied the operation.
    unsure: Vec<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asks {
    /// A majority must grant the same nonce; otherwise the claim is refused.
    Grant,
    /// As above, but a refusal is as good an answer.
    Rejoin,
    Lease,
    Release,
    Other,
}

#[derive(Debug)]
struct Vote {
    member: usize,
    outcome: Outcome,
}

/// Whether a member does not let the caller use the lease.
fn is_lost(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Lost | Outcome::Forbidden)
}

impl Ballot {
    pub fn new(op: &Op, count: Count) -> Ballot {
        let asks = match op {
            Op::Acquire(_) | Op::Delegate(_) => Asks::Grant,
            Op::Rejoin(_) => Asks::Rejoin,
            Op::Renew { .. } | Op::Raise { .. } => Asks::Lease,
            Op::Release(_) => Asks::Release,
            Op::Abandon { .. }
            | Op::Force { .. }
            | Op::GlobalQueue { .. }
            | Op::Read { .. }
            | Op::Commit(_)
            | Op::Extend(_)
            | Op::Restore(_) => Asks::Other,
        };
        let attempt = match op {
            Op::Acquire(claim) | Op::Rejoin(claim) => Some(claim.attempt),
            _ => None,
        };
        Ballot { count, asks, attempt, votes: Vec::new(), failures: 0, unsure: vec![true; count.members] }
    }

    pub fn count(&mut self, member: usize, outcome: Outcome) {
        self.unsure[member] = matches!(outcome, Outcome::Granted(_) | Outcome::Unknown);
        match outcome {
            Outcome::Unknown => self.failures += 1,
            outcome => self.votes.push(Vote { member, outcome }),
        }
    }

    /// `sent`: the member may have applied the operation.
    pub fn count_failure(&mut self, member: usize, sent: bool) {
        self.unsure[member] = sent;
        self.failures += 1;
    }

    /// The members that may have granted the operation.
    pub fn unsure(&self) -> impl Iterator<Item = usize> {
        self.unsure.iter().enumerate().filter(|(_, unsure)| **unsure).map(|(member, _)| member)
    }

    pub fn is_majority(&self, some: usize) -> bool {
        self.count.is_majority(some)
    }

    /// Whether no missing answer can change the outcome. A refusal needs the answers of a majority, if that is
    /// still possible: a member that failed has not answered.
    pub fn is_decided(&self) -> bool {
        let open = self.count.members - self.votes.len() - self.failures;
        let (yes, heard) = (self.yes(), self.votes.len());
        let is_hopeless = !self.is_majority(yes + open);
        let is_heard = self.is_majority(heard) || !self.is_majority(heard + open);
        let is_no = is_hopeless && is_heard && !self.may_have_been_granted();
        open == 0 || self.is_majority(yes) || is_no
    }

    /// The highest number of members with the same positive answer.
    fn yes(&self) -> usize {
        match self.asks {
            Asks::Grant | Asks::Rejoin => self.grants().len(),
            Asks::Lease => self.number(|outcome| matches!(outcome, Outcome::Renewed { .. })),
            Asks::Release => self.number(|outcome| matches!(outcome, Outcome::Released { .. })),
            Asks::Other => self.votes.len(),
        }
    }

    fn number(&self, says: impl Fn(&Outcome) -> bool) -> usize {
        self.votes.iter().filter(|vote| says(&vote.outcome)).count()
    }

    /// The grants of the lease that most members know.
    fn grants(&self) -> Vec<(&Vote, &Grant)> {
        let grants = self.votes.iter().filter_map(|vote| match &vote.outcome {
            Outcome::Granted(grant) => Some((vote, grant)),
            _ => None,
        });
        let grants: Vec<(&Vote, &Grant)> = grants.collect();
        let of = |nonce: u64| grants.iter().filter(move |(_, grant)| grant.nonce == nonce);
        let best = grants.iter().map(|(_, grant)| grant.nonce).max_by_key(|nonce| of(*nonce).count());
        best.map(|nonce| of(nonce).copied().collect()).unwrap_or_default()
    }

    /// The outcome of the operation; `None` if too few members have answered. `split_us`: when to retry if
    /// several claims divide the members among them, in microseconds.
    pub fn outcome(&self, op: &Op, split_us: u64) -> Option<Outcome> {
        match self.asks {
            Asks::Grant | Asks::Rejoin => self.granted(op, split_us),
            Asks::Lease => self.renewed(),
            Asks::Release => self.released(),
            Asks::Other => {
                let answered = self.is_majority(self.votes.len());
                let most = |vote: &&Vote| match vote.outcome {
                    Outcome::Forced { holders } => holders,
                    _ => 0,
                };
                answered.then(|| self.votes.iter().max_by_key(most).map(|vote| vote.outcome.clone()))?
            }
        }
    }

    fn granted(&self, op: &Op, split_us: u64) -> Option<Outcome> {
        let grants = self.grants();
        if self.is_majority(grants.len()) {
            let left = grants.iter().map(|(_, grant)| grant.left_us);
            let highest =
                |n: usize| grants.iter().filter_map(|(_, grant)| grant.tokens.get(n).copied()).max();
            let (_, first) = grants[0];
            return Some(Outcome::Granted(Grant {
                nonce: first.nonce,
                chosen: None,
                tokens: (0..op.keys().len()).filter_map(highest).collect(),
                left_us: self.of_majority(left),
                levels: grants.iter().map(|(_, grant)| grant.levels).max()?,
                repeated: first.repeated,
            }));
        }
        if self.may_have_been_granted() {
            return None;
        }
        let said = |says: fn(&Outcome) -> bool| self.votes.iter().map(|vote| &vote.outcome).find(|o| says(o));
        let refused = said(|outcome| {
            matches!(outcome, Outcome::RequestReused { .. } | Outcome::Full | Outcome::Done(_))
        });
        if let Some(outcome) = refused {
            return Some(outcome.clone());
        }
        if !self.is_majority(self.votes.len()) {
            return None;
        }
        if self.asks == Asks::Rejoin {
            return Some(Outcome::Absent);
        }
        // If claims divide the members among them, no claim gets a holder in its answer, and all retry soon.
        let held = self.votes.iter().filter_map(|vote| match &vote.outcome {
            Outcome::Held(denial) => Some(denial),
            _ => None,
        });
        let sooner = held.clone().min_by_key(|denial| denial.free_in_us);
        match self.is_majority(held.count()) {
            true => sooner.cloned().map(Outcome::Held),
            false => sooner.map(|denial| {
                let mut denial = denial.clone();
                denial.free_in_us = denial.free_in_us.min(split_us);
                denial.cause = Cause::Divided;
                Outcome::Held(denial)
            }),
        }
    }

    /// Whether an earlier call of the request may have been granted its lease: some members know the lease, and
    /// together with the silent members they may be a majority. A grant from an earlier round of this same
    /// claim does not count, because no client was told of it.
    fn may_have_been_granted(&self) -> bool {
        let of_another_call = self.votes.iter().filter_map(|vote| match &vote.outcome {
            Outcome::Granted(grant) if grant.repeated && Some(grant.nonce) != self.attempt => {
                Some(grant.nonce)
            }
            _ => None,
        });
        let knowing = of_another_call.map(|nonce| self.tokens(nonce).count()).max().unwrap_or(0);
        let silent = self.count.members - self.votes.len();
        knowing > 0 && self.is_majority(knowing + silent)
    }

    fn renewed(&self) -> Option<Outcome> {
        let left = self.votes.iter().filter_map(|vote| match vote.outcome {
            Outcome::Renewed { left_us } => Some(left_us),
            _ => None,
        });
        if self.is_majority(left.clone().count()) {
            return Some(Outcome::Renewed { left_us: self.of_majority(left) });
        }
        let lost = self.number(is_lost);
        (!self.is_majority(self.count.members - lost)).then(|| self.why_lost())
    }

    /// The lease is released if the members that may still hold it are no majority.
    fn released(&self) -> Option<Outcome> {
        let levels = self.votes.iter().filter_map(|vote| match vote.outcome {
            Outcome::Released { levels_left } => Some(levels_left),
            _ => None,
        });
        let lost = self.number(is_lost);
        let may_hold = self.count.members - lost - levels.clone().count();
        match levels.max() {
            Some(levels_left) if !self.is_majority(may_hold) => Some(Outcome::Released { levels_left }),
            None if !self.is_majority(self.count.members - lost) => Some(self.why_lost()),
            _ => None,
        }
    }

    /// The answer of the members that do not let the caller use the lease.
    fn why_lost(&self) -> Outcome {
        let forbidden = self.number(|outcome| *outcome == Outcome::Forbidden);
        if forbidden > 0 { Outcome::Forbidden } else { Outcome::Lost }
    }

    /// How long a majority still holds the lease. This counts from before the first member was asked, so that
    /// the time for asking is not added.
    fn of_majority(&self, left_us: impl Iterator<Item = u64>) -> u64 {
        let mut left_us: Vec<u64> = left_us.collect();
        left_us.sort_unstable_by(|a, b| b.cmp(a));
        left_us[self.count.members / 2]
    }

    /// The lowest tokens that members gave the lease, one for each key.
    pub fn lowest(&self, nonce: u64) -> Option<Vec<Token>> {
        self.tokens(nonce)
            .map(<[Token]>::to_vec)
            .reduce(|one, other| one.into_iter().zip(other).map(|(one, other)| one.min(other)).collect())
    }

    fn tokens(&self, nonce: u64) -> impl Iterator<Item = &[Token]> {
        self.votes.iter().filter_map(move |vote| match &vote.outcome {
            Outcome::Granted(grant) if grant.nonce == nonce => Some(&*grant.tokens),
            _ => None,
        })
    }

    /// How many members gave the lease these tokens, and which members gave it others.
    pub fn at_token(&self, nonce: u64, tokens: &[Token]) -> (usize, Vec<usize>) {
        let mut there = 0;
        let mut behind = Vec::new();
        for vote in &self.votes {
            match &vote.outcome {
                Outcome::Granted(grant) if grant.nonce == nonce && grant.tokens == tokens => there += 1,
                Outcome::Granted(grant) if grant.nonce == nonce => behind.push(vote.member),
                _ => {}
            }
        }
        (there, behind)
    }
}

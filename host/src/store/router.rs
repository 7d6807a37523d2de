//! Several stores as one: each space of keys has its own.
//!
//! While a policy's change of primitive is under way, a claim has keys of two spaces. It is then made in
//! one after the other and undone where the second one is taken; a renewal or a release goes to both.
//! Groups that touch one space, which is all others, are passed on as they are.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::{Done, Health, Loss, Page, Reply, Store, StoreError, StoreFuture, Stored};
use crate::clock;
use crate::lock::record::{Claim, Denial, Grant, Op, Outcome, Release};
use crate::lock::{Instant, Key, LeaseRef, ServerTime, Space, Token};
use crate::vital;

/// When to ask again where one's own lease of a single space is in the way, in microseconds.
const OWN_LEASE_US: u64 = 250_000;

/// The stores of the spaces that there are.
pub struct Router {
    stores: Arc<Stores>,
}

struct Stores {
    table: Arc<dyn Store>,
    others: Vec<(Space, Arc<dyn Store>)>,
}

impl Router {
    /// `table` has [`Space::Table`] and says whether the whole is healthy.
    pub fn new(table: Arc<dyn Store>, others: Vec<(Space, Arc<dyn Store>)>) -> Router {
        Router { stores: Arc::new(Stores { table, others }) }
    }
}

impl Store for Router {
    fn submit(&self, group: Vec<Op>, deadline: Instant, done: Done) {
        let mut keys = group.iter().flat_map(Op::keys).map(Key::space);
        let first = keys.next().unwrap_or_default();
        if keys.all(|space| space == first) {
            return match self.stores.of(first) {
                Some(store) => store.submit(group, deadline, done),
                None => done(Err(missing(first))),
            };
        }
        let stores = self.stores.clone();
        vital::spawn("a claim in two spaces", async move { done(stores.run_apart(group, deadline).await) });
    }

    fn submit_renewal(&self, op: Op, deadline: Instant, done: Done) {
        let first = op.keys()[0].space();
        match self.stores.of(first).filter(|_| op.keys().iter().all(|key| key.space() == first)) {
            Some(store) => store.submit_renewal(op, deadline, done),
            None => self.submit(vec![op], deadline, done),
        }
    }

    fn list(
        &self,
        prefix: String,
        after: Option<Key>,
        limit: usize,
    ) -> StoreFuture<Result<Page, StoreError>> {
        let stores = self.stores.clone();
        Box::pin(async move { stores.list(&prefix, after.as_ref(), limit).await })
    }

    fn read(&self, key: Key) -> StoreFuture<Result<Option<Stored>, StoreError>> {
        match self.stores.of(key.space()) {
            Some(store) => store.read(key),
            None => Box::pin(std::future::ready(Ok(None))),
        }
    }

    /// A quorum that lacks some of its servers, or its majority, is warned of: the rest goes on without.
    fn health(&self) -> Health {
        let mut health = self.stores.table.health();
        if let (Health::Ready { warnings, .. }, Some(quorum)) = (&mut health, self.stores.of(Space::Quorum)) {
            match quorum.health() {
                Health::Ready { warnings: more, .. } => warnings.extend(more),
                Health::Unavailable { why } => warnings.push(format!("the quorum has no majority: {why}")),
            }
        }
        health
    }

    fn is_gone(&self, space: Space) -> bool {
        let own = self.stores.of(space).filter(|_| space == Space::Quorum);
        self.stores.table.is_gone(space) || own.is_some_and(|store| store.is_gone(space))
    }

    fn lacks(&self, space: Space) -> Option<String> {
        match self.stores.of(space) {
            Some(store) => store.lacks(space),
            None => Some(missing(space).to_string()),
        }
    }

    fn on_loss(&self, tell: Loss) {
        for store in self.stores.all() {
            store.on_loss(tell.clone());
        }
    }

    fn rested(&self) -> StoreFuture<()> {
        let stores = self.stores.clone();
        Box::pin(async move {
            for store in stores.all() {
                store.rested().await;
            }
        })
    }

    /// Those of the spaces beside the table.
    fn raise_tokens(&self, least: Option<Token>) -> StoreFuture<Result<Token, StoreError>> {
        let stores = self.stores.clone();
        Box::pin(async move {
            let mut highest = Token::default();
            for (_, store) in &stores.others {
                highest = highest.max(store.raise_tokens(least).await?);
            }
            Ok(highest)
        })
    }

    fn forget(&self) {
        for store in self.stores.all() {
            store.forget();
        }
    }
}

fn missing(space: Space) -> StoreError {
    let what = match space {
        Space::Quorum => "a quorum needs three or more [stores.…] in config.toml".to_owned(),
        space => format!("this proxy has no store for the space {space:?}"),
    };
    StoreError::Unsent { why: what }
}

impl Stores {
    fn of(&self, space: Space) -> Option<&Arc<dyn Store>> {
        match space {
            Space::Table => Some(&self.table),
            space => self.others.iter().find(|(other, _)| *other == space).map(|(_, store)| store),
        }
    }

    fn all(&self) -> impl Iterator<Item = &Arc<dyn Store>> {
        std::iter::once(&self.table).chain(self.others.iter().map(|(_, store)| store))
    }

    /// Pages of all spaces, merged; without the table there is none. Keys of one text stay on one page, so that a page may be longer than
    /// asked for by those of the other spaces: whoever goes on after a key goes on after its text.
    async fn list(&self, prefix: &str, after: Option<&Key>, limit: usize) -> Result<Page, StoreError> {
        let mut whole = self.table.list(prefix.to_owned(), after.cloned(), limit).await?;
        for (space, store) in &self.others {
            match store.list(prefix.to_owned(), after.cloned(), limit).await {
                Ok(page) => {
                    whole.more |= page.more;
                    whole.items.extend(page.items);
                    whole.unheard.extend(page.unheard);
                }
                Err(error) => whole.unheard.push(format!("{space:?}: {}", error.why()).to_lowercase()),
            }
        }
        let Page { mut items, mut more, unheard } = whole;
        items.sort_by(|a, b| a.key.cmp(&b.key));
        let mut keep = items.len().min(limit);
        while keep > 0 && keep < items.len() && items[keep].key.as_str() == items[keep - 1].key.as_str() {
            keep += 1;
        }
        more |= keep < items.len();
        items.truncate(keep);
        Ok(Page { items, more, unheard })
    }

    /// One operation after the other. What follows a failure is not tried: the caller hears of the
    /// failure, and repeats or undoes the whole group. Where a part of the group was carried out, it counts as sent.
    async fn run_apart(&self, group: Vec<Op>, deadline: Instant) -> Result<Reply, StoreError> {
        let mut whole = Reply { outcomes: Vec::new(), asked_at: clock::now(), now: ServerTime::default() };
        for op in group {
            let done = self.run_one(op, deadline).await;
            let (outcome, now) = if whole.outcomes.is_empty() { done? } else { done.map_err(sent)? };
            whole.outcomes.push(outcome);
            whole.now = whole.now.max(now);
        }
        Ok(whole)
    }

    async fn run_one(&self, op: Op, deadline: Instant) -> Result<(Outcome, ServerTime), StoreError> {
        let mut parts = split(&op);
        if parts.len() == 1 {
            let (_, op) = parts.remove(0);
            return self.ask(op, deadline).await;
        }
        match op {
            Op::Acquire(claim) | Op::Rejoin(claim) => self.claim(parts, &claim, deadline).await,
            op => {
                let mut worst: Option<(Outcome, ServerTime)> = None;
                for (_, part) in parts {
                    let done = self.ask(part, deadline).await;
                    let (outcome, now) = if worst.is_none() { done? } else { done.map_err(sent)? };
                    worst = Some(match worst {
                        None => (outcome, now),
                        Some((seen, at)) => (worse(seen, outcome), at.max(now)),
                    });
                }
                Ok(worst.unwrap_or_else(|| unreachable!("{op:?} has keys")))
            }
        }
    }

    /// Grants all parts or none. While one of them may be left, the answer is an error: the caller undoes the
    /// whole claim later, as after any failure.
    async fn claim(
        &self,
        parts: Vec<(Vec<usize>, Op)>,
        claim: &Claim,
        deadline: Instant,
    ) -> Result<(Outcome, ServerTime), StoreError> {
        let result = self.claim_all(parts, claim, deadline).await;
        if !matches!(result, Ok((Outcome::Granted(_), _))) {
            // Whatever became of what undoes it: the claim was sent.
            self.undo(claim, deadline).await.map_err(sent)?;
        }
        result
    }

    async fn claim_all(
        &self,
        parts: Vec<(Vec<usize>, Op)>,
        claim: &Claim,
        deadline: Instant,
    ) -> Result<(Outcome, ServerTime), StoreError> {
        let mut grants: Vec<(Vec<usize>, Grant)> = Vec::new();
        let mut at = ServerTime::default();
        let again = |place: usize| {
            let key = claim.keys[place].clone();
            Outcome::Held(Denial {
                key,
                holder: None,
                free_in_us: OWN_LEASE_US,
                next_waiter: None,
                joined: None,
            })
        };
        for (places, part) in parts {
            match self.ask(part, deadline).await? {
                (Outcome::Granted(grant), now)
                    if grants.iter().all(|(_, before)| before.nonce == grant.nonce) =>
                {
                    at = at.max(now);
                    grants.push((places, grant));
                }
                // The owner's own lease of one space, entered again, cannot stand for both.
                (Outcome::Granted(_), now) => return Ok((again(places[0]), now)),
                other => return Ok(other),
            }
        }
        match self.lift(claim, &mut grants, deadline).await? {
            None => Ok((Outcome::Granted(joined(claim.keys.len(), &grants)), at)),
            Some(place) => Ok((again(place), at)),
        }
    }

    /// Lifts all parts to the highest token among them, so that the lease has one. The place of a key that was
    /// lost meanwhile, where there is one.
    ///
    /// A space whose tokens are a server's numbers knows of the lift only for as long as the session lasts. Its next token
    /// is above that of a row of the same text. Where the lease has no such row, the floor of all tokens is raised.
    async fn lift(
        &self,
        claim: &Claim,
        grants: &mut [(Vec<usize>, Grant)],
        deadline: Instant,
    ) -> Result<Option<usize>, StoreError> {
        let highest = grants.iter().flat_map(|(_, grant)| &grant.tokens).max().copied().unwrap_or_default();
        let is_below = |grant: &Grant| grant.tokens.iter().any(|token| *token < highest);
        let forgets = |key: &Key| {
            key.space().rests_on_session() && !claim.keys.contains(&key.clone().within(Space::Table))
        };
        let mut below = grants.iter().filter(|(_, grant)| is_below(grant)).flat_map(|(places, _)| places);
        if below.any(|place| forgets(&claim.keys[*place])) {
            // First: the session's own next token is above what it remembers, and nobody else would know of that.
            self.table.raise_tokens(Some(highest)).await?;
        }
        for (places, grant) in grants.iter_mut().filter(|(_, grant)| is_below(grant)) {
            let keys: Arc<[Key]> = places.iter().map(|place| claim.keys[*place].clone()).collect();
            grant.tokens = vec![highest; keys.len()];
            let lease = LeaseRef { keys, nonce: grant.nonce, token: Token::ANY };
            let raised = self.ask(Op::Raise { lease, tokens: grant.tokens.clone() }, deadline).await?;
            if !matches!(raised, (Outcome::Renewed { .. }, _)) {
                return Ok(Some(places[0]));
            }
        }
        Ok(None)
    }

    /// All parts are tried, whatever becomes of one.
    async fn undo(&self, claim: &Claim, deadline: Instant) -> Result<(), StoreError> {
        let abandon = Op::Abandon { keys: claim.keys.clone(), attempt: claim.attempt };
        let mut undone = Ok(());
        for (_, part) in split(&abandon) {
            if let Err(error) = self.ask(part, deadline).await {
                undone = Err(error);
            }
        }
        undone
    }

    async fn ask(&self, op: Op, deadline: Instant) -> Result<(Outcome, ServerTime), StoreError> {
        let space = op.keys()[0].space();
        let store = self.of(space).ok_or_else(|| missing(space))?;
        let (tell, told) = oneshot::channel();
        store.submit(vec![op], deadline, Box::new(move |result| drop(tell.send(result))));
        let reply = told.await.unwrap_or_else(|_| Err(StoreError::stopped()))?;
        match reply.outcomes.into_iter().next() {
            Some(Outcome::Unknown) => Err(StoreError::unknown()),
            outcome => Ok((outcome.ok_or_else(StoreError::stopped)?, reply.now)),
        }
    }
}

/// The error of a group of which a part was carried out, or may have been.
fn sent(error: StoreError) -> StoreError {
    StoreError::Unavailable { why: error.why() }
}

/// The operation for the keys of each space, with the places that these keys have among all.
fn split(op: &Op) -> Vec<(Vec<usize>, Op)> {
    let keys = op.keys();
    let of = |space: Space| -> Vec<usize> {
        (0..keys.len()).filter(|place| keys[*place].space() == space).collect()
    };
    let places = Space::ALL.into_iter().map(of).filter(|places| !places.is_empty());
    places
        .map(|places| {
            let keys: Arc<[Key]> = places.iter().map(|place| keys[*place].clone()).collect();
            let part = part(op, keys, places[0] == 0);
            (places, part)
        })
        .collect()
}

/// `first`: the part has the first key, whose token names the lease.
fn part(op: &Op, keys: Arc<[Key]>, first: bool) -> Op {
    // The parts without the first key are known by their nonce alone.
    let lease = |lease: &LeaseRef| LeaseRef {
        keys: keys.clone(),
        nonce: lease.nonce,
        token: if first { lease.token } else { Token::ANY },
    };
    match op {
        Op::Acquire(claim) => Op::Acquire(Claim { keys, ..claim.clone() }),
        Op::Rejoin(claim) => Op::Rejoin(Claim { keys, ..claim.clone() }),
        Op::Renew { lease: of, ttl_ms } => Op::Renew { lease: lease(of), ttl_ms: *ttl_ms },
        Op::Raise { lease: of, tokens } => Op::Raise { lease: lease(of), tokens: tokens.clone() },
        Op::Release(release) => Op::Release(Release { lease: lease(&release.lease), ..release.clone() }),
        Op::Abandon { attempt, .. } => Op::Abandon { keys, attempt: *attempt },
        Op::Force { .. } | Op::GlobalQueue { .. } | Op::Read { .. } | Op::Commit(_) => op.clone(),
    }
}

fn joined(keys: usize, grants: &[(Vec<usize>, Grant)]) -> Grant {
    let mut tokens = vec![Token::default(); keys];
    for (places, grant) in grants {
        for (place, token) in places.iter().zip(&grant.tokens) {
            tokens[*place] = *token;
        }
    }
    let all = || grants.iter().map(|(_, grant)| grant);
    Grant {
        nonce: all().map(|grant| grant.nonce).next().unwrap_or_default(),
        chosen: None,
        tokens,
        left_us: all().map(|grant| grant.left_us).min().unwrap_or_default(),
        levels: all().map(|grant| grant.levels).max().unwrap_or_default(),
        repeated: all().any(|grant| grant.repeated),
    }
}

/// What both parts together come to.
fn worse(one: Outcome, other: Outcome) -> Outcome {
    match (one, other) {
        (Outcome::Renewed { left_us: a }, Outcome::Renewed { left_us: b }) => {
            Outcome::Renewed { left_us: a.min(b) }
        }
        (Outcome::Released { levels_left: a }, Outcome::Released { levels_left: b }) => {
            Outcome::Released { levels_left: a.max(b) }
        }
        (Outcome::Abandoned, Outcome::Abandoned) => Outcome::Abandoned,
        (lost @ Outcome::Lost, _) | (_, lost @ Outcome::Lost) => lost,
        (_, other) => other,
    }
}

#[cfg(test)]
mod tests;

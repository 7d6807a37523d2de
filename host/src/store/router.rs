//! Combines several stores into one: each key space has its own store.
//!
//! While a policy's change of primitive is in progress, a claim has keys of two spaces. The claim is made in
//! one space after the other, and undone if the second one denies it. A renewal or a release goes to both
//! spaces. All other groups have keys of one space and are passed on unchanged.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::{Done, Health, Loss, Notify, Page, Reply, Store, StoreError, StoreFuture, Stored};
use crate::clock;
use crate::lock::record::{Cause, Claim, Denial, Grant, Op, Outcome, Release};
use crate::lock::{Instant, Key, LeaseRef, ServerTime, Space, Token};
use crate::vital;

/// When to retry if the owner's own lease of a single space blocks the claim, in microseconds.
const OWN_LEASE_US: u64 = 250_000;

/// The stores of all available spaces.
pub struct Router {
    stores: Arc<Stores>,
}

struct Stores {
    table: Arc<dyn Store>,
    others: Vec<(Space, Arc<dyn Store>)>,
}

impl Router {
    /// `table` is the store of [`Space::Table`]; its health is the health of the whole.
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

    /// A quorum without some of its servers, or without a majority, only causes a warning: the other spaces do
    /// not need it.
    fn health(&self) -> Health {
        let mut health = self.stores.table.health();
        let Health::Ready { warnings, .. } = &mut health else { return health };
        for (space, store) in self.stores.others.iter().filter(|(space, _)| space.has_own_servers()) {
            match store.health() {
                Health::Ready { warnings: more, .. } => warnings.extend(more),
                Health::Unavailable { why } => {
                    warnings.push(format!("the {} has no majority: {why}", name(*space)));
                }
            }
        }
        health
    }

    fn is_gone(&self, space: Space) -> bool {
        let own = self.stores.of(space).filter(|_| space.has_own_servers());
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

    /// Raises the token floors of the spaces other than the table.
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

    fn connect(&self, proxy: Arc<str>, notify: Notify) {
        self.stores.table.connect(proxy, notify);
    }

    fn suspend_delegations(&self) -> StoreFuture<()> {
        self.stores.table.suspend_delegations()
    }

    fn end_delegations(&self) {
        self.stores.table.end_delegations();
    }

    fn resume_delegations(&self) {
        self.stores.table.resume_delegations();
    }

    fn outdated(&self, key: &Key) {
        if let Some(store) = self.stores.of(key.space()) {
            store.outdated(key);
        }
    }

    fn forget(&self) {
        for store in self.stores.all() {
            store.forget();
        }
    }
}

/// The name of a space in messages.
fn name(space: Space) -> String {
    format!("{space:?}").to_lowercase()
}

fn missing(space: Space) -> StoreError {
    let why = match space.has_own_servers() {
        true => format!("a {} needs three or more [stores.…] in config.toml", name(space)),
        false => format!("this proxy has no store for the space {space:?}"),
    };
    StoreError::Unsent { why }
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

    /// Merges the pages of all spaces. The table's page is required. All keys with the same text stay on one
    /// page, which may therefore exceed `limit` by the keys of other spaces: a caller that continues after a
    /// key continues after its text.
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

    /// Runs the operations one after the other and stops at the first failure: the caller is told of it, and
    /// repeats or undoes the whole group. If a part of the group was applied, the group counts as sent.
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

    /// Grants all parts or none. If a part may remain granted, the answer is an error: the caller undoes the
    /// whole claim later, as after any failure.
    async fn claim(
        &self,
        parts: Vec<(Vec<usize>, Op)>,
        claim: &Claim,
        deadline: Instant,
    ) -> Result<(Outcome, ServerTime), StoreError> {
        let result = self.claim_all(parts, claim, deadline).await;
        if !matches!(result, Ok((Outcome::Granted(_), _))) {
            // The claim was sent, so the error must say so even if the undoing was not sent.
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
                cause: Cause::Held,
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
                // A level of the owner's own lease in one space cannot stand for both spaces.
                (Outcome::Granted(_), now) => return Ok((again(places[0]), now)),
                other => return Ok(other),
            }
        }
        match self.lift(claim, &mut grants, deadline).await? {
            None => Ok((Outcome::Granted(joined(claim.keys.len(), &grants)), at)),
            Some(place) => Ok((again(place), at)),
        }
    }

    /// Raises all parts to the highest token among them, so that the lease has one token. Returns the index of
    /// a key that was lost meanwhile, if there is one.
    ///
    /// A space whose tokens are a server's numbers remembers the raised token only as long as the session
    /// lasts. Its next token is above that of a row with the same text. If the lease has no such row, the floor
    /// of all tokens is raised.
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
            // This comes first: the next token of this session is above the token that it remembers, but no
            // other session would know of that.
            self.table.raise_tokens(Some(highest)).await?;
        }
        for (places, grant) in grants.iter_mut().filter(|(_, grant)| is_below(grant)) {
            let keys: Arc<[Key]> = places.iter().map(|place| claim.keys[*place].clone()).collect();
            grant.tokens = vec![highest; keys.len()];
            let lease = LeaseRef { keys, nonce: grant.nonce, token: None, principal: None };
            let raised = self.ask(Op::Raise { lease, tokens: Some(grant.tokens.clone()) }, deadline).await?;
            if !matches!(raised, (Outcome::Renewed { .. }, _)) {
                return Ok(Some(places[0]));
            }
        }
        Ok(None)
    }

    /// Undoes all parts, even if undoing one of them fails.
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

/// Turns an error into that of a group of which a part was applied, or may have been.
fn sent(error: StoreError) -> StoreError {
    StoreError::Unavailable { why: error.why() }
}

/// Splits the operation by key space. Each part has the indexes that its keys have in the whole.
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

/// The part of an operation for `keys`. `first`: the part has the first key, whose token identifies the lease.
fn part(op: &Op, keys: Arc<[Key]>, first: bool) -> Op {
    // Parts without the first key are identified by their nonce alone.
    let lease = |lease: &LeaseRef| LeaseRef {
        keys: keys.clone(),
        nonce: lease.nonce,
        token: lease.token.filter(|_| first),
        principal: lease.principal.clone(),
    };
    match op {
        Op::Acquire(claim) => Op::Acquire(Claim { keys, ..claim.clone() }),
        Op::Rejoin(claim) => Op::Rejoin(Claim { keys, ..claim.clone() }),
        Op::Renew { lease: of, ttl_ms } => Op::Renew { lease: lease(of), ttl_ms: *ttl_ms },
        Op::Raise { lease: of, tokens } => Op::Raise { lease: lease(of), tokens: tokens.clone() },
        Op::Release(release) => Op::Release(Release { lease: lease(&release.lease), ..release.clone() }),
        Op::Abandon { attempt, .. } => Op::Abandon { keys, attempt: *attempt },
        Op::Force { .. }
        | Op::GlobalQueue { .. }
        | Op::Read { .. }
        | Op::Commit(_)
        | Op::Delegate(_)
        | Op::Extend(_)
        | Op::Restore(_) => op.clone(),
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

/// The combined outcome of two parts.
fn worse(one: Outcome, other: Outcome) -> Outcome {
    match (one, other) {
        (Outcome::Renewed { left_us: a }, Outcome::Renewed { left_us: b }) => {
            Outcome::Renewed { left_us: a.min(b) }
        }
        (Outcome::Released { levels_left: a }, Outcome::Released { levels_left: b }) => {
            Outcome::Released { levels_left: a.max(b) }
        }
        (Outcome::Abandoned, Outcome::Abandoned) => Outcome::Abandoned,
        (forbidden @ Outcome::Forbidden, _) | (_, forbidden @ Outcome::Forbidden) => forbidden,
        (lost @ Outcome::Lost, _) | (_, lost @ Outcome::Lost) => lost,
        (_, other) => other,
    }
}

#[cfg(test)]
mod tests;

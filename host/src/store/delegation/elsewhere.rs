//! Keys about which other proxies decide: they are asked to give them back.

use std::sync::Arc;
use std::time::Duration;

use super::super::{Done, Reply, StoreError, StoreFuture, Stored};
use super::shared::Shared;
use super::state::Group;
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::record::{Cause, Denial, NextWaiter, Op, Outcome};
use crate::lock::{Instant, Key};
use crate::vital;

/// How often an operation asks again for a key that another proxy is giving back, at first and at last.
const ASK_AGAIN: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));
/// How often a list or a reading of a key asks again, and shows the delegation after that.
const LOOKS: u32 = 6;
/// When a claim is tried again whose key another proxy does not give back, in microseconds.
const RETRY_US: u64 = 250_000;

impl Shared {
    /// Tells another proxy that this one waits for a key.
    pub fn notify(&self, proxy: &str, key: &Key) {
        if let Some((_, notify)) = self.peers.get().filter(|_| !self.is_own(proxy)) {
            notify(proxy, key);
        }
    }

    /// Whether this is the name of this proxy.
    pub fn is_own(&self, proxy: &str) -> bool {
        self.peers.get().is_some_and(|(own, _)| **own == *proxy)
    }

    /// Lets the store decide.
    pub fn forward(&self, group: Group) {
        let Group { mut ops, is_renewal, deadline, done, .. } = group;
        let done = self.resolved(ops.clone(), is_renewal, deadline, done);
        match is_renewal {
            true => self.inner.submit_renewal(ops.remove(0), deadline, done),
            false => self.inner.submit(ops, deadline, done),
        }
    }

    /// Answers a group once no other proxy decides about its keys: those that do are asked to give them back.
    pub fn resolved(&self, ops: Vec<Op>, is_renewal: bool, deadline: Instant, done: Done) -> Done {
        let this = self.this.clone();
        Box::new(move |result| {
            let is_elsewhere = |outcome: &Outcome| matches!(outcome, Outcome::Elsewhere { .. });
            match (result, this.upgrade()) {
                (Ok(reply), Some(shared)) if reply.outcomes.iter().any(is_elsewhere) => {
                    vital::spawn("a key of another proxy", async move {
                        done(shared.ask_again(ops, is_renewal, deadline, reply).await);
                    });
                }
                (result, _) => done(result),
            }
        })
    }

    /// Asks for the outcomes that another proxy has to give, until they are in the store.
    async fn ask_again(
        &self,
        ops: Vec<Op>,
        is_renewal: bool,
        deadline: Instant,
        mut reply: Reply,
    ) -> Result<Reply, StoreError> {
        reached(Branch::DelegationElsewhere);
        let (mut pause, longest) = ASK_AGAIN;
        loop {
            let (mut places, mut awaited, mut is_lost, mut is_here) = (Vec::new(), None, true, false);
            for (place, outcome) in reply.outcomes.iter().enumerate() {
                if let Outcome::Elsewhere { key, proxy } = outcome {
                    self.notify(proxy, key);
                    places.push(place);
                    awaited = Some(key.clone());
                    let has_key = self.is_own(proxy) && self.state.lock().keys.contains_key(key);
                    is_here |= has_key;
                    is_lost &= self.is_own(proxy) && !has_key;
                }
            }
            let Some(awaited) = awaited else { return Ok(reply) };
            // A delegation of this proxy that it does not know any more takes the key until it ends.
            if is_lost || clock::now().plus_us(pause.as_micros() as u64) >= deadline {
                return given_up(&ops, reply, is_lost);
            }
            if !is_here {
                self.until_notified(&awaited, pause).await;
                pause = (pause * 2).min(longest);
            }
            let (tell, told) = tokio::sync::oneshot::channel();
            let asked: Vec<Op> = places.iter().map(|place| ops[*place].clone()).collect();
            let done = Box::new(move |result| drop(tell.send(result)));
            match (is_here, &asked[..]) {
                // The operation was on its way to the store when this proxy got the key.
                (true, _) => {
                    self.submit(Group { ops: asked, is_renewal, was_extended: false, deadline, done });
                }
                (false, [op]) if is_renewal => self.inner.submit_renewal(op.clone(), deadline, done),
                (false, _) => self.inner.submit(asked, deadline, done),
            }
            let again = told.await.unwrap_or_else(|_| Err(StoreError::stopped()));
            let again = match reply.outcomes.len() == places.len() {
                true => again?,
                // Other operations of the group are done.
                false => again.map_err(|error| StoreError::Unavailable { why: error.why() })?,
            };
            let counts = |outcome: &Outcome| matches!(outcome, Outcome::Granted(_) | Outcome::Renewed { .. });
            // What an outcome of the earlier question promises counts from that question.
            if !reply.outcomes.iter().any(counts) {
                (reply.asked_at, reply.now) = (again.asked_at, again.now);
            }
            for (place, outcome) in places.into_iter().zip(again.outcomes) {
                reply.outcomes[place] = outcome;
            }
        }
    }

    /// Waits until another proxy notifies this one of the key, but no longer than `pause`.
    async fn until_notified(&self, key: &Key, pause: Duration) {
        let signal = self.state.lock().asking.entry(key.clone()).or_default().clone();
        let _elapsed = tokio::time::timeout(pause, signal.notified()).await;
        let mut state = self.state.lock();
        drop(signal);
        if state.asking.get(key).is_some_and(|signal| Arc::strong_count(signal) == 1) {
            state.asking.remove(key);
        }
    }

    /// Reads the store until no other proxy decides about what it reads, and not too often.
    pub async fn looked<T>(
        &self,
        read: impl Fn() -> StoreFuture<Result<T, StoreError>>,
        stored: impl Fn(&T) -> &[Stored],
    ) -> Result<T, StoreError> {
        let mut pause = ASK_AGAIN.0;
        for _ in 1..LOOKS {
            let found = read().await?;
            if !self.recall(stored(&found)) {
                return Ok(found);
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        read().await
    }

    /// Asks other proxies to give back what they have of these keys. Returns whether they have any.
    fn recall<'a>(&self, stored: impl IntoIterator<Item = &'a Stored>) -> bool {
        let mut has_any = false;
        for stored in stored {
            let owner = stored.delegation().and_then(|holder| holder.tag.delegated_to.as_ref());
            if let Some(owner) = owner.filter(|owner| !self.is_own(owner)) {
                has_any = true;
                self.notify(owner, &stored.key);
            }
        }
        has_any
    }
}

/// The answer if another proxy did not give a key back in time. It is then not known whether an earlier attempt of a claim was
/// granted.
fn given_up(ops: &[Op], mut reply: Reply, is_lost: bool) -> Result<Reply, StoreError> {
    let is_unknown = |op: &Op| match op {
        Op::Rejoin(_) => true,
        Op::Acquire(claim) => claim.may_have_its_lease(),
        _ => false,
    };
    let mut left = ops.iter().zip(&reply.outcomes);
    if left.any(|(op, outcome)| matches!(outcome, Outcome::Elsewhere { .. }) && is_unknown(op)) {
        let why = "another proxy decides about the key in its memory, and does not answer";
        return Err(StoreError::Unavailable { why: why.to_owned() });
    }
    for (op, outcome) in ops.iter().zip(&mut reply.outcomes) {
        let Outcome::Elsewhere { key, proxy } = outcome else { continue };
        *outcome = match op {
            Op::Acquire(_) => Outcome::Held(Denial {
                key: key.clone(),
                cause: Cause::Delegated,
                holder: None,
                free_in_us: RETRY_US,
                next_waiter: Some(NextWaiter { proxy: proxy.clone(), ticket: None }),
                joined: None,
            }),
            Op::Abandon { .. } if is_lost => Outcome::Abandoned,
            Op::Renew { .. } | Op::Raise { .. } | Op::Release(_) if is_lost => Outcome::Lost,
            _ => Outcome::Unknown,
        };
    }
    Ok(reply)
}

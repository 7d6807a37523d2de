//! Keys that this proxy decides about in its memory, for a while.
//!
//! [`Delegations`] stands in front of the store of the table. If a claim may be delegated, the store grants it together with
//! a *delegation* of its key: a lease of this proxy on the key, which the store keeps (see
//! [`lock::record`](crate::lock::record)). From then on, acquire, renew and release are decided on the record in memory,
//! without a statement. A lease beneath a delegation ends before the delegation does; if it would not, the delegation is
//! extended first. When another proxy waits for the key, when nobody uses it, and when this proxy stops, its record goes back
//! to the store as it is, with its leases.
//!
//! While a key is delegated, only this proxy knows its leases. Whatever happens to this proxy, the store grants the key to
//! others only after all of these leases have ended.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use super::{Done, Health, Loss, Notify, Page, Store, StoreError, StoreFuture, Stored};
use crate::lock::record::Op;
use crate::lock::{Instant, Key, Space, Token};
use crate::mutex::Mutex;
use crate::telemetry::Metrics;
use crate::vital;

mod elsewhere;
mod held;
mod shared;
mod state;

use shared::Shared;
use state::{Group, State};

/// How often delegations are extended and given back.
const SWEEP: Duration = Duration::from_millis(100);
/// How long a key is granted here while another proxy waits for it.
const PASSING: Duration = Duration::from_micros(held::PASSING_US);
/// How often a suspension looks whether all keys are back.
const LOOK: Duration = Duration::from_millis(2);

/// The membership of this proxy in its fleet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Life {
    /// Rises whenever this proxy ceases to be a member. The others may have granted the same resources since, by other keys.
    pub number: u64,
    /// Whether this proxy is a member now.
    pub may_grant: bool,
}

/// Tells the membership.
pub type Lives = Box<dyn Fn() -> Life + Send + Sync>;

/// How long a delegation may last, and what it uses.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The longest lease, in milliseconds.
    pub longest_ms: u32,
    /// By how much clocks differ in speed, in thousandths.
    pub drift_per_mille: u32,
    /// How long the store may take.
    pub timeout: Duration,
    /// How many tokens a delegation has at first, and gets when they are used up.
    pub tokens: u64,
}

impl Bounds {
    /// The usual [`Bounds::tokens`].
    pub const TOKENS: u64 = 1_000;
}

/// A store of the table that keeps some records in memory.
pub struct Delegations {
    shared: Arc<Shared>,
}

impl Delegations {
    /// Puts delegations in front of `inner`.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn new(inner: Arc<dyn Store>, bounds: Bounds, lives: Lives, metrics: Metrics) -> Delegations {
        let shared = Arc::new_cyclic(|this: &Weak<Shared>| Shared {
            this: this.clone(),
            inner,
            lives,
            bounds,
            metrics,
            state: Mutex::default(),
            peers: OnceLock::new(),
            losses: Mutex::default(),
        });
        vital::spawn("the delegations", sweep(shared.this.clone()));
        Delegations { shared }
    }
}

async fn sweep(shared: Weak<Shared>) {
    loop {
        tokio::time::sleep(SWEEP).await;
        let Some(shared) = shared.upgrade() else { return };
        shared.with(State::sweep);
    }
}

impl Store for Delegations {
    fn submit(&self, group: Vec<Op>, deadline: Instant, done: Done) {
        self.shared.submit(Group { ops: group, is_renewal: false, was_extended: false, deadline, done });
    }

    fn submit_renewal(&self, op: Op, deadline: Instant, done: Done) {
        self.shared.submit(Group { ops: vec![op], is_renewal: true, was_extended: false, deadline, done });
    }

    fn list(
        &self,
        prefix: String,
        after: Option<Key>,
        limit: usize,
    ) -> StoreFuture<Result<Page, StoreError>> {
        let shared = self.shared.clone();
        Box::pin(async move {
            let (mut page, mut after) = (Page::default(), after);
            loop {
                let left = limit - page.items.len();
                let read = || shared.inner.list(prefix.clone(), after.clone(), left);
                let Page { mut items, more, unheard } = shared.looked(read, |page| &page.items).await?;
                after = items.last().map(|stored| stored.key.clone());
                // A key that is delegated to this proxy may have no lease.
                items.retain_mut(|stored| !shared.overlay(stored) || stored.record.until() > stored.now);
                page.items.extend(items);
                (page.more, page.unheard) = (more, unheard);
                // A page is full if there are more, because the caller continues after its last key.
                if !more || after.is_none() || page.items.len() == limit {
                    return Ok(page);
                }
            }
        })
    }

    fn read(&self, key: Key) -> StoreFuture<Result<Option<Stored>, StoreError>> {
        let shared = self.shared.clone();
        Box::pin(async move {
            let mut stored =
                shared.looked(|| shared.inner.read(key.clone()), |stored| stored.as_slice()).await?;
            if let Some(stored) = &mut stored {
                shared.overlay(stored);
            }
            Ok(stored)
        })
    }

    fn health(&self) -> Health {
        self.shared.inner.health()
    }

    fn is_gone(&self, space: Space) -> bool {
        self.shared.inner.is_gone(space)
    }

    fn lacks(&self, space: Space) -> Option<String> {
        self.shared.inner.lacks(space)
    }

    fn on_loss(&self, tell: Loss) {
        *self.shared.losses.lock() = Some(tell.clone());
        self.shared.inner.on_loss(tell);
    }

    fn connect(&self, proxy: Arc<str>, notify: Notify) {
        let _ = self.shared.peers.set((proxy, notify));
    }

    fn suspend_delegations(&self) -> StoreFuture<()> {
        self.shared.with(|state, now, work| {
            state.suspended = true;
            state.give_all_back(now, work);
        });
        let shared = self.shared.clone();
        Box::pin(async move {
            while !shared.state.lock().keys.is_empty() {
                tokio::time::sleep(LOOK).await;
            }
        })
    }

    fn end_delegations(&self) {
        self.shared.with(|state, now, work| {
            state.is_stopping = true;
            state.give_all_back(now, work);
        });
    }

    fn resume_delegations(&self) {
        self.shared.state.lock().suspended = false;
    }

    fn rested(&self) -> StoreFuture<()> {
        let (back, inner) = (self.suspend_delegations(), self.shared.inner.clone());
        Box::pin(async move {
            back.await;
            inner.rested().await;
        })
    }

    fn raise_tokens(&self, least: Option<Token>) -> StoreFuture<Result<Token, StoreError>> {
        self.shared.inner.raise_tokens(least)
    }

    fn outdated(&self, key: &Key) {
        let mut is_held = false;
        self.shared.with(|state, now, work| is_held = state.want(key, now, work));
        if !is_held {
            return self.shared.inner.outdated(key);
        }
        let (this, key) = (self.shared.this.clone(), key.clone());
        vital::spawn("the return of a delegated key", async move {
            tokio::time::sleep(PASSING).await;
            let Some(shared) = this.upgrade() else { return };
            shared.with(|state, now, work| {
                if state.held(&key).is_some_and(|held| held.is_due_back(now)) {
                    state.give_back(&key, None, now, work);
                }
            });
        });
    }

    fn forget(&self) {
        self.shared.inner.forget();
    }
}

#[cfg(test)]
mod tests;

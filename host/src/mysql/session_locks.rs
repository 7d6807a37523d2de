//! Locks that depend on a session. The guard of such a key is a lock that the session holds, so it is free when
//! the session ends.
//!
//! MySQL excludes only other proxies: one session has the key's named lock ([`advisory`]) or its row lock
//! ([`row`]). Among the clients of one proxy [`record::apply`](crate::lock::record::apply) decides as usual,
//! on records in memory that live as long as the guard. Tokens come from a counter of the server that is read
//! after the guard was taken. So they rise over all proxies and restarts.
//!
//! A session is never closed while a holder may be certain of a lock on it. If the session cannot be used any
//! more, its leases end and their holders are told. But its connection stays open, and its keys count as
//! held, until the last moment of which a holder may be certain. The same happens with all leases if this
//! proxy ceases to be a member of its fleet.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::context::Context;
use super::pipeline::queue::{Job, Places};
use super::store::MysqlStore;
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::record::Op;
use crate::lock::{Instant, Key, ServerTime, Space, Token};
use crate::mutex::{Mutex, MutexGuard};
use crate::store::local_records::{DecisionInputs, LocalRecords, page};
use crate::store::{Done, Health, Loss, Page, Store, StoreError, StoreFuture, Stored};

pub mod advisory;
pub mod row;
mod slot;
mod tokens;

/// How long the server keeps an idle session, in seconds. A proxy that was cut off keeps others out for that
/// long.
pub const SESSION_S: u32 = 30;
/// How long after the last sign of life of the session a holder may be certain of a lease, in microseconds.
/// It is shorter than [`SESSION_S`], which leaves time for the way to the server.
const CERTAIN_US: u64 = (SESSION_S as u64 - 1) * 1_000_000;

/// How often the task looks for ended leases and for idle sessions.
const SWEEP: Duration = Duration::from_millis(100);
/// How long to wait for an answer on a session with leases. If the server answers after all, nothing is lost.
const PATIENCE: Duration = Duration::from_secs(10);
/// After this time without an exchange the session is asked for a sign of life, in microseconds. Its end is
/// noticed this late.
const SILENCE_US: u64 = 1_000_000;

/// The handle on the task that keeps the guards of one space.
pub struct SessionLocks<G> {
    space: Space,
    jobs: UnboundedSender<Job>,
    places: Places,
    context: Arc<Context>,
    common: Arc<Common<G>>,
}

/// The state that the task and its users share.
struct Common<G> {
    held: Mutex<LocalRecords<G>>,
    time: Time,
    losses: Losses,
    /// The life of the membership that the leases belong to, see `Standing`.
    life: AtomicU64,
}

impl<G> SessionLocks<G> {
    /// The handle, and the receiver for the task.
    fn open(
        space: Space,
        store: &MysqlStore,
        max_queued: usize,
    ) -> (SessionLocks<G>, UnboundedReceiver<Job>) {
        let (jobs, incoming) = unbounded_channel();
        let (places, context) = (Places::new(max_queued), store.context.clone());
        let common = Common {
            held: Mutex::default(),
            time: Time::default(),
            losses: Losses::default(),
            life: AtomicU64::new(context.membership.standing().life),
        };
        (SessionLocks { space, jobs, places, context, common: Arc::new(common) }, incoming)
    }
}

impl<G: Clone> Common<G> {
    fn held(&self) -> MutexGuard<'_, LocalRecords<G>> {
        self.held.lock()
    }

    /// Whether a client has a lease on a key with such a guard.
    fn is_held(&self, which: impl Fn(&G) -> bool) -> bool {
        let (_, now) = moment(&self.time);
        self.held().is_held(now, which)
    }

    /// The inputs for decisions now. `grants_from` is on our own clock, and `heard` is the last sign of life of
    /// the session.
    ///
    /// Leases of an earlier life of this proxy end here: other proxies may have granted the same resources
    /// since, by other keys.
    fn inputs(
        &self,
        context: &Context,
        above: Token,
        grants_from: Instant,
        heard: Instant,
    ) -> DecisionInputs {
        let standing = context.membership.standing();
        if self.life.swap(standing.life, Ordering::Relaxed) != standing.life {
            reached(Branch::NotAMember);
            let lost = self.end(standing.latest, |_| true);
            tracing::warn!(
                leases = lost,
                "leases that depend on a session have ended: this proxy was not a member of its fleet"
            );
        }
        let (own, now) = moment(&self.time);
        let grants_from = self.time.at(grants_from.max(context.waits_until()));
        // A holder is certain only as long as the server surely keeps the session, and the fleet waits for this
        // proxy: after that the others may use other keys.
        let certain_until = heard.plus_us(CERTAIN_US).min(standing.until);
        DecisionInputs { own, now, above, grants_from, certain_until }
    }

    /// Ends the leases on such guards and tells their holders, who may be certain of them until `certain`.
    /// Returns the number of leases.
    fn end(&self, certain: Instant, which: impl Fn(&G) -> bool) -> usize {
        let (own, now) = moment(&self.time);
        let certain = self.time.at(certain.min(own.plus_us(CERTAIN_US)));
        let lost = self.held().end(now, certain, which);
        self.losses.tell(lost)
    }

    /// Forgets the keys with such guards, which are gone, and tells the holders. Returns the number of
    /// leases.
    fn lose(&self, which: impl Fn(&G) -> bool) -> usize {
        let (_, now) = moment(&self.time);
        let lost = self.held().lose(now, which);
        self.losses.tell(lost)
    }
}

/// Until when a holder may be certain of a lease on a session whose last sign of life was at `heard`.
fn certain_until(context: &Context, heard: Instant) -> Instant {
    heard.plus_us(CERTAIN_US).min(context.membership.standing().latest)
}

impl<G: Clone + Send + Sync + 'static> Store for SessionLocks<G> {
    fn submit(&self, group: Vec<Op>, deadline: Instant, done: Done) {
        if let Some(job) = self.places.admit(group, deadline, done) {
            // If the task is gone, the job's responder answers when it is dropped.
            let _ = self.jobs.send(job);
        }
    }

    fn list(
        &self,
        prefix: String,
        after: Option<Key>,
        limit: usize,
    ) -> StoreFuture<Result<Page, StoreError>> {
        let (_, now) = moment(&self.common.time);
        let page = page(self.common.held().list(&prefix, after.as_ref(), now), limit);
        Box::pin(std::future::ready(Ok(page)))
    }

    fn read(&self, key: Key) -> StoreFuture<Result<Option<Stored>, StoreError>> {
        let (_, now) = moment(&self.common.time);
        let stored = self.common.held().read(&key, now);
        Box::pin(std::future::ready(Ok(stored)))
    }

    fn health(&self) -> Health {
        self.context.health.now()
    }

    fn lacks(&self, space: Space) -> Option<String> {
        lacks(space, self.space, self.context.galera.load(Ordering::Relaxed))
    }

    fn on_loss(&self, tell: Loss) {
        self.common.losses.set(tell);
    }

    fn rested(&self) -> StoreFuture<()> {
        let common = self.common.clone();
        let certain = certain_until(&self.context, clock::now());
        Box::pin(async move {
            while clock::now() < certain && common.is_held(|_| true) {
                tokio::time::sleep(SWEEP).await;
            }
        })
    }
}

/// Why this store, which keeps keys of the space `here`, cannot keep those of `wanted`.
fn lacks(wanted: Space, here: Space, galera: bool) -> Option<String> {
    if wanted != here {
        return Some(format!("{wanted:?} is not kept here"));
    }
    let without = wanted == Space::Advisory && galera;
    without.then(|| "the server is a Galera node, and Galera has no GET_LOCK".to_owned())
}

/// The clock of the records. It begins with the server's time at the first reading and follows the proxy's
/// own clock, which is never set.
#[derive(Default)]
pub struct Time(OnceLock<u64>);

impl Time {
    /// Sets the clock, the first time.
    pub fn calibrate(&self, server: ServerTime, own: Instant) {
        let _ = self.0.set(server.0.saturating_sub(own.0));
    }

    /// The time at `own`.
    pub fn at(&self, own: Instant) -> ServerTime {
        ServerTime(own.0 + self.0.get().copied().unwrap_or_default())
    }
}

/// The receiver of losses: it is notified of leases that are lost with their session.
#[derive(Default)]
pub struct Losses(Mutex<Option<Loss>>);

impl Losses {
    /// Sets the receiver.
    pub fn set(&self, tell: Loss) {
        *self.0.lock() = Some(tell);
    }

    /// Tells the receiver. Returns the number of losses.
    pub fn tell(&self, nonces: Vec<u64>) -> usize {
        let lost = nonces.len();
        if lost > 0
            && let Some(tell) = &*self.0.lock()
        {
            tell(nonces);
        }
        lost
    }
}

/// The current moment, on both clocks.
pub fn moment(time: &Time) -> (Instant, ServerTime) {
    let own = clock::now();
    (own, time.at(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_galera_node_has_row_locks_and_no_advisory_locks() {
        for galera in [false, true] {
            assert_eq!(lacks(Space::Row, Space::Row, galera), None);
            assert!(
                lacks(Space::Advisory, Space::Row, galera).is_some_and(|why| why.contains("not kept here"))
            );
            let names = lacks(Space::Advisory, Space::Advisory, galera);
            assert_eq!(names.is_some(), galera, "{names:?}");
            assert!(names.is_none_or(|why| why.contains("GET_LOCK")));
        }
    }
}

//! A store in memory for tests. It makes the same decisions as a server; its clock can be set, and its answers
//! can be lost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::{Done, Health, Page, Reply, Store, StoreError, StoreFuture, Stored};
use crate::clock;
use crate::lock::record::{self, Doubt, Env, Op, Record, Records};
use crate::lock::{Instant, Key, ServerTime, Space, Token};
use crate::mutex::Mutex;

/// One connection to a [`Memory`]. A task runs the groups in the order of submission; the answers come later,
/// in the same order.
pub struct MemoryStore {
    memory: Memory,
    jobs: UnboundedSender<Job>,
}

/// The rows that several stores share, as several proxies share a server. Cheap to clone.
#[derive(Clone)]
pub struct Memory {
    shared: Arc<MemoryState>,
}

struct MemoryState {
    rows: Mutex<Rows>,
    clean_after: Duration,
    /// Added to the machine's clock, in microseconds.
    ahead_us: AtomicU64,
    /// How many answers to lose: the group is applied, and the answer is an error.
    losses: AtomicUsize,
    /// How long answers are delayed, in milliseconds.
    late_ms: AtomicU64,
    outage: Mutex<Option<String>>,
    /// How many groups still run before an outage begins; the largest number means that there is no outage.
    runs: AtomicUsize,
}

#[derive(Default)]
struct Rows {
    by_key: BTreeMap<Key, Row>,
    floor: Token,
    grants_from: ServerTime,
}

struct Row {
    record: Record,
    /// The last write, or the last end of a lease or delay.
    until: ServerTime,
}

struct Job {
    group: Vec<Op>,
    deadline: Instant,
    done: Done,
}

impl Memory {
    /// `clean_after`: rows that have been idle for this long are deleted.
    pub fn new(clean_after: Duration) -> Memory {
        Memory {
            shared: Arc::new(MemoryState {
                rows: Mutex::default(),
                clean_after,
                ahead_us: AtomicU64::new(0),
                losses: AtomicUsize::new(0),
                late_ms: AtomicU64::new(0),
                outage: Mutex::new(None),
                runs: AtomicUsize::new(usize::MAX),
            }),
        }
    }

    /// Opens another store on the same rows.
    ///
    /// # Panics
    /// If called outside a tokio runtime.
    pub fn store(&self) -> MemoryStore {
        let (jobs, incoming) = unbounded_channel();
        tokio::spawn(run(self.clone(), incoming));
        MemoryStore { memory: self.clone(), jobs }
    }

    /// The store's clock.
    pub fn now(&self) -> ServerTime {
        ServerTime(clock::wall_us() + self.shared.ahead_us.load(Ordering::SeqCst))
    }

    /// Sets the store's clock forward, so that leases end earlier than their holders expect.
    pub fn advance_ms(&self, ms: u64) {
        self.shared.ahead_us.fetch_add(ms * 1_000, Ordering::SeqCst);
    }

    /// The next `answers` groups are applied, but answered with an error.
    pub fn lose(&self, answers: usize) {
        self.shared.losses.store(answers, Ordering::SeqCst);
    }

    /// From now on answers are delayed by `ms` milliseconds.
    pub fn answer_late(&self, ms: u64) {
        self.shared.late_ms.store(ms, Ordering::SeqCst);
    }

    /// While `Some`, nothing is applied, and every call fails.
    pub fn set_outage(&self, why: Option<&str>) {
        *self.shared.outage.lock() = why.map(str::to_owned);
        self.shared.runs.store(usize::MAX, Ordering::SeqCst);
    }

    /// After `groups` more groups, nothing is applied.
    pub fn run_before_outage(&self, groups: usize) {
        self.shared.runs.store(groups, Ordering::SeqCst);
    }

    /// Prevents grants before this moment, as after a fail-over.
    pub fn set_grants_from(&self, at: ServerTime) {
        self.shared.rows.lock().grants_from = at;
    }

    fn run(&self, group: &[Op]) -> (Vec<record::Outcome>, ServerTime) {
        let mut rows = self.shared.rows.lock();
        let now = self.now();
        rows.clean(now, self.shared.clean_after);
        let env = Env {
            now,
            floor: rows.floor,
            renamed: Token::default(),
            others: Token::default(),
            grants_from: rows.grants_from,
            takeover: true,
            longest_us: u64::MAX,
            set_back_us: 0,
            steady: true,
        };
        let mut records = Records::default();
        for key in group.iter().flat_map(Op::keys) {
            records.insert(key.clone(), rows.by_key.get(key).map(|row| row.record.clone()));
        }
        let outcomes = group.iter().map(|op| record::apply(&mut records, op, &env)).collect();
        for (key, record, _) in records.changed() {
            let row = Row { record: record.clone(), until: record.until().max(now) };
            rows.by_key.insert(key.clone(), row);
        }
        (outcomes, now)
    }

    fn outage(&self) -> Result<(), StoreError> {
        match &*self.shared.outage.lock() {
            Some(why) => Err(StoreError::Unavailable { why: why.clone() }),
            None => Ok(()),
        }
    }

    fn page(&self, prefix: &str, after: Option<&Key>, limit: usize) -> Page {
        let rows = self.shared.rows.lock();
        let now = self.now();
        let mut items = rows
            .by_key
            .iter()
            .filter(|(key, _)| key.as_str().starts_with(prefix) && after.is_none_or(|after| *key > after))
            .filter(|(_, row)| row.record.until() > now)
            .map(|(key, row)| Stored {
                key: key.clone(),
                record: row.record.clone(),
                now,
                doubt: Doubt::default(),
            });
        let items_of_page = items.by_ref().take(limit).collect();
        Page { items: items_of_page, more: items.next().is_some(), ..Page::default() }
    }
}

impl Rows {
    fn clean(&mut self, now: ServerTime, after: Duration) {
        let after_us = after.as_micros() as u64;
        let floor = &mut self.floor;
        self.by_key.retain(|_, row| {
            let idle = row.until.0.saturating_add(after_us) < now.0;
            if idle {
                *floor = (*floor).max(row.record.token);
            }
            !idle
        });
    }
}

impl Store for MemoryStore {
    fn submit(&self, group: Vec<Op>, deadline: Instant, done: Done) {
        if let Err(refused) = self.jobs.send(Job { group, deadline, done }) {
            (refused.0.done)(Err(StoreError::Unavailable { why: "the store was closed".into() }));
        }
    }

    fn list(
        &self,
        prefix: String,
        after: Option<Key>,
        limit: usize,
    ) -> StoreFuture<Result<Page, StoreError>> {
        let memory = self.memory.clone();
        Box::pin(async move {
            memory.outage()?;
            Ok(memory.page(&prefix, after.as_ref(), limit))
        })
    }

    fn read(&self, key: Key) -> StoreFuture<Result<Option<Stored>, StoreError>> {
        let memory = self.memory.clone();
        Box::pin(async move {
            memory.outage()?;
            let now = memory.now();
            let rows = memory.shared.rows.lock();
            Ok(rows.by_key.get(&key).map(|row| Stored {
                key,
                record: row.record.clone(),
                now,
                doubt: Doubt::default(),
            }))
        })
    }

    fn health(&self) -> Health {
        match &*self.memory.shared.outage.lock() {
            Some(why) => Health::Unavailable { why: why.clone() },
            None => Health::Ready { server: "memory".into(), warnings: Vec::new() },
        }
    }

    fn lacks(&self, _space: Space) -> Option<String> {
        None
    }
}

async fn run(memory: Memory, mut jobs: UnboundedReceiver<Job>) {
    while let Some(Job { group, deadline, done }) = jobs.recv().await {
        let answer = answer(&memory, &group, deadline);
        match memory.shared.late_ms.load(Ordering::SeqCst) {
            0 => {}
            ms => tokio::time::sleep(Duration::from_millis(ms)).await,
        }
        done(answer);
    }
}

fn answer(memory: &Memory, group: &[Op], deadline: Instant) -> Result<Reply, StoreError> {
    memory.outage()?;
    let asked_at = clock::now();
    if asked_at > deadline {
        return Err(StoreError::Unavailable { why: "the deadline has passed".into() });
    }
    match memory.shared.runs.load(Ordering::SeqCst) {
        usize::MAX => {}
        0 => return Err(StoreError::Unavailable { why: "it is stopped".into() }),
        left => memory.shared.runs.store(left - 1, Ordering::SeqCst),
    }
    let (outcomes, now) = memory.run(group);
    let lost =
        memory.shared.losses.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
    match lost {
        Ok(_) => Err(StoreError::Unavailable { why: "the answer was lost".into() }),
        Err(_) => Ok(Reply { outcomes, asked_at, now }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::contract;
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_memory_store_keeps_the_contract() {
        let lasting = Memory::new(Duration::from_secs(3600));
        let forgetful = Memory::new(Duration::from_millis(200));
        contract::run_all(move |kind| {
            let memory = match kind {
                contract::Kind::Lasting => lasting.clone(),
                contract::Kind::Forgetful => forgetful.clone(),
            };
            async move { Arc::new(memory.store()) as Arc<dyn Store> }
        })
        .await;
    }

    #[tokio::test]
    async fn an_operation_whose_answer_is_lost_is_applied() {
        let memory = Memory::new(Duration::from_secs(3600));
        let store = memory.store();
        memory.lose(1);
        let key = Key::new("k").expect("it is a key");
        let claim = contract::claim(&[key.as_str()], "me");
        let deadline = clock::now().plus_ms(1_000);
        let (tell, told) = tokio::sync::oneshot::channel();
        store.submit(
            vec![Op::Acquire(claim)],
            deadline,
            Box::new(|result| tell.send(result).expect("it waits")),
        );
        assert!(told.await.expect("it is answered").is_err());
        assert_eq!(store.list(String::new(), None, 9).await.expect("it lists").items.len(), 1);
        memory.advance_ms(60_000);
        assert!(store.list(String::new(), None, 9).await.expect("it lists").items.is_empty());
    }
}

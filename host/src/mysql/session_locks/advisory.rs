//! The primitive `advisory`: thousands of named locks (`GET_LOCK`) on one pinned session.
//!
//! The session is a separate connection with a separate thread, and is opened for the first lock. Nothing else
//! uses this connection, so that no reset and no pool can free its locks. A batch takes one round trip: it
//! releases the names that are not needed any more, asks for new names without waiting, and asks for a number for
//! the tokens. If the connection is lost, its locks are lost too, and their holders are told at once. A session
//! that cannot be used any more, but may still have its locks, is *parked*: the next session takes its place, and
//! its connection is closed when no holder is certain any more.
//!
//! Only one session is in use at a time. A batch carries hundreds of locks, and a group of operations on
//! several keys needs no agreement between sessions.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::tokens::{counted, number, tokens_for};
use super::{Common, PATIENCE, SESSION_S, SILENCE_US, SWEEP, SessionLocks, certain_until};
use crate::clock;
use crate::config::StoreConfig;
use crate::coverage::{Branch, reached};
use crate::lock::maps::HashSet;
use crate::lock::record::{Op, Outcome};
use crate::lock::{Instant, Key, Space, Token};
use crate::mysql::context::Context;
use crate::mysql::pipeline::backoff::Backoff;
use crate::mysql::pipeline::lanes;
use crate::mysql::pipeline::queue::{Batch, LATE, Queue, Responder};
use crate::mysql::session::fault::Fault;
use crate::mysql::session::link::{EXCHANGE_LIMIT, Link};
use crate::mysql::sql;
use crate::mysql::store::MysqlStore;
use crate::store::Reply;
use crate::store::local_records::DecisionInputs;
use crate::vital;

/// The number of names that one statement asks for.
const STATEMENT_NAMES: usize = 512;

/// How often to look for expired deadlines while the server is awaited, in microseconds. To look at every new
/// operation would wake the thread for each operation of the next batch.
const LOOK_US: u64 = 50_000;

/// The most sessions that are parked at a time. A further one is opened only after one of them is closed.
const PARKED: usize = 4;

/// The name of a key's lock on the server.
type Name = Arc<str>;

/// The guard of a key: the session that has its name.
#[derive(Clone, Debug)]
pub struct Guard {
    name: Name,
    session: u64,
}

/// Named locks on the server of a [`MysqlStore`].
pub type Advisory = SessionLocks<Guard>;

impl SessionLocks<Guard> {
    /// Starts the session's task, which ends with the store. It has the batches and the queue of
    /// `config`.
    ///
    /// # Panics
    /// Outside of a tokio runtime, or if no thread can be started for the session.
    pub fn new(store: &MysqlStore, config: &StoreConfig) -> Advisory {
        let (advisory, incoming) = SessionLocks::open(Space::Advisory, store, config.max_queued);
        let session = Session {
            context: advisory.context.clone(),
            common: advisory.common.clone(),
            serial: 0,
            parked: JoinSet::new(),
            heard: Instant::default(),
            left_over: false,
        };
        store.spawn_apart("advisory locks", session.run(Queue::new(incoming, config.batch)));
        advisory
    }
}

/// The task that owns the connection.
struct Session {
    context: Arc<Context>,
    common: Arc<Common<Guard>>,
    /// The number of the session in use.
    serial: u64,
    parked: JoinSet<()>,
    /// The moment before the last successful exchange. The server keeps the session for [`SESSION_S`] from
    /// then on.
    heard: Instant,
    /// Whether some keys of the last batch may be free with their names not yet released.
    left_over: bool,
}

/// The work of one exchange with the server.
#[derive(Default)]
struct SessionBatch {
    /// Names to release. They count as free, even if the exchange fails.
    free: Vec<Name>,
    want: Vec<(Key, Name)>,
    tokens: u64,
}

/// The answer to a [`SessionBatch`].
#[derive(Default)]
struct SessionAnswer {
    above: Token,
    grants_from: Instant,
}

impl SessionBatch {
    fn is_empty(&self) -> bool {
        self.free.is_empty() && self.want.is_empty() && self.tokens == 0
    }
}

impl Session {
    async fn run(mut self, mut queue: Queue) {
        while self.is_wanted(&mut queue).await && self.has_place(&mut queue).await {
            let Some(mut link) = lanes::open(&self.context, &mut queue, None).await else { break };
            self.serial += 1;
            self.common.time.calibrate(link.sample.now, link.sample.after);
            let served = self.serve(&mut link, &mut queue).await;
            let Err(fault) = served else {
                let ended = self.common.lose(|_| true);
                tracing::info!(leases = ended, "the session of the advisory locks ends with the proxy");
                link.close().await;
                break;
            };
            self.context.metrics.store.error(fault.slug());
            let lost = self.give_up(link, &fault);
            tracing::warn!(leases = lost, "lost the session of the advisory locks: {fault}");
        }
        queue.refuse("the store was closed");
    }

    /// Stops using the session. Returns the number of leases that are lost with it.
    fn give_up(&mut self, link: Link, fault: &Fault) -> usize {
        let session = self.serial;
        let rests_on_it = move |guard: &Guard| guard.session == session;
        if fault.ended_session() {
            reached(Branch::NamesLost);
            return self.common.lose(rests_on_it);
        }
        reached(Branch::ParkedNames);
        let certain = certain_until(&self.context, self.heard);
        let lost = self.common.end(certain, rests_on_it);
        let common = self.common.clone();
        self.parked.spawn(vital::watched("a parked session of advisory locks", async move {
            while clock::now() < certain && common.is_held(rests_on_it) {
                tokio::time::sleep(SWEEP).await;
            }
            // The names are free before this proxy asks for them again.
            link.close().await;
            common.lose(rests_on_it);
        }));
        lost
    }

    /// Whether another session may be opened besides the parked ones. Waits for room.
    async fn has_place(&mut self, queue: &mut Queue) -> bool {
        while self.parked.try_join_next().is_some() {}
        if self.parked.len() < PARKED {
            return true;
        }
        tokio::select! {
            biased;
            _ = self.parked.join_next() => true,
            () = self.context.stop.cancelled() => false,
            never = queue.expire(LATE) => match never {},
        }
    }

    /// Waits for the first operation; no connection is opened before.
    async fn is_wanted(&self, queue: &mut Queue) -> bool {
        tokio::select! {
            biased;
            wanted = queue.wait() => wanted,
            () = self.context.stop.cancelled() => false,
        }
    }

    /// `Ok` once the store is closed and every operation is answered.
    async fn serve(&mut self, link: &mut Link, queue: &mut Queue) -> Result<(), Fault> {
        self.heard = clock::now();
        self.patiently(link.keep_idle(SESSION_S), &mut [], queue).await?;
        let mut sweep = tokio::time::interval(SWEEP);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            if self.context.stop.is_cancelled() && queue.close() {
                return Ok(());
            }
            tokio::select! {
                biased;
                // Before the queue, which may never be empty.
                _ = sweep.tick() => self.sweep(link, queue).await?,
                open = queue.wait() => {
                    if !open {
                        return Ok(());
                    }
                    self.run_batch(link, queue).await?;
                }
                () = self.context.stop.cancelled() => {}
            }
        }
    }

    /// Releases names whose leases have ended, and checks that the session is still there.
    async fn sweep(&mut self, link: &mut Link, queue: &mut Queue) -> Result<(), Fault> {
        let inputs = self.inputs(Token::default(), Instant::default());
        let session = self.serial;
        let free = names(self.common.held().take_idle(inputs.now, |guard| guard.session == session));
        self.run_session_batch(link, &SessionBatch { free, ..SessionBatch::default() }, &mut [], queue)
            .await
            .map(drop)
    }

    async fn run_session_batch(
        &mut self,
        link: &mut Link,
        session_batch: &SessionBatch,
        responders: &mut [Responder],
        queue: &mut Queue,
    ) -> Result<SessionAnswer, Fault> {
        let asked_at = clock::now();
        if session_batch.is_empty() && asked_at.us_since(self.heard) < SILENCE_US {
            return Ok(SessionAnswer::default());
        }
        let work = exchange(&self.context, link, session_batch);
        let (answer, had) = self.patiently(work, responders, queue).await?;
        self.heard = asked_at;
        let mut held = self.common.held();
        for ((key, name), _) in session_batch.want.iter().zip(had).filter(|(_, had)| *had) {
            held.insert(key.clone(), Guard { name: name.clone(), session: self.serial });
        }
        Ok(answer)
    }

    /// Waits for an answer of the server for [`EXCHANGE_LIMIT`]; if the session has leases, for [`PATIENCE`],
    /// even if no caller waits for the answer any more, because giving up the session loses all its leases.
    /// Callers get their answers in time meanwhile.
    async fn patiently<T>(
        &self,
        work: impl Future<Output = Result<T, Fault>>,
        responders: &mut [Responder],
        queue: &mut Queue,
    ) -> Result<T, Fault> {
        let mut work = pin!(work);
        let began = clock::now();
        let patient = |limit: Duration| began.plus_us(limit.as_micros() as u64);
        let mut limit = patient(EXCHANGE_LIMIT);
        loop {
            let next = limit.min(clock::now().plus_us(LOOK_US));
            if let Some(done) = queue.work_until(work.as_mut(), responders, next).await {
                return done;
            }
            if clock::now() < limit {
                continue;
            }
            let goes_on =
                limit < patient(PATIENCE) && self.common.is_held(|guard| guard.session == self.serial);
            if !goes_on {
                return Err(Fault::timeout("the session of the advisory locks"));
            }
            limit = limit.plus_us(SWEEP.as_micros() as u64);
        }
    }

    /// Call this after a statement failed on a working connection, for example because tokens were reserved
    /// elsewhere at the same time, or this proxy is no member. Releases the names that the batch may have
    /// got.
    async fn recover(
        &self,
        link: &mut Link,
        session_batch: &SessionBatch,
        fault: &Fault,
        queue: &mut Queue,
    ) -> Result<(), Fault> {
        self.context.metrics.store.error(fault.slug());
        tracing::debug!("could not ask for advisory locks: {fault}");
        let wanted = session_batch.want.iter().map(|(_, name)| name);
        let names: Vec<Name> = session_batch.free.iter().chain(wanted).cloned().collect();
        let freed = link.exchange(statements(&names, &[], 0));
        self.patiently(freed, &mut [], queue).await?;
        tokio::time::sleep(Backoff::new().next()).await;
        Ok(())
    }

    /// Runs one batch. If the session is lost meanwhile, undecided groups go back to the queue.
    async fn run_batch(&mut self, link: &mut Link, queue: &mut Queue) -> Result<(), Fault> {
        let mut batch = queue.batch();
        // All groups expired in the queue.
        if batch.groups.is_empty() {
            return Ok(());
        }
        let (ops, began) = (batch.ops(), clock::now());
        let mut outcomes = vec![None; batch.groups.len()];
        let session_batch = self.before(&batch, &mut outcomes, link.database());
        for (responder, decided) in batch.responders.iter_mut().zip(&outcomes) {
            responder.sent |= decided.is_some();
        }
        match self.run_session_batch(link, &session_batch, &mut batch.responders, queue).await {
            Ok(answer) => drop(self.after(batch, outcomes, began, Some(&answer))),
            Err(fault) => {
                if let Some(left) = self.after(batch, outcomes, began, None) {
                    queue.put_back(left);
                }
                if matches!(fault, Fault::Broken { .. }) {
                    return Err(fault);
                }
                self.recover(link, &session_batch, &fault, queue).await?;
            }
        }
        self.context.metrics.store.batch(ops, Duration::from_micros(clock::now().us_since(began)));
        if self.left_over && !queue.has_work() {
            self.sweep(link, queue).await?;
        }
        Ok(())
    }

    fn inputs(&self, above: Token, grants_from: Instant) -> DecisionInputs {
        self.common.inputs(&self.context, above, grants_from, self.heard)
    }

    /// Decides the groups that need nothing from the server. The others wait, and so do later groups with one
    /// of their keys.
    fn before(&self, batch: &Batch, decided: &mut [Option<Vec<Outcome>>], database: &str) -> SessionBatch {
        let inputs = self.inputs(Token::default(), Instant::default());
        let mut held = self.common.held();
        let mut late: HashSet<&Key> = HashSet::default();
        let mut done: Vec<&Key> = Vec::new();
        let mut grants: Vec<&Op> = Vec::new();
        for (group, outcomes) in batch.groups.iter().zip(decided) {
            let keys = || group.iter().flat_map(Op::keys);
            if !keys().any(|key| late.contains(key)) {
                *outcomes = held.try_group(group, &inputs);
            }
            if outcomes.is_some() {
                done.extend(keys());
            } else {
                late.extend(keys());
                grants.extend(group);
            }
        }
        let claimed: HashSet<&Key> =
            grants.iter().filter(|op| matches!(op, Op::Acquire(_))).flat_map(|op| op.keys()).collect();
        let wanted = claimed.into_iter().filter(|key| !held.has(key));
        let own = |guard: &Guard| guard.session == self.serial;
        SessionBatch {
            want: wanted.map(|key| (key.clone(), name(database, key))).collect(),
            free: names(held.take_if_idle(
                done.into_iter().filter(|key| !late.contains(key)),
                inputs.now,
                own,
            )),
            tokens: tokens_for(grants.into_iter()),
        }
    }

    /// Decides the rest, if the server has answered, and answers. Returns the undecided groups.
    fn after(
        &mut self,
        batch: Batch,
        decided: Vec<Option<Vec<Outcome>>>,
        asked_at: Instant,
        answer: Option<&SessionAnswer>,
    ) -> Option<Batch> {
        let inputs = answer.map(|answer| self.inputs(answer.above, answer.grants_from));
        let answered = inputs.unwrap_or_else(|| self.inputs(Token::default(), Instant::default()));
        let mut held = self.common.held();
        let mut answers = Vec::new();
        let mut left = Batch::default();
        self.left_over = false;
        // Groups that expired meanwhile are answered already, and are not carried out.
        let parts = batch.groups.into_iter().zip(batch.responders).zip(decided);
        for ((group, responder), decided) in parts.filter(|((_, responder), _)| responder.is_open()) {
            let outcomes = match (decided, &inputs) {
                (Some(outcomes), _) => outcomes,
                (None, Some(inputs)) => group.iter().map(|op| held.apply(op, inputs, |_| true)).collect(),
                (None, None) => {
                    left.groups.push(group);
                    left.tried.push(None);
                    left.responders.push(responder);
                    continue;
                }
            };
            let is_free = |key: &Key| held.has(key) && held.is_idle(key, answered.now);
            self.left_over |= group.iter().flat_map(Op::keys).any(is_free);
            // Some groups were decided before the server was asked, so times count from then.
            answers.push((responder, Reply { outcomes, asked_at, now: answered.now }));
        }
        drop(held);
        for (responder, reply) in answers {
            responder.answer(Ok(reply));
        }
        (!left.groups.is_empty()).then_some(left)
    }
}

/// Makes one round trip. Returns the answer, and for each wanted name whether the session has it.
async fn exchange(
    context: &Context,
    link: &mut Link,
    session_batch: &SessionBatch,
) -> Result<(SessionAnswer, Vec<bool>), Fault> {
    let SessionBatch { free, want, tokens } = session_batch;
    let tokens = *tokens;
    let mut answer = SessionAnswer::default();
    let mut sets = link.exchange(statements(free, want, tokens)).await?;
    if tokens > 0 {
        let until = context.membership.until();
        let keys = want.iter().map(|(key, _)| key);
        (answer.above, answer.grants_from) = counted(link, sets.pop(), tokens, keys, until).await?;
    } else {
        link.check_used(&mut sets)?;
    }
    let texts = sets.into_iter().flatten().filter_map(|mut row| row.take::<String, _>(0));
    let had = texts.flat_map(|text| text.into_bytes()).map(|digit| digit == b'1').collect();
    Ok((answer, had))
}

fn names(keys: Vec<(Key, Guard)>) -> Vec<Name> {
    keys.into_iter().map(|(_, guard)| guard.name).collect()
}

/// Releases names first, because others may want them. Asks for the number last, once the session has the
/// names; without tokens, asks for the server that the tables are used on instead.
fn statements(free: &[Name], want: &[(Key, Name)], tokens: u64) -> String {
    let mut sql = String::with_capacity(1_024 + 100 * (free.len() + 2 * want.len()));
    sql.push_str("DO 0");
    for name in free {
        sql.push_str(",RELEASE_LOCK('");
        sql.push_str(name);
        sql.push_str("')");
    }
    for names in want.chunks(STATEMENT_NAMES) {
        // One text of ones and zeroes: the column names alone would be longer than all the rest.
        sql.push_str(";SELECT CONCAT(''");
        for (_, name) in names {
            sql.push_str(",IFNULL(GET_LOCK('");
            sql.push_str(name);
            sql.push_str("',0),0)");
        }
        sql.push_str(") AS had");
    }
    sql.push(';');
    match tokens {
        0 => sql.push_str(&sql::used_on()),
        _ => sql.push_str(&number(want.iter().map(|(key, _)| key))),
    }
    sql
}

/// The name of the key's lock on a simulated server.
#[cfg(any(test, feature = "simulation"))]
pub fn simulated_name(key: &Key) -> Name {
    name(crate::mysql::store::DEFAULT_DATABASE, key)
}

/// Names belong to the server, not to the database. MySQL takes 64 characters and ignores case.
fn name(database: &str, key: &Key) -> Name {
    let mut hash = Sha256::new();
    hash.update((database.len() as u64).to_le_bytes());
    hash.update(database.as_bytes());
    hash.update(key.as_str().as_bytes());
    let digest: [u8; 32] = hash.finalize().into();
    let mut name = String::from("lk-");
    for byte in &digest[..30] {
        name.extend([byte >> 4, byte & 15].map(|digit| char::from(b"0123456789abcdef"[usize::from(digit)])));
    }
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Key {
        Key::new(text).expect("it is a key").within(Space::Advisory)
    }

    #[test]
    fn names_of_advisory_locks_are_short_and_distinct() {
        let names: HashSet<Name> = [("a", "bc"), ("ab", "c"), ("a", "BC"), ("a", "bc ")]
            .into_iter()
            .map(|(database, text)| name(database, &key(text)))
            .collect();
        assert_eq!(names.len(), 4);
        assert!(names.iter().all(|name| name.len() <= 64 && **name == name.to_lowercase()));
    }

    #[test]
    fn one_packet_releases_then_acquires_then_reads_the_token() {
        let sql = statements(&["lk-a".into()], &[(key("b"), "lk-b".into())], 1);
        let at = |text: &str| sql.find(text).expect(text);
        assert!(at("RELEASE_LOCK") < at("GET_LOCK") && at("GET_LOCK") < at("UUID_SHORT"));
        assert_eq!(statements(&[], &[], 0), format!("DO 0;{}", sql::used_on()));
    }
}

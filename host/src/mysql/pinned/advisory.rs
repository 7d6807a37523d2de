//! The primitive `advisory`: `GET_LOCK`, thousands of named locks on one pinned session.
//!
//! The session is a connection of its own, opened when the first lock is asked for, and has a thread of its
//! own. Nothing else is run on it, so that no reset and no pool can free its locks. A batch takes one round
//! trip: names that are not needed any more are given back, names that are wanted are asked for without
//! waiting, and a number for the tokens is asked for. When the connection is lost, so are its locks, and their
//! holders are told at once. A session that cannot be used any more, but may still have its locks, is *parked*:
//! the next session takes its place, and its connection is closed when no holder is certain any more.
//!
//! One session is in use at a time: a batch carries hundreds of locks, and what a group of operations does to
//! several keys needs no agreement between sessions.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::{
    Common, DecisionInputs, PATIENCE, Pinned, SESSION_S, SILENCE_US, SWEEP, certain_until, counted, number,
    reserve_tokens, tokens_for,
};
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::maps::HashSet;
use crate::lock::record::{Op, Outcome};
use crate::lock::{Instant, Key, Space, Token};
use crate::mysql::lanes::{self, Backoff, EXCHANGE_LIMIT};
use crate::mysql::link::{Fault, Link};
use crate::mysql::queue::{Batch, LATE, Queue, Responder, first_deadline};
use crate::mysql::sql;
use crate::mysql::store::{Context, MysqlStore};
use crate::store::Reply;
use crate::vital;

/// Names that one statement asks for.
const STATEMENT_NAMES: usize = 512;

/// While the server is waited for, how often it is looked who waits no longer, in microseconds. To look whenever
/// something comes would wake the thread for each of the operations that the next batch takes together.
const LOOK_US: u64 = 50_000;

/// The most sessions that are parked at a time. With so many, none is opened before one of them is closed.
const PARKED: usize = 4;

/// What the server knows a key by.
type Name = Arc<str>;

/// What guards a key: the session that has its name.
#[derive(Clone, Debug)]
pub struct Guard {
    name: Name,
    session: u64,
}

/// Named locks on the server of a [`MysqlStore`].
pub type Advisory = Pinned<Guard>;

impl Pinned<Guard> {
    /// Starts the session's task; it ends with the store's own. `batch` and `max_queued` as in
    /// [`StoreConfig`](crate::config::StoreConfig).
    ///
    /// # Panics
    /// Outside of a tokio runtime, and where the machine has no thread for the session.
    pub fn new(store: &MysqlStore, batch: usize, max_queued: usize) -> Advisory {
        let (advisory, incoming) = Pinned::open(Space::Advisory, store, max_queued);
        let session = Session {
            context: advisory.context.clone(),
            common: advisory.common.clone(),
            serial: 0,
            parked: JoinSet::new(),
            heard: Instant::default(),
            left_over: false,
        };
        store.spawn_apart("advisory locks", session.run(Queue::new(incoming, batch)));
        advisory
    }
}

/// The task that has the connection.
struct Session {
    context: Arc<Context>,
    common: Arc<Common<Guard>>,
    /// Of the session in use.
    serial: u64,
    parked: JoinSet<()>,
    /// Before the last exchange that succeeded: the server keeps the session from then on.
    heard: Instant,
    /// Some keys of the last batch may be free, and their names not yet given back.
    left_over: bool,
}

/// What one exchange with the server is to do.
#[derive(Default)]
struct SessionBatch {
    /// Names that were given up already: whatever becomes of the exchange, they count as free.
    free: Vec<Name>,
    want: Vec<(Key, Name)>,
    tokens: u64,
}

/// What it came to.
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
            self.context.metrics.store_error(fault.slug());
            let lost = self.give_up(link, &fault);
            tracing::warn!(leases = lost, "lost the session of the advisory locks: {fault}");
        }
        queue.refuse("the store was closed");
    }

    /// Uses the session no more. How many leases are lost with it.
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
        self.parked.spawn(vital::watched("a session of advisory locks that is given up", async move {
            while clock::now() < certain && common.is_held(rests_on_it) {
                tokio::time::sleep(SWEEP).await;
            }
            // The names are free before anybody here asks for them.
            link.close().await;
            common.lose(rests_on_it);
        }));
        lost
    }

    /// Whether another session may be opened, beside those that are parked.
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

    /// No connection is opened before somebody asks for a lock.
    async fn is_wanted(&self, queue: &mut Queue) -> bool {
        tokio::select! {
            biased;
            wanted = queue.wait() => wanted,
            () = self.context.stop.cancelled() => false,
        }
    }

    /// `Ok` once the store is closed and everything is answered.
    async fn serve(&mut self, link: &mut Link, queue: &mut Queue) -> Result<(), Fault> {
        self.heard = clock::now();
        let lasts = link.exchange(format!("SET SESSION wait_timeout={SESSION_S}"));
        self.patiently(lasts, &mut [], queue).await?;
        let mut sweep = tokio::time::interval(SWEEP);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            if self.context.stop.is_cancelled() {
                queue.close();
                if !queue.has_work() {
                    return Ok(());
                }
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

    /// Gives back what has ended by itself, and sees whether the session is still there.
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

    /// Waits for an answer of the server: for [`EXCHANGE_LIMIT`], and where the session has leases for
    /// [`PATIENCE`], whether or not anybody still waits for what was asked. To give the session up costs
    /// all that rests on it. Who waits is answered in time meanwhile.
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
            let next = first_deadline(responders).map_or(limit, |deadline| deadline.min(limit));
            let next = next.min(clock::now().plus_us(LOOK_US));
            tokio::select! {
                biased;
                done = &mut work => return done,
                () = clock::sleep_until(next) => {}
            }
            lanes::expire(responders, LATE);
            queue.expire_now(LATE);
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

    /// After a statement that failed on a connection that did not: the names that the errand may have got
    /// are given back. Tokens may be laid by elsewhere at the same time, or this proxy be no member.
    async fn recover(
        &self,
        link: &mut Link,
        session_batch: &SessionBatch,
        fault: &Fault,
        queue: &mut Queue,
    ) -> Result<(), Fault> {
        self.context.metrics.store_error(fault.slug());
        tracing::debug!("advisory locks could not be asked for: {fault}");
        let wanted = session_batch.want.iter().map(|(_, name)| name);
        let names: Vec<Name> = session_batch.free.iter().chain(wanted).cloned().collect();
        let freed = link.exchange(statements(&names, &[], 0));
        self.patiently(freed, &mut [], queue).await?;
        tokio::time::sleep(Backoff::new().next()).await;
        Ok(())
    }

    /// Runs one batch; where the session is lost meanwhile, what is not decided goes back to the queue.
    async fn run_batch(&mut self, link: &mut Link, queue: &mut Queue) -> Result<(), Fault> {
        let mut batch = queue.batch();
        lanes::expire(&mut batch.responders, LATE);
        batch.retain_open();
        // All of it expired in the queue.
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
        self.context.metrics.batch(ops, Duration::from_micros(clock::now().us_since(began)));
        if self.left_over && !queue.has_work() {
            self.sweep(link, queue).await?;
        }
        Ok(())
    }

    fn inputs(&self, above: Token, grants_from: Instant) -> DecisionInputs {
        self.common.inputs(&self.context, above, grants_from, self.heard)
    }

    /// Decides the groups that need nothing of the server. The others wait, and so does what follows on one of their
    /// keys.
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

    /// Decides the rest, where the errand was run, and answers. What is not decided stays.
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
        // What expired meanwhile is answered: it is not done.
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
            // Some of it was decided before the server was asked: times count from there.
            answers.push((responder, Reply { outcomes, asked_at, now: answered.now }));
        }
        drop(held);
        for (responder, reply) in answers {
            responder.answer(Ok(reply));
        }
        (!left.groups.is_empty()).then_some(left)
    }
}

/// One round trip: what it came to, and of each wanted name whether it was had.
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
        let keys = || want.iter().map(|(key, _)| key);
        let mut had = counted(&link.server, sets.pop(), tokens, until, false)?;
        if had.is_none() {
            let sql = format!("{};{}", reserve_tokens(link.sample.epoch, tokens, keys()), number(keys()));
            let set = link.exchange(sql).await?.pop();
            had = counted(&link.server, set, tokens, until, true)?;
        }
        let used_up = || Fault::Conflict { why: "tokens were used up while they were laid by".to_owned() };
        (answer.above, answer.grants_from) = had.ok_or_else(used_up)?;
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

/// Frees first: what is freed may be wanted by others. The number comes last, when the names are had; without it, the
/// server that the tables are used on.
fn statements(free: &[Name], want: &[(Key, Name)], tokens: u64) -> String {
    let mut sql = String::with_capacity(1_024 + 100 * (free.len() + 2 * want.len()));
    sql.push_str("DO 0");
    for name in free {
        sql.push_str(",RELEASE_LOCK('");
        sql.push_str(name);
        sql.push_str("')");
    }
    for names in want.chunks(STATEMENT_NAMES) {
        // One text of ones and zeroes: as columns, their names alone would be longer than all the rest.
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

/// Names are the server's, not the database's; MySQL takes 64 characters and ignores case.
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
    fn names_fit_and_differ() {
        let names: HashSet<Name> = [("a", "bc"), ("ab", "c"), ("a", "BC"), ("a", "bc ")]
            .into_iter()
            .map(|(database, text)| name(database, &key(text)))
            .collect();
        assert_eq!(names.len(), 4);
        assert!(names.iter().all(|name| name.len() <= 64 && **name == name.to_lowercase()));
    }

    #[test]
    fn one_packet_frees_then_asks_then_counts() {
        let sql = statements(&["lk-a".into()], &[(key("b"), "lk-b".into())], 1);
        let at = |text: &str| sql.find(text).expect(text);
        assert!(at("RELEASE_LOCK") < at("GET_LOCK") && at("GET_LOCK") < at("UUID_SHORT"));
        assert_eq!(statements(&[], &[], 0), format!("DO 0;{}", sql::used_on()));
    }
}

//! The primitive `advisory`: `GET_LOCK`, thousands of named locks on one pinned session.
//!
//! The session is a connection of its own, opened when the first lock is asked for, and has a thread of its
//! own. Nothing else is run on it, so that no reset and no pool can free its locks. A batch takes one round
//! trip: names that are not needed any more are given back, names that are wanted are asked for without
//! waiting, and a number for the tokens is asked for. When the connection is lost, so are its locks: whoever
//! holds one is told at once.
//!
//! One session, not several: a batch carries hundreds of locks, and what a group of operations does to
//! several keys needs no agreement between sessions.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::{
    Common, Pinned, SESSION_S, SILENCE_US, SWEEP, Terms, counted, lay_by, moment, number, tokens_for,
};
use crate::clock;
use crate::lock::record::{Op, Outcome};
use crate::lock::{Instant, Key, Space, Token};
use crate::mysql::lanes::{self, Backoff, EXCHANGE_LIMIT, LATE};
use crate::mysql::link::{Fault, Link};
use crate::mysql::queue::{Batch, Queue};
use crate::mysql::store::{MysqlStore, Shared};
use crate::store::Reply;

/// Names that one statement asks for.
const STATEMENT_NAMES: usize = 512;

/// What the server knows a key by.
pub type Name = Arc<str>;

/// Named locks on the server of a [`MysqlStore`].
pub type Advisory = Pinned<Name>;

impl Pinned<Name> {
    /// Starts the session's task; it ends with the store's own. `batch` and `max_queued` as in
    /// [`StoreConfig`](crate::config::StoreConfig).
    ///
    /// # Panics
    /// Outside of a tokio runtime, and where the machine has no thread for the session.
    pub fn new(store: &MysqlStore, batch: usize, max_queued: usize) -> Advisory {
        let (advisory, incoming) = Pinned::open(Space::Advisory, store, max_queued);
        let session = Session {
            shared: advisory.shared.clone(),
            common: advisory.common.clone(),
            heard: Instant::default(),
            left_over: false,
        };
        store.spawn_apart("advisory", session.run(Queue::new(incoming, batch)));
        advisory
    }
}

/// The task that has the connection.
struct Session {
    shared: Arc<Shared>,
    common: Arc<Common<Name>>,
    /// Before the last exchange that succeeded: the server keeps the session from then on.
    heard: Instant,
    /// Some keys of the last batch may be free, and their names not yet given back.
    left_over: bool,
}

/// What one exchange with the server is to do.
#[derive(Default)]
struct Errand {
    /// Names that were given up already: whatever becomes of the exchange, they count as free.
    free: Vec<Name>,
    want: Vec<(Key, Name)>,
    tokens: u64,
}

/// What it came to.
struct Errands {
    above: Token,
    grants_from: Instant,
}

impl Session {
    async fn run(mut self, mut queue: Queue) {
        while self.is_wanted(&mut queue).await {
            let Some(mut link) = lanes::open(&self.shared, &mut queue, None).await else { break };
            self.common.time.calibrate(link.sample.now, link.sample.after);
            let served = self.serve(&mut link, &mut queue).await;
            let (_, now) = moment(&self.common.time);
            let lost = self.common.held().clear(now);
            if let Err(fault) = &served {
                self.shared.metrics.store_error(fault.slug());
                tracing::warn!(leases = lost.len(), "lost the session of the advisory locks: {fault}");
            }
            self.common.losses.tell(lost);
            if served.is_ok() {
                link.close().await;
                break;
            }
        }
        queue.refuse("the store was closed");
    }

    /// No connection is opened before somebody asks for a lock.
    async fn is_wanted(&self, queue: &mut Queue) -> bool {
        tokio::select! {
            wanted = queue.wait() => wanted,
            () = self.shared.stop.cancelled() => false,
        }
    }

    /// `Ok` once the store is closed and everything is answered.
    async fn serve(&mut self, link: &mut Link, queue: &mut Queue) -> Result<(), Fault> {
        self.heard = clock::now();
        link.exchange(format!("SET SESSION wait_timeout={SESSION_S}")).await?;
        let mut sweep = tokio::time::interval(SWEEP);
        loop {
            if self.shared.stop.is_cancelled() {
                queue.close();
                if !queue.has_work() {
                    return Ok(());
                }
            }
            tokio::select! {
                biased;
                open = queue.wait() => {
                    if !open {
                        return Ok(());
                    }
                    self.run_batch(link, queue).await?;
                }
                () = self.shared.stop.cancelled() => {}
                _ = sweep.tick() => self.sweep(link).await?,
            }
        }
    }

    /// Gives back what has ended by itself, and sees whether the session is still there.
    async fn sweep(&mut self, link: &mut Link) -> Result<(), Fault> {
        let (_, now) = moment(&self.common.time);
        let free = names(self.common.held().take_idle(now));
        let errand = Errand { free, ..Errand::default() };
        let exchange = tokio::time::timeout(EXCHANGE_LIMIT, self.exchange(link, &errand)).await;
        exchange.unwrap_or_else(|_| Err(Fault::timeout("an idle session"))).map(drop)
    }

    /// After a statement that failed on a connection that did not: the names that the errand may have got
    /// are given back. Tokens may be laid by elsewhere at the same time, or this proxy be no member.
    async fn recover(&self, link: &mut Link, errand: &Errand, fault: &Fault) -> Result<(), Fault> {
        self.shared.metrics.store_error(fault.slug());
        let wanted = errand.want.iter().map(|(_, name)| name);
        let names: Vec<Name> = errand.free.iter().chain(wanted).cloned().collect();
        let sql = statements(&names, &[], 0);
        let freed = tokio::time::timeout(EXCHANGE_LIMIT, link.exchange(sql)).await;
        freed.unwrap_or_else(|_| Err(Fault::timeout("freeing names")))?;
        tokio::time::sleep(Backoff::new().next()).await;
        Ok(())
    }

    /// Runs one batch; where the session is lost meanwhile, it goes back to the queue.
    async fn run_batch(&mut self, link: &mut Link, queue: &mut Queue) -> Result<(), Fault> {
        let mut batch = queue.batch();
        lanes::expire(&mut batch.tickets, LATE);
        batch.retain_open();
        let (ops, began) = (batch.ops(), clock::now());
        let mut outcomes = vec![Vec::new(); batch.groups.len()];
        let errand = self.before(&batch, &mut outcomes, link.database());
        let result = {
            let work = std::pin::pin!(self.exchange(link, &errand));
            lanes::watched(work, &mut batch.tickets, queue).await
        };
        match result {
            Ok(errands) => drop(self.after(batch, outcomes, Some(&errands))),
            Err(fault @ Fault::Broken { .. }) => {
                queue.put_back(batch);
                return Err(fault);
            }
            Err(fault) => {
                if let Some(left) = self.after(batch, outcomes, None) {
                    queue.put_back(left);
                }
                self.recover(link, &errand, &fault).await?;
            }
        }
        self.shared.metrics.batch(ops, Duration::from_micros(clock::now().us_since(began)));
        if self.left_over && !queue.has_work() {
            self.sweep(link).await?;
        }
        Ok(())
    }

    fn terms(&self, above: Token, grants_from: Instant) -> Terms {
        let (own, now) = moment(&self.common.time);
        let grants_from = self.common.time.at(grants_from);
        let member_until = self.shared.membership.until_own();
        Terms { own, now, above, grants_from, heard: self.heard, member_until }
    }

    /// Decides what needs nothing of the server. What does waits, and so does what follows it in its group or
    /// on one of its keys.
    fn before(&self, batch: &Batch, decided: &mut [Vec<Outcome>], database: &str) -> Errand {
        let terms = self.terms(Token::default(), Instant::default());
        let mut held = self.common.held();
        let mut late: HashSet<&Key> = HashSet::new();
        let mut done: Vec<&Key> = Vec::new();
        let mut grants: Vec<&Op> = Vec::new();
        for (group, outcomes) in batch.groups.iter().zip(decided) {
            for op in group.iter().take_while(|op| !op.keys().iter().any(|key| late.contains(key))) {
                let Some(outcome) = held.try_apply(op, &terms, |_| true) else { break };
                outcomes.push(outcome);
                done.extend(op.keys());
            }
            let rest = &group[outcomes.len()..];
            late.extend(rest.iter().flat_map(Op::keys));
            grants.extend(rest);
        }
        let wanted = late.iter().filter(|key| !held.has(key));
        Errand {
            want: wanted.map(|key| ((*key).clone(), name(database, key))).collect(),
            free: names(held.take_if_idle(done.into_iter().filter(|key| !late.contains(key)), terms.now)),
            tokens: tokens_for(grants.into_iter()),
        }
    }

    /// Decides the rest, where the errand was run, and answers. What is not decided stays.
    fn after(
        &mut self,
        batch: Batch,
        decided: Vec<Vec<Outcome>>,
        errands: Option<&Errands>,
    ) -> Option<Batch> {
        let terms = errands.map(|errands| self.terms(errands.above, errands.grants_from));
        let answered = terms.unwrap_or_else(|| self.terms(Token::default(), Instant::default()));
        let mut held = self.common.held();
        let mut answers = Vec::new();
        let mut left = Batch::default();
        self.left_over = false;
        // Nobody waits any more for what expired meanwhile: what it asked for is not done.
        let parts = batch.groups.into_iter().zip(batch.tickets).zip(decided);
        for ((group, ticket), mut outcomes) in parts.filter(|((_, ticket), _)| ticket.is_open()) {
            match &terms {
                Some(terms) => {
                    let rest = group[outcomes.len()..].iter().map(|op| held.apply(op, terms));
                    outcomes.extend(rest.collect::<Vec<_>>());
                    self.left_over |= !matches!(outcomes.last(), Some(Outcome::Granted(_)));
                }
                None if outcomes.len() < group.len() => {
                    left.groups.push(group);
                    left.tried.push(None);
                    left.tickets.push(ticket);
                    continue;
                }
                None => {}
            }
            answers.push((ticket, Reply { outcomes, asked_at: answered.own, now: answered.now }));
        }
        drop(held);
        for (ticket, reply) in answers {
            ticket.answer(Ok(reply));
        }
        (!left.groups.is_empty()).then_some(left)
    }

    async fn exchange(&mut self, link: &mut Link, errand: &Errand) -> Result<Errands, Fault> {
        let Errand { free, want, tokens } = errand;
        let tokens = *tokens;
        let own = clock::now();
        let mut errands = Errands { above: Token::default(), grants_from: Instant::default() };
        let nothing = free.is_empty() && want.is_empty() && tokens == 0;
        if nothing && own.us_since(self.heard) < SILENCE_US {
            return Ok(errands);
        }
        let mut sets = link.exchange(statements(free, want, tokens)).await?;
        self.heard = own;
        if tokens > 0 {
            let until = self.shared.membership.until();
            let keys = || want.iter().map(|(key, _)| key);
            let mut had = counted(sets.pop(), tokens, until, false)?;
            if had.is_none() {
                let sql = format!("{};{}", lay_by(link.sample.epoch, tokens, keys()), number(keys()));
                had = counted(link.exchange(sql).await?.pop(), tokens, until, true)?;
            }
            let used_up =
                || Fault::Conflict { why: "tokens were used up while they were laid by".to_owned() };
            (errands.above, errands.grants_from) = had.ok_or_else(used_up)?;
        }
        let texts = sets.into_iter().flatten().filter_map(|mut row| row.take::<String, _>(0));
        let had: Vec<bool> = texts.flat_map(|text| text.into_bytes()).map(|digit| digit == b'1').collect();
        let mut held = self.common.held();
        for ((key, name), _) in want.iter().zip(had).filter(|(_, had)| *had) {
            held.insert(key.clone(), name.clone());
        }
        Ok(errands)
    }
}

fn names(keys: Vec<(Key, Name)>) -> Vec<Name> {
    keys.into_iter().map(|(_, name)| name).collect()
}

/// Frees first: what is freed may be wanted by others. The number comes last, when the names are had.
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
    if tokens > 0 {
        sql.push(';');
        sql.push_str(&number(want.iter().map(|(key, _)| key)));
    }
    sql
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
        assert_eq!(statements(&[], &[], 0), "DO 0");
    }
}

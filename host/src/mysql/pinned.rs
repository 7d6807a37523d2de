//! Keys that are guarded by something that a session holds, and is free when the session ends.
//!
//! What MySQL excludes is proxies from each other: one session has the key's named lock ([`advisory`]) or
//! its row lock ([`row`]). Among the clients of one proxy the same [`record::apply`] decides as everywhere,
//! on records in memory that live as long as the guard. Tokens are numbers that the server counts, asked
//! for after the guard was had: so they rise over all proxies, and over restarts.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::link::Fault;
use super::queue::{Job, Places};
use super::sql;
use super::sql::{COUNTER, LEASES, META, NOW_US};
use super::store::{MysqlStore, Shared};
use crate::clock;
use crate::lock::record::{self, Claim, Denial, Env, Op, Outcome, Record, Records};
use crate::lock::{Instant, Key, ServerTime, Space, Token};
use crate::store::{Answer, Done, Health, Loss, Page, Store, StoreError, Stored};

pub mod advisory;
pub mod row;
mod slot;

/// How long the server keeps a session that says nothing, in seconds: a proxy that was cut off keeps
/// others out for so long.
pub const SESSION_S: u32 = 30;
/// Less for the way to the server: nobody is told to be certain for longer than this after the session
/// was last heard of.
const CERTAIN_US: u64 = (SESSION_S as u64 - 1) * 1_000_000;
/// A guard goes back to the server after so many grants in a row, so that other proxies have a chance.
const PASSES: u32 = 64;
/// Keys that are remembered when their guard was given back.
const PAST: usize = 4_096;
/// When to ask again for a key that another session has, at the latest: nobody says when it is free.
const ELSEWHERE_US: u64 = 30_000_000;

/// How often it is looked for locks that have ended, and for sessions that have said nothing.
const SWEEP: Duration = Duration::from_millis(100);
/// How long a session says nothing, in microseconds: its end is noticed that late.
const SILENCE_US: u64 = 1_000_000;

/// The handle on the task that keeps the guards of one space.
pub struct Pinned<G> {
    space: Space,
    jobs: UnboundedSender<Job>,
    places: Places,
    shared: Arc<Shared>,
    common: Arc<Common<G>>,
}

/// What the task and its users share.
struct Common<G> {
    held: Mutex<Guarded<G>>,
    time: Time,
    losses: Losses,
}

impl<G> Pinned<G> {
    /// The handle, and what the task is sent through it.
    fn open(space: Space, store: &MysqlStore, max_queued: usize) -> (Pinned<G>, UnboundedReceiver<Job>) {
        let (jobs, incoming) = unbounded_channel();
        let common = Common { held: Mutex::default(), time: Time::default(), losses: Losses::default() };
        let (places, shared) = (Places::new(max_queued), store.shared.clone());
        (Pinned { space, jobs, places, shared, common: Arc::new(common) }, incoming)
    }
}

impl<G> Common<G> {
    fn held(&self) -> MutexGuard<'_, Guarded<G>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<G: Clone + Send + Sync + 'static> Store for Pinned<G> {
    fn submit(&self, group: Vec<Op>, deadline: Instant, done: Done) {
        if let Some(job) = self.places.admit(group, deadline, done) {
            // Where the task is gone, the job's ticket answers as it is dropped.
            let _ = self.jobs.send(job);
        }
    }

    /// Renewals need no statement: nothing can starve them.
    fn submit_renewal(&self, op: Op, deadline: Instant, done: Done) {
        self.submit(vec![op], deadline, done);
    }

    fn list(&self, prefix: String, after: Option<Key>, limit: usize) -> Answer<Result<Page, StoreError>> {
        let (_, now) = moment(&self.common.time);
        let page = page(self.common.held().list(&prefix, after.as_ref(), now), limit);
        Box::pin(std::future::ready(Ok(page)))
    }

    fn read(&self, key: Key) -> Answer<Result<Option<Stored>, StoreError>> {
        let (_, now) = moment(&self.common.time);
        let stored = self.common.held().read(&key, now);
        Box::pin(std::future::ready(Ok(stored)))
    }

    fn health(&self) -> Health {
        self.shared.health.now()
    }

    fn lacks(&self, space: Space) -> Option<String> {
        lacks(space, self.space, self.shared.galera.load(Ordering::Relaxed))
    }

    fn on_loss(&self, tell: Loss) {
        self.common.losses.set(tell);
    }
}

/// Why keys of the space `wanted` cannot be had where those of `here` are kept.
fn lacks(wanted: Space, here: Space, galera: bool) -> Option<String> {
    if wanted != here {
        return Some(format!("{wanted:?} is not kept here"));
    }
    let without = wanted == Space::Advisory && galera;
    without.then(|| "the server is a Galera node, and Galera has no GET_LOCK".to_owned())
}

/// The keys that are guarded now, and what is remembered of those that were of late. `G` says what guards
/// a key.
pub struct Guarded<G> {
    entries: HashMap<Key, Entry<G>>,
    /// To know a call that is repeated. What another proxy has done to the key since is not in it.
    past: HashMap<Key, Record>,
    forgetting: VecDeque<Key>,
}

struct Entry<G> {
    record: Record,
    guard: G,
    passes: u32,
}

/// The clock of the records: the server's at the first look at it, then the proxy's own, which nobody sets.
#[derive(Default)]
pub struct Time(OnceLock<u64>);

impl Time {
    pub fn calibrate(&self, server: ServerTime, own: Instant) {
        let _ = self.0.set(server.0.saturating_sub(own.0));
    }

    pub fn at(&self, own: Instant) -> ServerTime {
        ServerTime(own.0 + self.0.get().copied().unwrap_or_default())
    }
}

/// What one batch may use for its decisions.
#[derive(Clone, Copy)]
pub struct Terms {
    pub own: Instant,
    pub now: ServerTime,
    /// New tokens are above this; there are enough for all of the batch.
    pub above: Token,
    /// By the clock of the records, as `now`.
    pub grants_from: ServerTime,
    /// When the session was last heard of.
    pub heard: Instant,
    /// Until when this proxy is a member of its fleet: the others may go by other keys after it.
    pub member_until: Instant,
}

impl Terms {
    fn env(&self) -> Env {
        Env {
            now: self.now,
            floor: Token::default(),
            others: self.above,
            grants_from: self.grants_from,
            takeover: true,
        }
    }

    /// Nobody is certain for longer than the server is sure to keep the session, and the fleet to wait.
    fn capped(&self, outcome: Outcome) -> Outcome {
        let certain = self.heard.plus_us(CERTAIN_US).min(self.member_until).us_since(self.own);
        match outcome {
            Outcome::Granted(mut grant) => {
                grant.left_us = grant.left_us.min(certain);
                Outcome::Granted(grant)
            }
            Outcome::Renewed { left_us } => Outcome::Renewed { left_us: left_us.min(certain) },
            outcome => outcome,
        }
    }
}

impl<G> Default for Guarded<G> {
    fn default() -> Guarded<G> {
        Guarded { entries: HashMap::new(), past: HashMap::new(), forgetting: VecDeque::new() }
    }
}

impl<G: Clone> Guarded<G> {
    pub fn has(&self, key: &Key) -> bool {
        self.entries.contains_key(key)
    }

    pub fn guard(&self, key: &Key) -> Option<&G> {
        self.entries.get(key).map(|entry| &entry.guard)
    }

    /// Whether nobody holds the key.
    pub fn is_idle(&self, key: &Key, now: ServerTime) -> bool {
        self.entries.get(key).is_none_or(|entry| entry.record.until() <= now)
    }

    /// The key's guard is had.
    pub fn insert(&mut self, key: Key, guard: G) {
        let record = self.past.remove(&key).unwrap_or_default();
        self.entries.insert(key, Entry { record, guard, passes: 0 });
    }

    fn record(&self, key: &Key) -> Option<&Record> {
        self.entries.get(key).map(|entry| &entry.record).or_else(|| self.past.get(key))
    }

    /// Of what was put out nothing must be left but its end.
    fn remember(&mut self, key: &Key, entry: Entry<G>) {
        if self.past.insert(key.clone(), entry.record).is_none() {
            self.forgetting.push_back(key.clone());
        }
        // A key that was guarded again since is in the line twice, and goes early: it is no more than a help.
        while self.forgetting.len() > PAST {
            if let Some(oldest) = self.forgetting.pop_front() {
                self.past.remove(&oldest);
            }
        }
    }

    /// Decides one operation, unless it would make a new grant: that takes a guard for all of its keys and
    /// a token. So what is entered again, repeated or held costs no statement.
    ///
    /// A free key whose guard is not `fit` for the operation is held until that is given back.
    pub fn try_apply(&mut self, op: &Op, terms: &Terms, fit: impl Fn(&G) -> bool) -> Option<Outcome> {
        let Op::Acquire(claim) = op else { return Some(self.apply(op, terms)) };
        let guarded: Vec<Key> = claim.keys.iter().filter(|key| self.has(key)).cloned().collect();
        // Of what is not guarded only the end of a request by its id can be known.
        if !guarded.is_empty() || claim.request.is_some() {
            let rejoined = self.apply(&Op::Rejoin(claim.clone()), terms);
            if rejoined != Outcome::Absent {
                return Some(rejoined);
            }
        }
        if guarded.is_empty() || (claim.any && guarded.len() < claim.keys.len()) {
            return None;
        }
        let probe = Op::Acquire(Claim { keys: guarded.into(), ..claim.clone() });
        match self.decide(&probe, terms).0 {
            // One of several is about to be given back.
            Outcome::Granted(grant) if claim.any => grant.chosen.map(|key| elsewhere(&key, 0)),
            Outcome::Granted(_) => {
                let unfit = |key: &&Key| self.guard(key).is_some_and(|guard| !fit(guard));
                let unfit = claim.keys.iter().find(unfit).or_else(|| self.worn(claim, terms.now));
                unfit.map(|key| elsewhere(key, 0))
            }
            outcome => Some(terms.capped(outcome)),
        }
    }

    /// Decides one operation. Keys without a guard have no holder that anybody knows of, and are not granted.
    pub fn apply(&mut self, op: &Op, terms: &Terms) -> Outcome {
        if let Op::Acquire(claim) = op
            && claim.any
        {
            return self.apply_any(claim, terms);
        }
        if let Op::Acquire(claim) = op {
            if let Some(key) = claim.keys.iter().find(|key| !self.has(key)) {
                return elsewhere(key, ELSEWHERE_US);
            }
            if let Some(key) = self.worn(claim, terms.now) {
                return elsewhere(key, 0);
            }
        }
        let (outcome, records) = self.decide(op, terms);
        self.keep(&outcome, &records);
        terms.capped(outcome)
    }

    fn keep(&mut self, outcome: &Outcome, records: &Records) {
        let granted = matches!(outcome, Outcome::Granted(grant) if !grant.repeated);
        for (key, record, _) in records.changed() {
            if let Some(entry) = self.entries.get_mut(key) {
                entry.record = record.clone();
                entry.passes += u32::from(granted);
            }
        }
    }

    /// Takes out the keys that nobody holds, with their guards, which are to be given back.
    pub fn take_idle(&mut self, now: ServerTime) -> Vec<(Key, G)> {
        let idle = self.entries.iter().filter(|(_, entry)| entry.record.until() <= now);
        let idle: Vec<Key> = idle.map(|(key, _)| key.clone()).collect();
        self.take_if_idle(idle.iter(), now)
    }

    /// As [`Guarded::take_idle`], of these keys alone.
    pub fn take_if_idle<'a>(
        &mut self,
        keys: impl Iterator<Item = &'a Key>,
        now: ServerTime,
    ) -> Vec<(Key, G)> {
        let mut taken = Vec::new();
        for key in keys {
            if self.entries.get(key).is_some_and(|entry| entry.record.until() <= now)
                && let Some(entry) = self.entries.remove(key)
            {
                let guard = entry.guard.clone();
                self.remember(key, entry);
                taken.push((key.clone(), guard));
            }
        }
        taken
    }

    /// Any of the keys that are guarded; of the others nothing is known.
    fn apply_any(&mut self, claim: &Claim, terms: &Terms) -> Outcome {
        let guarded: Vec<Key> = claim.keys.iter().filter(|key| self.has(key)).cloned().collect();
        if guarded.is_empty() {
            return elsewhere(&claim.keys[0], ELSEWHERE_US);
        }
        let (outcome, records) =
            self.decide(&Op::Acquire(Claim { keys: guarded.into(), ..claim.clone() }), terms);
        self.keep(&outcome, &records);
        terms.capped(outcome)
    }

    fn decide(&self, op: &Op, terms: &Terms) -> (Outcome, Records) {
        let mut records = Records::default();
        for key in op.keys() {
            records.insert(key.clone(), self.record(key).cloned());
        }
        let outcome = record::apply(&mut records, op, &terms.env());
        (outcome, records)
    }

    /// A key that is free and has been handed on here for long enough.
    fn worn<'a>(&self, claim: &'a Claim, now: ServerTime) -> Option<&'a Key> {
        let worn = |entry: &Entry<G>| entry.passes >= PASSES && entry.record.until() <= now;
        claim.keys.iter().find(|key| self.entries.get(key).is_some_and(worn))
    }

    /// Forgets all: the nonces of the leases that were running.
    pub fn clear(&mut self, now: ServerTime) -> Vec<u64> {
        self.lose(now, |_| true)
    }

    /// Forgets the keys with such guards: the nonces of the leases that were running.
    pub fn lose(&mut self, now: ServerTime, lost: impl Fn(&G) -> bool) -> Vec<u64> {
        let gone: Vec<(Key, Entry<G>)> = self.entries.extract_if(|_, entry| lost(&entry.guard)).collect();
        let holders = gone.into_iter().flat_map(|(_, entry)| entry.record.holders);
        let mut nonces: Vec<u64> =
            holders.filter(|holder| holder.until > now).map(|holder| holder.nonce).collect();
        nonces.sort_unstable();
        nonces.dedup();
        nonces
    }

    pub fn read(&self, key: &Key, now: ServerTime) -> Option<Stored> {
        let record = self.record(key)?.clone();
        Some(Stored { key: key.clone(), record, now })
    }

    /// Held keys with this prefix from after `after`, in no order.
    pub fn list(&self, prefix: &str, after: Option<&Key>, now: ServerTime) -> Vec<Stored> {
        let wanted = |key: &Key| {
            key.as_str().starts_with(prefix) && after.is_none_or(|after| key.as_str() > after.as_str())
        };
        let held = self.entries.iter().filter(|(key, entry)| wanted(key) && entry.record.until() > now);
        held.map(|(key, entry)| Stored { key: key.clone(), record: entry.record.clone(), now }).collect()
    }
}

/// One page of what [`Guarded::list`] found.
pub fn page(mut items: Vec<Stored>, limit: usize) -> Page {
    items.sort_by(|a, b| a.key.cmp(&b.key));
    let more = items.len() > limit;
    items.truncate(limit);
    Page { items, more, ..Page::default() }
}

/// Another session has the key, or is to have its turn.
fn elsewhere(key: &Key, free_in_us: u64) -> Outcome {
    Outcome::Held(Denial { key: key.clone(), holder: None, free_in_us, turn: None })
}

/// Who is told of leases that are lost with their session.
#[derive(Default)]
pub struct Losses(Mutex<Option<Loss>>);

impl Losses {
    pub fn set(&self, tell: Loss) {
        *self.lock() = Some(tell);
    }

    pub fn tell(&self, nonces: Vec<u64>) {
        if !nonces.is_empty()
            && let Some(tell) = &*self.lock()
        {
            tell(nonces);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Loss>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many tokens of one key the operations may need.
pub fn tokens_for<'a>(ops: impl Iterator<Item = &'a Op>) -> u64 {
    let mut counts: HashMap<&Key, u64> = HashMap::new();
    for op in ops.filter(|op| matches!(op, Op::Acquire(_))) {
        for key in op.keys() {
            *counts.entry(key).or_default() += 1;
        }
    }
    counts.into_values().max().unwrap_or(0)
}

/// Tokens that one number of the server stands for: as many grants of a key as one group makes.
const PER_NUMBER: u64 = 64;
/// How many tokens are laid by at a time.
const BLOCK: u64 = PER_NUMBER * 1_000_000;

/// Asks for a number that is higher than all that the server gave before, to whomever: `UUID_SHORT` counts
/// in the server's memory, so that nothing has to be written. One row. To be asked when the keys are
/// guarded. What such a number is as a token, and up to which token that holds, is in the database: after a
/// restart of the server its numbers are others, and out of these bounds. Where the floor has risen past
/// it, as when another server was in use meanwhile, it is of no use either.
pub fn number<'a>(keys: impl Iterator<Item = &'a Key>) -> String {
    let rows = highest_of_rows(keys);
    format!(
        "SELECT UUID_SHORT() AS n,LAST_INSERT_ID() AS own,run,base,token,GREATEST({rows},floor) AS r,grants_from,{NOW_US} AS now \
         FROM {COUNTER} JOIN {META} USING (id) WHERE id=1"
    )
}

/// Lays by the next block of tokens, above all that may have been given out, and above what these keys
/// were ever given as rows of the lease table; and `tokens` below it for whoever asks.
pub fn lay_by<'a>(epoch: u64, tokens: u64, keys: impl Iterator<Item = &'a Key>) -> String {
    let epoch = Token::floor_of_epoch(epoch).0;
    let rows = highest_of_rows(keys);
    // From left to right: the new token counts from the new base.
    format!(
        "UPDATE {COUNTER} SET base=LAST_INSERT_ID(GREATEST(token,{epoch},(SELECT floor FROM {META} WHERE id=1),\
         {rows})+{tokens}+1),run=UUID_SHORT(),token=base+{BLOCK} WHERE id=1"
    )
}

fn highest_of_rows<'a>(keys: impl Iterator<Item = &'a Key>) -> String {
    let mut list = String::new();
    for key in keys {
        if !list.is_empty() {
            list.push(',');
        }
        sql::hex(&mut list, key.as_str().as_bytes());
    }
    match list.is_empty() {
        true => "0".to_owned(),
        false => {
            format!("(SELECT COALESCE(MAX(token),0) FROM {LEASES} FORCE INDEX (PRIMARY) WHERE k IN ({list}))")
        }
    }
}

/// What [`number`] answered, for `tokens` of them: the tokens begin above this, and grants not before that
/// moment on our own clock: the records' is another than that of a server which took their first one's place. `None`
/// where tokens have to be laid by first; `laid_by`: by this session, in the same request.
pub fn counted(
    set: Option<Vec<mysql_async::Row>>,
    tokens: u64,
    until: ServerTime,
    laid_by: bool,
) -> Result<Option<(Token, Instant)>, Fault> {
    let row = set.and_then(|mut rows| rows.pop());
    let read =
        row.and_then(|row| mysql_async::from_row_opt::<(u64, u64, u64, u64, u64, u64, u64, u64)>(row).ok());
    let Some((number, own, run, base, last, above, from, now)) = read else {
        let why = format!("the row in {COUNTER} is missing: were its tables dropped?");
        return Err(Fault::Broken { why, slug: "schema" });
    };
    if now > until.0 {
        let why = "this proxy's place in the fleet is not confirmed".to_owned();
        return Err(Fault::Conflict { why });
    }
    let from = begins(from, now, clock::now());
    if tokens > PER_NUMBER {
        return Ok(laid_by.then(|| (Token(own - tokens - 1), from)));
    }
    let token = number.checked_sub(run).and_then(|n| n.checked_mul(PER_NUMBER)?.checked_add(base));
    let fits = |token: &u64| *token + PER_NUMBER <= last && *token > above;
    Ok(token.filter(fits).map(|token| (Token(token - 1), from)))
}

/// When grants may begin, on our own clock: `from` and `now` are by the clock of the server that was asked.
fn begins(from: u64, now: u64, own: Instant) -> Instant {
    own.plus_us(from.saturating_sub(now))
}

/// The moment for decisions, on both clocks.
pub fn moment(time: &Time) -> (Instant, ServerTime) {
    let own = clock::now();
    (own, time.at(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_as_long_on_a_server_with_another_clock() {
        let time = Time::default();
        time.calibrate(ServerTime(1_000_000_000), Instant(0));
        let own = Instant(5_000_000);
        let left = |from, now| time.at(begins(from, now, own)).us_since(time.at(own));
        assert_eq!(left(1_019_000_000, 1_005_000_000), 14_000_000, "the first one");
        assert_eq!(left(1_009_000_000, 995_000_000), 14_000_000, "one that is ten seconds behind it");
        assert_eq!(left(1_009_000_000, 1_015_000_000), 0, "it was over before");
    }

    #[test]
    fn a_galera_node_has_rows_and_no_names() {
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

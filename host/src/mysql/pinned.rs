//! Keys that are guarded by something that a session holds, and is free when the session ends.
//!
//! What MySQL excludes is proxies from each other: one session has the key's named lock ([`advisory`]) or
//! its row lock ([`row`]). Among the clients of one proxy the same
//! [`record::apply`](crate::lock::record::apply) decides as everywhere, on records in memory that live as long
//! as the guard. Tokens are numbers that the server counts, asked for after the guard was had: so they rise
//! over all proxies, and over restarts.
//!
//! A session is never given up while a holder is certain of a lock on it. Where it cannot be used any more, its
//! leases are over and their holders are told, but its connection is kept open, and the keys count as held, until
//! the last moment that a holder was told. The same is done with all leases when this proxy ceases to be a
//! member of its fleet.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::link::{self, Fault};
use super::preflight::Server;
use super::queue::{Job, Places};
use super::sql;
use super::sql::{COUNTER, LEASES, META, NOW_US};
use super::store::{Context, MysqlStore};
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::maps::HashMap;
use crate::lock::record::{Env, Op, Outcome};
use crate::lock::{Instant, Key, ServerTime, Space, Token};
use crate::store::{Done, Health, Loss, Page, Store, StoreError, StoreFuture, Stored};

use guarded::{Guarded, page};

pub mod advisory;
mod guarded;
pub mod row;
mod slot;

/// How long the server keeps a session that says nothing, in seconds: a proxy that was cut off keeps
/// others out for so long.
pub const SESSION_S: u32 = 30;
/// Less for the way to the server: nobody is told to be certain for longer than this after the session
/// was last heard of.
const CERTAIN_US: u64 = (SESSION_S as u64 - 1) * 1_000_000;

/// How often it is looked for locks that have ended, and for sessions that have said nothing.
const SWEEP: Duration = Duration::from_millis(100);
/// How long an answer is waited for on a session that somebody has a lease on. The server may answer again, and
/// then nothing was lost.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a session says nothing, in microseconds: its end is noticed that late.
const SILENCE_US: u64 = 1_000_000;

/// The handle on the task that keeps the guards of one space.
pub struct Pinned<G> {
    space: Space,
    jobs: UnboundedSender<Job>,
    places: Places,
    context: Arc<Context>,
    common: Arc<Common<G>>,
}

/// What the task and its users share.
struct Common<G> {
    held: Mutex<Guarded<G>>,
    time: Time,
    losses: Losses,
    /// The life of the membership that the leases belong to.
    life: AtomicU64,
}

impl<G> Pinned<G> {
    /// The handle, and what the task is sent through it.
    fn open(space: Space, store: &MysqlStore, max_queued: usize) -> (Pinned<G>, UnboundedReceiver<Job>) {
        let (jobs, incoming) = unbounded_channel();
        let (places, context) = (Places::new(max_queued), store.context.clone());
        let common = Common {
            held: Mutex::default(),
            time: Time::default(),
            losses: Losses::default(),
            life: AtomicU64::new(context.membership.standing().life),
        };
        (Pinned { space, jobs, places, context, common: Arc::new(common) }, incoming)
    }
}

impl<G: Clone> Common<G> {
    fn held(&self) -> MutexGuard<'_, Guarded<G>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether somebody has a lease on a key with such a guard.
    fn is_held(&self, which: impl Fn(&G) -> bool) -> bool {
        let (_, now) = moment(&self.time);
        self.held().is_held(now, which)
    }

    /// What decisions are made on now. `grants_from` is on our own clock.
    ///
    /// What was granted in an earlier life of this proxy is over: others may have granted the same resources
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
            tracing::warn!(leases = lost, "leases that rest on a session are over: this proxy was no member");
        }
        let (own, now) = moment(&self.time);
        let grants_from = self.time.at(grants_from.max(context.waits_until()));
        DecisionInputs { own, now, above, grants_from, heard, member_until: standing.until }
    }

    /// Ends the leases on such guards, and tells their holders, who may be certain until `certain` of what they
    /// were told. How many there were.
    fn end(&self, certain: Instant, which: impl Fn(&G) -> bool) -> usize {
        let (own, now) = moment(&self.time);
        let certain = self.time.at(certain.min(own.plus_us(CERTAIN_US)));
        let lost = self.held().end(now, certain, which);
        self.losses.tell(lost)
    }

    /// Forgets the keys with such guards, which are gone, and tells the holders. How many there were.
    fn lose(&self, which: impl Fn(&G) -> bool) -> usize {
        let (_, now) = moment(&self.time);
        let lost = self.held().lose(now, which);
        self.losses.tell(lost)
    }
}

/// Until when a holder may be certain of a lease on a session that was last heard of at `heard`.
fn certain_until(context: &Context, heard: Instant) -> Instant {
    heard.plus_us(CERTAIN_US).min(context.membership.standing().latest)
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

/// Why keys of the space `wanted` cannot be had where those of `here` are kept.
fn lacks(wanted: Space, here: Space, galera: bool) -> Option<String> {
    if wanted != here {
        return Some(format!("{wanted:?} is not kept here"));
    }
    let without = wanted == Space::Advisory && galera;
    without.then(|| "the server is a Galera node, and Galera has no GET_LOCK".to_owned())
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
pub struct DecisionInputs {
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

impl DecisionInputs {
    fn env(&self) -> Env {
        Env {
            now: self.now,
            floor: Token::default(),
            renamed: Token::default(),
            others: self.above,
            grants_from: self.grants_from,
            takeover: true,
            longest_us: u64::MAX,
            set_back_us: 0,
            steady: true,
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

/// Who is told of leases that are lost with their session.
#[derive(Default)]
pub struct Losses(Mutex<Option<Loss>>);

impl Losses {
    pub fn set(&self, tell: Loss) {
        *self.lock() = Some(tell);
    }

    /// How many there were.
    pub fn tell(&self, nonces: Vec<u64>) -> usize {
        let lost = nonces.len();
        if lost > 0
            && let Some(tell) = &*self.lock()
        {
            tell(nonces);
        }
        lost
    }

    fn lock(&self) -> MutexGuard<'_, Option<Loss>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many tokens of one key the operations may need.
pub fn tokens_for<'a>(ops: impl Iterator<Item = &'a Op>) -> u64 {
    let mut counts: HashMap<&Key, u64> = HashMap::default();
    for op in ops.filter(|op| matches!(op, Op::Acquire(_))) {
        for key in op.keys() {
            *counts.entry(key).or_default() += 1;
        }
    }
    counts.into_values().max().unwrap_or(0)
}

/// Tokens that one number of the server stands for: as many grants of a key as one group makes.
const PER_NUMBER: u64 = 64;
/// How many tokens are laid by at a time, at most. Leases are granted above the block, and no token is far ahead of the
/// clock: so a block ends at the time, where that leaves the least number of tokens.
const BLOCK: u64 = PER_NUMBER * 1_000_000;
const LEAST_BLOCK: u64 = PER_NUMBER * 16;

/// Asks for a number that is higher than all that the server gave before, to whomever: `UUID_SHORT` counts
/// in the server's memory, so that nothing has to be written. One row. To be asked when the keys are
/// guarded. What such a number is as a token, and up to which token that holds, is in the database: after a
/// restart of the server its numbers are others, and out of these bounds. Where the floor has risen past
/// it, as when another server was in use meanwhile, it is of no use either.
pub fn number<'a>(keys: impl Iterator<Item = &'a Key>) -> String {
    let rows = highest_of_rows(keys);
    format!(
        "SELECT UUID_SHORT() AS n,LAST_INSERT_ID() AS own,run,base,token,GREATEST({rows},floor) AS r,grants_from,{NOW_US} AS now,identity \
         FROM {COUNTER} JOIN {META} USING (id) WHERE id=1"
    )
}

/// Lays by the next block of tokens, above all that may have been given out, and above what these keys
/// were ever given as rows of the lease table; and `tokens` below it for whoever asks.
pub fn reserve_tokens<'a>(epoch: u64, tokens: u64, keys: impl Iterator<Item = &'a Key>) -> String {
    let epoch = Token::floor_of_epoch(epoch).0;
    let rows = highest_of_rows(keys);
    // From left to right: the new token counts from the new base. The floor rises with it: leases are granted above the
    // block, by proxies that may have looked at it a second ago, and that see to it that the floor is the same still.
    format!(
        "UPDATE {COUNTER} SET base=LAST_INSERT_ID(GREATEST(token,{epoch},(SELECT floor FROM {META} WHERE id=1),\
         {rows})+{tokens}+1),run=UUID_SHORT(),\
         token=IF(base+{LEAST_BLOCK}<{NOW_US},LEAST(base+{BLOCK},{NOW_US}),base+{LEAST_BLOCK}) WHERE id=1;{}",
        sql::raise_floor(0)
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
    server: &Server,
    set: Option<Vec<mysql_async::Row>>,
    tokens: u64,
    until: ServerTime,
    laid_by: bool,
) -> Result<Option<(Token, Instant)>, Fault> {
    let row = set.and_then(|mut rows| rows.pop());
    type Columns = (u64, u64, u64, u64, u64, u64, u64, u64, Vec<u8>);
    let read = row.and_then(|row| mysql_async::from_row_opt::<Columns>(row).ok());
    let Some((number, own, run, base, last, above, from, now, used_on)) = read else {
        let why = format!("the row in {COUNTER} is missing: were its tables dropped?");
        return Err(Fault::Broken { why, slug: "schema" });
    };
    link::check_use(server, &used_on)?;
    link::check_member(ServerTime(now), until)?;
    let from = begins(from, now, clock::now());
    if tokens > PER_NUMBER {
        return Ok(laid_by.then(|| (Token(own - tokens - 1), from)));
    }
    if just_started(number, now) {
        let why = "the server has just been started; its numbers are used from the next second on".to_owned();
        return Err(Fault::Conflict { why });
    }
    let token = number.checked_sub(run).and_then(|n| n.checked_mul(PER_NUMBER)?.checked_add(base));
    let fits = |token: &u64| *token + PER_NUMBER <= last && *token > above;
    Ok(token.filter(fits).map(|token| (Token(token - 1), from)))
}

/// Whether the server was started in this second of its clock, or the last one. `UUID_SHORT` counts from the second of the
/// start: a server that gives a number and is started again within the same second would give it again.
fn just_started(number: u64, now_us: u64) -> bool {
    let started_s = (number >> 24) & u64::from(u32::MAX);
    (started_s..=started_s + 1).contains(&(now_us / 1_000_000))
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
    fn a_number_is_used_once_the_second_of_the_start_is_over() {
        let number = |started_s: u64| (7 << 56) + (started_s << 24) + 3;
        let started = 1_795_314_151;
        for (now_us, just) in [(0, true), (999_999, true), (1_999_999, true), (2_000_000, false)] {
            assert_eq!(just_started(number(started), started * 1_000_000 + now_us), just, "{now_us}");
        }
        assert!(!just_started(number(started), (started - 60) * 1_000_000), "the clock was set back since");
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

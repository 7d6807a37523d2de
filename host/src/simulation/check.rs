//! Checks whether everything that clients were told can be true.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

mod order;
mod rules;
mod vain;
mod working;

pub use working::Work;

use self::order::{OrderOfAll, Waiting, pass};
use self::rules::RecordedRules;
use super::faults::SEPARATOR;
use super::options::{Options, Second};
use super::server::Ended;
use crate::clock;
use crate::lock::record::Holder;
use crate::lock::table::ABANDON_MS;
use crate::lock::{Instant, Key, LeaseRef, Mode, Space, Token};
use crate::mysql::simulated_name;

/// A broken promise, in a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

/// A lease, as its client knows it.
#[derive(Clone, Debug)]
struct Held {
    owner: String,
    mode: Mode,
    token: Token,
    /// When the client received the answer.
    from: Instant,
    /// Until when the client may be certain.
    until: Instant,
    session: Option<Session>,
}

/// The database session that a lease also ends with.
#[derive(Clone, Debug)]
struct Session {
    /// The proxy that granted the lease.
    proxy: usize,
    /// The session's locks on the server for this lease.
    locked: Vec<Vec<u8>>,
}

impl Session {
    fn of(keys: &[Key], proxy: usize) -> Option<Session> {
        let locked: Vec<Vec<u8>> = keys
            .iter()
            .filter_map(|key| match key.space() {
                Space::Advisory => Some(simulated_name(key).as_bytes().to_vec()),
                Space::Row => Some(key.as_str().as_bytes().to_vec()),
                _ => None,
            })
            .collect();
        (!locked.is_empty()).then_some(Session { proxy, locked })
    }

    fn ended_with(&self, ended: &Ended) -> bool {
        self.proxy == ended.proxy && self.locked.iter().any(|lock| ended.locked.contains(lock))
    }
}

/// The state of a `once`.
#[derive(Default)]
struct Once {
    /// The outcomes that clients have sent.
    sent: BTreeSet<String>,
    /// The last confirmed outcome: when it was confirmed, and until when it is kept at least.
    kept: Option<(Instant, Instant)>,
}

/// The versions of a resource.
#[derive(Default)]
struct Versions {
    /// The version that was made from each version that was read.
    made_of: BTreeMap<Token, Token>,
    content: BTreeMap<Token, Option<String>>,
    /// The highest version in all answers so far, at each time.
    highest: Vec<(Instant, Token)>,
}

/// A request, and what its client knows of its lease.
#[derive(Default)]
struct Asked {
    /// The proxies that were asked, each with its `life`.
    proxies: Vec<(usize, u64)>,
    /// When the last of them was asked.
    last: Instant,
    /// The client was granted a lease, and was not told that the lease is over.
    has_lease: bool,
}

/// Everything that clients were told.
#[derive(Default)]
pub struct Checks {
    /// Leases that may still be certain, by resource and nonce. A lease of several resources is listed under each of
    /// them.
    held: BTreeMap<String, BTreeMap<u64, Held>>,
    /// The nonces of all leases that were granted.
    nonces: BTreeSet<u64>,
    /// Waiters, by resource.
    waiting: BTreeMap<String, Vec<Waiting>>,
    /// The id of the last waiter.
    last_id: u64,
    /// Policies whose keys were renamed, or may have been.
    renamed: BTreeSet<&'static str>,
    /// Policies that had a global queue, or may have had one.
    in_global_queue: BTreeSet<&'static str>,
    /// The highest token in all answers so far, by resource, in order of time.
    tokens: BTreeMap<String, Vec<(Instant, Token)>>,
    /// The lease of each request id.
    requests: BTreeMap<String, (String, u64)>,
    once: BTreeMap<String, Once>,
    versions: BTreeMap<String, Versions>,
    /// By owner; each request has its own owner.
    asked: BTreeMap<String, Asked>,
    /// Sessions that ended in the last minute.
    ended: Vec<Ended>,
    /// A server's clock was set, so values that are kept for a time may end earlier.
    pub is_clock_set: bool,
    /// A fail-over has lost writes, so leases, outcomes and versions may be gone. Even so, no lock has two holders,
    /// and tokens increase.
    pub has_lost_writes: bool,
    recorded_rules: RecordedRules,
    order_of_all: OrderOfAll,
    /// Waiters join the global queue in the order of their requests, because none of their packets is late or lost.
    joins_in_order: bool,
    /// Nothing goes wrong in the run, no policy is replaced, and nobody asks for several resources. (A waiter for one
    /// of two resources blocks the other one for the waiters behind it.)
    is_plain: bool,
    /// Whether guarded requests may continue after their leases are lost.
    lets_finish: bool,
    /// When a lease of each resource last began or ended.
    moved: BTreeMap<String, Instant>,
    /// The guarded requests that the application works on, by resource.
    work: BTreeMap<String, working::UnderWay>,
    /// The number of guarded requests that were checked.
    works: u64,
    /// The history, for people.
    history: Vec<(Instant, String)>,
    /// The number of events at the last moment.
    at_once: usize,
    /// A promise is broken, so later events are not recorded.
    has_ended: bool,
}

/// An answer to an acquire.
pub struct Granted<'a> {
    pub resource: &'a str,
    pub owner: &'a str,
    pub lease: &'a LeaseRef,
    pub mode: Mode,
    pub token: Token,
    pub request_id: Option<&'a str>,
    /// When the client asked.
    pub asked_at: Instant,
    pub now: Instant,
    pub valid_until: Instant,
    /// The proxy that granted the lease.
    pub proxy: usize,
    /// The proxy's `life`.
    pub life: u64,
}

/// So many events at one moment mean that something never ends.
const AT_ONCE: usize = 5_000;
/// How long the end of a session is remembered: longer than an answer is in flight.
const REMEMBERED_US: u64 = 60_000_000;

impl Checks {
    /// The state at the start of a run.
    pub fn new(options: &Options) -> Checks {
        Checks {
            order_of_all: OrderOfAll::of(options),
            joins_in_order: options.joins_in_order(),
            is_plain: options.is_calm() && !options.asks_for_several,
            lets_finish: options.lets_finish(),
            // Proxies may use either node of a cluster at any time, and the replica after a fail-over.
            is_clock_set: options.second_ahead_ms != 0 && !matches!(options.second, Some(Second::Replica(_))),
            ..Checks::default()
        }
    }

    /// Records an event, to be read if a check fails.
    pub fn note(&mut self, now: Instant, what: String) {
        if self.has_ended {
            return;
        }
        let is_same_moment = self.history.last().is_some_and(|(at, _)| *at == now);
        self.at_once = if is_same_moment { self.at_once + 1 } else { 0 };
        self.history.push((now, what));
    }

    /// Records that a promise is broken; later events are not recorded.
    pub fn ends(&mut self, now: Instant, violation: &Violation) {
        self.note(now, format!("BROKEN: {}", violation.0));
        self.has_ended = true;
    }

    /// The number of grants that were checked: leases that were granted to clients, and guarded requests that reached
    /// the application.
    pub fn grants(&self) -> u64 {
        self.nonces.len() as u64 + self.works
    }

    /// Checks that time passes: a loop without a pause keeps everything else from running.
    pub fn time_passes(&self) -> Result<(), Violation> {
        match (self.at_once > AT_ONCE, self.history.last()) {
            (true, Some((_, what))) => {
                Err(Violation(format!("too much happens at one moment, at last: {what}")))
            }
            _ => Ok(()),
        }
    }

    /// Checks a grant, and records it.
    pub fn granted(&mut self, granted: &Granted<'_>) -> Result<(), Violation> {
        let Granted {
            resource,
            owner,
            lease,
            mode,
            token,
            request_id,
            asked_at,
            now,
            valid_until,
            proxy,
            life,
        } = *granted;
        self.note(
            now,
            format!(
                "{owner} is granted {resource} {mode:?} with token {}, for {} ms, by proxy {proxy}, as {:?}",
                token.0,
                valid_until.ms_since(now),
                lease.keys
            ),
        );
        self.moves(resource, now);
        let asked = self.asked.entry(owner.to_owned()).or_default();
        asked.has_lease = true;
        // Another proxy may have granted the lease, if the client asked that proxy first.
        let is_of_this_proxy = asked.proxies.iter().all(|asked| *asked == (proxy, life));
        if let Some(id) = request_id {
            let (first_resource, nonce) =
                self.requests.entry(id.to_owned()).or_insert((resource.to_owned(), lease.nonce)).clone();
            // Only the proxy that granted a lease on a session knows that lease.
            let is_other =
                |first: &&Held| first.session.is_none() && nonce != lease.nonce && first.until > now;
            if let Some(first) = self.known(&first_resource, nonce).filter(is_other) {
                return Err(Violation(format!(
                    "one request, two leases: {owner} is granted {resource} with token {} by a request whose lease with token \
                     {} lasts for another {} ms",
                    token.0,
                    first.token.0,
                    first.until.ms_since(now)
                )));
            }
        }
        if let Some(known) = self.known(resource, lease.nonce) {
            // The request was repeated.
            let until = known.until.max(valid_until);
            self.of_lease(resource, lease.nonce).for_each(|held| held.until = until);
            return Ok(());
        }
        let is_new = self.nonces.insert(lease.nonce);
        if is_new && is_of_this_proxy && self.keeps_order(resource) {
            pass(&mut self.waiting, granted, self.order_of_all.since());
        }
        let session = Session::of(&lease.keys, proxy);
        let has_ended = session.as_ref().is_some_and(|session| {
            self.ended.iter().any(|ended| ended.at >= asked_at && session.ended_with(ended))
        });
        let new = Held { owner: owner.to_owned(), mode, token, from: now, until: valid_until, session };
        for part in parts(resource) {
            if valid_until > now && !has_ended {
                let held = self.held.entry(part.to_owned()).or_default();
                if let Some(other) = held.values().find(|other| !are_compatible(&new, held.values(), other)) {
                    return Err(Violation(format!(
                        "two holders: {owner} is granted {part} with token {} while {} is certain of it for another {} ms \
                         (token {})",
                        token.0,
                        other.owner,
                        other.until.ms_since(now),
                        other.token.0
                    )));
                }
                held.insert(lease.nonce, new.clone());
            }
            let tokens = self.tokens.entry(part.to_owned()).or_default();
            rises(tokens, token, asked_at, now).map_err(|last| {
                Violation(format!(
                    "tokens do not rise: {owner} is granted {part} with token {}, and {} was told before it asked",
                    token.0, last.0
                ))
            })?;
        }
        Ok(())
    }

    /// The lease of a resource, if it is known. All its parts have the same data.
    fn known(&self, resource: &str, nonce: u64) -> Option<&Held> {
        parts(resource).find_map(|part| self.held.get(part)?.get(&nonce))
    }

    fn of_lease(&mut self, resource: &str, nonce: u64) -> impl Iterator<Item = &mut Held> {
        let is_part = |part: &str| parts(resource).any(|other| other == part);
        let held = self.held.iter_mut().filter(move |(part, _)| is_part(part));
        held.filter_map(move |(_, held)| held.get_mut(&nonce))
    }

    /// Records a renewal, which lets the client be certain for longer.
    pub fn renewed(
        &mut self,
        resource: &str,
        lease: &LeaseRef,
        (now, valid_until): (Instant, Instant),
    ) -> Result<(), Violation> {
        // A lease whose session has ended is no longer known here. Its proxy may renew it until it notices.
        for part in parts(resource) {
            let Some(held) = self.held.get_mut(part) else { continue };
            let Some(mut renewed) = held.remove(&lease.nonce) else { continue };
            renewed.until = renewed.until.max(valid_until);
            let mode = with_limit_of_all(renewed.mode, held.values());
            let as_new = Held { from: now, mode, ..renewed.clone() };
            // An answer that comes too late promises nothing.
            if renewed.until > now
                && let Some(other) =
                    held.values().find(|other| !are_compatible(&as_new, held.values(), other))
            {
                return Err(Violation(format!(
                    "two holders: {} renews {part} while {} is certain of it",
                    renewed.owner, other.owner
                )));
            }
            held.insert(lease.nonce, renewed);
        }
        Ok(())
    }

    /// The client no longer counts on the lease: it has released it, or was told that the lease is lost.
    pub fn let_go(&mut self, resource: &str, lease: &LeaseRef) {
        self.moves(resource, clock::now());
        for part in parts(resource) {
            if let Some(held) = self.held.get_mut(part) {
                held.remove(&lease.nonce);
            }
        }
    }

    /// A client asks a proxy.
    pub fn asks(&mut self, owner: &str, proxy: (usize, u64)) {
        let asked = self.asked.entry(owner.to_owned()).or_default();
        asked.proxies.push(proxy);
        asked.last = clock::now();
    }

    /// The proxy tells the owner that its lease is released.
    pub fn released(&mut self, owner: &str) {
        self.asked.entry(owner.to_owned()).or_default().has_lease = false;
    }

    /// Checks a lease whose client was not granted it, or has released it. If all proxies that were asked for it are
    /// still running, one of them should have taken the lease back. They try for as long as the lease would last by
    /// their own clocks, and a lease lasts longer if the server's clock is set back.
    pub fn is_left(&self, key: &str, holder: &Holder, lives: &[(usize, u64)]) -> Result<(), Violation> {
        let owner = &holder.owner;
        let Some(asked) = self.asked.get(&**owner) else { return Ok(()) };
        let lasts_longer =
            self.is_clock_set && clock::now() > asked.last.plus_ms(holder.ttl_ms).plus_ms(ABANDON_MS);
        let live = asked.proxies.iter().all(|life| lives.contains(life));
        if asked.has_lease || self.has_lost_writes || lasts_longer || !live {
            return Ok(());
        }
        Err(Violation(format!(
            "left behind: {owner} has {key}, and its client was granted no lease, or has released it"
        )))
    }

    /// Checks that a granted `once` was not done before.
    pub fn begun(&self, resource: &str, asked_at: Instant, now: Instant) -> Result<(), Violation> {
        let kept = self.once.get(resource).and_then(|once| once.kept);
        match kept {
            Some((since, until))
                if since < asked_at && now < until && !self.is_clock_set && !self.has_lost_writes =>
            {
                Err(Violation(format!(
                    "done twice: {resource} is granted, and its outcome is kept for another {} ms",
                    until.ms_since(now)
                )))
            }
            _ => Ok(()),
        }
    }

    /// A client sends an outcome.
    pub fn finishes(&mut self, resource: &str, outcome: &str) {
        self.once.entry(resource.to_owned()).or_default().sent.insert(outcome.to_owned());
    }

    /// The outcome is kept from `now` until at least `until`.
    pub fn finished(&mut self, resource: &str, now: Instant, until: Instant) {
        self.once.entry(resource.to_owned()).or_default().kept = Some((now, until));
    }

    /// Checks an outcome that a client was told.
    pub fn done(&self, resource: &str, outcome: &str) -> Result<(), Violation> {
        match self.once.get(resource) {
            Some(once) if once.sent.contains(outcome) => Ok(()),
            _ => Err(Violation(format!("{resource} has the outcome {outcome}, which nobody has sent"))),
        }
    }

    /// Checks a version that a client was told, with its value.
    pub fn read(
        &mut self,
        resource: &str,
        (version, content): (Token, Option<String>),
        (asked_at, now): (Instant, Instant),
    ) -> Result<(), Violation> {
        if self.has_lost_writes {
            return Ok(());
        }
        let versions = self.versions.entry(resource.to_owned()).or_default();
        let before = versions.highest.iter().rev().find(|(at, _)| *at < asked_at);
        if let Some((_, last)) = before.filter(|(_, last)| *last > version) {
            let why = format!(
                "{resource} has the version {}, and {} was told before it was asked for",
                version.0, last.0
            );
            return Err(Violation(why));
        }
        let known = versions.content.entry(version).or_insert_with(|| content.clone());
        if *known != content {
            let why = format!("version {} of {resource} is {content:?}, and was {known:?}", version.0);
            return Err(Violation(why));
        }
        note_highest(&mut versions.highest, version, now);
        Ok(())
    }

    /// Checks a commit of a client, which made a version from the one that it had read.
    pub fn committed(
        &mut self,
        resource: &str,
        (read, made): (Token, Token),
        content: &str,
        now: Instant,
    ) -> Result<(), Violation> {
        if self.has_lost_writes {
            return Ok(());
        }
        let versions = self.versions.entry(resource.to_owned()).or_default();
        let first = *versions.made_of.entry(read).or_insert(made);
        if made <= read || first != made {
            return Err(Violation(format!(
                "version {} of {resource} was made of {}, of which {} was made",
                made.0, read.0, first.0
            )));
        }
        let known = versions.content.entry(made).or_insert_with(|| Some(content.to_owned()));
        if known.as_deref() != Some(content) {
            return Err(Violation(format!(
                "version {} of {resource} is {content}, and was {known:?}",
                made.0
            )));
        }
        note_highest(&mut versions.highest, made, now);
        Ok(())
    }

    /// A proxy is gone with all its sessions, so nobody is certain of a lease on one of them.
    pub fn proxy_ends(&mut self, proxy: usize) {
        let rests = |held: &Held| held.session.as_ref().is_some_and(|session| session.proxy == proxy);
        self.held.values_mut().for_each(|held| held.retain(|_, held| !rests(held)));
    }

    /// Sessions ended against the wish of their proxies, so nobody is certain of a lease on one of them.
    pub fn sessions_end(&mut self, ended: Vec<Ended>, now: Instant) {
        self.ended.retain(|ended| now.us_since(ended.at) < REMEMBERED_US);
        for ended in ended {
            let rests = |held: &Held| held.session.as_ref().is_some_and(|session| session.ended_with(&ended));
            self.held.values_mut().for_each(|held| held.retain(|_, held| !rests(held)));
            self.ended.push(ended);
        }
    }

    /// Until when the client may be certain of the lease; `None` if it has released the lease.
    pub fn certain_until(&self, resource: &str, lease: &LeaseRef) -> Option<Instant> {
        Some(self.known(resource, lease.nonce)?.until)
    }

    /// A hash of the history: runs with the same events have the same fingerprint.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (at, what) in &self.history {
            (at.0, what).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// The history, as lines of text.
    pub fn time_line(&self, last: usize) -> String {
        let from = self.history.len().saturating_sub(last);
        let began = clock::simulated::BEGINNING;
        let line =
            |(at, what): &(Instant, String)| format!("{:>12.6} s  {what}\n", at.us_since(began) as f64 / 1e6);
        self.history[from..].iter().map(line).collect()
    }
}

/// The resources in a name.
fn parts(resource: &str) -> impl Iterator<Item = &str> {
    resource.split(SEPARATOR)
}

fn is_of(resource: &str, policy: &str) -> bool {
    resource.split_once('/').is_some_and(|(of, _)| of == policy)
}

/// Records the token of an answer that was received at `now` and asked for at `asked_at`. Returns an error if a token
/// that is as high was already known at `asked_at`.
fn rises(
    tokens: &mut Vec<(Instant, Token)>,
    token: Token,
    asked_at: Instant,
    now: Instant,
) -> Result<(), Token> {
    let before = tokens.iter().rev().find(|(at, _)| *at < asked_at);
    if let Some((_, last)) = before.filter(|(_, last)| *last >= token) {
        return Err(*last);
    }
    note_highest(tokens, token, now);
    Ok(())
}

fn note_highest(tokens: &mut Vec<(Instant, Token)>, token: Token, now: Instant) {
    let highest = tokens.last().map_or(token, |(_, last)| token.max(*last));
    tokens.push((now, highest));
}

/// The mode with the highest limit of all: the policy may have raised the number of permits since the lease was
/// granted.
fn with_limit_of_all<'a>(mode: Mode, all: impl Iterator<Item = &'a Held>) -> Mode {
    let Mode::Permits { count, limit } = mode else { return mode };
    let limits = all.filter_map(|held| match held.mode {
        Mode::Permits { limit, .. } => Some(limit),
        _ => None,
    });
    Mode::Permits { count, limit: limits.fold(limit, u32::max) }
}

/// Whether both leases may be held at the same time, together with `all`.
fn are_compatible<'a>(new: &Held, all: impl Iterator<Item = &'a Held>, other: &Held) -> bool {
    if new.from >= other.until {
        return true;
    }
    match (new.mode, other.mode) {
        (Mode::Shared, Mode::Shared) => true,
        (Mode::Permits { count, limit }, Mode::Permits { .. }) => {
            let taken = all.filter(|held| held.until > new.from).map(|held| match held.mode {
                Mode::Permits { count, .. } => count,
                _ => 0,
            });
            count + taken.sum::<u32>() <= limit
        }
        _ => false,
    }
}

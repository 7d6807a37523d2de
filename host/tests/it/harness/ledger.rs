//! Everything that clients were told of their leases and of the outcomes of `once`, recorded as soon as they were
//! told, with the checks of it.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::{LazyLock, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::mpsc::UnboundedSender;

use super::Response;

/// The ledger, by the names of resources. The names of keys do not matter.
#[derive(Default)]
pub struct Ledger {
    told: Mutex<HashMap<String, Vec<Told>>>,
    outcomes: Mutex<HashMap<String, Vec<Outcome>>>,
    ends: Mutex<Vec<SessionsEnd>>,
    /// Sends all records to the ledger of another process, if there is one.
    says: Option<UnboundedSender<Said>>,
}

/// A record for the ledger of another process. Times are microseconds of the machine's clock; see [`Moment`].
#[derive(Debug, Serialize, Deserialize)]
pub enum Said {
    Granted {
        at: usize,
        resource: String,
        by: String,
        tokens: Vec<(String, u64)>,
        times: [Moment; 3],
        ends_with: Option<SocketAddr>,
    },
    /// A grant has another end now.
    Until { at: usize, resource: String, until: Moment },
    /// The outcome of a `once`.
    Outcome { resource: String, outcome: Value, at: Moment },
}

/// A moment, in a form that all processes of this machine understand.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Moment(i64);

/// The same moment on both clocks.
static SAME: LazyLock<(Instant, i64)> = LazyLock::new(|| {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (Instant::now(), now.tv_sec * 1_000_000 + now.tv_nsec / 1_000)
});

impl From<Instant> for Moment {
    fn from(instant: Instant) -> Moment {
        let (same, us) = *SAME;
        let after = instant.saturating_duration_since(same).as_micros();
        let before = same.saturating_duration_since(instant).as_micros();
        Moment(us + i64::try_from(after).expect("it is near") - i64::try_from(before).expect("it is near"))
    }
}

impl From<Moment> for Instant {
    fn from(Moment(us): Moment) -> Instant {
        let (same, same_us) = *SAME;
        let apart = Duration::from_micros((us - same_us).unsigned_abs());
        if us < same_us { same.checked_sub(apart).expect("the machine ran") } else { same + apart }
    }
}

/// The end of everything that depended on the sessions of a proxy.
#[derive(Clone, Copy)]
struct SessionsEnd {
    proxy: SocketAddr,
    /// From this moment on nobody counts on it.
    at: Instant,
    /// Requests after this moment use other sessions; `None` if there are none.
    over: Option<Instant>,
}

/// What a client was told of a lease, and what it did with it.
struct Told {
    by: String,
    /// The keys, with their tokens.
    tokens: Vec<(String, u64)>,
    asked: Instant,
    /// The time in which the client was certain. It is empty if the client was told too late to be certain of
    /// anything, as by a proxy that was paused.
    from: Instant,
    until: Instant,
    /// The proxy, if the lock ends with it.
    ends_with: Option<SocketAddr>,
}

/// The outcome of a `once` that a client was told.
struct Outcome {
    outcome: Value,
    at: Instant,
}

/// The place of a grant in the ledger.
#[derive(Clone, Debug)]
pub struct Noted {
    resource: String,
    at: usize,
}

impl Ledger {
    /// Records a grant that was just answered. Its holder is certain of it until it says otherwise.
    pub fn granted(
        &self,
        resource: &str,
        by: &str,
        asked: Instant,
        proxy: SocketAddr,
        granted: &Response,
    ) -> Noted {
        let from = Instant::now();
        // The proxy began to wait after it was asked, and counted the rest of the lease from the end of the wait.
        let told = Duration::from_millis(granted.number("waited_ms") + granted.number("expires_in_ms"));
        let tokens = tokens(&granted.json);
        assert!(!tokens.is_empty(), "a grant has tokens: {}", granted.text);
        let ends_with = (granted.json["ends_with"] == "session").then_some(proxy);
        self.note(resource, Told { by: by.to_owned(), tokens, asked, from, until: asked + told, ends_with })
    }

    fn note(&self, resource: &str, told: Told) -> Noted {
        let mut all = self.lock();
        let of_resource = all.entry(resource.to_owned()).or_default();
        let at = of_resource.len();
        self.say(|| Said::Granted {
            at,
            resource: resource.to_owned(),
            by: told.by.clone(),
            tokens: told.tokens.clone(),
            times: [told.asked, told.from, told.until].map(Moment::from),
            ends_with: told.ends_with,
        });
        of_resource.push(told);
        Noted { resource: resource.to_owned(), at }
    }

    /// Records an outcome that was just told.
    pub fn outcome(&self, resource: &str, outcome: &Value) {
        self.note_outcome(resource, outcome.clone(), Instant::now());
    }

    fn note_outcome(&self, resource: &str, outcome: Value, at: Instant) {
        self.say(|| Said::Outcome { resource: resource.to_owned(), outcome: outcome.clone(), at: at.into() });
        let mut all = self.outcomes.lock().expect("nobody panics with it");
        all.entry(resource.to_owned()).or_default().push(Outcome { outcome, at });
    }

    /// A ledger that also sends its records to another process.
    pub fn that_says(says: UnboundedSender<Said>) -> Ledger {
        Ledger { says: Some(says), ..Ledger::default() }
    }

    fn say(&self, said: impl FnOnce() -> Said) {
        if let Some(says) = &self.says {
            // At the end of the process nobody listens.
            let _ = says.send(said());
        }
    }

    /// Takes over a record of another process. `places`: where this ledger has the records of that process.
    pub fn take_in(&self, said: Said, places: &mut HashMap<(String, usize), Noted>) {
        match said {
            Said::Granted { at, resource, by, tokens, times, ends_with } => {
                let [asked, from, until] = times.map(Instant::from);
                let noted = self.note(&resource, Told { by, tokens, asked, from, until, ends_with });
                places.insert((resource, at), noted);
            }
            Said::Until { at, resource, until } => {
                let noted = &places[&(resource, at)];
                self.change(noted, |told| told.until = until.into());
            }
            Said::Outcome { resource, outcome, at } => self.note_outcome(&resource, outcome, at.into()),
        }
    }

    /// Records a renewal, which counts from the time it was asked for.
    pub fn renewed(&self, noted: &Noted, asked: Instant, answer: &Response) {
        let until = asked + Duration::from_millis(answer.number("expires_in_ms"));
        self.change(noted, |told| told.until = told.until.max(until));
    }

    /// Locks that end with this proxy have ended. Call this before the proxy is killed.
    pub fn killed(&self, proxy: SocketAddr) {
        self.sessions_end(SessionsEnd { proxy, at: Instant::now(), over: None });
    }

    /// The sessions of this proxy have ended at some time since that moment. It may have new sessions by now.
    pub fn lost_sessions(&self, proxy: SocketAddr, since: Instant) {
        self.sessions_end(SessionsEnd { proxy, at: since, over: Some(Instant::now()) });
    }

    fn sessions_end(&self, end: SessionsEnd) {
        self.ends.lock().expect("nobody panics with it").push(end);
    }

    /// The holder no longer counts on the grant. Call this before it is released.
    pub fn ended(&self, noted: &Noted) {
        self.change(noted, |told| told.until = told.until.min(Instant::now()));
    }

    /// Until when the holder is certain.
    pub fn until(&self, noted: &Noted) -> Instant {
        self.lock()[&noted.resource][noted.at].until
    }

    /// The number of grants.
    pub fn grants(&self) -> usize {
        self.lock().values().map(Vec::len).sum()
    }

    /// The number of grants by the kind of the resource.
    pub fn grants_by_kind(&self) -> BTreeMap<String, usize> {
        let mut grants = BTreeMap::new();
        for (resource, told) in &*self.lock() {
            *grants.entry(kind(resource).to_owned()).or_default() += told.len();
        }
        grants
    }

    /// The number of outcomes that clients were told.
    pub fn outcomes(&self) -> usize {
        self.outcomes.lock().expect("nobody panics with it").values().map(Vec::len).sum()
    }

    /// The first grant of a lease that was asked for after this moment: the time from the moment to it, and its token.
    pub fn first_grant_since(&self, moment: Instant) -> Option<(Duration, u64)> {
        let all = self.lock();
        let first = all.values().flatten().filter(|told| told.asked > moment).min_by_key(|told| told.from)?;
        Some((first.from - moment, first.tokens[0].1))
    }

    /// Checks all grants: no two clients were certain of a resource at the same time, the tokens of each key
    /// increase, and each `once` has one outcome. Returns the keys that were granted.
    pub fn check(&self) -> Vec<String> {
        let mut by_key: HashMap<String, Vec<(Instant, Instant, u64)>> = HashMap::new();
        let ends = self.ends.lock().expect("nobody panics with it").clone();
        for (resource, told) in &*self.lock() {
            let mut certain: Vec<Certain<'_>> = told.iter().map(|told| Certain::of(told, &ends)).collect();
            certain.sort_by_key(|certain| certain.told.from);
            check_times(resource, &certain);
            if let Some(outcomes) = self.outcomes.lock().expect("nobody panics with it").get(resource) {
                check_outcomes(resource, outcomes, told);
            }
            for told in told {
                for (key, token) in &told.tokens {
                    by_key.entry(key.clone()).or_default().push((told.asked, told.from, *token));
                }
            }
        }
        for (key, grants) in &by_key {
            check_tokens(key, grants);
        }
        by_key.into_keys().collect()
    }

    fn change(&self, noted: &Noted, change: impl FnOnce(&mut Told)) {
        let mut all = self.lock();
        let told = all.get_mut(&noted.resource).and_then(|told| told.get_mut(noted.at));
        let told = told.expect("what was noted stays");
        change(told);
        let Noted { resource, at } = noted.clone();
        self.say(|| Said::Until { at, resource, until: told.until.into() });
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<Told>>> {
        self.told.lock().expect("nobody panics with it")
    }
}

/// The part of a resource's name before the first slash.
pub fn kind(resource: &str) -> &str {
    resource.split('/').next().unwrap_or_default()
}

fn tokens(lease: &Value) -> Vec<(String, u64)> {
    let keys = lease["keys"].as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned);
    let tokens: Vec<u64> = match &lease["tokens"] {
        Value::Array(tokens) => tokens.iter().filter_map(Value::as_u64).collect(),
        _ => lease["token"].as_u64().into_iter().collect(),
    };
    keys.zip(tokens).collect()
}

/// Until when a client really counted on its lease.
struct Certain<'a> {
    told: &'a Told,
    until: Instant,
}

impl Certain<'_> {
    fn of<'a>(told: &'a Told, ends: &[SessionsEnd]) -> Certain<'a> {
        let is_its = |end: &&SessionsEnd| {
            told.ends_with == Some(end.proxy) && end.over.is_none_or(|over| told.asked < over)
        };
        let ended = ends.iter().filter(is_its).map(|end| end.at).min();
        Certain { told, until: ended.map_or(told.until, |ended| told.until.min(ended)) }
    }
}

/// Checks grants that are sorted by their beginning.
fn check_times(resource: &str, all: &[Certain<'_>]) {
    let mut last: Option<&Certain<'_>> = None;
    for next in all.iter().filter(|next| next.told.from < next.until) {
        if let Some(last) = last {
            let over = last.until.saturating_duration_since(next.told.from);
            assert!(
                over.is_zero(),
                "{resource}: {} {:?} overlaps {} {:?} by {over:?}, {:?} ago",
                last.told.by,
                last.told.tokens,
                next.told.by,
                next.told.tokens,
                next.told.from.elapsed()
            );
        }
        if last.is_none_or(|last| last.until < next.until) {
            last = Some(next);
        }
    }
}

/// Checks that all clients are told the same outcome, and that nobody who asks later is told to do the work.
fn check_outcomes(resource: &str, outcomes: &[Outcome], all: &[Told]) {
    let Some(first) = outcomes.iter().min_by_key(|outcome| outcome.at) else { return };
    for Outcome { outcome, .. } in outcomes {
        assert_eq!(outcome, &first.outcome, "{resource} has two outcomes");
    }
    for told in all {
        assert!(told.asked <= first.at, "{resource} was done, and {} is to do it {:?}", told.by, told.tokens);
    }
}

/// Checks that a grant has a higher token than every grant that had arrived when it was asked for.
fn check_tokens(key: &str, grants: &[(Instant, Instant, u64)]) {
    let mut arrived: Vec<(Instant, u64)> = grants.iter().map(|(_, from, token)| (*from, *token)).collect();
    arrived.sort_unstable();
    let mut asked: Vec<(Instant, u64)> = grants.iter().map(|(asked, _, token)| (*asked, *token)).collect();
    asked.sort_unstable();
    let (mut highest, mut next) = (0, 0);
    for (at, token) in asked {
        while arrived[next].0 < at {
            highest = highest.max(arrived[next].1);
            next += 1;
        }
        assert!(token > highest, "{key}: {token} was granted after {highest}");
    }
    let mut tokens: Vec<u64> = grants.iter().map(|(_, _, token)| *token).collect();
    tokens.sort_unstable();
    assert!(tokens.is_sorted_by(|a, b| a < b), "{key}: a token was given out twice");
}

/// Tests of the ledger: it must find violations.
mod tests {
    use serde_json::json;

    use super::*;

    const PROXY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 1);

    fn grant(ledger: &Ledger, token: u64, left_ms: u64) -> Noted {
        grant_that_ends_with(ledger, "lease", token, left_ms)
    }

    fn grant_that_ends_with(ledger: &Ledger, end: &str, token: u64, left_ms: u64) -> Noted {
        let (keys, waited_ms) = (["k"], 0);
        let json = json!({
            "keys": keys, "token": token, "waited_ms": waited_ms, "expires_in_ms": left_ms, "ends_with": end
        });
        let headers = hyper::HeaderMap::new();
        let answer = Response { status: 200, headers, text: json.to_string(), json };
        ledger.granted("r", "me", Instant::now(), PROXY, &answer)
    }

    #[test]
    fn grants_one_after_another_pass() {
        let ledger = Ledger::default();
        for token in [3, 4, 9] {
            ledger.ended(&grant(&ledger, token, 10_000));
        }
        grant(&ledger, 10, 10_000);
        assert_eq!((ledger.check(), ledger.grants()), (vec!["k".to_owned()], 4));
    }

    #[test]
    #[should_panic = "overlaps"]
    fn a_holder_that_reports_no_end_counts_until_the_end_of_its_lease() {
        let ledger = Ledger::default();
        grant(&ledger, 1, 10_000);
        ledger.ended(&grant(&ledger, 2, 0));
        grant(&ledger, 3, 10_000);
        ledger.check();
    }

    #[test]
    fn a_session_lock_ends_with_its_proxy() {
        let ledger = Ledger::default();
        grant_that_ends_with(&ledger, "session", 1, 10_000);
        ledger.killed(PROXY);
        grant_that_ends_with(&ledger, "session", 2, 10_000);
        ledger.check();
    }

    #[test]
    #[should_panic = "overlaps"]
    fn a_session_lock_granted_after_a_loss_of_sessions_still_counts() {
        let ledger = Ledger::default();
        let since = Instant::now();
        grant_that_ends_with(&ledger, "session", 1, 10_000);
        ledger.lost_sessions(PROXY, since);
        grant_that_ends_with(&ledger, "session", 2, 10_000);
        grant_that_ends_with(&ledger, "session", 3, 10_000);
        ledger.check();
    }

    #[test]
    #[should_panic = "overlaps"]
    fn a_lease_outlives_its_proxy() {
        let ledger = Ledger::default();
        grant(&ledger, 1, 10_000);
        ledger.killed(PROXY);
        grant(&ledger, 2, 10_000);
        ledger.check();
    }

    #[test]
    #[should_panic = "overlaps"]
    fn a_renewal_extends_the_certain_time() {
        let ledger = Ledger::default();
        let first = grant(&ledger, 1, 0);
        let json = json!({"expires_in_ms": 10_000});
        let headers = hyper::HeaderMap::new();
        let answer = Response { status: 200, headers, text: String::new(), json };
        ledger.renewed(&first, Instant::now(), &answer);
        grant(&ledger, 2, 10_000);
        ledger.check();
    }

    #[test]
    fn a_repeated_equal_outcome_passes() {
        let ledger = Ledger::default();
        ledger.ended(&grant(&ledger, 1, 10_000));
        for _ in 0..2 {
            ledger.outcome("r", &json!("sent"));
        }
        ledger.check();
    }

    #[test]
    #[should_panic = "has two outcomes"]
    fn a_second_different_outcome_is_found() {
        let ledger = Ledger::default();
        ledger.ended(&grant(&ledger, 1, 10_000));
        for outcome in ["sent", "sent again"] {
            ledger.outcome("r", &json!(outcome));
        }
        ledger.check();
    }

    #[test]
    #[should_panic = "was done"]
    fn a_grant_after_an_outcome_is_found() {
        let ledger = Ledger::default();
        ledger.ended(&grant(&ledger, 1, 10_000));
        ledger.outcome("r", &json!("sent"));
        ledger.ended(&grant(&ledger, 2, 10_000));
        ledger.check();
    }

    #[test]
    #[should_panic = "was granted after"]
    fn a_token_that_falls_is_found() {
        let ledger = Ledger::default();
        for token in [3, 2] {
            ledger.ended(&grant(&ledger, token, 10_000));
        }
        ledger.check();
    }
}

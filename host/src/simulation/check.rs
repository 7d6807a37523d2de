//! What clients were told, and whether all of it can be true.

use std::collections::BTreeMap;

use crate::lock::{Instant, LeaseRef, Mode, Token};

/// A promise that was broken, in a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

/// One lease, as its client knows it.
#[derive(Clone, Debug)]
struct Held {
    owner: String,
    mode: Mode,
    token: Token,
    /// The client has had the answer since then.
    from: Instant,
    /// The client may be certain until then.
    until: Instant,
    /// The proxy that granted it, where the lease also ends with that proxy, or with its session.
    session_of: Option<usize>,
}

impl Held {
    /// Whether the lease may have ended with its session. Nobody is told of that before its proxy notices.
    fn may_have_ended(&self, broke_at: Instant) -> bool {
        self.session_of.is_some() && self.from <= broke_at
    }
}

/// All that clients were told.
#[derive(Default)]
pub struct Checks {
    /// By resource and nonce: those that may still be certain.
    held: BTreeMap<String, BTreeMap<u64, Held>>,
    /// By resource: the highest token of all answers that had arrived by then, in the order of time.
    tokens: BTreeMap<String, Vec<(Instant, Token)>>,
    /// What was checked.
    pub grants: u64,
    pub renewals: u64,
    pub releases: u64,
    /// When a connection last broke, or was given up: a session may have ended with it.
    pub broke_at: Instant,
    /// What happened, for people.
    pub history: Vec<(Instant, String)>,
}

/// One answer to an acquire.
pub struct Granted<'a> {
    pub resource: &'a str,
    pub owner: &'a str,
    pub lease: &'a LeaseRef,
    pub mode: Mode,
    pub token: Token,
    /// When the client had asked.
    pub asked_at: Instant,
    pub now: Instant,
    pub valid_until: Instant,
    /// The proxy that granted it, where the lease also ends with that proxy, or with its session.
    pub session_of: Option<usize>,
}

impl Checks {
    /// Notes what happened, to be read where a check fails.
    pub fn note(&mut self, now: Instant, what: String) {
        self.history.push((now, what));
    }

    pub fn granted(&mut self, granted: &Granted<'_>) -> Result<(), Violation> {
        let Granted { resource, owner, lease, mode, token, asked_at, now, valid_until, session_of } =
            *granted;
        self.note(
            now,
            format!(
                "{owner} is granted {resource} {mode:?} with token {}, for {} ms",
                token.0,
                valid_until.ms_since(now)
            ),
        );
        let held = self.held.entry(resource.to_owned()).or_default();
        if let Some(known) = held.get_mut(&lease.nonce) {
            // The same request, asked again.
            known.until = known.until.max(valid_until);
            return Ok(());
        }
        self.grants += 1;
        if valid_until > now {
            let new =
                Held { owner: owner.to_owned(), mode, token, from: now, until: valid_until, session_of };
            for other in held.values().filter(|other| !other.may_have_ended(self.broke_at)) {
                if !are_compatible(&new, held.values(), other) {
                    return Err(Violation(format!(
                        "two holders: {owner} is granted {resource} with token {} while {} is certain of it for another \
                         {} ms (token {})",
                        token.0,
                        other.owner,
                        other.until.ms_since(now),
                        other.token.0
                    )));
                }
            }
            held.insert(lease.nonce, new);
        }
        let tokens = self.tokens.entry(resource.to_owned()).or_default();
        let before = tokens.iter().rev().find(|(at, _)| *at < asked_at);
        if let Some((_, last)) = before.filter(|(_, last)| *last >= token) {
            return Err(Violation(format!(
                "tokens do not rise: {owner} is granted {resource} with token {}, and {} was told before it asked",
                token.0, last.0
            )));
        }
        let highest = tokens.last().map_or(token, |(_, last)| token.max(*last));
        tokens.push((now, highest));
        Ok(())
    }

    /// The client may be certain for longer.
    pub fn renewed(
        &mut self,
        resource: &str,
        lease: &LeaseRef,
        (now, valid_until): (Instant, Instant),
    ) -> Result<(), Violation> {
        self.renewals += 1;
        let Some(held) = self.held.get_mut(resource) else { return Ok(()) };
        // Its session has ended, and its proxy does not know yet.
        let Some(mut renewed) = held.remove(&lease.nonce) else { return Ok(()) };
        renewed.until = renewed.until.max(valid_until);
        // An answer that comes too late promises nothing.
        let is_certain = renewed.until > now;
        for other in held.values().filter(|other| other.until > now && !other.may_have_ended(self.broke_at)) {
            if is_certain && !are_compatible(&renewed, held.values(), other) {
                return Err(Violation(format!(
                    "two holders: {} renews {resource} while {} is certain of it",
                    renewed.owner, other.owner
                )));
            }
        }
        held.insert(lease.nonce, renewed);
        Ok(())
    }

    /// The client does not count on the lease any more: it lets go, or was told that it is lost.
    pub fn let_go(&mut self, resource: &str, lease: &LeaseRef) {
        if let Some(held) = self.held.get_mut(resource) {
            held.remove(&lease.nonce);
        }
    }

    /// The sessions of a proxy have ended, or of all proxies: nobody is certain of a lease that rests on one.
    pub fn sessions_end(&mut self, proxy: Option<usize>) {
        let rests = |held: &Held| held.session_of.is_some_and(|of| proxy.is_none_or(|proxy| proxy == of));
        self.held.values_mut().for_each(|held| held.retain(|_, held| !rests(held)));
    }

    /// The proxy says that a lease on a session was lost with it.
    pub fn session_lost(&mut self, owner: &str, token: Token) {
        let is_it = |held: &Held| held.session_of.is_some() && held.token == token && held.owner == owner;
        self.held.values_mut().for_each(|held| held.retain(|_, held| !is_it(held)));
    }

    /// Until when the client may be certain of the lease; `None` where it has let go.
    pub fn certain_until(&self, resource: &str, lease: &LeaseRef) -> Option<Instant> {
        Some(self.held.get(resource)?.get(&lease.nonce)?.until)
    }

    /// What happened, as lines of text.
    pub fn time_line(&self, last: usize) -> String {
        let from = self.history.len().saturating_sub(last);
        let began = self.history.first().map_or(Instant(0), |(at, _)| *at);
        let line =
            |(at, what): &(Instant, String)| format!("{:>12.6} s  {what}\n", at.us_since(began) as f64 / 1e6);
        self.history[from..].iter().map(line).collect()
    }
}

/// Whether both may be held at a time, where `all` are held.
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

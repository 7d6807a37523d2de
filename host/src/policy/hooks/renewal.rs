//! `renewal.due`: decides whether an expiring lease is extended.

use std::sync::Arc;

use super::{Definition, Hook};
use crate::config::Limits;
use crate::lock::Key;
use crate::policy::bindings::{self, renewal as wit};
use crate::policy::check::Trial;
use crate::policy::module::Module;
use crate::policy::{Fault, Generation, Observed, Rejection};

pub(super) const HOOK: Definition =
    Definition { hook: Hook::Renewal, name: "renewal", interface: "renewal", function: "due", try_out };

/// A lease near its end that the proxy keeps alive, as `renewal.due` sees it.
#[derive(Clone, Debug)]
pub struct Expiring {
    /// The key of the lease.
    pub key: Key,
    /// The holder's name.
    pub owner: String,
    /// The length of the lease in the holder's plan.
    pub ttl_ms: u32,
    /// The number of renewals so far.
    pub renewals: u32,
    /// The time since the grant.
    pub held_ms: u32,
    /// The longest hold that the plan allows.
    pub max_hold_ms: u32,
    /// The number of the key's waiters.
    pub waiters: u32,
    /// Whether the client's connection still exists.
    pub client_alive: bool,
    /// The labels of the holder's plan.
    pub labels: Arc<[(Box<str>, Box<str>)]>,
}

/// The answer of `renewal.due`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// Extend the lease to this length.
    Extend {
        /// The new length of the lease, counted from the renewal.
        ttl_ms: u32,
    },
    /// Let the lease end.
    Lapse,
}

impl Generation {
    /// Decides whether a lease is extended.
    pub fn renewal(&self, expiring: &Expiring) -> Option<Result<Renewal, Fault>> {
        let answer = self.ask_optional(Hook::Renewal, || {
            let decision = ask(&self.module, &self.settings, &expiring.to_wit())?;
            Ok(clamp(decision, expiring, &self.limits))
        });
        self.observed(expiring.key.as_str(), answer.as_ref(), |answer| Observed::Renewal {
            expiring: expiring.clone(),
            answer,
        });
        answer
    }
}

fn ask(module: &Module, settings: &[u8], expiring: &wit::Expiring) -> Result<wit::Decision, Fault> {
    module.ask(Hook::Renewal, (settings, expiring))
}

/// No extension exceeds the longest hold.
fn clamp(from: wit::Decision, expiring: &Expiring, limits: &Limits) -> Renewal {
    let left_ms = expiring.max_hold_ms.min(limits.max_hold_ms).saturating_sub(expiring.held_ms);
    match from {
        wit::Decision::Extend(_) if left_ms == 0 => Renewal::Lapse,
        wit::Decision::Extend(ttl_ms) => {
            Renewal::Extend { ttl_ms: ttl_ms.clamp(limits.min_ttl_ms, limits.max_ttl_ms).min(left_ms) }
        }
        wit::Decision::Lapse => Renewal::Lapse,
    }
}

impl Expiring {
    /// The fallback, for a policy that does not export the hook or fails: extends by the ttl while the client is alive,
    /// up to the longest hold.
    pub fn fallback(&self) -> Renewal {
        match self.max_hold_ms.saturating_sub(self.held_ms) {
            left_ms if left_ms > 0 && self.client_alive => {
                Renewal::Extend { ttl_ms: self.ttl_ms.min(left_ms) }
            }
            _ => Renewal::Lapse,
        }
    }

    fn to_wit(&self) -> wit::Expiring {
        wit::Expiring {
            key: self.key.as_str().to_owned(),
            owner: self.owner.clone(),
            ttl: self.ttl_ms,
            renewals: self.renewals,
            held: self.held_ms,
            max_hold: self.max_hold_ms,
            waiters: self.waiters,
            client_alive: self.client_alive,
            labels: bindings::labels(&self.labels),
        }
    }
}

fn try_out(trial: &Trial<'_>) -> Result<Vec<String>, Rejection> {
    let expiring = Expiring {
        key: trial.key.clone(),
        owner: "trial".to_owned(),
        ttl_ms: 10_000,
        renewals: 3,
        held_ms: 20_000,
        max_hold_ms: 60_000,
        waiters: 1,
        client_alive: true,
        labels: Arc::from([]),
    };
    let expiring = expiring.to_wit();
    trial.twice("a lease near its end", || ask(trial.module, trial.settings, &expiring))?;
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expiring(held_ms: u32, max_hold_ms: u32, client_alive: bool) -> Expiring {
        Expiring {
            key: Key::new("a").unwrap(),
            owner: String::new(),
            ttl_ms: 10,
            renewals: 0,
            held_ms,
            max_hold_ms,
            waiters: 0,
            client_alive,
            labels: Arc::from([]),
        }
    }

    #[test]
    fn leases_of_live_clients_are_extended_up_to_the_longest_hold() {
        let due = |held_ms, client_alive| expiring(held_ms, 25, client_alive).fallback();
        assert_eq!(due(5, true), Renewal::Extend { ttl_ms: 10 });
        assert_eq!(due(20, true), Renewal::Extend { ttl_ms: 5 });
        assert_eq!(due(25, true), Renewal::Lapse);
        assert_eq!(due(5, false), Renewal::Lapse);
    }

    #[test]
    fn extensions_are_bounded() {
        let extend = |ttl_ms, held_ms| {
            clamp(wit::Decision::Extend(ttl_ms), &expiring(held_ms, 10_000, true), &Limits::default())
        };
        assert_eq!(extend(5_000, 8_000), Renewal::Extend { ttl_ms: 2_000 });
        assert_eq!(extend(1, 0), Renewal::Extend { ttl_ms: 100 });
        assert_eq!(extend(5_000, 10_000), Renewal::Lapse);
    }
}

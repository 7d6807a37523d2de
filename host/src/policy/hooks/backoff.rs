//! `backoff.contended`: decides what a waiter does while another client holds the key. Without the hook, the queue
//! decides: see `lock::table`.

use std::sync::Arc;

use super::{Definition, Hook, shortened};
use crate::lock::Key;
use crate::lock::table::{self, Next};
use crate::policy::bindings::{self, backoff as wit};
use crate::policy::check::Trial;
use crate::policy::module::Module;
use crate::policy::{Fault, Generation, Observed, Rejection};

const MIN_POLL_MS: u32 = 5;
const MAX_POLL_MS: u32 = 60_000;

pub(super) const HOOK: Definition =
    Definition { hook: Hook::Backoff, name: "backoff", interface: "backoff", function: "contended", try_out };

/// A key that another client holds, as `backoff.contended` sees it.
#[derive(Clone, Debug)]
pub struct Contention {
    /// The key that is held.
    pub key: Key,
    /// 1 for the first attempt that found the key held.
    pub attempt: u32,
    /// How long the request has waited.
    pub waited_ms: u32,
    /// The rest of the longest wait.
    pub wait_left_ms: u32,
    /// The rest of the holder's lease, as far as it is known.
    pub holder_left_ms: u32,
    /// The holder's name.
    pub holder: String,
    /// The number of the key's waiters.
    pub waiters: u32,
    /// The sleep before this attempt.
    pub last_sleep_ms: u32,
    /// The labels of the waiter's plan.
    pub labels: Arc<[(Box<str>, Box<str>)]>,
    /// Random bits, for policies that need a choice without a pattern.
    pub seed: u32,
}

/// The answer of `backoff.contended`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backoff {
    /// Ask again after this time, or at a notification that comes first.
    Poll {
        /// The time until the next attempt.
        after_ms: u32,
    },
    /// Ask again at a notification, or when the holder's lease ends.
    WakeUp,
    /// Refuse the request, for this reason.
    GiveUp {
        /// The policy's reason, which the client sees.
        reason: String,
    },
}

impl Generation {
    /// Decides how a request waits for a key that another client holds.
    pub fn backoff(&self, contention: &Contention) -> Option<Result<Backoff, Fault>> {
        let answer = self.ask_optional(Hook::Backoff, || {
            ask(&self.module, &self.settings, &contention.to_wit()).map(clamp)
        });
        self.observed(contention.key.as_str(), answer.as_ref(), |answer| Observed::Backoff {
            contention: contention.clone(),
            answer,
        });
        answer
    }
}

fn ask(module: &Module, settings: &[u8], contention: &wit::Contention) -> Result<wit::Decision, Fault> {
    module.ask(Hook::Backoff, (settings, contention))
}

fn clamp(from: wit::Decision) -> Backoff {
    match from {
        wit::Decision::Poll(after_ms) => Backoff::Poll { after_ms: after_ms.clamp(MIN_POLL_MS, MAX_POLL_MS) },
        wit::Decision::WakeUp => Backoff::WakeUp,
        wit::Decision::GiveUp(reason) => Backoff::GiveUp { reason: shortened(reason) },
    }
}

impl From<Backoff> for Next {
    fn from(decision: Backoff) -> Next {
        match decision {
            Backoff::Poll { after_ms } => Next::Poll { after_ms },
            Backoff::WakeUp => Next::WakeUp,
            Backoff::GiveUp { reason } => Next::GiveUp { reason },
        }
    }
}

impl Contention {
    /// What the hook sees of what the lock table asks about a waiter, with the labels of its plan.
    pub fn of(
        key: Key,
        asked: table::Contention,
        labels: Arc<[(Box<str>, Box<str>)]>,
        seed: u32,
    ) -> Contention {
        Contention {
            key,
            attempt: asked.attempt,
            waited_ms: asked.waited_ms,
            wait_left_ms: asked.wait_left_ms,
            holder_left_ms: asked.holder_left_ms,
            holder: asked.holder.into(),
            waiters: asked.waiters,
            last_sleep_ms: asked.last_sleep_ms,
            labels,
            seed,
        }
    }

    fn to_wit(&self) -> wit::Contention {
        wit::Contention {
            key: self.key.as_str().to_owned(),
            attempt: self.attempt,
            waited: self.waited_ms,
            wait_left: self.wait_left_ms,
            holder_left: self.holder_left_ms,
            holder: self.holder.clone(),
            waiters: self.waiters,
            last_sleep: self.last_sleep_ms,
            labels: bindings::labels(&self.labels),
            seed: self.seed,
        }
    }
}

fn try_out(trial: &Trial<'_>) -> Result<Vec<String>, Rejection> {
    let contention = Contention {
        key: trial.key.clone(),
        attempt: 2,
        waited_ms: 20,
        wait_left_ms: 1_000,
        holder_left_ms: 500,
        holder: "other".to_owned(),
        waiters: 1,
        last_sleep_ms: 10,
        labels: Arc::from([]),
        seed: 1,
    };
    let contention = contention.to_wit();
    trial.twice("a key held elsewhere", || ask(trial.module, trial.settings, &contention))?;
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleeps_are_bounded() {
        let poll = |after_ms| clamp(wit::Decision::Poll(after_ms));
        assert_eq!(poll(0), Backoff::Poll { after_ms: 5 });
        assert_eq!(poll(u32::MAX), Backoff::Poll { after_ms: 60_000 });
    }
}

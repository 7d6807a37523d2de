//! The last decisions about each key, for diagnosis.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Decision;
use crate::clock;
use crate::lock::maps::HashMap;
use crate::lock::table::{Next, WaiterId};
use crate::lock::{Key, Mode};

/// How many decisions are kept for each key.
const KEPT: usize = 8;
/// For how many keys decisions are kept. Beyond that, the key whose first decision is the oldest is forgotten.
const KEYS: usize = 8_192;

/// A decision, which is put into words only on request.
#[derive(Clone, Debug)]
pub(super) enum What {
    Planned { mode: Mode, ttl_ms: u32, wait_ms: u32 },
    Chose { waiter: Option<WaiterId> },
    BackedOff(Next),
    Renewed { ttl_ms: u32 },
    Lapsed,
}

/// The last decisions about the keys.
#[derive(Default)]
pub(super) struct History {
    keys: HashMap<Key, VecDeque<(u64, Arc<str>, What)>>,
    order: VecDeque<Key>,
}

impl History {
    pub fn note(&mut self, key: &Key, by: Arc<str>, what: What) {
        let entry = (clock::wall_us(), by, what);
        if let Some(decisions) = self.keys.get_mut(key) {
            if decisions.len() >= KEPT {
                decisions.pop_front();
            }
            decisions.push_back(entry);
            return;
        }
        if self.order.len() >= KEYS
            && let Some(oldest) = self.order.pop_front()
        {
            self.keys.remove(&oldest);
        }
        self.order.push_back(key.clone());
        self.keys.insert(key.clone(), VecDeque::from([entry]));
    }

    pub fn of(&self, key: &Key) -> Vec<Decision> {
        let decisions = self.keys.get(key).into_iter().flatten();
        decisions.map(|(at_us, by, what)| what.told(*at_us, by.clone())).collect()
    }
}

impl What {
    fn told(&self, at_us: u64, by: Arc<str>) -> Decision {
        let (hook, what) = match self {
            What::Planned { mode, ttl_ms, wait_ms } => {
                let mode = match mode {
                    Mode::Exclusive => "exclusive".to_owned(),
                    Mode::Shared => "shared".to_owned(),
                    Mode::Permits { count, limit } => format!("{count} of {limit} permits"),
                };
                ("plan", format!("{mode}, lease {ttl_ms} ms, wait up to {wait_ms} ms"))
            }
            What::Chose { waiter: Some(WaiterId(n)) } => ("choose", format!("waiter {n} is next")),
            What::Chose { waiter: None } => ("choose", "first by rank, then arrival".to_owned()),
            What::BackedOff(Next::Poll { after_ms }) => ("backoff", format!("ask again after {after_ms} ms")),
            What::BackedOff(Next::WakeUp) => ("backoff", "wait for a wake-up".to_owned()),
            What::BackedOff(Next::GiveUp { reason }) => ("backoff", format!("give up: {reason}")),
            What::Renewed { ttl_ms } => ("renewal", format!("extend by {ttl_ms} ms")),
            What::Lapsed => ("renewal", "let it lapse".to_owned()),
        };
        Decision { at_us, hook, by, what }
    }
}

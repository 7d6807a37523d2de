//! The last decisions about each key, and its last holds, for diagnosis.

use std::collections::VecDeque;
use std::sync::Arc;

use super::holds::Holds;
use super::views::Decision;
use crate::clock;
use crate::lock::maps::BoundedMap;
use crate::lock::table::{Next, WaiterId};
use crate::lock::{Key, Mode};

/// How many decisions are kept for each key.
const KEPT: usize = 8;
/// For how many keys decisions and holds are kept. Beyond that, the key whose last decision is longest ago is forgotten.
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

/// What is remembered of a key. At most about 700 bytes, and its names.
#[derive(Default)]
struct KeyHistory {
    decisions: VecDeque<(u64, Arc<str>, What)>,
    holds: Holds,
}

/// The last decisions about the keys, and how long they were held.
pub(super) struct History {
    keys: BoundedMap<Key, KeyHistory>,
}

impl Default for History {
    fn default() -> History {
        History { keys: BoundedMap::new(KEYS) }
    }
}

impl History {
    pub fn note(&mut self, key: &Key, by: Arc<str>, what: What) {
        let mut known = self.keys.remove(key).unwrap_or_default();
        if known.decisions.len() >= KEPT {
            known.decisions.pop_front();
        }
        known.decisions.push_back((clock::wall_us(), by, what));
        self.keys.insert(key.clone(), known);
    }

    /// A lease of the key has ended. The first key of a lease is known from its plan. A key that is not known displaces no
    /// other key, because the ends of leases must stay cheap.
    pub fn held(&mut self, key: &Key, held_ms: u32) {
        if let Some(known) = self.keys.get_mut(key) {
            known.holds.add(held_ms);
        } else if self.keys.has_room() {
            let mut known = KeyHistory::default();
            known.holds.add(held_ms);
            self.keys.insert(key.clone(), known);
        }
    }

    pub fn holds(&self, key: &Key) -> Holds {
        self.keys.get(key).map(|known| known.holds).unwrap_or_default()
    }

    pub fn of(&self, key: &Key) -> Vec<Decision> {
        let decisions = self.keys.get(key).into_iter().flat_map(|known| &known.decisions);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_history_forgets_the_key_with_the_oldest_decision() {
        let (mut history, by) = (History::default(), Arc::<str>::from("a policy"));
        let key = |n: usize| Key::new(&format!("key-{n}")).expect("a key");
        (0..KEYS).for_each(|n| history.note(&key(n), by.clone(), What::Lapsed));
        for _ in 0..=KEPT {
            history.note(&key(0), by.clone(), What::Lapsed);
        }
        history.note(&key(KEYS), by, What::Lapsed);
        let kept = [0, 1, 2, KEYS].map(|n| history.of(&key(n)).len());
        assert_eq!(kept, [KEPT, 0, 1, 1]);
    }

    #[test]
    fn holds_are_forgotten_with_their_key() {
        let (mut history, by) = (History::default(), Arc::<str>::from("a policy"));
        let key = |n: usize| Key::new(&format!("key-{n}")).expect("a key");
        (0..KEYS - 1).for_each(|n| history.note(&key(n), by.clone(), What::Lapsed));
        history.held(&key(0), 7);
        history.held(&key(1), 8);
        // A key that no plan named is known by its hold while there is room.
        history.held(&key(KEYS), 9);
        history.held(&key(KEYS + 1), 10);
        history.note(&key(KEYS + 2), by, What::Lapsed);
        let recent = [0, 1, KEYS, KEYS + 1].map(|n| history.holds(&key(n)).recent().to_vec());
        assert_eq!(recent, [vec![], vec![8], vec![9], vec![]]);
        assert_eq!(history.of(&key(1)).len(), 1);
    }
}

//! `fairness.choose`: chooses the next waiter of a key. Without the hook, the queue chooses: see `lock::table`.

use std::sync::Arc;

use super::{Definition, Hook};
use crate::lock::table::GroupShare;
use crate::lock::{Key, Mode};
use crate::policy::bindings::{self, fairness as wit};
use crate::policy::check::Trial;
use crate::policy::generation::invalid_answer;
use crate::policy::module::Module;
use crate::policy::{Fault, Generation, Observed, Rejection};

pub(super) const HOOK: Definition =
    Definition { hook: Hook::Choose, name: "choose", interface: "fairness", function: "choose", try_out };

/// The queue of a key, as `fairness.choose` sees it.
#[derive(Clone, Debug)]
pub struct QueueView {
    /// The key that became free.
    pub key: Key,
    /// At most 64: the first waiters of each group, in order of rank, then of arrival.
    pub waiters: Vec<WaiterView>,
    /// The groups of the waiters.
    pub groups: Vec<GroupView>,
    /// Random bits, for policies that need a choice without a pattern.
    pub seed: u32,
}

/// A waiter in a [`QueueView`].
#[derive(Clone, Debug)]
pub struct WaiterView {
    /// Lower ranks go first.
    pub rank: i32,
    /// The waiter's group, from its plan.
    pub group: Box<str>,
    /// The weight from the waiter's plan, at least 1.
    pub weight: u32,
    /// The name of the waiting owner.
    pub owner: Box<str>,
    /// How the waiter wants to hold the key.
    pub mode: Mode,
    /// How long the request has waited.
    pub waited_ms: u32,
    /// The labels of the waiter's plan.
    pub labels: Arc<[(Box<str>, Box<str>)]>,
}

/// A group of waiters in a [`QueueView`].
#[derive(Clone, Debug)]
pub struct GroupView {
    /// The name of the group.
    pub group: Box<str>,
    /// The number of the group's waiters in the whole queue, including those that are not shown.
    pub waiting: u32,
    /// The number of the key's recent grants that went to the group.
    pub recent_grants: u32,
}

impl From<GroupShare> for GroupView {
    fn from(share: GroupShare) -> GroupView {
        let GroupShare { group, waiting, recent_grants } = share;
        GroupView { group, waiting, recent_grants }
    }
}

impl Generation {
    /// Chooses the next waiter of the queue: a valid index.
    pub fn choose(&self, queue: &QueueView) -> Option<Result<usize, Fault>> {
        let answer = self.ask_optional(Hook::Choose, || {
            let index = ask(&self.module, &self.settings, &queue.to_wit())? as usize;
            match queue.waiters.len() {
                len if index < len => Ok(index),
                len => Err(invalid_answer(Hook::Choose, format!("chose waiter {index} of {len}"))),
            }
        });
        self.observed(queue.key.as_str(), answer.as_ref(), |answer| Observed::Choose {
            queue: queue.clone(),
            answer,
        });
        answer
    }
}

fn ask(module: &Module, settings: &[u8], queue: &wit::Queue) -> Result<u32, Fault> {
    module.ask(Hook::Choose, (settings, queue))
}

impl QueueView {
    fn to_wit(&self) -> wit::Queue {
        let waiters = self.waiters.iter().map(|waiter| wit::Waiter {
            rank: waiter.rank,
            group: waiter.group.to_string(),
            weight: waiter.weight,
            owner: waiter.owner.to_string(),
            mode: bindings::mode(waiter.mode),
            waited: waiter.waited_ms,
            labels: bindings::labels(&waiter.labels),
        });
        let groups = self.groups.iter().map(|share| wit::GroupShare {
            group: share.group.to_string(),
            waiting: share.waiting,
            recent_grants: share.recent_grants,
        });
        wit::Queue {
            key: self.key.as_str().to_owned(),
            waiters: waiters.collect(),
            groups: groups.collect(),
            seed: self.seed,
        }
    }
}

fn try_out(trial: &Trial<'_>) -> Result<Vec<String>, Rejection> {
    let waiter = |group: &str, rank, waited_ms| WaiterView {
        rank,
        group: group.into(),
        weight: 1,
        owner: "trial".into(),
        mode: Mode::Exclusive,
        waited_ms,
        labels: Arc::from([]),
    };
    let share = |group: &str, waiting| GroupView { group: group.into(), waiting, recent_grants: waiting };
    let queue = QueueView {
        key: trial.key.clone(),
        waiters: vec![waiter("a", 0, 30), waiter("b", 0, 20), waiter("a", 1, 10)],
        groups: vec![share("a", 2), share("b", 1)],
        seed: 1,
    };
    let queue = queue.to_wit();
    trial.twice("a queue of three", || ask(trial.module, trial.settings, &queue))?;
    Ok(Vec::new())
}

//! Fair shares between groups: a large group does not starve a small one.
//!
//! README.md documents the settings. A label of the request names its group. When a key becomes free, the next group
//! is the one with the fewest recent grants, divided by its weight.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use lockkeeper_sdk::fairness::{Queue, Waiter};
use lockkeeper_sdk::reads::Part;
use lockkeeper_sdk::{Plan, Policy, Refusal, Request, within};
use serde::{Deserialize, Serialize};

/// The policy.
pub struct FairGroups;

/// The settings, which README.md documents.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    pub label: String,
    pub required: bool,
    pub weights: BTreeMap<String, u32>,
    pub default_weight: u32,
    pub ttl_ms: u32,
    pub wait_ms: u32,
    pub max_waiters: u32,
    pub permits: u32,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            label: "group".into(),
            required: false,
            weights: BTreeMap::new(),
            default_weight: 1,
            ttl_ms: Plan::TTL,
            wait_ms: 0,
            max_waiters: Plan::MAX_WAITERS,
            permits: 10,
        }
    }
}

impl Policy for FairGroups {
    type Settings = Settings;

    fn check(settings: &Settings) -> Result<(), String> {
        if settings.label.is_empty() || settings.label.len() > 256 {
            return Err("`label` must have 1 to 256 bytes".into());
        }
        if settings.weights.len() > 1_000 {
            return Err(format!(
                "`weights` must name at most 1000 groups, and names {}",
                settings.weights.len()
            ));
        }
        for (group, weight) in &settings.weights {
            within(&format!("weights.{group}"), *weight, 1..=1_000)?;
        }
        within("default_weight", settings.default_weight, 1..=1_000)?;
        within("ttl_ms", settings.ttl_ms, 100..=3_600_000)?;
        within("wait_ms", settings.wait_ms, 0..=3_600_000)?;
        within("max_waiters", settings.max_waiters, 0..=20_000)?;
        within("permits", settings.permits, 1..=1_024)
    }

    fn plan(settings: &Settings, request: &Request) -> Result<Plan, Refusal> {
        let group = match request.label(&settings.label) {
            None if settings.required => {
                return Err(Refusal::new(format!("the label `{}` is missing", settings.label)));
            }
            group => group.unwrap_or_default(),
        };
        let weight = settings.weights.get(group).copied().unwrap_or(settings.default_weight);
        let plan = Plan {
            ttl: request.ttl.unwrap_or(settings.ttl_ms),
            wait: request.wait.unwrap_or(settings.wait_ms),
            max_waiters: settings.max_waiters,
            ..Plan::of(request)
        };
        plan.with_group(group, weight).with_permits(settings.permits)
    }

    fn plan_reads(settings: &Settings) -> Vec<Part> {
        vec![Part::Name, Part::Mode, Part::Ttl, Part::Wait, Part::Label(settings.label.clone())]
    }

    /// Within a group, rank and arrival decide. Between groups, the lowest share after one more grant wins. Of equal
    /// shares, the waiter that has waited longest is next.
    fn choose(_: &Settings, queue: &Queue) -> u32 {
        let mut firsts: BTreeMap<&str, (usize, &Waiter)> = BTreeMap::new();
        for (index, waiter) in queue.waiters.iter().enumerate() {
            let first = firsts.entry(&waiter.group).or_insert((index, waiter));
            // Of equal ranks, the first in the queue stays.
            if waiter.rank < first.1.rank {
                *first = (index, waiter);
            }
        }
        let next = firsts.into_values().min_by_key(|(_, waiter)| {
            let recent = queue.groups.iter().find(|share| share.group == waiter.group);
            let grants = u64::from(recent.map_or(0, |share| share.recent_grants)) + 1;
            // In billionths, so that integer division keeps the shares of all weights up to 1000 apart.
            (grants * 1_000_000_000 / u64::from(waiter.weight.max(1)), Reverse(waiter.waited))
        });
        next.map_or(0, |(index, _)| index as u32)
    }
}

lockkeeper_sdk::export!(FairGroups, fairness, reads);

#[cfg(test)]
mod tests;

//! Brings a policy's plan within the proxy's limits.
//!
//! Quantities (times, queue lengths, weights) are moved to the nearest allowed value. Values that identify the lock
//! (keys, permits, the group and the labels) are never changed: out of bounds, they are a fault.

use std::collections::BTreeSet;
use std::num::NonZero;
use std::sync::Arc;

use super::{OnLoss, Plan};
use crate::config::Limits;
use crate::lock::record::When;
use crate::lock::{Key, Mode, Modes, Primitive, Properties};
use crate::policy::bindings::{naming as wit, types};

/// How long the outcome of a `once` is stored if the policy does not say.
const DEFAULT_KEEP_MS: u32 = 86_400_000;
/// The prefix of a plan's labels that are for the proxy.
const OWN_LABELS: &str = "lockkeeper.";

type Labels = Vec<(Box<str>, Box<str>)>;

/// Checks a plan. The error says what is invalid, for a fault of kind `Value`.
pub(super) fn plan(from: wit::LockPlan, limits: &Limits) -> Result<Plan, String> {
    let plan = named(from, limits)?;
    is_possible(&plan)?;
    Ok(plan)
}

/// A plan with valid keys. It may ask for more than its primitive supports: see [`is_possible`].
pub(super) fn named(from: wit::LockPlan, limits: &Limits) -> Result<Plan, String> {
    let primitive = primitive(from.primitive);
    let is_once = primitive.keeps_outcome();
    if from.group.len() > limits.max_label_bytes {
        return Err(format!(
            "the group has {} bytes, at most {} are allowed",
            from.group.len(),
            limits.max_label_bytes
        ));
    }
    let keys = keys(&from.keys, limits)?;
    let mode = mode(from.mode, limits)?;
    let (own, labels) = own_labels(labels(from.labels, limits)?)?;
    let plan = Plan {
        keys,
        primitive,
        second: own.second,
        global_order: own.global_order,
        any: own.any,
        mode,
        ttl_ms: from.ttl.clamp(limits.min_ttl_ms, limits.max_ttl_ms),
        wait_ms: from.wait.min(limits.max_wait_ms),
        rank: from.rank,
        group: from.group.into(),
        weight: from.weight.max(1),
        // A `once` is never re-entrant: a client that asks again would do the work twice.
        reentrant: from.reentrant && !is_once,
        max_waiters: from.max_waiters.min(limits.max_waiters),
        lock_at_least_ms: if is_once { 0 } else { from.lock_at_least.min(limits.max_lock_delay_ms) },
        keep_ms: NonZero::new(keep_ms(from.lock_at_least, limits)).filter(|_| is_once),
        lock_delay_ms: from.lock_delay.min(limits.max_lock_delay_ms),
        max_hold_ms: from.max_hold.clamp(limits.min_ttl_ms, limits.max_hold_ms),
        on_loss: own.on_loss,
        delegate: own.delegate,
        labels,
    };
    Ok(plan.with_primitive(primitive))
}

/// Checks that the plan's primitive, and its substitute, support what the plan asks for.
pub(super) fn is_possible(plan: &Plan) -> Result<(), String> {
    let Properties { name, calls, any_key, global_order, .. } = plan.primitive.properties();
    for primitive in [Some(plan.primitive), plan.second].into_iter().flatten() {
        fits(primitive, plan.keys.len(), plan.mode)?;
    }
    if plan.second.is_some_and(|second| second.properties().calls != *calls) {
        return Err(format!("`{name}` cannot stand in for another primitive's calls"));
    }
    if plan.global_order && !global_order {
        let has = names(|primitive| primitive.global_order);
        return Err(format!("`{name}` has no order over all proxies; {has} has"));
    }
    if plan.delegate.is_some() && plan.primitive != Primitive::Lease {
        return Err(format!("keys of `{name}` are not delegated; those of `lease` can be"));
    }
    if plan.any && (plan.global_order || !any_key) {
        let these = names(|primitive| primitive.any_key);
        return Err(format!("any of several keys is for {these} in their own order, not `{name}`"));
    }
    Ok(())
}

/// Fields of a plan that the record of the WIT file lacks: a policy gives them as labels.
#[derive(Default)]
struct OwnLabels {
    second: Option<Primitive>,
    global_order: bool,
    any: bool,
    on_loss: OnLoss,
    delegate: Option<When>,
}

/// Parses the labels that are for the proxy, and separates them from those that the policy is shown again later.
fn own_labels(labels: Labels) -> Result<(OwnLabels, Labels), String> {
    let (own, others): (Labels, Labels) =
        labels.into_iter().partition(|(name, _)| name.starts_with(OWN_LABELS));
    let mut fields = OwnLabels::default();
    for (name, value) in own {
        match (&name[OWN_LABELS.len()..], &*value) {
            ("second-primitive", name) => {
                let second = Primitive::from_name(name);
                fields.second = Some(second.ok_or_else(|| format!("`{name}` is not a primitive"))?);
            }
            ("keys", "any") => fields.any = true,
            ("order", "global") => fields.global_order = true,
            ("delegate", "never") => fields.delegate = None,
            ("delegate", "contended") => fields.delegate = Some(When::Contended),
            ("delegate", "always") => fields.delegate = Some(When::Always),
            ("on-loss", "finish") => fields.on_loss = OnLoss::Finish,
            ("on-loss", "mark") => fields.on_loss = OnLoss::Mark,
            ("on-loss", "cut") => fields.on_loss = OnLoss::Cut,
            _ => return Err(format!("the label {name} = {value} means nothing to the proxy")),
        }
    }
    Ok((fields, others))
}

/// Checks that a primitive supports the keys and the mode.
fn fits(primitive: Primitive, keys: usize, mode: Mode) -> Result<(), String> {
    let Properties { name, several_keys, modes, .. } = primitive.properties();
    if keys > 1 && !several_keys {
        return Err(format!("{keys} keys: `{name}` guards one"));
    }
    match modes {
        _ if modes.contain(mode) => Ok(()),
        Modes::Exclusive => Err(format!("`{name}` is exclusive, and has no other mode")),
        Modes::Shared | Modes::Permits => Err(format!("`{name}` is exclusive or shared, and has no permits")),
    }
}

/// The names of the primitives that have a property.
fn names(has: impl Fn(&Properties) -> bool) -> String {
    let properties = Primitive::ALL.into_iter().map(Primitive::properties).filter(|row| has(row));
    properties.map(|row| format!("`{}`", row.name)).collect::<Vec<_>>().join(" and ")
}

/// For `once`, lock-at-least is the time for which the outcome is stored.
fn keep_ms(lock_at_least: u32, limits: &Limits) -> u32 {
    match lock_at_least {
        0 => DEFAULT_KEEP_MS.min(limits.max_keep_ms),
        ms => ms.min(limits.max_keep_ms),
    }
}

fn keys(from: &[String], limits: &Limits) -> Result<Arc<[Key]>, String> {
    let mut keys = BTreeSet::new();
    for text in from {
        let max = limits.max_key_bytes.min(Key::MAX_BYTES);
        if text.is_empty() {
            return Err("a key is empty".to_owned());
        }
        if text.len() > max {
            return Err(format!("a key has {} bytes, at most {max} are allowed", text.len()));
        }
        keys.extend(Key::new(text));
        if keys.len() > limits.max_keys {
            return Err(format!("more than {} keys", limits.max_keys));
        }
    }
    if keys.is_empty() {
        return Err("there is no key".to_owned());
    }
    Ok(keys.into_iter().collect())
}

fn mode(from: types::Mode, limits: &Limits) -> Result<Mode, String> {
    Ok(match from {
        types::Mode::Exclusive => Mode::Exclusive,
        types::Mode::Shared => Mode::Shared,
        types::Mode::Permits(types::Permits { count, limit }) => {
            if !(1..=limits.max_permits).contains(&limit) {
                return Err(format!(
                    "a limit of {limit} permits is not between 1 and {}",
                    limits.max_permits
                ));
            }
            if !(1..=limit).contains(&count) {
                return Err(format!("{count} permits of {limit}"));
            }
            Mode::Permits { count, limit }
        }
    })
}

fn labels(from: Vec<types::Label>, limits: &Limits) -> Result<Labels, String> {
    if from.len() > limits.max_labels {
        return Err(format!("{} labels, at most {} are allowed", from.len(), limits.max_labels));
    }
    let long = |label: &types::Label| label.name.len().max(label.value.len()) > limits.max_label_bytes;
    if from.iter().any(long) {
        return Err(format!("a label has more than {} bytes", limits.max_label_bytes));
    }
    Ok(from.into_iter().map(|label| (label.name.into(), label.value.into())).collect())
}

fn primitive(from: types::Primitive) -> Primitive {
    match from {
        types::Primitive::Lease => Primitive::Lease,
        types::Primitive::Row => Primitive::Row,
        types::Primitive::Advisory => Primitive::Advisory,
        types::Primitive::Version => Primitive::Version,
        types::Primitive::Once => Primitive::Once,
        types::Primitive::Quorum => Primitive::Quorum,
    }
}

#[cfg(test)]
mod tests;

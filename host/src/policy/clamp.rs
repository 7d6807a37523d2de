//! Brings every value that a policy returns within the proxy's limits.
//!
//! Quantities (times, queue lengths, weights) are moved to the nearest allowed value. Values that identify the lock
//! (keys, permits, the group and the labels) are never changed: out of bounds, they are a fault. Texts for people are
//! cut.

use std::collections::BTreeSet;

use super::bindings::{self, naming, response, types};
use super::{Backoff, OnLoss, Plan, RefusalResponse, Renewal};
use crate::config::Limits;
use crate::lock::{Key, Mode, Modes, Primitive, Properties};

/// How long the outcome of a `once` is stored if the policy does not say.
const DEFAULT_KEEP_MS: u32 = 86_400_000;
const MAX_REASON_BYTES: usize = 1024;
const MIN_POLL_MS: u32 = 5;
const MAX_POLL_MS: u32 = 60_000;
const MAX_RETRY_AFTER_MS: u32 = 3_600_000;
const MAX_HEADERS: usize = 16;
const MAX_HEADER_BYTES: usize = 1024;
/// Response headers that frame the response, which a policy must not set.
const OWN_HEADERS: [&str; 9] = [
    "connection",
    "content-length",
    "content-type",
    "keep-alive",
    "retry-after",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// The prefix of a plan's labels that are for the proxy.
const OWN_LABELS: &str = "lockkeeper.";

type Labels = Vec<(Box<str>, Box<str>)>;

/// Checks a plan. The error says what is invalid, for a fault of kind `Value`.
pub(super) fn plan(from: naming::LockPlan, limits: &Limits) -> Result<Plan, String> {
    let plan = named(from, limits)?;
    is_possible(&plan)?;
    Ok(plan)
}

/// A plan with valid keys. It may ask for more than its primitive supports: see [`is_possible`].
pub(super) fn named(from: naming::LockPlan, limits: &Limits) -> Result<Plan, String> {
    let primitive = bindings::primitive(from.primitive);
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
    let (wishes, labels) = wishes(labels(from.labels, limits)?)?;
    let plan = Plan {
        keys,
        primitive,
        second: wishes.second,
        global_order: wishes.global_order,
        any: wishes.any,
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
        keep_ms: if is_once { keep_ms(from.lock_at_least, limits) } else { 0 },
        lock_delay_ms: from.lock_delay.min(limits.max_lock_delay_ms),
        max_hold_ms: from.max_hold.clamp(limits.min_ttl_ms, limits.max_hold_ms),
        on_loss: wishes.on_loss,
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
    if plan.any && (plan.global_order || !any_key) {
        let these = names(|primitive| primitive.any_key);
        return Err(format!("any of several keys is for {these} in their own order, not `{name}`"));
    }
    Ok(())
}

/// The names of the primitives that have a property.
fn names(has: impl Fn(&Properties) -> bool) -> String {
    let properties = Primitive::ALL.into_iter().map(Primitive::properties).filter(|row| has(row));
    properties.map(|row| format!("`{}`", row.name)).collect::<Vec<_>>().join(" and ")
}

/// Requests of a plan that have no field in the record and are given as labels.
#[derive(Default)]
struct Wishes {
    second: Option<Primitive>,
    global_order: bool,
    any: bool,
    on_loss: OnLoss,
}

/// Separates the proxy's own labels from those that the policy is shown again later.
fn wishes(labels: Labels) -> Result<(Wishes, Labels), String> {
    let (own, others): (Labels, Labels) =
        labels.into_iter().partition(|(name, _)| name.starts_with(OWN_LABELS));
    let mut wishes = Wishes::default();
    for (name, value) in own {
        match (&name[OWN_LABELS.len()..], &*value) {
            ("second-primitive", name) => {
                let second = Primitive::from_name(name);
                wishes.second = Some(second.ok_or_else(|| format!("`{name}` is not a primitive"))?);
            }
            ("keys", "any") => wishes.any = true,
            ("order", "global") => wishes.global_order = true,
            ("on-loss", "finish") => wishes.on_loss = OnLoss::Finish,
            ("on-loss", "mark") => wishes.on_loss = OnLoss::Mark,
            ("on-loss", "cut") => wishes.on_loss = OnLoss::Cut,
            _ => return Err(format!("the label {name} = {value} means nothing to the proxy")),
        }
    }
    Ok((wishes, others))
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

/// For `once`, lock-at-least is the time for which the outcome is stored.
fn keep_ms(lock_at_least: u32, limits: &Limits) -> u32 {
    match lock_at_least {
        0 => DEFAULT_KEEP_MS.min(limits.max_keep_ms),
        ms => ms.min(limits.max_keep_ms),
    }
}

pub(super) fn backoff(from: Backoff) -> Backoff {
    match from {
        Backoff::Poll { after_ms } => Backoff::Poll { after_ms: after_ms.clamp(MIN_POLL_MS, MAX_POLL_MS) },
        Backoff::WakeUp => Backoff::WakeUp,
        Backoff::GiveUp { reason: text } => Backoff::GiveUp { reason: reason(text) },
    }
}

/// `held_ms` and `max_hold_ms` are those of the lease: no extension exceeds the maximum.
pub(super) fn renewal(from: Renewal, held_ms: u32, max_hold_ms: u32, limits: &Limits) -> Renewal {
    let left_ms = max_hold_ms.min(limits.max_hold_ms).saturating_sub(held_ms);
    match from {
        Renewal::Extend { .. } if left_ms == 0 => Renewal::Lapse,
        Renewal::Extend { ttl_ms } => {
            Renewal::Extend { ttl_ms: ttl_ms.clamp(limits.min_ttl_ms, limits.max_ttl_ms).min(left_ms) }
        }
        Renewal::Lapse => Renewal::Lapse,
    }
}

pub(super) fn answer(from: response::Answer) -> Result<RefusalResponse, String> {
    if !(400..=599).contains(&from.status) {
        return Err(format!("the status {} is not between 400 and 599", from.status));
    }
    if from.headers.len() > MAX_HEADERS {
        return Err(format!("{} headers, at most {MAX_HEADERS} are allowed", from.headers.len()));
    }
    let headers: Result<Vec<_>, String> = from.headers.into_iter().map(header).collect();
    Ok(RefusalResponse {
        status: from.status,
        retry_after_ms: from.retry_after.min(MAX_RETRY_AFTER_MS),
        headers: headers?,
        detail: reason(from.detail),
    })
}

/// Cuts a text for people at the limit, between characters.
pub(super) fn reason(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(MAX_REASON_BYTES));
    text
}

fn keys(from: &[String], limits: &Limits) -> Result<std::sync::Arc<[Key]>, String> {
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

fn header(from: types::Label) -> Result<(String, String), String> {
    let name = from.name.to_ascii_lowercase();
    let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    let sound = !name.is_empty()
        && name.bytes().all(token)
        && from.value.bytes().all(|byte| (0x20..0x7f).contains(&byte))
        && name.len() + from.value.len() <= MAX_HEADER_BYTES;
    if !sound {
        return Err(format!("the header {:?} is malformed", reason(name)));
    }
    if OWN_HEADERS.contains(&name.as_str()) {
        return Err(format!("the header `{name}` is the proxy's own"));
    }
    Ok((name, from.value))
}

#[cfg(test)]
mod tests;

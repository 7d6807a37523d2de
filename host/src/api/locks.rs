//! `GET /v1/locks` and `/v1/locks/{name}`: holders, waiters and recent decisions.

use serde::Serialize;
use serde_json::value::RawValue;

use super::queued::{Queued, Times};
use crate::clock;
use crate::config::Limits;
use crate::fronts::mode::Shown;
use crate::http::{Kind, Problem, Query, Response, json};
use crate::lock::record::{Origin, StoredValue};
use crate::lock::{Key, Mode, Primitive};
use crate::service::{Decision, HolderEntry, LockEntry, LockPage, LockView, Principal, Service};

const MAX_LIMIT: usize = 1_000;
const DEFAULT_LIMIT: usize = 100;

/// `GET /v1/locks`: one page of locks, in the order of their keys.
pub async fn list(
    service: &Service,
    principal: &Principal,
    query: Option<&str>,
) -> Result<Response, Problem> {
    let query = Query::parse(query, &["prefix", "limit", "after"])?;
    let limit = query.count("limit", DEFAULT_LIMIT, MAX_LIMIT)?;
    let after = match query.text("after").filter(|after| !after.is_empty()) {
        None => None,
        Some(after) => Some(Key::new(after).ok_or_else(|| bound("after"))?),
    };
    let prefix = query.text("prefix").unwrap_or_default();
    if prefix.len() > Key::MAX_BYTES {
        return Err(bound("prefix"));
    }
    let LockPage { locks, more, unheard } = service.list(principal, prefix.to_owned(), after, limit).await?;
    let next = if more { locks.last().map(|lock| lock.key.to_string()) } else { None };
    Ok(json(&Page { locks: locks.into_iter().map(Lock::from).collect(), more, next, unheard }))
}

/// `GET /v1/locks/{name}?owner=`: one lock, with its queue, or the waiters of one owner, and its recent decisions.
pub async fn show(
    service: &Service,
    limits: &Limits,
    principal: &Principal,
    name: &str,
    query: Option<&str>,
) -> Result<Response, Problem> {
    let query = Query::parse(query, &["owner"])?;
    if name.len() > limits.max_resource_bytes.max(Key::MAX_BYTES) {
        return Err(bound("name"));
    }
    let hidden = if principal.identity().is_some() { ", or you may not read it" } else { "" };
    match service.show(principal, name).await? {
        Some(mut view) => {
            if let Some(owner) = query.text("owner") {
                view.queue.retain(|waiter| waiter.owner == owner);
            }
            Ok(json(&View::from(view)))
        }
        None => {
            Err(Problem::new(Kind::NOT_FOUND, format!("nothing is known of `{name}`: it is free{hidden}")))
        }
    }
}

fn bound(field: &'static str) -> Problem {
    let bound = format!("at most {} bytes", Key::MAX_BYTES);
    Problem::invalid(field, format!("must have {bound}")).with("bound", bound)
}

#[derive(Serialize)]
struct Page {
    locks: Vec<Lock>,
    more: bool,
    /// The value of `after` that asks for the next page.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
    /// Stores that could not be listed now and may have more locks, with the reason.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unheard: Vec<String>,
}

#[derive(Serialize)]
struct Lock {
    key: String,
    /// Absent for keys of the lease table (leases, outcomes and versions).
    #[serde(skip_serializing_if = "Option::is_none")]
    primitive: Option<&'static str>,
    token: u64,
    holders: Vec<Holder>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kept: Option<KeptValue>,
}

/// The value that a `once` or a commit stored under the key.
#[derive(Serialize)]
struct KeptValue {
    /// Absent in lists, and if the value is the answer to a guarded request.
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<Box<RawValue>>,
    since: String,
    /// Absent for a value that is kept until it is replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    until: Option<String>,
}

#[derive(Serialize)]
struct Holder {
    /// Absent if the client may not read it.
    #[serde(skip_serializing_if = "Option::is_none")]
    resource: Option<String>,
    owner: String,
    /// The authenticated client; absent without authentication.
    #[serde(skip_serializing_if = "Option::is_none")]
    principal: Option<String>,
    mode: Shown,
    #[serde(skip_serializing_if = "Option::is_none")]
    permits_limit: Option<u32>,
    token: u64,
    since: String,
    until: String,
    held_ms: u32,
    left_ms: u32,
    levels: u32,
    policy: String,
}

#[derive(Serialize)]
struct View {
    #[serde(flatten)]
    lock: Lock,
    queue: Vec<Queued>,
    /// How long the key was held lately; absent if too few holds have ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    recent_holds: Option<Times>,
    /// Clients of other proxies wait for the key, too, and no estimate counts them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    others_wait: bool,
    decisions: Vec<Decided>,
}

#[derive(Serialize)]
struct Decided {
    at: String,
    hook: &'static str,
    by: String,
    what: String,
}

impl From<LockEntry> for Lock {
    fn from(entry: LockEntry) -> Lock {
        Lock {
            key: entry.key.to_string(),
            primitive: Primitive::of_space(entry.key.space()).map(Primitive::as_str),
            token: entry.token.0,
            holders: entry.holders.into_iter().map(Holder::from).collect(),
            kept: entry.kept.as_ref().map(KeptValue::listed),
        }
    }
}

impl KeptValue {
    fn listed(kept: &StoredValue) -> KeptValue {
        KeptValue {
            value: None,
            since: clock::rfc3339(kept.since.0),
            until: (kept.until.0 < u64::MAX).then(|| clock::rfc3339(kept.until.0)),
        }
    }

    fn shown(kept: &StoredValue) -> KeptValue {
        let value = Some(kept).filter(|kept| kept.origin == Origin::Api).map(|kept| kept.value.clone());
        let value = value.and_then(|value| RawValue::from_string(value.into()).ok());
        KeptValue { value, ..KeptValue::listed(kept) }
    }
}

impl From<HolderEntry> for Holder {
    fn from(entry: HolderEntry) -> Holder {
        let permits_limit = match entry.mode {
            Mode::Permits { limit, .. } => Some(limit),
            _ => None,
        };
        Holder {
            resource: entry.resource,
            owner: entry.owner,
            principal: entry.principal.as_deref().map(str::to_owned),
            mode: Shown(entry.mode),
            permits_limit,
            token: entry.token.0,
            since: clock::rfc3339(entry.since_us),
            until: clock::rfc3339(entry.until_us),
            held_ms: entry.held_ms,
            left_ms: entry.left_ms,
            levels: entry.levels,
            policy: entry.policy,
        }
    }
}

impl From<LockView> for View {
    fn from(view: LockView) -> View {
        let kept = view.entry.kept.as_ref().map(KeptValue::shown);
        View {
            lock: Lock { kept, ..view.entry.into() },
            queue: view.queue.into_iter().map(Queued::from).collect(),
            recent_holds: view.held.map(Times::from),
            others_wait: view.others_wait,
            decisions: view.decisions.into_iter().map(Decided::from).collect(),
        }
    }
}

impl From<Decision> for Decided {
    fn from(decision: Decision) -> Decided {
        Decided {
            at: clock::rfc3339(decision.at_us),
            hook: decision.hook,
            by: decision.by.to_string(),
            what: decision.what,
        }
    }
}

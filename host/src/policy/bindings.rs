//! The types that wasmtime generates from `sdk/wit/policy.wit`, and conversions between them and the proxy's types.

use std::sync::Arc;

use super::{Backoff, Contention, Expiring, HttpView, PlanRequest, QueueView, Renewal, ResponseContention};
use crate::lock::{self, Primitive};

mod generated {
    #![allow(clippy::all, unused_qualifications)]
    wasmtime::component::bindgen!({ path: "../sdk/wit", world: "policy" });
}

pub(super) use generated::exports::lockkeeper::policy::{
    backoff, fairness, naming, renewal, response, settings,
};
pub(super) use generated::lockkeeper::policy::types;

pub(super) fn request(from: &PlanRequest) -> types::Request {
    types::Request {
        name: from.resource.clone(),
        owner: from.owner.clone(),
        mode: mode(from.mode),
        ttl: from.ttl_ms,
        wait: from.wait_ms,
        labels: pairs(&from.labels),
        http: from.http.as_deref().map(http),
        seed: from.seed,
    }
}

fn http(from: &HttpView) -> types::HttpRequest {
    types::HttpRequest {
        method: from.method.clone(),
        path: from.path.clone(),
        captures: pairs(&from.captures),
        query: pairs(&from.query),
        headers: pairs(&from.headers),
        body: from.body.clone(),
    }
}

fn pairs(from: &[(String, String)]) -> Vec<types::Label> {
    from.iter().map(|(name, value)| label(name, value)).collect()
}

pub(super) fn queue(from: &QueueView) -> fairness::Queue {
    let waiters = from.waiters.iter().map(|waiter| fairness::Waiter {
        rank: waiter.rank,
        group: waiter.group.to_string(),
        weight: waiter.weight,
        owner: waiter.owner.to_string(),
        mode: mode(waiter.mode),
        waited: waiter.waited_ms,
        labels: labels(&waiter.labels),
    });
    let groups = from.groups.iter().map(|share| fairness::GroupShare {
        group: share.group.to_string(),
        waiting: share.waiting,
        recent_grants: share.recent_grants,
    });
    fairness::Queue {
        key: from.key.as_str().to_owned(),
        waiters: waiters.collect(),
        groups: groups.collect(),
        seed: from.seed,
    }
}

pub(super) fn contention(from: &Contention) -> backoff::Contention {
    backoff::Contention {
        key: from.key.as_str().to_owned(),
        attempt: from.attempt,
        waited: from.waited_ms,
        wait_left: from.wait_left_ms,
        holder_left: from.holder_left_ms,
        holder: from.holder.clone(),
        waiters: from.waiters,
        last_sleep: from.last_sleep_ms,
        labels: labels(&from.labels),
        seed: from.seed,
    }
}

pub(super) fn expiring(from: &Expiring) -> renewal::Expiring {
    renewal::Expiring {
        key: from.key.as_str().to_owned(),
        owner: from.owner.clone(),
        ttl: from.ttl_ms,
        renewals: from.renewals,
        held: from.held_ms,
        max_hold: from.max_hold_ms,
        waiters: from.waiters,
        client_alive: from.client_alive,
        labels: labels(&from.labels),
    }
}

pub(super) fn refused(from: &ResponseContention) -> response::Contention {
    response::Contention {
        key: from.key.as_str().to_owned(),
        holder: from.holder.clone(),
        position: from.position,
        waited: from.waited_ms,
        retry_after: from.retry_after_ms,
    }
}

pub(super) fn backoff_answer(from: backoff::Decision) -> Backoff {
    match from {
        backoff::Decision::Poll(after_ms) => Backoff::Poll { after_ms },
        backoff::Decision::WakeUp => Backoff::WakeUp,
        backoff::Decision::GiveUp(reason) => Backoff::GiveUp { reason },
    }
}

pub(super) fn renewal_answer(from: renewal::Decision) -> Renewal {
    match from {
        renewal::Decision::Extend(ttl_ms) => Renewal::Extend { ttl_ms },
        renewal::Decision::Lapse => Renewal::Lapse,
    }
}

pub(super) fn primitive(from: types::Primitive) -> Primitive {
    match from {
        types::Primitive::Lease => Primitive::Lease,
        types::Primitive::Row => Primitive::Row,
        types::Primitive::Advisory => Primitive::Advisory,
        types::Primitive::Version => Primitive::Version,
        types::Primitive::Once => Primitive::Once,
        types::Primitive::Quorum => Primitive::Quorum,
    }
}

fn mode(from: lock::Mode) -> types::Mode {
    match from {
        lock::Mode::Exclusive => types::Mode::Exclusive,
        lock::Mode::Shared => types::Mode::Shared,
        lock::Mode::Permits { count, limit } => types::Mode::Permits(types::Permits { count, limit }),
    }
}

fn labels(from: &Arc<[(Box<str>, Box<str>)]>) -> Vec<types::Label> {
    from.iter().map(|(name, value)| label(name, value)).collect()
}

fn label(name: &str, value: &str) -> types::Label {
    types::Label { name: name.to_owned(), value: value.to_owned() }
}

//! The types that wasmtime generates from `sdk/wit/policy.wit`, and the conversions that several hooks need.

use std::sync::Arc;

use crate::lock;

mod generated {
    #![allow(clippy::all, unused_qualifications)]
    wasmtime::component::bindgen!({ path: "../sdk/wit", world: "policy" });
}

pub(super) use generated::exports::lockkeeper::policy::{
    backoff, fairness, naming, reads, renewal, response,
};
pub(super) use generated::lockkeeper::policy::types;

pub(super) fn mode(from: lock::Mode) -> types::Mode {
    match from {
        lock::Mode::Exclusive => types::Mode::Exclusive,
        lock::Mode::Shared => types::Mode::Shared,
        lock::Mode::Permits { count, limit } => types::Mode::Permits(types::Permits { count, limit }),
    }
}

pub(super) fn labels(from: &Arc<[(Box<str>, Box<str>)]>) -> Vec<types::Label> {
    from.iter().map(|(name, value)| label(name, value)).collect()
}

pub(super) fn label(name: &str, value: &str) -> types::Label {
    types::Label { name: name.to_owned(), value: value.to_owned() }
}

//! Metrics and logs. Labels are bounded: policies, hooks, reasons and outcomes, never a key.

use std::time::Duration;

use crate::policy::{FaultKind, Hook};

/// Every counter of the proxy. Cheap to clone.
#[derive(Clone, Default)]
pub struct Metrics {}

impl Metrics {
    /// An acquire was answered. `outcome` is `granted` or the problem's slug.
    pub fn acquire(&self, _policy: &str, _outcome: &'static str, _waited: Duration) {}
    /// A policy failed and the request was refused or the built-in answer was used.
    pub fn policy_fault(&self, _policy: &str, _hook: Hook, _kind: FaultKind) {}
    /// A policy was asked and answered.
    pub fn policy_call(&self, _policy: &str, _hook: Hook, _took: Duration) {}
    /// A load or push was made live (`live`), or refused (`refused`).
    pub fn policy_load(&self, _policy: &str, _outcome: &'static str) {}
    pub fn renewal(&self, _outcome: &'static str) {}
    pub fn release(&self, _outcome: &'static str) {}
    /// A lease ended, `held` after its grant. `how` is `released`, `expired`, `handed_off`, `forced` or `lost`.
    pub fn lease_ended(&self, _how: &'static str, _held: Duration) {}
    /// A transaction of `operations` was committed.
    pub fn batch(&self, _operations: usize, _took: Duration) {}
    /// The store failed; `reason` is a stable slug.
    pub fn store_error(&self, _reason: &'static str) {}
    pub fn waiters(&self, _now: usize) {}
    pub fn leases(&self, _now: usize) {}
    /// An HTTP request was answered by `front` (`api` or `admin`).
    pub fn http(&self, _front: &'static str, _status: u16) {}
}

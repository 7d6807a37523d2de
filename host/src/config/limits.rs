//! `[limits]`: bounds on locks and on the requests for them.

use super::reader::{Section, defaults};
use crate::lock::Key;

const DAY_MS: u64 = 86_400_000;

/// Limits on locks and on the requests for them. Every value that a policy returns is clamped to these limits.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Limits {
    /// The longest name of a resource, in bytes.
    pub max_resource_bytes: usize,
    /// The longest name of an owner, in bytes.
    pub max_owner_bytes: usize,
    /// The size limit of a request id.
    pub max_request_id_bytes: usize,
    /// The most labels of a request or a plan.
    pub max_labels: usize,
    /// The size limit of a label's name, of a label's value, and of a group.
    pub max_label_bytes: usize,
    /// The most keys of one lease.
    pub max_keys: usize,
    /// The size limit of a key.
    pub max_key_bytes: usize,
    /// The shortest lease.
    pub min_ttl_ms: u32,
    /// The longest lease. After a fail-over, no lease is granted until leases of this length have ended.
    pub max_ttl_ms: u32,
    /// The longest time that an acquire may wait.
    pub max_wait_ms: u32,
    /// The most waiters for one key.
    pub max_waiters: u32,
    /// The most waiters on this proxy.
    pub max_waiters_total: usize,
    /// The most permits of a key, and of a request.
    pub max_permits: u32,
    /// The longest time that the proxy keeps a lease alive.
    pub max_hold_ms: u32,
    /// The longest time that a key stays taken after a lease that ended without a release.
    pub max_lock_delay_ms: u32,
    /// The longest time that the outcome of a `once` is kept.
    pub max_keep_ms: u32,
    /// The size limit of an outcome, and of a value that is committed with a version.
    pub max_value_bytes: usize,
    /// The part of a lease, in thousandths, that is subtracted from the time a holder is promised, because clocks run
    /// at different speeds.
    pub drift_per_mille: u32,
    /// The most streams of events on this proxy.
    pub max_watchers: usize,
    /// How many events a client of `/v1/watch` may lag behind before it misses events.
    pub watch_buffer: usize,
}

impl Limits {
    /// Reads `[limits]`.
    pub(super) fn read(section: &Section<'_>) -> Limits {
        let limits = Limits {
            max_resource_bytes: section.integer("max_resource_bytes", 1..=4_096, 512),
            max_owner_bytes: section.integer("max_owner_bytes", 32..=1_024, 256),
            max_request_id_bytes: section.integer("max_request_id_bytes", 16..=1_024, 128),
            max_labels: section.integer("max_labels", 0..=256, 16),
            max_label_bytes: section.integer("max_label_bytes", 1..=4_096, 256),
            max_keys: section.integer("max_keys", 1..=16, 16),
            max_key_bytes: section.integer("max_key_bytes", 1..=Key::MAX_BYTES as u64, 1_024),
            min_ttl_ms: section.integer("min_ttl_ms", 10..=DAY_MS, 100),
            max_ttl_ms: section.integer("max_ttl_ms", 10..=DAY_MS, 3_600_000),
            max_wait_ms: section.integer("max_wait_ms", 0..=DAY_MS, 3_600_000),
            max_waiters: section.integer("max_waiters", 0..=1_000_000, 20_000),
            max_waiters_total: section.integer("max_waiters_total", 0..=10_000_000, 100_000),
            max_permits: section.integer("max_permits", 1..=1_000_000, 1_024),
            max_hold_ms: section.integer("max_hold_ms", 100..=30 * DAY_MS, 86_400_000),
            max_lock_delay_ms: section.integer("max_lock_delay_ms", 0..=DAY_MS, 600_000),
            max_keep_ms: section.integer("max_keep_ms", 1_000..=30 * DAY_MS, 604_800_000),
            max_value_bytes: section.integer("max_value_bytes", 64..=1_048_576, 16_384),
            drift_per_mille: section.integer("drift_per_mille", 0..=500, 2),
            max_watchers: section.integer("max_watchers", 0..=100_000, 1_000),
            watch_buffer: section.integer("watch_buffer", 16..=1_048_576, 4_096),
        };
        if limits.min_ttl_ms > limits.max_ttl_ms {
            let (least, most) = (limits.min_ttl_ms, limits.max_ttl_ms);
            section.complain("min_ttl_ms", format!("is {least}, over limits.max_ttl_ms, which is {most}"));
        }
        section.finish();
        limits
    }
}

impl Default for Limits {
    fn default() -> Limits {
        defaults(Limits::read)
    }
}

//! Intervals and bounds of a [`Table`](super::Table).

use crate::lock::record::UNNOTICED_US;

/// How many waiters of a key a policy is shown at most.
pub const VIEW_WAITERS: usize = 64;
/// How many waiters one batch can grant a key to at most.
pub(super) const RUN_MAX: usize = 64;
/// The shortest interval between two polls of a key that is held through another proxy.
pub(super) const MIN_POLL_MS: u32 = 5;
/// The longest interval between two polls of a held key, in case a notification was missed.
pub(super) const MAX_POLL_MS: u32 = 30_000;
/// How long a waiter pauses after the store could not be reached.
pub(super) const STORE_RETRY_MS: u32 = 250;
/// How long a waiter that stands behind others of this proxy may wait before it joins the global queue, so that
/// several waiters join together. Each join writes the row, which delays the next waiter.
pub(super) const JOIN_MS: u32 = 10;
/// How often this proxy extends its waiters' places in the global queue.
pub(super) const KEEP_PLACES_MS: u32 = 1_500;
/// While the store cannot be reached, the proxy retries the undoing of a claim until this long after the
/// claim's lease would end by the proxy's clock. If the server's clock is set back meanwhile, the lease may
/// outlast the retries.
pub const ABANDON_MS: u32 = 5_000;
/// How long after its deadline a waiter may still begin to wait for an in-flight batch.
pub(super) const OVERDUE_MS: u32 = 1_000;
/// How long after the end of a lease, as this proxy knows it, the proxy asks the store whether the lease has
/// ended. By then other waiters may have the key.
pub(super) const LOOK_MS: u32 = (UNNOTICED_US / 1_000) as u32;

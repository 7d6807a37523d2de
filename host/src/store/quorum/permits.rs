//! Checks whether majorities have granted more permits of a key than its limit.
//!
//! Any two majorities have a member in common, so two leases that exclude each other cannot both be granted.
//! But three leases of one permit each can exceed a limit of two: if each lease has a different pair of three
//! members, no member has granted more than two permits. So after a majority has granted permits, the proxy
//! reads the key from a majority again. If the leases together exceed the limit, the lease that got its
//! majority last sees all the others and is given up.

use std::time::Duration;

use super::{Member, PAUSE_US, views};
use crate::coverage::{Branch, reached};
use crate::lock::Mode;
use crate::lock::record::{Cause, Claim, Denial, HeldBy, Holder};
use crate::random;
use crate::store::Stored;

/// Whether a granted lease may keep its permits.
pub enum Room {
    /// The lease may keep its permits.
    Enough,
    /// Other leases have too many permits.
    Taken(Denial),
    /// No majority has answered.
    Unknown,
}

/// Counts the permits of each key again, for a claim that was granted the lease with this nonce.
pub async fn recount(members: &[Member], patience: Duration, claim: &Claim, nonce: u64) -> Room {
    let Mode::Permits { count, limit: limit @ 2.. } = claim.mode else { return Room::Enough };
    for key in &*claim.keys {
        let Ok(seen) = views::read(members, patience, key).await else { return Room::Unknown };
        let Some(stored) = seen else { continue };
        let others = others(&stored, nonce);
        let used: u64 = others.iter().map(|holder| permits(holder)).sum();
        if used + u64::from(count) > u64::from(limit) {
            reached(Branch::PermitsTaken);
            let longest = others.into_iter().max_by_key(|holder| holder.until);
            return Room::Taken(Denial {
                key: key.clone(),
                cause: Cause::Permits { used: u32::try_from(used).unwrap_or(u32::MAX), limit },
                holder: longest.map(HeldBy::from),
                // The other leases may be given up, too.
                free_in_us: random::within(PAUSE_US),
                next_waiter: None,
                joined: None,
            });
        }
    }
    Room::Enough
}

/// The other leases of permits that have a majority, or may have one.
fn others(stored: &Stored, nonce: u64) -> Vec<&Holder> {
    let all = stored.record.holders.iter();
    all.filter(|holder| holder.nonce != nonce && permits(holder) > 0 && !stored.has_ended(holder)).collect()
}

/// How many permits the holder has. Leases of other modes do not count: each member refuses permits while it
/// has one.
fn permits(holder: &Holder) -> u64 {
    match holder.mode {
        Mode::Permits { count, .. } => count.into(),
        Mode::Exclusive | Mode::Shared => 0,
    }
}

//! Whether majorities have granted more permits of a key than its limit.
//!
//! Any two majorities have a member in common, so two leases that exclude each other cannot both be granted. But three leases
//! of a permit each can exceed a limit of two: when each lease has a different pair of three members, no member has granted
//! more than two. So when a majority has granted permits, the proxy reads the key from a majority again. If the leases together
//! exceed the limit, the one that got its majority last sees all the others, and is given up.

use std::time::Duration;

use super::{Member, PAUSE_US, views};
use crate::coverage::{Branch, reached};
use crate::lock::Mode;
use crate::lock::record::{Claim, Denial, HeldBy, Holder};
use crate::random;
use crate::store::Stored;

/// Whether a lease that was granted may keep its permits.
pub enum Room {
    Enough,
    /// Other leases have too many of them.
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
                holder: longest.map(HeldBy::from),
                // The others may give up, too.
                free_in_us: random::within(PAUSE_US),
                next_waiter: None,
                joined: None,
            });
        }
    }
    Room::Enough
}

/// The other leases of permits that a majority has, or may have.
fn others(stored: &Stored, nonce: u64) -> Vec<&Holder> {
    let all = stored.record.holders.iter();
    all.filter(|holder| holder.nonce != nonce && permits(holder) > 0 && !stored.has_ended(holder)).collect()
}

/// Leases of other modes are not counted: each member refuses permits beside them.
fn permits(holder: &Holder) -> u64 {
    match holder.mode {
        Mode::Permits { count, .. } => count.into(),
        Mode::Exclusive | Mode::Shared => 0,
    }
}

//! Whether leases of permits that majorities have granted are more than there are permits.
//!
//! Two majorities have a member in common, so two leases that exclude each other are not both granted. Of two permits, three
//! leases can be: where each has another two of three members, no member has granted more than two. So a lease of permits
//! counts only after a look at a majority that follows its grants. Of leases that are too many together, the last one that
//! its majority has granted sees all the others.

use std::time::Duration;

use super::{Member, PAUSE_US, views};
use crate::coverage::{Branch, reached};
use crate::lock::Mode;
use crate::lock::record::{Claim, Denial, HeldBy, Holder};
use crate::random;
use crate::store::Stored;

/// What a look at the permits of a granted claim comes to.
pub enum Room {
    Enough,
    /// Others have too many of them.
    Taken(Denial),
    /// No majority has answered.
    Unknown,
}

/// Looks at the keys of a claim that was granted a lease with this nonce.
pub async fn look(members: &[Member], patience: Duration, claim: &Claim, nonce: u64) -> Room {
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
                // Others may give up as well.
                free_in_us: random::within(PAUSE_US),
                turn: None,
                joined: None,
            });
        }
    }
    Room::Enough
}

/// Those that a majority has, or may have.
fn others(stored: &Stored, nonce: u64) -> Vec<&Holder> {
    let all = stored.record.holders.iter();
    all.filter(|holder| holder.nonce != nonce && permits(holder) > 0 && !stored.has_ended(holder)).collect()
}

/// A lease of another mode excludes permits on each member.
fn permits(holder: &Holder) -> u64 {
    match holder.mode {
        Mode::Permits { count, .. } => count.into(),
        Mode::Exclusive | Mode::Shared => 0,
    }
}

//! What a decision knows of the store.

use super::Holder;
use crate::lock::{ServerTime, Token};

/// What a decision knows of the store beside the records.
#[derive(Clone, Copy, Debug)]
pub struct Env {
    /// The store's clock, read after the records were locked.
    pub now: ServerTime,
    /// Every new token is above this: the store's epoch, and the tokens of rows that were cleaned up.
    pub floor: Token,
    /// The lowest version. A version below this was read before keys got other names, so a commit would not replace the
    /// content that was read.
    pub renamed: Token,
    /// New tokens are above this, too: what other spaces of keys have given out.
    pub others: Token,
    /// No new grants before this moment: leases of the server that was here before may still run.
    pub grants_from: ServerTime,
    /// Whether expired leases may be taken over. False while the store's clock is in doubt.
    pub takeover: bool,
    /// No lease is reported to last longer than this, in microseconds.
    pub longest_us: u64,
    /// By how much the store's clock was set back a short while ago, in microseconds. A lease that is granted now must also
    /// last by the clock as it was before: another proxy may not have noticed the step.
    pub set_back_us: u64,
    /// Whether the age of a mark can be read from the store's clock: the clock has not been set forward in the last
    /// [`MARK_KEPT_US`](super::MARK_KEPT_US).
    pub steady: bool,
}

impl Env {
    /// The token of the next grant of a key whose last one was `last`.
    pub(super) fn token_after(&self, last: Token) -> Token {
        last.max(self.floor).max(self.others).next()
    }

    /// How long the holder is told that the lease lasts: no longer than it was set for. Where the store's clock was set back,
    /// the end of the lease is farther off, and comes that much sooner when the clock is set forward again.
    pub(super) fn left_us(&self, holder: &Holder) -> u64 {
        let set_for_us = holder.until.us_since(holder.since).min(self.longest_us);
        holder.until.us_since(self.now.plus_us(self.set_back_us)).min(set_for_us)
    }

    /// The end of what lasts for so long from now on.
    pub(super) fn end_of(&self, ms: u32) -> ServerTime {
        self.now.plus_us(self.set_back_us).plus_ms(ms)
    }

    /// Extends a lease, so that it lasts for `ms` milliseconds from now on. Does nothing while another server may still be in
    /// use: on that server the lease keeps its end, and its keys are granted to others after it. The wait for grants is longer
    /// than the longest lease. In the time by which it is longer, all proxies that can see both servers agree on one of them.
    pub(super) fn lengthen(&self, holder: &mut Holder, ms: u32) {
        if self.now.plus_us(self.longest_us) >= self.grants_from {
            holder.until = holder.until.max(self.end_of(ms));
        }
    }

    /// Whether a lease that nobody has taken over goes on: its holder may still be certain of it, and nobody else is
    /// granted its keys. While the store's clock is in doubt, each such lease goes on, whatever the clock says.
    pub(super) fn lasts(&self, holder: &Holder) -> bool {
        holder.over_at() > self.now || !self.takeover
    }

    /// Whether the previous server may have granted the keys of this lease to another holder: after the end of the lease,
    /// and in writes that the fail-over has lost. That holder is certain of the keys until grants begin here, at most.
    pub(super) fn may_be_taken(&self, holder: &Holder) -> bool {
        holder.over_at() <= self.now && self.grants_from > self.now
    }
}

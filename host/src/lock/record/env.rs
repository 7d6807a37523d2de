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
    /// Versions begin here. Keys have changed their names since those below it were read, so what was read is
    /// not what a commit would replace.
    pub renamed: Token,
    /// New tokens are above this, too: what other spaces of keys have given out.
    pub others: Token,
    /// No new grants before this moment: leases of the server that was here before may still run.
    pub grants_from: ServerTime,
    /// Whether expired leases may be taken over. False while the store's clock is in doubt.
    pub takeover: bool,
    /// No lease is reported to last longer than this, in microseconds.
    pub longest_us: u64,
    /// By how much the store's clock was set back a short while ago, in microseconds. What is granted lasts by the clock as
    /// it would be, too: another proxy may see nothing else.
    pub set_back_us: u64,
    /// Whether the store's clock tells how old a mark is: it has not been set forward for [`MARK_KEPT_US`](super::MARK_KEPT_US).
    pub steady: bool,
}

impl Env {
    /// The token of the next grant of a key whose last one was `last`.
    pub(super) fn token_after(&self, last: Token) -> Token {
        last.max(self.floor).max(self.others).next()
    }

    /// How long a lease is told to last. That is no longer than it was set for: where the store's clock was set back,
    /// its end is farther off than that, and comes that much sooner when the clock is set forward again.
    pub(super) fn left_us(&self, holder: &Holder) -> u64 {
        let set_for_us = holder.until.us_since(holder.since).min(self.longest_us);
        holder.until.us_since(self.now.plus_us(self.set_back_us)).min(set_for_us)
    }

    /// The end of what lasts for so long from now on.
    pub(super) fn end_of(&self, ms: u32) -> ServerTime {
        self.now.plus_us(self.set_back_us).plus_ms(ms)
    }

    /// Whether a lease that nobody has taken over goes on: its holder may be certain of it still, and nobody else is
    /// granted its keys. While the store's clock is in doubt that is so whatever the clock says.
    pub(super) fn lasts(&self, holder: &Holder) -> bool {
        holder.over_at() > self.now || !self.takeover
    }

    /// Whether the server that was here before may have granted the keys of a lease that lasts to others, after its end
    /// and in writes that are lost. They are certain of the keys until grants begin, at most.
    pub(super) fn may_be_taken(&self, holder: &Holder) -> bool {
        holder.over_at() <= self.now && self.grants_from > self.now
    }
}

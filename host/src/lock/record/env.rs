//! The state of the store that a decision depends on.

use super::Holder;
use crate::lock::{ServerTime, Token};

/// The state of the store that a decision depends on, besides the records.
#[derive(Clone, Copy, Debug)]
pub struct Env {
    /// The store's clock, read after the records were locked.
    pub now: ServerTime,
    /// The token floor: every new token is above it. It covers the store's epoch and the tokens of rows that
    /// were cleaned up.
    pub floor: Token,
    /// The lowest valid version. A lower version was read before keys got other names, so a commit of it might
    /// replace other content than the caller read.
    pub renamed: Token,
    /// New tokens are also above this one, the highest token of other key spaces.
    pub others: Token,
    /// No new grants before this moment: leases of the previous server may still be running.
    pub grants_from: ServerTime,
    /// Whether the keys of expired leases may be granted. False while the store's clock is in doubt.
    pub takeover: bool,
    /// The longest lease time that is reported to a holder, in microseconds.
    pub longest_us: u64,
    /// By how much the store's clock was set back recently, in microseconds. A new lease must also last by the
    /// clock as it was before, because another proxy may not have noticed the step.
    pub set_back_us: u64,
    /// Whether the age of a batch id can be read from the store's clock: the clock has not been set forward
    /// within the last [`BATCH_ID_KEPT_US`](super::BATCH_ID_KEPT_US).
    pub steady: bool,
}

impl Env {
    /// The state of a store that is the only one there ever was, and whose clock was never set.
    pub fn certain(now: ServerTime) -> Env {
        Env {
            now,
            floor: Token::default(),
            renamed: Token::default(),
            others: Token::default(),
            grants_from: ServerTime(0),
            takeover: true,
            longest_us: u64::MAX,
            set_back_us: 0,
            steady: true,
        }
    }

    /// The next token of a key whose last token is `last`.
    pub(super) fn token_after(&self, last: Token) -> Token {
        last.max(self.floor).max(self.others).next()
    }

    /// How long the lease lasts, as reported to its holder: no longer than its lease time. If the store's clock
    /// was set back, the end of the lease appears to be farther off, and it comes sooner by the same amount
    /// when the clock is set forward again.
    pub(super) fn left_us(&self, holder: &Holder) -> u64 {
        let set_for_us = holder.until.us_since(holder.since).min(self.longest_us);
        holder.until.us_since(self.now.plus_us(self.set_back_us)).min(set_for_us)
    }

    /// The end of a period of `ms` milliseconds from now.
    pub(super) fn end_of(&self, ms: u32) -> ServerTime {
        self.now.plus_us(self.set_back_us).plus_ms(ms)
    }

    /// Extends a lease to last for `ms` milliseconds from now. Does nothing while a previous server may still
    /// be in use: on that server the lease keeps its end, and its keys are granted to others after it. The wait
    /// for grants is longer than the longest lease. In the remaining time, all proxies that can see both
    /// servers agree on one of them.
    pub(super) fn lengthen(&self, holder: &mut Holder, ms: u32) {
        if self.now.plus_us(self.longest_us) >= self.grants_from {
            holder.until = holder.until.max(self.end_of(ms));
        }
    }

    /// Whether a lease that no other client has taken over is still in force: its holder may rely on it, and its
    /// keys are granted to nobody else. While the store's clock is in doubt, every such lease is in force,
    /// whatever the clock says.
    pub(super) fn lasts(&self, holder: &Holder) -> bool {
        holder.over_at() > self.now || !self.takeover
    }

    /// Whether the holder no longer blocks the key. While the store's clock is in doubt, every holder does.
    pub(super) fn is_past(&self, holder: &Holder) -> bool {
        self.takeover && holder.free_at() <= self.now
    }

    /// Whether the previous server may have granted the keys of this lease to another holder after the end of
    /// the lease, in writes that the fail-over has lost. Such a holder counts on the keys until this server
    /// begins to grant, at most.
    pub(super) fn may_be_taken(&self, holder: &Holder) -> bool {
        holder.over_at() <= self.now && self.grants_from > self.now
    }
}

//! What one principal may ask of a proxy at a time: requests in a second, and requests in progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::clock;
use crate::config::PrincipalLimits;

/// A principal has used up one of its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverLimit {
    /// Too many requests in a second.
    #[error("the client may send {limit} requests a second")]
    Rate {
        /// The limit.
        limit: u32,
        /// When the next request is accepted, in milliseconds.
        retry_after_ms: u32,
    },
    /// Too many requests in progress: waiting, or streams that are open.
    #[error("the client may have {limit} requests in progress, which count while they wait or stream")]
    InProgress {
        /// The limit.
        limit: u32,
    },
}

/// Counts the requests of a principal.
#[derive(Debug, Default)]
pub(super) struct Meter {
    /// When the allowance is full again, in microseconds of [`clock::now`].
    full_at: AtomicU64,
    in_progress: AtomicU32,
}

/// A request in progress. It counts until this is dropped.
#[derive(Debug)]
pub(super) struct InProgress(Arc<Meter>);

impl Drop for InProgress {
    fn drop(&mut self) {
        self.0.in_progress.fetch_sub(1, Relaxed);
    }
}

impl Meter {
    /// Counts a request, if the limits allow it.
    pub fn take(self: &Arc<Meter>, limits: &PrincipalLimits) -> Result<InProgress, OverLimit> {
        if let Some(limit) = limits.per_second {
            self.take_turn(limit)?;
        }
        let before = self.in_progress.fetch_add(1, Relaxed);
        // Dropped, and so uncounted, if it is one too many.
        let taken = InProgress(Arc::clone(self));
        match limits.in_progress {
            Some(limit) if before >= limit => Err(OverLimit::InProgress { limit }),
            _ => Ok(taken),
        }
    }

    /// Each request moves the moment at which the allowance is full by its share of a second. A second's requests may
    /// come at once (the generic cell rate algorithm).
    fn take_turn(&self, limit: u32) -> Result<(), OverLimit> {
        const SECOND_US: u64 = 1_000_000;
        let now = clock::now().0;
        let step = SECOND_US / u64::from(limit);
        let next = |full_at: u64| Some(full_at.max(now) + step).filter(|next| *next <= now + SECOND_US);
        self.full_at.fetch_update(Relaxed, Relaxed, next).map(drop).map_err(|full_at| {
            let wait_us = (full_at + step).saturating_sub(now + SECOND_US);
            OverLimit::Rate {
                limit,
                retry_after_ms: u32::try_from(wait_us / 1_000).unwrap_or(u32::MAX).max(1),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_requests_of_a_second_may_come_at_once_and_no_more() {
        let meter = Arc::new(Meter::default());
        let limits = PrincipalLimits { per_second: Some(5), in_progress: None };
        for _ in 0..5 {
            meter.take(&limits).unwrap();
        }
        let Err(OverLimit::Rate { limit: 5, retry_after_ms }) = meter.take(&limits) else {
            panic!("the sixth")
        };
        assert!((1..=200).contains(&retry_after_ms), "{retry_after_ms}");
    }

    #[test]
    fn a_request_counts_while_it_is_in_progress() {
        let meter = Arc::new(Meter::default());
        let limits = PrincipalLimits { per_second: None, in_progress: Some(2) };
        let first = meter.take(&limits).unwrap();
        let _second = meter.take(&limits).unwrap();
        assert_eq!(meter.take(&limits).unwrap_err(), OverLimit::InProgress { limit: 2 });
        drop(first);
        meter.take(&limits).unwrap();
    }
}

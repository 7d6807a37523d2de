//! Operations that no caller waits for: undoing claims, and checking whether a lease is over.

use std::collections::VecDeque;
use std::sync::Arc;

use super::charge::Charge;
use crate::lock::{Instant, Key};

/// An operation that no caller waits for.
#[derive(Clone, Debug)]
pub(super) enum Chore {
    /// Undo a claim that may have been granted.
    Abandon(Abandon),
    /// Check whether the lease is over, or was renewed through another proxy.
    Look { nonce: u64 },
}

/// A claim that is to be undone, because it may have been granted and nobody knows of the grant.
#[derive(Clone, Debug)]
pub(super) struct Abandon {
    pub keys: Arc<[Key]>,
    pub attempt: u64,
    /// After this moment a grant has ended by itself, unless the server's clock was set back.
    pub until: Instant,
    /// What the claim occupies of the limits of its client until it is undone.
    pub _charge: Charge,
}

/// The chores that wait, and how many are in flight.
#[derive(Debug, Default)]
pub(super) struct Chores {
    pub waiting: VecDeque<Chore>,
    pub flying: usize,
    /// The length of the last pause; `None` while the store answers.
    pub pause_ms: Option<u32>,
    /// No chore begins before this moment.
    pub pause_until: Option<Instant>,
}

impl Chores {
    /// Whether chores wait that may begin as soon as others end.
    pub fn are_due(&self) -> bool {
        !self.waiting.is_empty() && self.pause_until.is_none()
    }
}

//! What an acquire occupies of the limits of its client.

use std::any::Any;
use std::sync::Arc;

/// What an acquire occupies of the limits of its client. The table does not look inside: it keeps each part as long as
/// the part counts, and then drops it.
#[derive(Clone, Debug, Default)]
pub struct Charge {
    /// Counts until the waiter has its answer. If nobody is left to receive the answer, it counts until the claim is undone.
    pub request: Part,
    /// Counts as long, and until the lease has ended.
    pub lease: Part,
}

/// A part of a [`Charge`]; `None` if nothing is occupied.
pub type Part = Option<Arc<dyn Any + Send + Sync>>;

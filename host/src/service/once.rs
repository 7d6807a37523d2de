//! The primitive `once`: work that is done once, with an outcome that later callers get.

use super::acquire::acquire;
use super::context::Service;
use super::errors::{AcquireError, LeaseError};
use super::lease::{Lease, new_release};
use super::request::Request;
use crate::lock::record::{Left, Origin, StoredValue};
use crate::lock::{Call, LeaseRef};

/// The result of [`Service::begin`].
#[derive(Clone, Debug)]
pub enum Begun {
    /// The work has not been done. The holder of this lease does it, and reports the outcome with
    /// [`Service::finish`].
    First(Box<Lease>),
    /// The work has been done, with this outcome.
    Done(StoredValue),
}

impl Service {
    /// Begins a `once`. The first caller gets a lease; callers that come meanwhile wait for it, as long as
    /// their plan allows, and get the outcome. If a lease ends without an outcome, the next waiter becomes the
    /// first.
    ///
    /// # Errors
    /// [`AcquireError`]: why there is neither a lease nor an outcome.
    pub async fn begin(&self, request: Request) -> Result<Begun, AcquireError> {
        match acquire(&self.shared, &request, Call::Once).await {
            Ok((lease, _)) => Ok(Begun::First(Box::new(lease))),
            Err(AcquireError::Done(kept)) => Ok(Begun::Done(kept)),
            Err(error) => Err(error),
        }
    }

    /// Ends the lease that [`Service::begin`] returned, and stores `outcome`, which is JSON text, for as long
    /// as the policy said. The call may be repeated.
    ///
    /// # Errors
    /// [`LeaseError`]: the lease is lost, or the store did not answer.
    pub async fn finish(&self, lease: LeaseRef, outcome: Box<str>) -> Result<(), LeaseError> {
        let outcome = Left { value: outcome, origin: Origin::Api };
        self.released(self.begin_release(new_release(lease, Some(outcome)))).await
    }
}

//! `response`: makes the answer to a guarded request that does not get its lock.

use crate::bindings::response::exports::lockkeeper::policy::response as interface;
use crate::{Policy, Request};
pub use interface::{Answer, Contention};

/// Answers 423 Locked.
pub fn response(contention: &Contention) -> Answer {
    Answer {
        status: 423,
        retry_after: contention.retry_after,
        headers: Vec::new(),
        detail: "another request holds the lock".to_owned(),
    }
}

impl<P: Policy> interface::Guest for P {
    fn contended(settings: Vec<u8>, request: Request, contention: Contention) -> Answer {
        P::response(&super::settings::decode::<P::Settings>(&settings), &request, &contention)
    }
}

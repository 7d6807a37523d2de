//! `naming`: turns a request into a plan. Every policy exports this hook.

use crate::bindings::naming::exports::lockkeeper::policy::naming;
use crate::{Policy, Request};
pub use naming::{LockPlan as Plan, Refusal};

impl Refusal {
    /// A refusal with a reason, which is shown to the client.
    pub fn new(reason: impl Into<String>) -> Refusal {
        Refusal { reason: reason.into() }
    }
}

impl<P: Policy> naming::Guest for P {
    fn plan(settings: Vec<u8>, request: Request) -> Result<Plan, Refusal> {
        P::plan(&super::settings::decode::<P::Settings>(&settings), &request)
    }
}

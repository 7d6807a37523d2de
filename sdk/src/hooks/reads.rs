//! `reads`: lists what `plan` reads of a request.

use crate::Policy;
use crate::bindings::reads::exports::lockkeeper::policy::reads;
pub use reads::Part;

impl Part {
    /// All parts. The proxy then asks for the plan of each request.
    pub fn all() -> Vec<Part> {
        vec![Part::Name, Part::Owner, Part::Mode, Part::Ttl, Part::Wait, Part::Labels, Part::Http, Part::Seed]
    }
}

impl<P: Policy> reads::Guest for P {
    fn plan_reads(settings: Vec<u8>) -> Vec<Part> {
        P::plan_reads(&super::settings::decode::<P::Settings>(&settings))
    }
}

//! A candidate with a mistake: it panics for printers whose name is not a number.

use lockkeeper_sdk::{Plan, Policy, Refusal, Request};
use serde::{Deserialize, Serialize};

/// The policy.
pub struct Brittle;

/// None.
#[derive(Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {}

impl Policy for Brittle {
    type Settings = Settings;

    /// Printers with a low number are fast, so their leases are short.
    fn plan(_: &Settings, request: &Request) -> Result<Plan, Refusal> {
        let plan = Plan::of(request);
        Ok(match request.name.strip_prefix("printers/") {
            Some(number) if number.parse::<u32>().expect("printers have numbers") < 10 => {
                Plan { ttl: 5_000, ..plan }
            }
            _ => plan,
        })
    }
}

lockkeeper_sdk::export!(Brittle);

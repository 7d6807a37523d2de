//! The default policy with other names for its keys: what a careless deploy does to running locks.

use lockkeeper_sdk::{Plan, Policy, Refusal, Request};
use serde::{Deserialize, Serialize};

pub struct Renamed;

/// Takes any settings, so that it can be live under some that others refuse.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    configure: String,
}

impl Policy for Renamed {
    type Settings = Settings;

    /// `x/` and the resource; many resources share a key where the label `pool` names one.
    fn plan(_: &Settings, request: &Request) -> Result<Plan, Refusal> {
        let name = request.label("pool").unwrap_or(&request.name);
        Plan::of(request).with_key(format!("x/{name}")).with_permits(10)
    }
}

lockkeeper_sdk::export!(Renamed);

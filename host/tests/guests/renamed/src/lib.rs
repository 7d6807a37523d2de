//! The default policy with other names for its keys: what a careless deploy does to running locks.

use lockkeeper_sdk::{Delegate, Plan, Policy, Refusal, Request};
use serde::{Deserialize, Serialize};

pub struct Renamed;

/// Takes any settings, so that it can be live under some that others refuse.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    configure: String,
    delegate: String,
}

impl Policy for Renamed {
    type Settings = Settings;

    /// `x/` and the resource; many resources share a key where the label `pool` names one.
    fn plan(settings: &Settings, request: &Request) -> Result<Plan, Refusal> {
        let name = request.label("pool").unwrap_or(&request.name);
        let plan = Plan::of(request).with_key(format!("x/{name}"));
        let plan = match settings.delegate.as_str() {
            "contended" => plan.delegated(Delegate::Contended),
            "always" => plan.delegated(Delegate::Always),
            _ => plan,
        };
        plan.with_permits(10)
    }
}

lockkeeper_sdk::export!(Renamed);

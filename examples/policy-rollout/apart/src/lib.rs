//! A candidate with a mistake: each tenant has keys of its own, so two tenants no longer exclude each other.

use lockkeeper_sdk::{Plan, Policy, Refusal, Request};
use serde::{Deserialize, Serialize};

/// The policy.
pub struct Apart;

/// None.
#[derive(Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {}

impl Policy for Apart {
    type Settings = Settings;

    fn plan(_: &Settings, request: &Request) -> Result<Plan, Refusal> {
        let tenant = request.label("group").unwrap_or("nobody");
        Ok(Plan::of(request).with_key(format!("{tenant}/{}", request.name)).with_group(tenant, 1))
    }
}

lockkeeper_sdk::export!(Apart);

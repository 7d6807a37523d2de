//! Locks every item that a guarded request names in its query: `?items=a,b`.

use lockkeeper_sdk::{Plan, Policy, Primitive, Refusal, Request};
use serde::{Deserialize, Serialize};

pub struct Basket;

#[derive(Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Items are locked as rows, not as leases.
    rows: bool,
}

impl Policy for Basket {
    type Settings = Settings;

    fn plan(settings: &Settings, request: &Request) -> Result<Plan, Refusal> {
        let items = request.query("items").ok_or_else(|| Refusal::new("the query names no `items`"))?;
        let plan = Plan::of(request).with_keys(items.split(',').map(|item| format!("stock/{item}")));
        Ok(if settings.rows { plan.with_primitive(Primitive::Row) } else { plan })
    }
}

lockkeeper_sdk::export!(Basket);

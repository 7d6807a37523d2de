//! Locks every item that a guarded request names in its query: `?items=a,b`.

use lockkeeper_sdk::{Plan, Policy, Refusal, Request};

pub struct Basket;

impl Policy for Basket {
    type Settings = ();

    fn plan(_: &(), request: &Request) -> Result<Plan, Refusal> {
        let items = request.query("items").ok_or_else(|| Refusal::new("the query names no `items`"))?;
        Ok(Plan::of(request).with_keys(items.split(',').map(|item| format!("stock/{item}"))))
    }
}

lockkeeper_sdk::export!(Basket);

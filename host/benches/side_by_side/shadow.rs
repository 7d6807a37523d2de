//! What a shadow costs.

use anyhow::{Context, Result, bail};
use serde_json::Value;

use lockkeeper::policy::builtin;

use crate::http::Client;
use crate::recording::beside;
use crate::report::Report;
use crate::rounds::Target;
use crate::world::World;

const COST: Target =
    Target { text: "≥ 0.95 times without", times: 0.95, ours: "with a shadow", theirs: "without" };

/// The cycles of 64 clients with their own keys, with a shadow for a tenth of the keys and without.
pub async fn measure(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let proxy = world.another_proxy("shadowed", "").await?;
    let component = builtin("fair-groups").context("there is a fair policy")?;
    let path = "/v1/policies/default/shadow";
    let status = proxy.put(&format!("{path}?share=10&for_ms=3600000"), component).await?;
    if status != 200 {
        bail!("the shadow was refused: {status}");
    }
    let rates = beside(world, &proxy, "bench/shadowed", quick).await?;
    let mut row = rates.row("64 clients, own keys: with a shadow for 10 % of the keys", &COST);
    let seen: Value = serde_json::from_str(Client::connect(proxy.admin()).await?.get(path).await?)?;
    let calls: u64 =
        seen["hooks"].as_array().into_iter().flatten().filter_map(|hook| hook["calls"].as_u64()).sum();
    if calls == 0 {
        bail!("the shadow has seen no call: {seen}");
    }
    row.details["calls_of_the_shadow"] = calls.into();
    row.details["calls_dropped"] = seen["dropped"].clone();
    report.add(row);
    Ok(())
}

//! A single client on an idle machine: the time that the proxy adds to one acquire.

use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::json;

use crate::direct::{self, Direct};
use crate::http::{self, Client};
use crate::report::{Report, Row};
use crate::stats::{median, micros, percentile};
use crate::world::World;

/// Measures an acquire, through the proxy and directly.
pub async fn measure(world: &World, quick: bool, report: &mut Report) -> Result<()> {
    let times = if quick { 200 } else { 3000 };
    let key = "bench/single".to_owned();
    direct::prepare(world.url(), std::slice::from_ref(&key)).await?;
    let mut direct = Direct::connect(world.url(), 1).await?;
    let mut proxy = Client::connect(world.api()).await?;
    let request = http::acquire(&key, "single", 0);

    let (mut by_sql, mut by_proxy) = (Vec::new(), Vec::new());
    // The sides alternate at every acquire. The first ones are a warm-up.
    for turn in 0..times + times / 10 {
        let began = Instant::now();
        let token = direct.try_acquire(&key).await?.context("the key is free")?;
        let direct_took = began.elapsed();
        direct.release(&key, token).await?;

        let began = Instant::now();
        let lease = proxy.acquire(&request).await?;
        let proxy_took = began.elapsed();
        proxy.release(&lease).await?;
        if turn >= times / 10 {
            by_sql.push(direct_took);
            by_proxy.push(proxy_took);
        }
    }
    let (sql_us, proxy_us) = (micros(median(&by_sql)), micros(median(&by_proxy)));
    let ratio = proxy_us / sql_us;
    report.add(Row {
        name: "1 client: median acquire",
        target: "≤ 1.5 times direct",
        figure: format!("{ratio:.2} times"),
        note: format!("proxy {proxy_us:.0} µs, direct {sql_us:.0} µs"),
        met: Some(ratio <= 1.5),
        details: json!({
            "ratio": ratio,
            "proxy_median_us": proxy_us,
            "direct_median_us": sql_us,
            "proxy_p99_us": micros(percentile(&by_proxy, 0.99)),
            "direct_p99_us": micros(percentile(&by_sql, 0.99)),
        }),
    });
    Ok(())
}

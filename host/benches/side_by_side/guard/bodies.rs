//! Large bodies through a guarded route in both directions, and the memory that they take in the proxy.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Guard, locked};
use crate::http::Client;
use crate::report::Row;
use crate::rounds::CLIENTS;
use crate::world::Proxy;

const MIB: u64 = 1 << 20;
const MOST_MIB: f64 = 16.0;

/// The number of small requests that bring the proxy's memory to its level.
const WARM_UP: u64 = 2000;

/// The interval at which the memory is sampled.
const SAMPLE: Duration = Duration::from_millis(5);

/// Measures the memory.
pub async fn measure(guard: &Guard, quick: bool) -> Result<Row> {
    let bytes = if quick { 128 * MIB } else { 2048 * MIB };
    let mut client = Client::connect(guard.address).await?;
    for turn in 0..WARM_UP {
        // Use keys that no earlier proxy had: that proxy was killed, and its locks are held for a while.
        client.exchange(&locked(CLIENTS + turn % CLIENTS)).await?;
    }
    let level = guard.proxy.memory()?;

    let began = Instant::now();
    let up = highest_during(&guard.proxy, async {
        let answer = client.upload("/locked/upload", bytes).await?;
        let told = format!("received {bytes} ");
        ensure!(answer.starts_with(&told), "of {bytes} bytes the upstream {answer}");
        Ok(())
    });
    let (up, up_took) = (up.await?, began.elapsed());

    let began = Instant::now();
    let down = highest_during(&guard.proxy, async {
        let came = client.download(&format!("/locked/download?bytes={bytes}")).await?;
        ensure!(came == bytes, "of {bytes} bytes {came} came");
        Ok(())
    });
    let (down, down_took) = (down.await?, began.elapsed());

    let [up_mib, down_mib, level_mib] =
        [up.saturating_sub(level), down.saturating_sub(level), level].map(|bytes| bytes as f64 / MIB as f64);
    let most = up_mib.max(down_mib);
    let rate = |took: Duration| bytes as f64 / MIB as f64 / took.as_secs_f64();
    let (up_rate, down_rate) = (rate(up_took), rate(down_took));
    Ok(Row {
        name: "guard: 2 GiB body each way",
        target: "resident memory + 16 MiB at most",
        figure: format!("{most:.1} MiB"),
        note: format!(
            "{} MiB; up {up_mib:.1} MiB at {up_rate:.0} MiB/s, down {down_mib:.1} MiB at {down_rate:.0} MiB/s",
            bytes / MIB
        ),
        met: Some(most <= MOST_MIB),
        details: json!({
            "body_bytes": bytes,
            "level_mib": level_mib,
            "upload_growth_mib": up_mib,
            "download_growth_mib": down_mib,
            "upload_mib_per_s": up_rate,
            "download_mib_per_s": down_rate,
        }),
    })
}

/// The highest resident memory of the proxy, in bytes, that was sampled during `work`.
async fn highest_during(proxy: &Proxy, work: impl Future<Output = Result<()>>) -> Result<u64> {
    let mut work = std::pin::pin!(work);
    let mut tick = tokio::time::interval(SAMPLE);
    let mut highest = 0;
    loop {
        tokio::select! {
            done = &mut work => {
                done?;
                return Ok(highest.max(proxy.memory()?));
            }
            _ = tick.tick() => highest = highest.max(proxy.memory()?),
        }
    }
}

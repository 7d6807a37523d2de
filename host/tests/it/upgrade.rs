//! An earlier version of the program and this version on one store. `cargo xtask upgrade` builds the earlier version
//! and runs these tests. Without it the tests fail.

use std::net::SocketAddr;
use std::path::PathBuf;

use rustix::process::Signal;
use serde_json::json;

use crate::harness::{Kind, Proxy, Settings, World, database, eventually, fresh, program};

const FLEET: usize = 3;

#[test]
#[ignore = "needs an earlier build: cargo xtask upgrade"]
fn a_fleet_is_upgraded_under_load_on_mysql() {
    crate::harness::run(a_fleet_is_upgraded_under_load(Kind::Mysql));
}

#[test]
#[ignore = "needs an earlier build: cargo xtask upgrade"]
fn a_fleet_is_upgraded_under_load_on_mariadb() {
    crate::harness::run(a_fleet_is_upgraded_under_load(Kind::Mariadb));
}

fn earlier() -> PathBuf {
    std::env::var_os("LOCKKEEPER_EARLIER")
        .expect("`cargo xtask upgrade` says where the earlier build is")
        .into()
}

/// This version does not grant beside the earlier one, and says what to do. Leases survive the upgrade, no lock has
/// two holders, and tokens increase.
async fn a_fleet_is_upgraded_under_load(kind: Kind) {
    let url = database(kind).await;
    let settings = || Settings {
        url: url.clone(),
        sections: "[fleet]\nbeat_ms = 250\n".to_owned(),
        ..Settings::default()
    };
    let mut old = Vec::new();
    for _ in 0..FLEET {
        let proxy = Proxy::of(program(&earlier()), settings()).await;
        proxy.until_ready().await;
        old.push(proxy);
    }
    let addresses: Vec<SocketAddr> = old.iter().map(Proxy::api_address).collect();
    let load = World::start(&addresses);
    load.another_round().await;
    let kept = old[0].client().lease(&fresh("kept"), 120_000).await;

    let mut new = Vec::new();
    for _ in 0..FLEET {
        new.push(Proxy::with(settings()).await);
    }
    eventually("this version says that it waits for the earlier one", async || {
        let told = new[0].admin().get("/ready").await;
        told.status == 503 && told.text.contains("an earlier version")
    })
    .await;
    let refused = new[0].client().acquire(json!({"resource": fresh("early")})).await;
    assert_eq!(refused.status, 503, "{}", refused.text);
    load.another_round().await;

    for (n, mut proxy) in old.into_iter().enumerate() {
        load.set_address(n, new[n].api_address());
        proxy.signal(Signal::TERM);
        assert_eq!(proxy.ended().await, Some(0), "{}", proxy.log());
    }
    for proxy in &new {
        proxy.until_ready().await;
    }
    load.another_round().await;
    let renewed = new[1].client().renew(&kept).await;
    assert_eq!(renewed.status, 200, "{}", renewed.text);

    // A proxy of the earlier version is started by mistake beside the upgraded fleet.
    let late = Proxy::of(program(&earlier()), settings()).await;
    load.another_round().await;
    let refused = late.client().acquire(json!({"resource": fresh("late")})).await;
    assert_eq!(refused.status, 503, "{}", refused.text);
    assert_eq!(new[2].client().release(&kept).await.status, 200);
    load.finish().await;
}

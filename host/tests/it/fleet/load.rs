//! Promises 1 and 2 for a whole fleet while its policy changes and its proxies die: over all grants, no resource has
//! two holders, whatever its keys are called, and the tokens of each key increase.

use std::net::SocketAddr;
use std::time::Instant;

use super::*;
use crate::harness::{Habits, Noted, World};

const RESOURCES: usize = 3;
/// The longest heartbeat interval. A silent proxy is a member for fifteen of them.
const SLOW_BEAT_MS: u64 = 4_000;

on_both! {
    /// Several changes, pushed to the proxies in turn.
    async fn changes_make_no_second_holder(kind: Kind) {
        let fleet = Fleet::start(kind, 3, default_policy()).await;
        let load = Load::start(&fleet);
        for n in 0..6_u8 {
            load.0.another_round().await;
            pushed(&fleet.proxies[usize::from(n) % 3], &version(n)).await;
        }
        load.0.another_round().await;
        load.check().await;
    }

    /// A proxy is killed in the middle of a change.
    async fn a_proxy_killed_during_a_change_makes_no_second_holder(kind: Kind) {
        let mut fleet = Fleet::start(kind, 3, default_policy()).await;
        let load = Load::start(&fleet);
        load.0.another_round().await;
        let push = pushing(&fleet.proxies[0], &RENAMED);
        eventually("the change is under way", async || phase(&fleet.proxies[0]).await == "both").await;
        fleet.proxies[1].kill();
        assert_eq!(push.await.unwrap().expect("an answer").status, 200);
        load.0.another_round().await;
        // Start a proxy with the older file during the next change.
        let push = pushing(&fleet.proxies[2], &version(1));
        let late = fleet.add(default_policy(), "").await.api_address();
        load.0.set_address(1, late);
        assert_eq!(push.await.unwrap().expect("an answer").status, 200);
        load.0.another_round().await;
        load.check().await;
    }

    /// A proxy joins in the middle of a change, grants during it, and continues with the others.
    async fn a_proxy_that_joins_during_a_change_makes_no_second_holder(kind: Kind) {
        let mut fleet = Fleet::start(kind, 2, default_policy()).await;
        // Its silence delays the change for long enough.
        fleet.add_with_beat(default_policy(), "", SLOW_BEAT_MS).await;
        fleet.until_members(3).await;
        let load = Load::start(&fleet);
        load.0.another_round().await;
        load.0.set_address(2, fleet.proxies[0].api_address());
        stop(&fleet.proxies[2]);
        let push = pushing(&fleet.proxies[0], &RENAMED);
        for at in [0, 1] {
            eventually("the change is under way", async || phase(&fleet.proxies[at]).await == "both").await;
        }
        let late = fleet.add(default_policy(), "").await;
        assert_eq!(phase(late).await, "both");
        load.0.set_address(2, late.api_address());
        load.0.another_round().await;
        assert!(late.metric("lockkeeper_grants_total", &[]).await > 0.0, "the new one grants");
        assert_eq!(named(&late.client(), "r").await, json!(["r", "x/r"]));
        assert_eq!(phase(late).await, "both");
        assert!(!push.is_finished(), "all of this was in the middle");
        go_on(&fleet.proxies[2]);
        let live = push.await.unwrap().expect("an answer");
        assert_eq!(live.status, 200, "{}", live.text);
        fleet.until_settled(&[0, 1, 2, 3], &live.json["digest"]).await;
        load.0.another_round().await;
        load.check().await;
    }

    /// A proxy is paused before a change, with waiters and claims, and continues after the fleet has changed. It
    /// grants nothing based on old knowledge.
    async fn a_paused_proxy_grants_nothing_under_an_outdated_policy(kind: Kind) {
        let fleet = Fleet::start(kind, 3, default_policy()).await;
        let load = Load::start(&fleet);
        load.0.another_round().await;
        stop(&fleet.proxies[1]);
        // The push is delayed until the paused proxy counts as gone.
        pushed(&fleet.proxies[0], &RENAMED).await;
        // When the proxy continues, others hold the resources under the new keys alone.
        let holders = load.hold_all(&fleet.proxies[2].client()).await;
        go_on(&fleet.proxies[1]);
        pause_ms(6 * BEAT_MS).await;
        load.release_all(&fleet.proxies[2].client(), holders).await;
        fleet.until_members(3).await;
        load.0.another_round().await;
        // The policy changes and changes back while the proxy is away.
        stop(&fleet.proxies[1]);
        pushed(&fleet.proxies[0], &version(1)).await;
        let holders = load.hold_all(&fleet.proxies[2].client()).await;
        pushed(&fleet.proxies[0], &RENAMED).await;
        go_on(&fleet.proxies[1]);
        pause_ms(6 * BEAT_MS).await;
        load.release_all(&fleet.proxies[2].client(), holders).await;
        fleet.until_members(3).await;
        load.0.another_round().await;
        load.check().await;
    }
}

/// Two policies that name keys differently, in turn.
fn version(n: u8) -> Vec<u8> {
    if n.is_multiple_of(2) { variant(&RENAMED, n) } else { variant(default_policy(), n) }
}

struct Load(World);

impl Load {
    fn start(fleet: &Fleet) -> Load {
        let proxies: Vec<SocketAddr> = fleet.proxies.iter().map(Proxy::api_address).collect();
        let habits = Habits {
            clients: 12,
            resources: (0..RESOURCES).map(resource).collect(),
            ttl_ms: 300..=1_500,
            // Some waits are longer than the pause of a proxy.
            wait_ms: 0..=8_000,
            work_ms: 0..=60,
            // A paused proxy answers when it continues, later than anything else here.
            patience: [Duration::from_secs(2), Duration::from_secs(14)],
            ..Habits::default()
        };
        Load(World::with(&proxies, habits))
    }

    /// Acquires all resources at once and keeps them for long. Until then nobody else is granted one.
    async fn hold_all(&self, client: &Client) -> Vec<(Noted, Value)> {
        let mut leases = Vec::new();
        for n in 0..RESOURCES {
            let resource = resource(n);
            let body = json!({"resource": resource, "owner": "keeper", "ttl_ms": 60_000, "wait_ms": 30_000});
            let asked = Instant::now();
            let granted = client.acquire(body).await;
            assert_eq!(granted.status, 200, "{}", granted.text);
            let noted = self.0.ledger().granted(&resource, "keeper", asked, client.address(), &granted);
            leases.push((noted, granted.json));
        }
        leases
    }

    async fn release_all(&self, client: &Client, leases: Vec<(Noted, Value)>) {
        for (noted, lease) in leases {
            self.0.ledger().ended(&noted);
            assert_eq!(client.release(&lease).await.status, 200);
        }
    }

    /// Checks all grants since the start.
    async fn check(self) {
        let keys = self.0.finish().await;
        assert!(keys.len() > RESOURCES, "the policy has renamed nothing: {keys:?}");
    }
}

fn resource(n: usize) -> String {
    format!("orders/{n}")
}

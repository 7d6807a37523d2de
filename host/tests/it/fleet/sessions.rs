//! Locks on sessions of their proxy, in a fleet.

use super::*;

/// Resources `row/*` are locked by row locks, and all others by named locks.
const BOTH: &str = "[policies.default.settings]\nprimitive = \"advisory\"\n[policies.row]\npath = \"builtin:default\"\n\
    settings = { primitive = \"row\" }\n[[routes]]\nresource = \"row/*\"\npolicy = \"row\"";

on_both! {
    /// Other proxies may have used other keys since this proxy counted as gone. So its earlier leases are not
    /// renewed, even if its session still has the locks.
    async fn a_proxy_that_counted_as_gone_has_lost_its_session_locks(kind: Kind) {
        let mut fleet = Fleet { url: database(kind).await, proxies: Vec::new(), dirs: Vec::new() };
        for _ in 0..2 {
            fleet.add(default_policy(), BOTH).await;
        }
        fleet.until_members(2).await;
        let [one, other] = &fleet.proxies[..] else { unreachable!("there are two") };
        let client = one.client();
        let mut leases = Vec::new();
        for (resource, primitive) in [("r", "advisory"), ("row/r", "row")] {
            let (lines, _) = client.hold(&json!({"resource": format!("{resource}/held"), "ttl_ms": 60_000})).await;
            leases.push((client.lease(resource, 60_000).await, lines));
            assert_eq!(leases[leases.len() - 1].0["primitive"], primitive);
        }
        stop(one);
        until_members(other, 1).await;
        go_on(one);
        fleet.until_members(2).await;
        for (lease, lines) in &mut leases {
            let renewed = client.renew(lease).await;
            assert_eq!((renewed.status, renewed.slug()), (410, "lost"), "{}", renewed.text);
            while lines.json().await.expect("the holder is told")["event"] != "lost" {}
            let body = json!({"resource": lease["resource"], "wait_ms": 10_000});
            let next = other.client().acquire(body).await;
            assert_eq!(next.status, 200, "{}", next.text);
        }
    }
}

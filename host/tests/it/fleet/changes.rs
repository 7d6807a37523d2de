//! Policies that are replaced on all proxies while something goes wrong.

use mysql_async::prelude::Queryable;

use super::*;

/// Larger than every other component that the tests push.
const LARGE: usize = 300_000;

/// The same policy, larger than a proxy with [`SMALL`] accepts.
fn large(component: &[u8]) -> Vec<u8> {
    let mut name_and_content = vec![1, b'l'];
    name_and_content.resize(LARGE, 0);
    let mut section = vec![0];
    let mut length = name_and_content.len();
    while length >= 0x80 {
        section.push((length & 0x7f) as u8 | 0x80);
        length >>= 7;
    }
    section.push(length as u8);
    [component, &section, &name_and_content].concat()
}

on_both! {
    /// A push to one proxy is live on all proxies when it is answered.
    async fn a_push_goes_live_on_all_proxies(kind: Kind) {
        let fleet = Fleet::start(kind, 3, default_policy()).await;
        let old = fleet.proxies[2].client().lease("held", 30_000).await;
        let new = pushed(&fleet.proxies[0], &RENAMED).await;
        for proxy in &fleet.proxies {
            assert_eq!(named(&proxy.client(), "r").await, json!(["x/r"]));
            assert_eq!(status(proxy, "default").await["digest"], new["digest"]);
            let held = proxy.client().acquire(json!({"resource": "held"})).await;
            assert_eq!((held.status, held.slug()), (409, "contended"), "{}", held.text);
        }
        fleet.until_settled(&[0, 1, 2], &new["digest"]).await;
        assert_eq!(fleet.proxies[1].client().release(&old).await.status, 200);
        // Any proxy can restore the previous policy, for all.
        let back = fleet.proxies[1].admin().send("POST", "/v1/policies/default/rollback", "").await;
        assert_eq!((back.status, back.json["outcome"].as_str()), (200, Some("rolled_back")), "{}", back.text);
        for proxy in &fleet.proxies {
            assert_eq!(named(&proxy.client(), "q").await, json!(["q"]));
        }
        assert_eq!(fleet.proxies[2].metric("lockkeeper_fleet_changes_total", &["live"]).await, 2.0);
    }

    /// A file that is replaced on one proxy goes live on all proxies.
    async fn a_changed_file_goes_live_on_all_proxies(kind: Kind) {
        let fleet = Fleet::start(kind, 2, default_policy()).await;
        std::fs::write(fleet.dirs[1].path().join("policy.wasm"), &*RENAMED).unwrap();
        eventually("the other proxy goes by it", async || {
            named(&fleet.proxies[0].client(), "r").await == json!(["x/r"])
        })
        .await;
    }

    /// Other proxies cannot see a lease on a session. While such a lease without the new keys lasts, no proxy uses
    /// the new keys alone.
    async fn a_change_waits_for_session_leases(kind: Kind) {
        let mut fleet = Fleet { url: database(kind).await, proxies: Vec::new(), dirs: Vec::new() };
        for _ in 0..2 {
            fleet.add(default_policy(), "[policies.default.settings]\nprimitive = \"advisory\"").await;
        }
        fleet.until_members(2).await;
        let (one, other) = (fleet.proxies[0].client(), fleet.proxies[1].client());
        let (lines, first) = other.hold(&json!({"resource": "r", "ttl_ms": 2_000})).await;
        assert_eq!(first["primitive"], "advisory");
        let push = pushing(&fleet.proxies[0], &RENAMED);
        eventually("both name keys", async || phase(&fleet.proxies[1]).await == "both").await;
        pause_ms(6 * BEAT_MS).await;
        assert!(!push.is_finished());
        for client in [&one, &other] {
            let held = client.acquire(json!({"resource": "r"})).await;
            assert_eq!((held.status, held.slug()), (409, "contended"), "{}", held.text);
        }
        let free = one.lease("free", 1_000).await;
        assert_eq!(keys(&free), ["free", "x/free"]);
        drop(lines);
        let answer = push.await.unwrap().expect("an answer");
        assert_eq!(answer.status, 200, "{}", answer.text);
        // Proxies that cannot see that the lease is over wait a moment longer.
        for client in [&one, &other] {
            eventually("the new key stands alone", async || named(client, "r").await == json!(["x/r"])).await;
        }
    }

    /// While a member is out of contact, claims take the keys of both policies. A second change is refused, and the
    /// same change joins the first one. When the member counts as gone, the fleet continues without it.
    async fn a_silent_member_delays_a_change_until_the_member_counts_as_gone(kind: Kind) {
        // A silent member counts as gone after 15 heartbeats. The proxies have to check both pushed components before that.
        let fleet = Fleet::start_with_beat(kind, 3, default_policy(), 1_000).await;
        stop(&fleet.proxies[2]);
        let push = pushing(&fleet.proxies[0], &RENAMED);
        eventually("the change is under way", async || phase(&fleet.proxies[1]).await == "both").await;
        eventually("claims take both keys", async || {
            named(&fleet.proxies[1].client(), "r").await == json!(["r", "x/r"])
        })
        .await;
        assert_eq!(named(&fleet.proxies[0].client(), "r").await, json!(["r", "x/r"]));
        let second = pushing(&fleet.proxies[1], &variant(default_policy(), 9)).await.unwrap().unwrap();
        assert_eq!((second.status, second.slug()), (409, "conflict"), "{}", second.text);
        let same = pushing(&fleet.proxies[1], &RENAMED);
        for answer in [push, same] {
            let answer = answer.await.unwrap().expect("an answer");
            assert_eq!(answer.status, 200, "{}", answer.text);
        }
        for at in [0, 1] {
            // Others wait for an earlier lease a little longer than it lasts.
            eventually("claims take the new key alone", async || {
                named(&fleet.proxies[at].client(), "r").await == json!(["x/r"])
            })
            .await;
        }
        go_on(&fleet.proxies[2]);
        fleet.until_members(3).await;
        eventually("it follows", async || {
            let answer = fleet.proxies[2].client().acquire(json!({"resource": "r"})).await;
            answer.status == 200 && {
                fleet.proxies[2].client().release(&answer.json).await;
                keys(&answer.json) == ["x/r"]
            }
        })
        .await;
    }

    /// If the proxy that received the push dies, the others complete the change.
    async fn a_change_completes_although_the_pushing_proxy_dies(kind: Kind) {
        let mut fleet = Fleet::start(kind, 3, default_policy()).await;
        stop(&fleet.proxies[2]);
        let push = pushing(&fleet.proxies[0], &RENAMED);
        eventually("the change is under way", async || phase(&fleet.proxies[1]).await == "both").await;
        fleet.proxies[0].kill();
        assert!(push.await.unwrap().is_none());
        go_on(&fleet.proxies[2]);
        for at in [1, 2] {
            eventually("it goes by the new policy", async || {
                let answer = fleet.proxies[at].client().acquire(json!({"resource": "r"})).await;
                let _ = fleet.proxies[at].client().release(&answer.json).await;
                keys(&answer.json) == ["x/r"]
            })
            .await;
        }
        until_members(&fleet.proxies[1], 2).await;
    }

    /// A member that refuses the component cancels the change for all.
    async fn a_member_that_refuses_a_component_cancels_the_change(kind: Kind) {
        let mut fleet = Fleet::start(kind, 2, default_policy()).await;
        let bound = format!("[engine]\nmax_component_bytes = {LARGE}");
        let small = fleet.add(default_policy(), &bound).await;
        let id = small.admin().get("/v1/fleet").await.json["id"].as_str().unwrap().to_owned();
        fleet.until_members(3).await;
        let refused = pushing(&fleet.proxies[0], &large(&RENAMED)).await.unwrap().unwrap();
        assert_eq!((refused.status, refused.slug()), (422, "refused"), "{}", refused.text);
        assert!(refused.text.contains(&id) && refused.text.contains("max_component_bytes"), "{}", refused.text);
        for proxy in &fleet.proxies {
            eventually("it is as before", async || phase(proxy).await == "settled").await;
            eventually("claims take the old key alone", async || {
                named(&proxy.client(), "r").await == json!(["r"])
            })
            .await;
            eventually("it says who refused", async || {
                let shown = status(proxy, "default").await;
                shown["fleet"]["note"].as_str().is_some_and(|why| why.contains(&id))
            })
            .await;
        }
        // A component that all members accept still goes live.
        pushed(&fleet.proxies[0], &RENAMED).await;
        assert_eq!(named(&fleet.proxies[2].client(), "r").await, json!(["x/r"]));
    }

    /// A proxy that joins while claims take the keys of both policies takes both as well.
    async fn a_proxy_that_joins_during_a_change_takes_the_keys_of_both_policies(kind: Kind) {
        // A silent member counts as gone after 15 heartbeats. The late proxy has to start before that.
        let mut fleet = Fleet::start_with_beat(kind, 2, default_policy(), 1_000).await;
        stop(&fleet.proxies[1]);
        let push = pushing(&fleet.proxies[0], &RENAMED);
        eventually("the change is under way", async || phase(&fleet.proxies[0]).await == "both").await;
        let late = fleet.add_with_beat(default_policy(), "", 1_000).await.client();
        assert_eq!(named(&late, "r").await, json!(["r", "x/r"]));
        go_on(&fleet.proxies[1]);
        assert_eq!(push.await.unwrap().expect("an answer").status, 200);
        for proxy in &fleet.proxies {
            eventually("it goes by the new policy", async || {
                let answer = proxy.client().acquire(json!({"resource": "r"})).await;
                let _ = proxy.client().release(&answer.json).await;
                keys(&answer.json) == ["x/r"]
            })
            .await;
        }
    }

    /// A claim that is at the store without an answer was planned by the old policy alone. The change waits for that
    /// claim.
    async fn a_change_waits_for_a_claim_in_flight(kind: Kind) {
        let fleet = Fleet::start(kind, 2, default_policy()).await;
        let (one, other) = (fleet.proxies[0].client(), fleet.proxies[1].client());
        assert_eq!(named(&other, "r").await, json!(["r"]));
        // The server delays the claim.
        let mut blocking = mysql_async::Conn::from_url(&fleet.url).await.unwrap();
        let lock = "BEGIN;SELECT k FROM lockkeeper_lease WHERE k='r' FOR UPDATE";
        blocking.query_drop(lock).await.unwrap();
        let claim = waiting(&other, json!({"resource": "r", "ttl_ms": 30_000, "wait_ms": 30_000}));
        other.until_queued("r", 1).await;
        let push = pushing(&fleet.proxies[0], &RENAMED);
        eventually("the change is under way", async || phase(&fleet.proxies[1]).await == "both").await;
        pause_ms(8 * BEAT_MS).await;
        assert!(!push.is_finished() && !claim.is_finished());
        assert_eq!(phase(&fleet.proxies[0]).await, "both");
        blocking.query_drop("ROLLBACK").await.unwrap();
        let lease = claim.await.unwrap();
        assert_eq!((lease.status, keys(&lease.json)), (200, vec!["r"]), "{}", lease.text);
        assert_eq!(push.await.unwrap().expect("an answer").status, 200);
        let held = one.acquire(json!({"resource": "r"})).await;
        assert_eq!((held.status, held.slug()), (409, "contended"), "{}", held.text);
        blocking.disconnect().await.unwrap();
    }

    /// A claim has locked its row, and its proxy is paused until the fleet has completed the change. The claim is not
    /// written. The proxy joins again at once, however long the claim could wait.
    async fn a_claim_of_a_paused_proxy_is_not_written_after_the_change(kind: Kind) {
        let fleet = Fleet::start(kind, 1, default_policy()).await;
        let one = fleet.proxies[0].client();
        assert_eq!(named(&one, "r").await, json!(["r"]));
        let patient = Settings { api: String::new(),
            url: fleet.url.clone(),
            store: "timeout_ms = 60000".to_owned(),
            sections: format!("[fleet]\nbeat_ms = {BEAT_MS}"),
        };
        let proxy = Proxy::with(patient).await;
        proxy.until_ready().await;
        let mut blocking = mysql_async::Conn::from_url(&fleet.url).await.unwrap();
        let lock = "BEGIN;SELECT k FROM lockkeeper_lease WHERE k='r' FOR UPDATE";
        blocking.query_drop(lock).await.unwrap();
        let claim = waiting(&proxy.client(), json!({"resource": "r", "ttl_ms": 30_000, "wait_ms": 60_000}));
        proxy.client().until_queued("r", 1).await;
        // Less than the claim waits for a row.
        pause_ms(100).await;
        stop(&proxy);
        blocking.query_drop("ROLLBACK").await.unwrap();
        pushed(&fleet.proxies[0], &RENAMED).await;
        let keeper = one.lease("r", 60_000).await;
        assert_eq!(keys(&keeper), ["x/r"]);
        go_on(&proxy);
        until_members(&proxy, 2).await;
        pause_ms(8 * BEAT_MS).await;
        assert!(!claim.is_finished(), "it is held");
        let held = one.get("/v1/locks?prefix=r").await;
        assert_eq!(held.json["locks"], json!([]), "{}", held.text);
        assert_eq!(one.release(&keeper).await.status, 200);
        assert_eq!(claim.await.unwrap().status, 200);
        blocking.disconnect().await.unwrap();
    }

    /// A request waits at a proxy that is paused. Meanwhile the key is freed and the fleet changes to other keys. The
    /// request is not granted the old key.
    async fn a_waiter_of_a_paused_proxy_takes_the_new_keys(kind: Kind) {
        waits_at_a_paused_proxy(kind, "lease", "").await;
    }

    /// The servers of a quorum do not know the fleet, and are not paused with it.
    async fn a_waiter_of_a_paused_proxy_takes_the_new_keys_of_a_quorum(kind: Kind) {
        let mut more = "[policies.default.settings]\nprimitive = \"quorum\"\n".to_owned();
        for name in ["a", "b", "c"] {
            more += &format!("[stores.{name}]\nurl = \"{}\"\n", database(kind).await);
        }
        waits_at_a_paused_proxy(kind, "quorum", &more).await;
    }
}

async fn waits_at_a_paused_proxy(kind: Kind, primitive: &str, more: &str) {
    let mut fleet = Fleet { url: database(kind).await, proxies: Vec::new(), dirs: Vec::new() };
    for _ in 0..2 {
        fleet.add(default_policy(), more).await;
    }
    fleet.until_members(2).await;
    let (one, paused) = (fleet.proxies[0].client(), fleet.proxies[1].client());
    let old = one.lease("r", 60_000).await;
    assert_eq!(old["primitive"], primitive);
    let waiter = waiting(&paused, json!({"resource": "r", "ttl_ms": 30_000, "wait_ms": 60_000}));
    paused.until_queued("r", 1).await;
    // By then its first claim was answered. If the proxy stopped earlier, the claim would have the row locked.
    pause_ms(300).await;
    stop(&fleet.proxies[1]);
    let released = one.release(&old).await;
    assert_eq!(released.status, 200, "{}", released.text);
    pushed(&fleet.proxies[0], &RENAMED).await;
    let keeper = one.lease("r", 60_000).await;
    assert_eq!(keys(&keeper), ["x/r"]);
    go_on(&fleet.proxies[1]);
    fleet.until_members(2).await;
    pause_ms(4 * BEAT_MS).await;
    assert!(!waiter.is_finished(), "it is held");
    assert_eq!(one.release(&keeper).await.status, 200);
    let next = waiter.await.unwrap();
    assert_eq!(next.status, 200, "{}", next.text);
    let at = keys(&next.json).iter().position(|key| *key == "x/r").expect("the new key");
    let token = next.json["tokens"][at].as_u64().or(next.json["token"].as_u64());
    assert!(token > keeper["token"].as_u64(), "{}", next.text);
}

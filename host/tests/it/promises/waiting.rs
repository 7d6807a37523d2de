//! What a waiter is told: why it waits, behind whom, and about how long.

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::{proxy_with, until_proxies_notify};
use crate::harness::{Client, Proxy, Response, Settings, database, eventually, fresh};

/// A client that waits for a minute, once it is in the queue. `more` is added to its request.
async fn waits(client: &Client, resource: &str, owner: &str, more: Value) -> JoinHandle<Response> {
    let mut body = json!({"resource": resource, "owner": owner, "ttl_ms": 60_000, "wait_ms": 60_000});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.acquire(body).await }
    });
    eventually("it waits", async || waiter(client, resource, owner).await != Value::Null).await;
    waiting
}

/// The waiter in the queue of the resource; `Null` if there is none.
async fn waiter(client: &Client, resource: &str, owner: &str) -> Value {
    let answer = client.get(&format!("/v1/locks/{}?owner={owner}", resource.replace('+', "%2B"))).await;
    answer.json["queue"][0].clone()
}

/// The reason why the owner waits, once the store has answered.
async fn why(client: &Client, resource: &str, owner: &str) -> Value {
    let asked = json!("asked");
    eventually("the store has answered", async || {
        waiter(client, resource, owner).await["why"]["reason"] != asked
    })
    .await;
    waiter(client, resource, owner).await["why"].clone()
}

on_both! {
    /// The holder, the waiters ahead, their ranks, and the plan of each.
    async fn a_waiter_is_told_who_holds_the_key_and_who_goes_first(kind: Kind) {
        let proxy = proxy_with(&database(kind).await, "rank_label = \"rank\"", "").await;
        let (client, resource) = (proxy.client(), fresh("why"));
        let lease = client.lease(&resource, 60_000).await;
        let ranked = |rank: &str| json!({"labels": {"rank": rank, "other": "x"}});
        let _late = waits(&client, &resource, "late", ranked("5")).await;
        let _early = waits(&client, &resource, "early", ranked("0")).await;
        let _reader = waits(&client, &resource, "reader", json!({"mode": "shared", "labels": {"rank": "5"}})).await;

        let first = waiter(&client, &resource, "early").await;
        assert_eq!((&first["position"], &first["rule"]), (&json!(1), &json!("rank_then_arrival")), "{first}");
        let why = &first["why"];
        assert_eq!((&why["reason"], &why["key"]), (&json!("held"), &json!(resource)), "{why}");
        assert_eq!((&why["holder"]["owner"], &why["holder"]["token"]), (&lease["owner"], &lease["token"]), "{why}");
        assert_eq!(why["holder"]["mode"], "exclusive", "{why}");
        assert!(why["text"].as_str().unwrap().starts_with("next: first by rank, then arrival; "), "{why}");
        assert!(first["wait_left_ms"].as_u64() > Some(10_000), "{first}");
        assert_eq!(first["estimate"], json!({"none": "too_few_holds", "holds": 0}));

        let plan = &first["plan"];
        assert_eq!((&plan["keys"], &plan["ttl_ms"]), (&json!([resource]), &json!(60_000)), "{plan}");
        assert_eq!(plan["policy"], lease["policy"], "{plan}");
        assert!(plan["wait_ms"].as_u64() > Some(10_000), "{plan}");
        let read = |part: &str, value: &str| json!({"part": part, "value": value});
        let reads = json!([read("name", &resource), read("mode", "exclusive"), {"part": "ttl"}, {"part": "wait"},
            read("label(rank)", "0")]);
        assert_eq!(plan["reads"], reads, "the label that the policy does not read is not shown");

        let late = waiter(&client, &resource, "late").await;
        assert_eq!(late["why"]["behind"], json!({"owner": "early", "mode": "exclusive", "by": "rank"}), "{late}");
        let reader = waiter(&client, &resource, "reader").await;
        let behind = json!({"owner": "late", "mode": "exclusive", "by": "arrival"});
        assert_eq!((&reader["why"]["reason"], &reader["why"]["behind"]), (&json!("behind"), &behind), "{reader}");
        assert_eq!(reader["position"], 3);

        let shown = client.show(&resource).await;
        assert_eq!(shown["queue"].as_array().map(Vec::len), Some(3), "{shown}");
        let unknown = client.get(&format!("/v1/locks/{resource}?waiter=1")).await;
        assert_eq!((unknown.status, &unknown.json["field"]), (400, &json!("waiter")), "{}", unknown.text);
    }

    /// A reader could share the key with its holder, but a writer came first.
    async fn a_reader_is_told_of_the_writer_ahead(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("readers"));
        let held = client.acquire(json!({"resource": resource, "owner": "r1", "mode": "shared", "ttl_ms": 60_000})).await;
        assert_eq!(held.status, 200, "{}", held.text);
        let _writer = waits(&client, &resource, "w", json!({})).await;
        let _reader = waits(&client, &resource, "r2", json!({"mode": "shared"})).await;
        let of_writer = why(&client, &resource, "w").await;
        assert_eq!((&of_writer["reason"], &of_writer["holder"]["mode"]), (&json!("held"), &json!("shared")), "{of_writer}");
        let of_reader = why(&client, &resource, "r2").await;
        assert_eq!(of_reader["text"], "behind w, which wants the lock exclusively and arrived earlier", "{of_reader}");
    }

    async fn permits_that_do_not_fit_are_counted(kind: Kind) {
        let proxy = proxy_with(&database(kind).await, "permits = 3", "").await;
        let (client, resource) = (proxy.client(), fresh("permits"));
        let permits = |count: u32| json!({"mode": {"permits": count}});
        let mut body = json!({"resource": resource, "owner": "p1", "ttl_ms": 60_000});
        body.as_object_mut().unwrap().extend(permits(2).as_object().unwrap().clone());
        assert_eq!(client.acquire(body).await.status, 200);
        let _second = waits(&client, &resource, "p2", permits(2)).await;
        let why = why(&client, &resource, "p2").await;
        assert_eq!((&why["reason"], &why["permits"]), (&json!("permits"), &json!({"taken": 2, "limit": 3})), "{why}");
        assert_eq!(waiter(&client, &resource, "p2").await["estimate"], json!({"none": "permits"}));
    }

    /// The other key of two is the one that is not free.
    async fn the_key_of_several_that_is_held_is_named(kind: Kind) {
        let proxy = proxy_with(&database(kind).await, "separator = \"+\"", "").await;
        let (client, one, two) = (proxy.client(), fresh("one"), fresh("two"));
        client.lease(&two, 60_000).await;
        let waiting = tokio::spawn({
            let body = json!({"resource": format!("{one}+{two}"), "owner": "both", "wait_ms": 60_000});
            let client = client.clone();
            async move { client.acquire(body).await }
        });
        client.until_queued(&one, 1).await;
        let why = why(&client, &one, "both").await;
        assert_eq!((&why["reason"], &why["key"]), (&json!("held"), &json!(two)), "{why}");
        let shown = waiter(&client, &one, "both").await;
        assert_eq!(shown["estimate"], json!({"none": "several_keys"}), "{shown}");
        assert_eq!(shown["plan"]["keys"].as_array().map(Vec::len), Some(2), "{shown}");
        waiting.abort();
    }

    /// The lease of a client that has gone keeps its key for the lock delay.
    async fn a_lock_delay_is_told_from_a_lease(kind: Kind) {
        let proxy = proxy_with(&database(kind).await, "lock_delay_ms = 60_000", "").await;
        let (client, resource) = (proxy.client(), fresh("delayed"));
        client.lease(&resource, 1_000).await;
        let _waiting = waits(&client, &resource, "w", json!({})).await;
        eventually("the lease has ended", async || why(&client, &resource, "w").await["reason"] == "delay").await;
        let why = why(&client, &resource, "w").await;
        assert!(why["free_in_ms"].as_u64() > Some(10_000), "{why}");
        assert_eq!(waiter(&client, &resource, "w").await["estimate"], json!({"none": "not_held"}));
    }

    /// Each proxy knows its own waiters, and the store knows the order of all of them.
    async fn a_waiter_is_told_its_place_in_the_global_queue(kind: Kind) {
        let url = database(kind).await;
        let config = || proxy_with(&url, "global_order = true", "");
        let (one, other) = (config().await, config().await);
        let resource = fresh("global");
        let lease = one.client().lease(&resource, 60_000).await;
        let _first = waits(&one.client(), &resource, "first", json!({})).await;
        eventually("it has its place", async || {
            waiter(&one.client(), &resource, "first").await["global_position"] == 1
        })
        .await;
        let _second = waits(&other.client(), &resource, "second", json!({})).await;
        eventually("it has its place", async || {
            waiter(&other.client(), &resource, "second").await["global_position"] == 2
        })
        .await;
        let second = waiter(&other.client(), &resource, "second").await;
        assert_eq!((&second["position"], &second["rule"]), (&json!(1), &json!("global_queue")), "{second}");
        assert_eq!(second["why"]["reason"], "global_queue", "{second}");
        let first = waiter(&one.client(), &resource, "first").await;
        assert_eq!((&first["why"]["reason"], &first["why"]["holder"]["token"]), (&json!("held"), &lease["token"]), "{first}");
    }

    /// The holder is at another proxy; then the key is delegated to a proxy that does not answer.
    async fn a_holder_and_a_delegation_at_another_proxy_are_named(kind: Kind) {
        let url = database(kind).await;
        let config = || proxy_with(&url, "delegate = \"always\"", "");
        let (one, other) = (config().await, config().await);
        until_proxies_notify(&url).await;
        let (owner, client, resource) = (one.client(), other.client(), fresh("elsewhere"));
        let lease = owner.lease(&resource, 60_000).await;
        let waiting = waits(&client, &resource, "w", json!({})).await;
        let held = why(&client, &resource, "w").await;
        assert_eq!((&held["reason"], &held["holder"]["token"]), (&json!("held"), &lease["token"]), "{held}");
        // The owner does not see the waiters of the other proxy, but that there are some.
        eventually("the store knows that the other proxy waits", async || {
            owner.show(&resource).await["others_wait"] == true
        })
        .await;
        assert_eq!(owner.show(&resource).await["queue"], json!([]));
        waiting.abort();

        let resource = fresh("delegated");
        let first = owner.lease(&resource, 60_000).await;
        assert_eq!(owner.release(&first).await.status, 200);
        owner.lease(&resource, 60_000).await;
        one.signal(Signal::STOP);
        let _waiting = waits(&client, &resource, "w", json!({})).await;
        let why = waiter(&client, &resource, "w").await["why"].clone();
        one.signal(Signal::CONT);
        assert_eq!((&why["reason"], why["proxy"].is_string()), (&json!("delegated"), true), "{why}");
    }

    /// Twelve readers hold the key for a while, so that its next hold can be estimated.
    async fn a_wait_is_estimated_from_recent_holds(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("estimated"));
        let mut leases = Vec::new();
        for n in 0..12 {
            let body = json!({"resource": resource, "owner": format!("r{n}"), "mode": "shared", "ttl_ms": 60_000});
            leases.push(client.acquire(body).await.json);
        }
        tokio::time::sleep(std::time::Duration::from_secs(10)).await;
        for lease in &leases {
            assert_eq!(client.release(lease).await.status, 200);
        }
        let held = &client.show(&resource).await["recent_holds"];
        assert_eq!(held["holds"], 12, "{held}");
        assert!(held["median_ms"].as_u64() >= Some(9_900) && held["low_ms"].as_u64() <= held["high_ms"].as_u64(), "{held}");
        client.lease(&resource, 60_000).await;
        let _next = waits(&client, &resource, "next", json!({})).await;
        let _later = waits(&client, &resource, "later", json!({})).await;
        let shown = client.show(&resource).await;
        let [next, later] = [0, 1].map(|n| shown["queue"][n]["estimate"].clone());
        assert_eq!((&next["holds"], &later["holds"]), (&json!(12), &json!(12)), "{shown}");
        // One hold more, with two digits that count.
        let median = |estimate: &Value| estimate["median_ms"].as_u64().unwrap();
        assert!(median(&next) <= median(held), "{shown}");
        assert!(median(&later) + 2_000 >= median(&next) + median(held), "{shown}");
        eventually("it is held for longer than ever", async || {
            waiter(&client, &resource, "next").await["estimate"] == json!({"none": "held_longer", "holds": 12})
        })
        .await;
    }
}

/// The order of arrival says nothing then.
#[test]
fn a_policy_that_chooses_the_next_waiter_is_named() {
    crate::harness::run(async {
        let sections = "[policies.fair]\npath = \"builtin:fair-groups\"\n[policies.fair.settings]\nweights = { heavy = 3 }\n\
            [[routes]]\nresource = \"*\"\npolicy = \"fair\"\n";
        let url = database(crate::harness::Kind::Mysql).await;
        let proxy = Proxy::with(Settings { url, sections: sections.to_owned(), ..Settings::default() }).await;
        let (client, resource) = (proxy.client(), fresh("fair"));
        client.lease(&resource, 60_000).await;
        for owner in ["a", "b"] {
            let _waits = waits(&client, &resource, owner, json!({"labels": {"group": owner}})).await;
        }
        let [first, second] = [waiter(&client, &resource, "a").await, waiter(&client, &resource, "b").await];
        assert_eq!(
            (&first["rule"], &first["why"]["reason"]),
            (&json!("fairness"), &json!("held")),
            "{first}"
        );
        assert_eq!(
            (&second["rule"], &second["why"]["reason"]),
            (&json!("fairness"), &json!("fairness")),
            "{second}"
        );
        assert_eq!((&first["estimate"], &first["group"]), (&json!({"none": "fairness"}), &json!("a")));
        let reads = first["plan"]["reads"].as_array().unwrap();
        assert!(reads.contains(&json!({"part": "label(group)", "value": "a"})), "{reads:?}");
    });
}

//! `lockkeeper policy canary`: a version decides for a share of the keys on all proxies, and goes live or is rolled back.

use super::*;
use crate::policies::BAD;

/// Sends the canary to a proxy. `query`: its terms.
async fn canary(proxy: &Proxy, component: &[u8], query: &str) -> Response {
    proxy.admin().send("PUT", &format!("/v1/policies/default/canary?{query}"), component.to_vec()).await
}

/// What the fleet records of the default policy, as this proxy sees it.
async fn record(proxy: &Proxy) -> Value {
    status(proxy, "default").await["fleet"].clone()
}

async fn until_phase(proxy: &Proxy, phase: &str) {
    eventually(phase, async || record(proxy).await["phase"] == phase).await;
}

/// Takes and releases the resource, and returns the keys of its lease and the id of what decided.
async fn cycle(client: &Client, resource: &str) -> (Vec<String>, String) {
    let lease = client.lease(resource, 60_000).await;
    let keys = keys(&lease).into_iter().map(str::to_owned).collect();
    released(client, &lease).await;
    (keys, lease["policy"].as_str().expect("an id").to_owned())
}

async fn released(client: &Client, lease: &Value) {
    assert_eq!(client.release(lease).await.status, 200);
}

on_both! {
    async fn a_canary_decides_for_its_share_of_the_keys_and_no_lock_loses_its_exclusion(kind: Kind) {
        let fleet = Fleet::start(kind, 2, default_policy()).await;
        let [one, other] = [&fleet.proxies[0], &fleet.proxies[1]];
        let begun = canary(one, &RENAMED, "share=50").await;
        assert_eq!((begun.status, &begun.json["outcome"]), (200, &json!("canary")), "{}", begun.text);
        until_phase(other, "canary").await;
        let (client, elsewhere) = (one.client(), other.client());
        let mut decided = Vec::new();
        for n in 0..60 {
            let resource = format!("r/{n}");
            let (keys, by) = cycle(&client, &resource).await;
            let is_canary = keys == [resource.clone(), format!("x/{resource}")];
            assert!(is_canary || keys == [resource.clone()], "{keys:?}");
            // The share of the keys is the same on all proxies, and for each request.
            assert_eq!(cycle(&elsewhere, &resource).await, (keys, by.clone()), "{resource}");
            decided.push((resource, is_canary, by));
        }
        let of_canary = decided.iter().filter(|(_, is_canary, _)| *is_canary).count();
        assert!((12..=48).contains(&of_canary), "{of_canary} of 60");
        let live = &decided.iter().find(|(_, is_canary, _)| !is_canary).unwrap().2;
        assert!(decided.iter().all(|(_, is_canary, by)| *is_canary == (by != live)), "a lease says what decided: {decided:?}");
        let seen = status(one, "default").await["canary"].clone();
        assert_eq!((&seen["canary"]["granted"], &seen["others"]["granted"]), (&json!(of_canary), &json!(60 - of_canary)), "{seen}");
        // Whoever decides, the live version's key is taken; the other name of the canary excludes no other request.
        for (resource, ..) in &decided[..10] {
            let held = client.lease(resource, 60_000).await;
            let refused = elsewhere.acquire(json!({"resource": resource})).await;
            assert_eq!(refused.status, 409, "{}", refused.text);
            released(&client, &held).await;
        }
        // A lease of the canary outlives it.
        let (resource, ..) = decided.iter().find(|(_, is_canary, _)| *is_canary).unwrap();
        let held = client.lease(resource, 60_000).await;
        let back = one.admin().send("POST", "/v1/policies/default/abort", "").await;
        assert_eq!((back.status, &back.json["outcome"]), (200, &json!("called_off")), "{}", back.text);
        until_phase(other, "settled").await;
        assert_eq!(elsewhere.acquire(json!({"resource": resource})).await.status, 409);
        assert_eq!(client.renew(&held).await.status, 200);
        released(&client, &held).await;
        for (resource, _, _) in &decided[..5] {
            assert_eq!(cycle(&elsewhere, resource).await.0, std::slice::from_ref(resource));
        }
    }

    async fn a_greater_share_has_the_keys_of_the_smaller_one_and_a_promotion_has_all(kind: Kind) {
        let fleet = Fleet::start(kind, 2, default_policy()).await;
        let [one, other] = [&fleet.proxies[0], &fleet.proxies[1]];
        let of_canary = async |client: &Client| {
            let mut of = Vec::new();
            for n in 0..40 {
                if cycle(client, &format!("r/{n}")).await.0.len() == 2 {
                    of.push(n);
                }
            }
            of
        };
        assert_eq!(canary(one, &RENAMED, "share=20").await.status, 200);
        let few = of_canary(&one.client()).await;
        assert_eq!(canary(other, &RENAMED, "share=70").await.status, 200);
        let many = of_canary(&one.client()).await;
        assert!(few.iter().all(|n| many.contains(n)) && few.len() < many.len(), "{few:?} {many:?}");
        let held = one.client().lease("r/held", 60_000).await;
        let promoted = one.admin().send("POST", "/v1/policies/default/promote", "").await;
        assert!([200, 202].contains(&promoted.status), "{}", promoted.text);
        released(&one.client(), &held).await;
        until_phase(one, "settled").await;
        eventually("all go by it", async || cycle(&other.client(), "r/1").await.0 == ["x/r/1"]).await;
        assert_eq!(one.admin().send("POST", "/v1/policies/default/promote", "").await.status, 422);
    }

    async fn a_canary_that_fails_is_rolled_back_by_itself_on_all_proxies(kind: Kind) {
        let fleet = Fleet::start(kind, 2, default_policy()).await;
        let [one, other] = [&fleet.proxies[0], &fleet.proxies[1]];
        assert_eq!(canary(one, &BAD, "share=100&faults=3").await.status, 200);
        until_phase(other, "canary").await;
        let client = other.client();
        for _ in 0..4 {
            // Its faults cost the clients nothing.
            assert_eq!(cycle(&client, "panic").await.0, ["panic"]);
        }
        until_phase(one, "settled").await;
        let record = record(one).await;
        let why = record["note"].as_str().unwrap();
        assert!(why.contains("it failed 4 times, and 3 are allowed") && why.contains("panicked"), "{why}");
        let listed = status(other, "default").await;
        assert!(listed["last_error"].as_str().unwrap().contains("a canary was rolled back"), "{listed}");
        let metrics = other.admin().get("/metrics").await.text;
        assert!(metrics.contains("lockkeeper_fleet_changes_total{outcome=\"canary_rolled_back\"} 1"), "{metrics}");
        assert_eq!(cycle(&client, "good").await.0, ["good"]);
    }

    async fn a_canary_that_refuses_more_is_rolled_back(kind: Kind) {
        let fleet = Fleet::start(kind, 1, default_policy()).await;
        let proxy = &fleet.proxies[0];
        assert_eq!(canary(proxy, &BAD, "share=100&refused=10").await.status, 200);
        let client = proxy.client();
        for n in 0..210 {
            let resource = if n % 4 == 0 { "refuse".to_owned() } else { format!("r/{n}") };
            let answer = client.acquire(json!({"resource": resource})).await;
            match answer.status {
                200 => released(&client, &answer.json).await,
                status => assert_eq!((status, answer.slug()), (403, "refused"), "{}", answer.text),
            }
        }
        until_phase(proxy, "settled").await;
        let why = record(proxy).await["note"].as_str().unwrap().to_owned();
        assert!(why.contains("it refuses 2") && why.contains("and 10 % are allowed"), "{why}");
        assert_eq!(cycle(&client, "refuse").await.0, ["refuse"]);
    }

    async fn a_canary_goes_live_step_by_step(kind: Kind) {
        let fleet = Fleet::start(kind, 2, default_policy()).await;
        let [one, other] = [&fleet.proxies[0], &fleet.proxies[1]];
        assert_eq!(canary(one, &RENAMED, "share=60&steps=100&every_ms=1000").await.status, 200);
        pause_ms(2_500).await;
        assert_eq!(record(one).await["canary"]["share"], 60.0, "nobody has tried it");
        let work = async |client: Client| {
            for n in 0..400 {
                cycle(&client, &format!("r/{n}")).await;
            }
        };
        work(one.client()).await;
        eventually("the next share", async || record(one).await["canary"]["share"] == 100.0).await;
        work(other.client()).await;
        eventually("it is live", async || {
            let record = record(other).await;
            record["phase"] == "settled" && record["canary"].is_null()
        })
        .await;
        eventually("all go by it", async || cycle(&other.client(), "r/1").await.0 == ["x/r/1"]).await;
        assert_eq!(cycle(&one.client(), "r/1").await.0, ["x/r/1"]);
    }

    async fn a_canary_is_refused_with_its_reason(kind: Kind) {
        let fleet = Fleet::start(kind, 1, default_policy()).await;
        let proxy = &fleet.proxies[0];
        for (query, field) in [
            ("", "share"),
            ("share=0", "share"),
            ("share=101", "share"),
            ("share=x", "share"),
            ("share=5&steps=4,100&every_ms=1000", "steps"),
            ("share=5&steps=10,1000&every_ms=1000", "steps"),
            ("share=5&steps=10", "every_ms"),
            ("share=5&every_ms=1", "every_ms"),
            ("share=5&every_ms=99999999999999999", "every_ms"),
            ("share=5&faults=-1", "faults"),
            ("share=5&ungranted=101", "ungranted"),
            ("share=5&p99=0.5", "p99"),
            ("share=5&refused=-1", "refused"),
        ] {
            let refused = canary(proxy, &RENAMED, query).await;
            assert_eq!((refused.status, &refused.json["field"]), (400, &json!(field)), "{query}: {}", refused.text);
        }
        assert_eq!(canary(proxy, b"<html>", "share=5").await.status, 422);
        assert_eq!(canary(proxy, default_policy(), "share=5").await.status, 422);
        assert_eq!(canary(proxy, &RENAMED, "share=5").await.status, 200);
        let second = canary(proxy, &BAD, "share=5").await;
        assert_eq!((second.status, second.slug()), (409, "conflict"), "{}", second.text);
        let other = proxy.admin().send("PUT", "/v1/policies/default", BAD.to_vec()).await;
        assert_eq!((other.status, other.slug()), (409, "conflict"), "{}", other.text);
        assert!(other.text.contains("tried as a canary"), "{}", other.text);
        // To push what is live ends the canary.
        let kept = proxy.admin().send("PUT", "/v1/policies/default", default_policy().to_vec()).await;
        assert_eq!((kept.status, &kept.json["outcome"]), (200, &json!("called_off")), "{}", kept.text);
        until_phase(proxy, "settled").await;
        let nothing = proxy.admin().send("POST", "/v1/policies/default/abort", "").await;
        assert_eq!((nothing.status, nothing.slug()), (422, "refused"), "{}", nothing.text);
    }
}

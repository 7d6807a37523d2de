//! A new policy that names keys differently: holders under the old and the new name never exist at the same time.

use super::*;

/// Whether a request for the resource would be granted now, without waiting.
async fn is_free(client: &Client, resource: &str) -> bool {
    let answer = client.acquire(json!({"resource": resource, "ttl_ms": 20_000})).await;
    match answer.status {
        200 => {
            released(client, &answer.json).await;
            true
        }
        409 => false,
        _ => panic!("{}", answer.text),
    }
}

/// The proxy checks twice a second whether the old leases have ended. Only then are their new keys free.
async fn until_only_new_keys(client: &Client, resource: &str, new: &[&str]) {
    eventually("later leases hold only the new key", async || {
        let answer = client.acquire(json!({"resource": resource, "ttl_ms": 20_000})).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        released(client, &answer.json).await;
        keys(&answer.json) == new
    })
    .await;
}

/// Releases one lease after another. Each time, the only waiter that is granted is the next in the queue.
async fn granted_in_turn(client: &Client, first: &Value, waiters: Vec<JoinHandle<Response>>) {
    let mut lease = first.clone();
    let mut waiters = std::collections::VecDeque::from(waiters);
    while let Some(next) = waiters.pop_front() {
        assert!(!next.is_finished(), "granted while another one holds it");
        released(client, &lease).await;
        lease = granted(next).await;
        assert!(waiters.iter().all(|waiter| !waiter.is_finished()), "two were granted at once");
    }
    released(client, &lease).await;
}

on_both! {
    /// The holder of the old key keeps it. Later requests wait for that key, and then hold both.
    async fn later_requests_wait_for_the_holder_of_the_old_key(kind: Kind) {
        let deployment = Deployment::start(kind, default_policy()).await;
        let client = deployment.proxy.client();
        let old = client.lease("r", 30_000).await;
        deployment.push(&RENAMED).await;
        assert!(!is_free(&client, "r").await);
        let waiter = line_up(&client, "r", "w", 1).await.remove(0);
        pause_ms(300).await;
        assert!(!waiter.is_finished());
        assert_eq!(client.renew(&old).await.status, 200);
        released(&client, &old).await;
        let next = granted(waiter).await;
        assert_eq!(keys(&next), ["r", "x/r"]);
        assert!(next["tokens"][0].as_u64() > old["token"].as_u64(), "{next}");
        assert!(!is_free(&client, "r").await);
        assert_eq!(client.renew(&next).await.status, 200);
        released(&client, &next).await;
        until_only_new_keys(&client, "r", &["x/r"]).await;
    }

    /// A holder that never releases is waited for until its lease ends.
    async fn later_requests_wait_until_an_old_lease_expires(kind: Kind) {
        let deployment = Deployment::start(kind, default_policy()).await;
        let client = deployment.proxy.client();
        // The component is built on first use, which may take longer than the lease lasts.
        let renamed: &[u8] = &RENAMED;
        let began = Instant::now();
        client.lease("r", 4_000).await;
        deployment.push(renamed).await;
        let next = granted(waiting(&client, json!({"resource": "r", "wait_ms": 30_000}))).await;
        assert!(began.elapsed() >= Duration::from_secs(4), "{:?}", began.elapsed());
        assert_eq!(keys(&next), ["r", "x/r"]);
    }

    /// Waiters from before and after the swap are granted one after another, in order of arrival.
    async fn waiters_of_both_generations_are_granted_in_order_of_arrival(kind: Kind) {
        let deployment = Deployment::start(kind, default_policy()).await;
        let client = deployment.proxy.client();
        let old = client.lease("r", 30_000).await;
        let mut waiters = line_up(&client, "r", "old-", 3).await;
        deployment.push(&RENAMED).await;
        waiters.extend(line_up(&client, "r", "new-", 3).await);
        granted_in_turn(&client, &old, waiters).await;
        until_only_new_keys(&client, "r", &["x/r"]).await;
    }

    /// A swap and a rollback while locks are held: three generations of keys, one holder at a time.
    async fn a_rollback_makes_no_second_holder(kind: Kind) {
        let deployment = Deployment::start(kind, default_policy()).await;
        let (client, admin) = (deployment.proxy.client(), deployment.proxy.admin());
        let old = client.lease("r", 30_000).await;
        let free = client.lease("q", 30_000).await;
        released(&client, &free).await;
        deployment.push(&RENAMED).await;
        let new = client.lease("q", 30_000).await;
        assert_eq!(keys(&new), ["x/q"]);
        let mut waiters = line_up(&client, "r", "between-", 2).await;
        let mut others = line_up(&client, "q", "between-", 2).await;
        assert_eq!(admin.send("POST", "/v1/policies/default/rollback", "").await.status, 200);
        waiters.extend(line_up(&client, "r", "after-", 2).await);
        others.extend(line_up(&client, "q", "after-", 2).await);
        granted_in_turn(&client, &old, waiters).await;
        granted_in_turn(&client, &new, others).await;
        until_only_new_keys(&client, "r", &["r"]).await;
        until_only_new_keys(&client, "q", &["q"]).await;
    }

    /// Many old keys become one key, which is free when all their holders are gone.
    async fn a_merged_key_is_free_only_after_all_old_holders(kind: Kind) {
        let deployment = Deployment::start(kind, default_policy()).await;
        let client = deployment.proxy.client();
        let pooled = |resource: &str| json!({"resource": resource, "ttl_ms": 30_000, "labels": {"pool": "p"}});
        let mut held = Vec::new();
        for n in 0..20 {
            let answer = client.acquire(pooled(&format!("r/{n}"))).await;
            assert_eq!(answer.status, 200, "{}", answer.text);
            held.push(answer.json);
        }
        deployment.push(&RENAMED).await;
        for lease in held {
            let refused = client.acquire(pooled("other")).await;
            assert_eq!((refused.status, refused.slug()), (409, "contended"), "{}", refused.text);
            released(&client, &lease).await;
        }
        let next = client.acquire(pooled("other")).await;
        assert_eq!(next.status, 200, "{}", next.text);
        assert_eq!(client.renew(&next.json).await.status, 200);
        assert_eq!(client.acquire(pooled("r/1")).await.status, 409);
        released(&client, &next.json).await;
        eventually("leases hold the one key", async || {
            let answer = client.acquire(pooled("r/2")).await;
            released(&client, &answer.json).await;
            keys(&answer.json) == ["x/p"]
        })
        .await;
    }

    /// Readers of the old key keep out writers of the new key, and admit readers.
    async fn readers_of_the_old_key_exclude_writers_of_the_new_key(kind: Kind) {
        let deployment = Deployment::start(kind, default_policy()).await;
        let client = deployment.proxy.client();
        let shared = json!({"resource": "r", "mode": "shared", "ttl_ms": 30_000});
        let readers = [client.acquire(shared.clone()).await.json, client.acquire(shared.clone()).await.json];
        deployment.push(&RENAMED).await;
        assert!(!is_free(&client, "r").await);
        let reader = client.acquire(shared).await;
        assert_eq!((reader.status, keys(&reader.json)), (200, vec!["r", "x/r"]), "{}", reader.text);
        for lease in readers.iter().chain([&reader.json]) {
            assert!(!is_free(&client, "r").await);
            released(&client, lease).await;
        }
        assert!(is_free(&client, "r").await);
    }

    /// Promise 6 across a swap: a repeated request gets the same lease or a clean failure.
    async fn a_repeated_request_makes_no_second_holder(kind: Kind) {
        let deployment = Deployment::start(kind, default_policy()).await;
        let client = deployment.proxy.client();
        let body = json!({"resource": "r", "owner": "o", "request_id": "once", "ttl_ms": 30_000});
        let first = client.acquire(body.clone()).await.json;
        deployment.push(&RENAMED).await;
        let again = client.acquire(body).await;
        match again.status {
            200 => assert_eq!(again.json["lease_id"], first["lease_id"]),
            status => assert_eq!(status, 409, "{}", again.text),
        }
        released(&client, &first).await;
        assert!(is_free(&client, "r").await, "the repetition holds something");
    }

    /// Leases of an earlier run, whose policy has changed since, are waited for.
    async fn leases_of_an_earlier_run_are_waited_for(kind: Kind) {
        let deployment = Deployment::start(kind, default_policy()).await;
        let old = deployment.proxy.client().lease("r", 30_000).await;
        deployment.deploy(&RENAMED);
        let deployment = deployment.restart().await;
        let client = deployment.proxy.client();
        assert_eq!(keys(&client.lease("new", 1_000).await), ["x/new"]);
        assert!(!is_free(&client, "r").await);
        let waiters = line_up(&client, "r", "w", 2).await;
        granted_in_turn(&client, &old, waiters).await;
        until_only_new_keys(&client, "r", &["x/r"]).await;
    }

    /// The same if not the policy has changed, but the policy that the resource goes to.
    async fn leases_of_another_route_are_waited_for(kind: Kind) {
        let deployment = Deployment::start(kind, default_policy()).await;
        let old = deployment.proxy.client().lease("shop/1", 30_000).await;
        let Deployment { proxy, url, dir } = deployment;
        drop(proxy);
        std::fs::write(dir.path().join("shop.wasm"), &*RENAMED).unwrap();
        let file = dir.path().join("shop.wasm");
        let more = format!(
            "[policies.shop]\npath = \"{}\"\n[[routes]]\nresource = \"shop/*\"\npolicy = \"shop\"",
            file.display()
        );
        let proxy = start(&url, dir.path(), &more).await;
        let client = proxy.client();
        assert!(!is_free(&client, "shop/1").await);
        // A swap of that policy also asks about the lease.
        push(&proxy, "shop", &variant(&RENAMED, 1)).await;
        assert!(!is_free(&client, "shop/1").await);
        let waiters = line_up(&client, "shop/1", "w", 1).await;
        granted_in_turn(&client, &old, waiters).await;
    }

    /// Leases that another proxy granted before the swap are waited for as well.
    async fn leases_of_another_proxy_are_waited_for(kind: Kind) {
        let deployment = Deployment::start(kind, default_policy()).await;
        let other = start(&deployment.url, deployment.dir.path(), "").await;
        let old = other.client().lease("r", 30_000).await;
        deployment.push(&RENAMED).await;
        let client = deployment.proxy.client();
        assert!(!is_free(&client, "r").await);
        let waiters = line_up(&client, "r", "w", 2).await;
        assert_eq!(other.client().renew(&old).await.status, 200);
        granted_in_turn(&client, &old, waiters).await;
        until_only_new_keys(&client, "r", &["x/r"]).await;
    }
}

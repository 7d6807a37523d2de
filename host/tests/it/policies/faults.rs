//! Promise 4: a policy that fails affects only its own requests.

use super::*;

/// The default policy is the faulty guest, and `good/…` goes to a good policy. Hooks are never suspended, unless a
/// test wants that.
fn sections(faults_to_suspend: u32) -> String {
    format!(
        "[policies.good]\npath = \"builtin:default\"\n\
         [[routes]]\nresource = \"good/*\"\npolicy = \"good\"\n\
         [engine]\nfaults_to_suspend = {faults_to_suspend}\nsuspend_ms = 700\n"
    )
}

async fn faults(proxy: &Proxy, policy: &str, hook: &str, reason: &str) -> f64 {
    let labels = [("policy", policy), ("hook", hook), ("reason", reason)];
    let labels = labels.map(|(name, value)| format!("{name}=\"{value}\""));
    proxy.metric("lockkeeper_policy_faults_total", &labels.each_ref().map(String::as_str)).await
}

/// Ways to fail in `plan`, with the reasons under which they are counted.
const WAYS: [(&str, &str); 8] = [
    ("loop", "time"),
    ("recurse", "stack"),
    ("memory", "memory"),
    ("panic", "trap"),
    ("huge", "answer"),
    ("utf8", "answer"),
    ("empty", "value"),
    ("long", "value"),
];

/// Makes requests of a good policy, one after another. Returns the longest time of a request.
fn undisturbed(client: Client) -> JoinHandle<Duration> {
    tokio::spawn(async move {
        let mut longest = Duration::ZERO;
        for n in 0..40 {
            let began = Instant::now();
            let lease = client.lease(&format!("good/{n}"), 1_000).await;
            assert!(lease["policy"].as_str().is_some_and(|id| id.starts_with("good@")));
            released(&client, &lease).await;
            longest = longest.max(began.elapsed());
        }
        longest
    })
}

/// Makes one request for each of the ways, all at the same time.
async fn fail_in_every_way(client: &Client) {
    let asked = WAYS.map(|(how, _)| waiting(client, json!({"resource": how})));
    for (answer, (how, reason)) in asked.into_iter().zip(WAYS) {
        let answer = answer.await.unwrap();
        assert_eq!((answer.status, answer.slug()), (500, "policy_fault"), "{how}: {}", answer.text);
        assert_eq!(answer.json["reason"], reason, "{how}");
        assert_eq!(answer.json["policy"], "default", "{how}");
    }
}

on_both! {
    /// Each way to fail in naming refuses its request, and is counted by policy, hook and reason. At the same time,
    /// requests of another policy are granted.
    async fn a_failing_naming_hook_refuses_its_requests_and_disturbs_no_other_policy(kind: Kind) {
        let deployment = Deployment::with(kind, &BAD, &sections(1_000_000)).await;
        let proxy = &deployment.proxy;
        let (client, good) = (proxy.client(), undisturbed(proxy.client()));
        let mut rounds = 0;
        while rounds < 3 || !good.is_finished() {
            fail_in_every_way(&client).await;
            rounds += 1;
        }
        let clamped = client.lease("ttl", 10_000).await;
        assert_eq!(clamped["ttl_ms"], 3_600_000, "u32::MAX is moved inside the limits");
        released(&client, &clamped).await;
        for (_, reason) in WAYS {
            let ways = WAYS.iter().filter(|(_, other)| *other == reason).count();
            assert_eq!(faults(proxy, "default", "plan", reason).await, (ways * rounds) as f64, "{reason}");
        }
        let longest = good.await.expect("the good policy's requests are granted");
        assert!(longest < Duration::from_secs(3), "{longest:?}");
        assert_eq!(proxy.metric("lockkeeper_policy_faults_total", &["policy=\"good\""]).await, 0.0);
        assert_eq!(deployment.status().await["faults"], WAYS.len() * rounds);
        assert!(deployment.status().await["last_error"].as_str().is_some());
        // Refused requests leave nothing behind.
        for (how, _) in WAYS {
            let known = shown(&client, how).await;
            assert_eq!((&known["holders"], &known["queue"]), (&Value::Null, &Value::Null), "{how}");
        }
    }

    /// A policy that fails several times in a row is suspended for a while, and then called again.
    async fn a_policy_that_keeps_failing_is_suspended(kind: Kind) {
        let deployment = Deployment::with(kind, &BAD, &sections(3)).await;
        let client = deployment.proxy.client();
        for _ in 0..3 {
            assert_eq!(client.acquire(json!({"resource": "panic"})).await.json["reason"], "trap");
        }
        let refused = client.acquire(json!({"resource": "fine"})).await;
        assert_eq!((refused.status, refused.json["reason"].as_str()), (500, Some("suspended")));
        client.lease("good/1", 1_000).await;
        eventually("it is asked again", async || {
            client.acquire(json!({"resource": "fine"})).await.status == 200
        })
        .await;
        assert!(faults(&deployment.proxy, "default", "plan", "suspended").await >= 1.0);
    }

    /// A generation that fails to name the keys of some held locks goes live only when these locks have ended. It is
    /// still asked about the other locks, whose new keys get no second holder.
    async fn a_swap_waits_for_locks_whose_new_keys_the_policy_fails_to_name(kind: Kind) {
        let deployment = Deployment::with(kind, default_policy(), &sections(1)).await;
        let client = deployment.proxy.client();
        let moved: Vec<String> = (0..8).map(|n| format!("moved/{n}")).collect();
        for resource in &moved {
            client.lease(resource, 60_000).await;
        }
        for resource in ["loop", "panic", "recurse", "memory"] {
            client.lease(resource, 3_000).await;
        }
        let began = Instant::now();
        deployment.push(&BAD).await;
        assert!(began.elapsed() > Duration::from_millis(2_000), "it waits for those whose new keys nothing tells");
        assert_eq!(keys(&client.lease("moved/new", 1_000).await), ["x/moved/new"]);
        for resource in moved {
            let again = client.acquire(json!({"resource": resource})).await;
            assert_eq!((again.status, again.slug()), (409, "contended"), "{resource}: {}", again.text);
        }
    }

    /// If `fairness` fails, rank and arrival decide who is next.
    async fn failing_fairness_falls_back_to_arrival(kind: Kind) {
        let deployment = Deployment::with(kind, &BAD, &sections(1_000_000)).await;
        let client = deployment.proxy.client();
        let ways = [("loop", "time"), ("recurse", "stack"), ("memory", "memory"), ("panic", "trap")];
        for (how, reason) in ways.into_iter().chain([("range", "value")]) {
            let resource = format!("choose/{how}");
            let mut lease = client.lease(&resource, 30_000).await;
            for (n, waiter) in line_up(&client, &resource, "w", 3).await.into_iter().enumerate() {
                released(&client, &lease).await;
                lease = granted(waiter).await;
                assert_eq!(lease["owner"], format!("w{n}"), "{how}");
            }
            assert!(faults(&deployment.proxy, "default", "choose", reason).await >= 2.0, "{how}");
        }
    }

    /// If `backoff` fails, the built-in sleeps apply; if `renewal` fails, the lease is extended.
    async fn failing_backoff_and_renewal_hooks_fall_back_to_the_built_in_decisions(kind: Kind) {
        let deployment = Deployment::with(kind, &BAD, &sections(1_000_000)).await;
        let (proxy, client) = (&deployment.proxy, deployment.proxy.client());
        for (how, reason) in [("loop", "time"), ("recurse", "stack"), ("memory", "memory"), ("panic", "trap")] {
            let resource = format!("backoff/{how}");
            let lease = client.lease(&resource, 30_000).await;
            let waiter = line_up(&client, &resource, "w", 1).await.remove(0);
            eventually(how, async || faults(proxy, "default", "backoff", reason).await >= 1.0).await;
            let decisions = shown(&client, &resource).await["decisions"].to_string();
            assert!(decisions.contains("built-in"), "{decisions}");
            released(&client, &lease).await;
            granted(waiter).await;

            let resource = format!("renewal/{how}");
            let mut hold = reload::hold(proxy, json!({"resource": resource, "ttl_ms": 1_500})).await;
            assert_eq!(reload::line(&mut hold).await["event"], "granted");
            for _ in 0..3 {
                assert_eq!(reload::line(&mut hold).await["event"], "renewed", "{how}");
            }
            assert!(faults(proxy, "default", "renewal", reason).await >= 3.0, "{how}");
        }
    }

    /// Promise 1: a holder whose policy lets the lease lapse is told at once, and may count on the lock until the end
    /// that it was told before. Nobody else gets the lock before that.
    async fn a_lease_that_its_policy_lets_lapse_stays_locked_while_its_holder_is_certain(kind: Kind) {
        let deployment = Deployment::with(kind, &BAD, &sections(1_000_000)).await;
        let (proxy, client) = (&deployment.proxy, deployment.proxy.client());
        let asked = Instant::now();
        let mut hold = reload::hold(proxy, json!({"resource": "renewal/lapse", "ttl_ms": 3_000})).await;
        assert_eq!(reload::line(&mut hold).await["event"], "granted");
        let waiter = line_up(&client, "renewal/lapse", "w", 1).await.remove(0);
        let lost = reload::line(&mut hold).await;
        assert_eq!(lost["event"], "lost", "{lost}");
        let left = lost["expires_in_ms"].as_u64().expect("it says for how long");
        assert!(left > 0, "it is told while its lease runs: {lost}");
        let since = lost["since_ms"].as_u64().expect("it says from when");
        let certain = asked + Duration::from_millis(since + left);
        granted(waiter).await;
        let early = certain.saturating_duration_since(Instant::now());
        assert!(early.is_zero(), "granted {early:?} before the holder's certain time is over");
    }
}

//! A version that exceeds its guard after it went live goes back by itself.

use super::*;
use crate::policies::BAD;

async fn record(proxy: &Proxy) -> Value {
    status(proxy, "default").await["fleet"].clone()
}

/// Asks for the resource, and releases the lease if there is one.
async fn ask(client: &Client, resource: &str) -> u16 {
    let answer = client.acquire(json!({"resource": resource})).await;
    if answer.status == 200 {
        assert_eq!(client.release(&answer.json).await.status, 200);
    }
    answer.status
}

on_both! {
    async fn a_version_that_fails_goes_back_by_itself_on_all_proxies(kind: Kind) {
        let mut fleet = Fleet::start(kind, 1, default_policy()).await;
        let log = fleet.dirs[0].path().join("audit.log");
        fleet.add(default_policy(), &format!("[audit]\nfile = \"{}\"\n", log.display())).await;
        fleet.until_members(2).await;
        let [one, other] = [&fleet.proxies[0], &fleet.proxies[1]];
        let before = status(one, "default").await["digest"].clone();
        pushed(one, &BAD).await;
        fleet.until_settled(&[0, 1], &record(one).await["digest"]).await;
        let client = other.client();
        assert_eq!(ask(&client, "good").await, 200);
        for _ in 0..10 {
            assert_eq!(ask(&client, "panic").await, 500);
        }
        fleet.until_settled(&[0, 1], &before).await;
        assert_eq!(ask(&client, "panic").await, 200);
        for proxy in [one, other] {
            let listed = status(proxy, "default").await;
            let why = listed["last_error"].as_str().unwrap();
            assert!(why.starts_with("rolled back by itself: proxy ") && why.contains("failed to plan 10 of 11"), "{listed}");
            assert!(why.contains("panicked"), "{listed}");
            assert_eq!(listed["fleet"]["note"], listed["last_error"], "{listed}");
        }
        let metrics = other.admin().get("/metrics").await.text;
        assert!(metrics.contains("lockkeeper_fleet_changes_total{outcome=\"rolled_back\"} 1"), "{metrics}");
        let audit = std::fs::read_to_string(&log).unwrap();
        let line: Value = serde_json::from_str(audit.lines().last().unwrap()).unwrap();
        assert_eq!((&line["front"], &line["verb"], &line["on"]), (&json!("fleet"), &json!("policy.rollback"), &json!("default")));
        // Neither a rollback nor a file that changes late brings the version back.
        let refused = one.admin().send("POST", "/v1/policies/default/rollback", "").await;
        assert_eq!((refused.status, refused.slug()), (422, "refused"), "{}", refused.text);
        assert!(refused.text.contains("push it if it is to be live again"), "{}", refused.text);
        std::fs::write(fleet.dirs[0].path().join("policy.wasm"), &*BAD).unwrap();
        eventually("the file is refused", async || one.log().contains("a changed file is not loaded")).await;
        assert_eq!(record(other).await["digest"], before);
    }

    async fn a_version_that_came_back_is_not_watched(kind: Kind) {
        let fleet = Fleet::start(kind, 1, &BAD).await;
        let proxy = &fleet.proxies[0];
        let (client, before) = (proxy.client(), record(proxy).await["digest"].clone());
        for _ in 0..30 {
            assert_eq!(ask(&client, "good").await, 200);
        }
        pushed(proxy, &variant(&BAD, 1)).await;
        for n in 0..40 {
            ask(&client, if n < 30 { "good" } else { "panic" }).await;
        }
        fleet.until_settled(&[0], &before).await;
        // It fails more often than the one that it has replaced.
        for _ in 0..20 {
            assert_eq!(ask(&client, "panic").await, 500);
        }
        pause_ms(4 * BEAT_MS).await;
        assert_eq!(record(proxy).await["digest"], before);
    }

    async fn a_candidate_that_fails_is_called_off(kind: Kind) {
        // A proxy that does not answer holds the change up, until it counts as gone after 15 heartbeats. The other one must
        // compile the component and fail before that.
        let fleet = Fleet::start_with_beat(kind, 2, default_policy(), 3_000).await;
        let [one, other] = [&fleet.proxies[0], &fleet.proxies[1]];
        let (client, before) = (one.client(), record(one).await["digest"].clone());
        stop(other);
        let push = pushing(one, &BAD);
        eventually("both name keys", async || phase(one).await == "both").await;
        for _ in 0..10 {
            ask(&client, "panic").await;
        }
        let answer = push.await.unwrap().expect("an answer");
        go_on(other);
        assert_eq!(answer.status, 422, "{}", answer.text);
        assert!(answer.text.contains("failed to plan 10 of 10"), "{}", answer.text);
        fleet.until_settled(&[0, 1], &before).await;
        assert_eq!(ask(&client, "panic").await, 200);
    }

    async fn a_version_goes_back_for_refusals_if_the_policy_says_so_and_not_after_its_time(kind: Kind) {
        let mut fleet = Fleet { url: database(kind).await, proxies: Vec::new(), dirs: Vec::new() };
        fleet.add(default_policy(), "[policies.default.guard]\nrefused_points = 5\nwatch_s = 20\n").await;
        let proxy = &fleet.proxies[0];
        let client = proxy.client();
        for n in 0..200 {
            assert_eq!(ask(&client, &format!("r/{n}")).await, 200);
        }
        let before = record(proxy).await["digest"].clone();
        pushed(proxy, &BAD).await;
        for n in 0..210 {
            ask(&client, if n % 4 == 0 { "refuse" } else { "good" }).await;
        }
        fleet.until_settled(&[0], &before).await;
        let why = record(proxy).await["note"].as_str().unwrap().to_owned();
        assert!(why.contains("it refuses 2") && why.contains("refused 0.0 %; 5 percentage points more"), "{why}");
        // A version that is not watched any more stays, whatever it does.
        pushed(proxy, &BAD).await;
        let bad = record(proxy).await["digest"].clone();
        pause_ms(20_500).await;
        for _ in 0..12 {
            assert_eq!(ask(&client, "panic").await, 500);
        }
        pause_ms(3 * BEAT_MS).await;
        assert_eq!(record(proxy).await["digest"], bad);
    }
}

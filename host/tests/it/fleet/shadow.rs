//! `lockkeeper policy shadow`: a component is asked what the live version is asked, and decides nothing.

use super::*;
use crate::policies::BAD;
use crate::policies::command_line::{ended, lockkeeper, text};

const PATH: &str = "/v1/policies/default/shadow";

async fn shadow(proxy: &Proxy, component: &[u8], query: &str) -> Response {
    proxy.admin().send("PUT", &format!("{PATH}?{query}"), component.to_vec()).await
}

async fn report(proxy: &Proxy) -> Value {
    proxy.admin().get(PATH).await.json
}

/// Takes and releases the resource, and returns the keys of its lease.
async fn cycle(client: &Client, resource: &str) -> Value {
    let lease = client.lease(resource, 60_000).await;
    assert_eq!(client.release(&lease).await.status, 200);
    json!(keys(&lease))
}

/// The calls of a hook in the report, once there are so many.
async fn calls(proxy: &Proxy, hook: &str, count: u64) -> Value {
    let of_hook = async || {
        let report = report(proxy).await;
        report["hooks"].as_array().unwrap().iter().find(|calls| calls["hook"] == hook).cloned()
    };
    eventually(&format!("{count} calls of {hook}"), async || {
        of_hook().await.is_some_and(|calls| calls["calls"] == count)
    })
    .await;
    of_hook().await.unwrap()
}

on_both! {
    async fn a_shadow_compares_every_call_and_decides_nothing(kind: Kind) {
        let fleet = Fleet::start(kind, 1, default_policy()).await;
        let proxy = &fleet.proxies[0];
        let begun = shadow(proxy, &RENAMED, "share=100&for_ms=60000").await;
        assert_eq!((begun.status, &begun.json["state"]), (200, &json!("running")), "{}", begun.text);
        let client = proxy.client();
        for n in 0..20 {
            let resource = format!("r/{n}");
            assert_eq!(cycle(&client, &resource).await, json!([resource]));
        }
        let plans = calls(proxy, "plan", 20).await;
        assert_eq!((&plans["different"], &plans["failed"]), (&json!(20), &json!(0)), "{plans}");
        let seen = report(proxy).await;
        assert_eq!((&seen["plans"]["requests"], &seen["plans"]["changes"][0]["field"]), (&json!(20), &json!("keys")), "{seen}");
        assert_eq!((&seen["plans"]["lost_exclusion"], &seen["dropped"]), (&json!(0), &json!(0)), "{seen}");
        let metrics = proxy.admin().get("/metrics").await.text;
        let line = "lockkeeper_shadow_calls_total{policy=\"default\",hook=\"plan\",result=\"different\"} 20";
        assert!(metrics.contains(line), "{metrics}");
        let second = shadow(proxy, &BAD, "share=100").await;
        assert_eq!((second.status, second.slug()), (409, "conflict"), "{}", second.text);
        let ended = proxy.admin().send("DELETE", PATH, "").await;
        assert_eq!((ended.status, &ended.json["state"]), (200, &json!("stopped")), "{}", ended.text);
        cycle(&client, "r/more").await;
        pause_ms(300).await;
        assert_eq!(report(proxy).await["hooks"][0]["calls"], 20, "it sees nothing any more");
    }

    async fn faults_of_a_shadow_are_told_and_cost_the_policy_nothing(kind: Kind) {
        let fleet = Fleet::start(kind, 1, default_policy()).await;
        let proxy = &fleet.proxies[0];
        assert_eq!(shadow(proxy, &BAD, "share=100&for_ms=60000").await.status, 200);
        let client = proxy.client();
        for resource in ["panic", "good", "refuse", "panic"] {
            assert_eq!(cycle(&client, resource).await, json!([resource]));
        }
        let plans = calls(proxy, "plan", 4).await;
        assert_eq!((&plans["different"], &plans["failed"]), (&json!(1), &json!(2)), "{plans}");
        let seen = report(proxy).await;
        assert!(seen["fault"].as_str().unwrap().contains("panicked"), "{seen}");
        assert_eq!((&seen["plans"]["newly_refused"], &seen["plans"]["not_compared"]), (&json!(1), &json!(2)), "{seen}");
        let listed = status(proxy, "default").await;
        assert_eq!((&listed["faults"], &listed["last_error"]), (&json!(0), &Value::Null), "{listed}");
    }

    async fn a_shadow_ends_with_its_time_and_with_the_version_that_it_follows(kind: Kind) {
        let fleet = Fleet::start(kind, 1, default_policy()).await;
        let proxy = &fleet.proxies[0];
        let nothing = proxy.admin().get(PATH).await;
        assert_eq!((nothing.status, nothing.slug()), (404, "not_found"), "{}", nothing.text);
        assert_eq!(shadow(proxy, &RENAMED, "share=100&for_ms=1000").await.status, 200);
        eventually("its time is over", async || report(proxy).await["state"] == "over").await;
        assert_eq!(shadow(proxy, &RENAMED, "share=100&for_ms=60000").await.status, 200);
        pushed(proxy, &RENAMED).await;
        eventually("another version is live", async || report(proxy).await["state"] == "replaced").await;
        for (query, field) in [("share=0", "share"), ("share=101", "share"), ("for_ms=10", "for_ms"), ("for_ms=x", "for_ms"), ("share=x", "share")] {
            let refused = shadow(proxy, &RENAMED, query).await;
            assert_eq!((refused.status, &refused.json["field"]), (400, &json!(field)), "{query}: {}", refused.text);
        }
        assert_eq!(shadow(proxy, b"<html>", "share=5").await.status, 422);
        let unknown = proxy.admin().send("PUT", "/v1/policies/none-such/shadow", RENAMED.clone()).await;
        assert_eq!(unknown.status, 404, "{}", unknown.text);
    }

    async fn the_command_waits_for_the_end_and_fails_if_the_component_does(kind: Kind) {
        let fleet = Fleet::start(kind, 1, default_policy()).await;
        let proxy = &fleet.proxies[0];
        let dir = folder();
        let file = dir.path().join("bad.wasm");
        std::fs::write(&file, &*BAD).unwrap();
        let file = file.display().to_string();
        let client = proxy.client();
        let work = tokio::spawn(async move {
            for n in 0..1_000 {
                cycle(&client, if n % 2 == 0 { "good" } else { "panic" }).await;
                pause_ms(10).await;
            }
        });
        let args = ["policy", "shadow", "default", &file, "--share", "100%", "--for", "2s", "--fail-on", "fault"];
        let ran = ended(lockkeeper(proxy, &args)).await;
        let (told, complaint) = (text(&ran.stdout), text(&ran.stderr));
        assert_eq!(ran.status.code(), Some(7), "{told}{complaint}");
        for text in ["shadow of default (100 % of the keys of this proxy): over, 2 of 2 s", "the candidate has failed", "PLANS"] {
            assert!(told.contains(text), "{text} is not in {told}");
        }
        assert!(complaint.contains("the component has failed"), "{complaint}");
        let again = ended(lockkeeper(proxy, &["policy", "shadow", "default", "--json"])).await;
        let report: Value = serde_json::from_slice(&again.stdout).unwrap();
        assert_eq!((again.status.code(), &report["state"]), (Some(0), &json!("over")), "{report}");
        work.abort();
    }
}

//! Changes that must wait: they are shown, can be cancelled and taken back, and do not block others.

use super::*;
use crate::harness::lockkeeper;

const ADVISORY: &str = "[policies.default.settings]\nprimitive = \"advisory\"";

/// Two proxies, and a change that waits for a lease of the first one. Returns the fleet, the lease, and the push.
async fn waiting_change(kind: Kind) -> (Fleet, Value, JoinHandle<Option<Response>>) {
    let mut fleet = Fleet { url: database(kind).await, proxies: Vec::new(), dirs: Vec::new() };
    for _ in 0..2 {
        fleet.add(default_policy(), ADVISORY).await;
    }
    fleet.until_members(2).await;
    let lease = fleet.proxies[0].client().lease("r", 60_000).await;
    let push = begin_change(&fleet).await;
    (fleet, lease, push)
}

async fn begin_change(fleet: &Fleet) -> JoinHandle<Option<Response>> {
    let push = pushing(&fleet.proxies[1], &RENAMED);
    for proxy in &fleet.proxies {
        eventually("the change is under way", async || phase(proxy).await == "both").await;
    }
    push
}

/// Runs a command. Returns its exit code and its output.
async fn run(proxy: &Proxy, args: &[&str]) -> (Option<i32>, String) {
    let admin = format!("http://{}", proxy.admin_address());
    let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
    let command = move || lockkeeper().args(["--admin", &admin]).args(args).output().unwrap();
    let output = tokio::task::spawn_blocking(command).await.unwrap();
    (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

async fn is_called_off(fleet: &Fleet, push: JoinHandle<Option<Response>>) {
    let refused = push.await.unwrap().expect("an answer");
    assert_eq!((refused.status, refused.slug()), (422, "refused"), "{}", refused.text);
    assert!(refused.text.contains("an operator kept"), "{}", refused.text);
    for proxy in &fleet.proxies {
        eventually("it is as before", async || phase(proxy).await == "settled").await;
        eventually("claims take the old key alone", async || {
            named(&proxy.client(), "q").await == json!(["q"])
        })
        .await;
    }
}

on_both! {
    /// An operator sees what a change waits for, and cancels it by a rollback or by a push of the live component.
    async fn a_waiting_change_can_be_cancelled(kind: Kind) {
        let (fleet, lease, push) = waiting_change(kind).await;
        let id = fleet.proxies[0].admin().get("/v1/fleet").await.json["id"].as_str().unwrap().to_owned();
        eventually("the first one is waited for", async || {
            let (_, listed) = run(&fleet.proxies[1], &["policy", "list"]).await;
            listed.contains("to sha256:") && listed.contains(&format!("waits for proxy {id}"))
        })
        .await;
        eventually("it says what it waits for", async || {
            let (_, listed) = run(&fleet.proxies[0], &["policy", "list"]).await;
            listed.contains("rest on sessions")
        })
        .await;
        let (code, told) = run(&fleet.proxies[1], &["policy", "rollback", "default"]).await;
        assert!(code == Some(0) && told.contains("is called off"), "{told}");
        is_called_off(&fleet, push).await;

        let push = begin_change(&fleet).await;
        let live = fleet.dirs[0].path().join("policy.wasm");
        let (code, told) =
            run(&fleet.proxies[0], &["policy", "push", "default", live.to_str().unwrap()]).await;
        assert!(code == Some(0) && told.contains("is called off"), "{told}");
        is_called_off(&fleet, push).await;
        assert_eq!(fleet.proxies[0].client().renew(&lease).await.status, 200, "it was there all the time");
    }

    /// A file whose change must wait for another change delays no other file, and is replaced by the next content of
    /// the file.
    async fn a_waiting_file_does_not_delay_another_file(kind: Kind) {
        let (url, dir) = (database(kind).await, folder());
        let shop = dir.path().join("shop.wasm");
        std::fs::write(&shop, default_policy()).unwrap();
        let more = format!(
            "{ADVISORY}\n[policies.shop]\npath = \"{}\"\n[[routes]]\nresource = \"shop/*\"\npolicy = \"shop\"",
            shop.display()
        );
        let proxy = start(&url, dir.path(), default_policy(), &more).await;
        proxy.until_ready().await;
        let client = proxy.client();
        let lease = client.lease("r", 60_000).await;
        let push = pushing(&proxy, &RENAMED);
        eventually("the change is under way", async || phase(&proxy).await == "both").await;
        let file = dir.path().join("policy.wasm");
        std::fs::write(&file, variant(default_policy(), 1)).unwrap();
        eventually("the file waits", async || proxy.log().contains("the changed file waits")).await;
        std::fs::write(&shop, &*RENAMED).unwrap();
        eventually("the other file is live", async || {
            named(&client, "shop/1").await == json!(["x/shop/1"])
        })
        .await;
        assert_eq!(phase(&proxy).await, "both");
        // The live component cancels the change that the file waits for, and replaces the file's content.
        std::fs::write(&file, default_policy()).unwrap();
        eventually("the change is called off", async || phase(&proxy).await == "settled").await;
        assert_eq!(push.await.unwrap().expect("an answer").status, 422);
        eventually("claims take the old key alone", async || named(&client, "q").await == json!(["q"])).await;
        assert_eq!(client.release(&lease).await.status, 200);
    }

    /// A rollback restores the fleet's previous policy, also through a proxy that has seen another one.
    async fn a_rollback_restores_the_previous_policy_of_the_fleet(kind: Kind) {
        let mut fleet = Fleet::start(kind, 1, default_policy()).await;
        let before = pushed(&fleet.proxies[0], &variant(default_policy(), 1)).await;
        let live = pushed(&fleet.proxies[0], &variant(default_policy(), 2)).await;
        let late = fleet.add(&RENAMED, "").await;
        let shown = status(late, "default").await;
        assert_eq!((&shown["digest"], &shown["previous"]), (&live["digest"], &before["digest"]), "{shown}");
        let back = late.admin().send("POST", "/v1/policies/default/rollback", "").await;
        assert_eq!((back.status, &back.json["digest"]), (200, &before["digest"]), "{}", back.text);
        fleet.until_settled(&[0, 1], &before["digest"]).await;
        // And forward again, after a restart of all proxies that may remember something.
        let url = fleet.url.clone();
        drop(fleet);
        let dir = folder();
        let alone = start(&url, dir.path(), &variant(default_policy(), 1), "").await;
        alone.until_ready().await;
        let forth = alone.admin().send("POST", "/v1/policies/default/rollback", "").await;
        assert_eq!((forth.status, &forth.json["digest"]), (200, &live["digest"]), "{}", forth.text);
    }

    /// A member whose quorum lacks a majority cannot read all leases. It grants nothing, and does not delay the
    /// changes of others.
    async fn a_member_without_its_majority_does_not_delay_changes(kind: Kind) {
        let mut fleet = Fleet::start(kind, 1, default_policy()).await;
        let mut more = String::new();
        for name in ["a", "b", "c"] {
            more += &format!("[stores.{name}]\nurl = \"mysql://nobody@127.0.0.1:9/{name}\"\n");
        }
        let dir = folder();
        let blind = start(&fleet.url, dir.path(), default_policy(), &more).await;
        fleet.until_members(2).await;
        let refused = blind.client().acquire(json!({"resource": "r"})).await;
        assert_eq!((refused.status, refused.slug()), (503, "store_unavailable"), "{}", refused.text);
        let live = pushed(&fleet.proxies[0], &RENAMED).await;
        assert_eq!(live["outcome"], "live", "{live}");
        assert_eq!(named(&fleet.proxies[0].client(), "r").await, json!(["x/r"]));
        let refused = blind.client().acquire(json!({"resource": "r"})).await;
        assert_eq!(refused.status, 503, "{}", refused.text);
        fleet.proxies.push(blind);
        fleet.dirs.push(dir);
        fleet.until_settled(&[0, 1], &live["digest"]).await;
    }
}

//! All proxies of a store go by the same rules: a new file may reach one after another, and a proxy that goes by other
//! rules than its store grants nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use tokio::task::JoinHandle;

use super::*;

/// A proxy with a file of its own.
struct Deployed {
    proxy: Proxy,
    folder: tempfile::TempDir,
    client: Client,
}

/// A file with this version. `more` is the name of another principal.
fn rules(version: u64, token: &NewToken, more: &str) -> String {
    let principal = |name: &str, token: &NewToken| {
        let (id, sha256) = (&token.id, &token.sha256);
        format!(
            "[[principal]]\nname = \"{name}\"\nroles = [\"all\"]\ntokens = [{{ id = \"{id}\", sha256 = \"{sha256}\" }}]\n"
        )
    };
    let others = principal(more, &new_token());
    // Comments, and the order of what is written, do not matter.
    let version = if version == 0 { "# no version\n".to_owned() } else { format!("version = {version}\n") };
    format!("{version}{}{others}[roles.all]\nallow = [{{ do = \"*\" }}]\n", principal("client", token))
}

impl Deployed {
    async fn start(url: &str, grace_s: u64, token: &NewToken, rules: &str) -> Deployed {
        let folder = folder();
        let file = folder.path().join("auth.toml");
        write(&file, rules);
        let sections = format!("[auth]\nfile = \"{}\"\ngrace_s = {grace_s}\n", file.display());
        let proxy = Proxy::with(Settings { url: url.to_owned(), sections, ..Settings::default() }).await;
        let client = proxy.client().with_token(&token.token);
        Deployed { proxy, folder, client }
    }

    fn deploy(&self, rules: &str) {
        write(&self.folder.path().join("auth.toml"), rules);
    }

    async fn ready(&self) -> Value {
        self.proxy.admin().get("/ready").await.json
    }

    async fn until_in_step(&self) {
        eventually("its rules are those of the store", async || {
            let ready = self.ready().await;
            ready["status"] == "ready"
                && ready["warnings"].as_array().is_none_or(|all| !all.iter().any(is_of_rules))
        })
        .await;
    }

    async fn until_refusing(&self) {
        eventually("it grants nothing", async || {
            ask(&self.client, &fresh("asked")).await.slug() == "rules_differ"
        })
        .await;
    }
}

fn is_of_rules(what: &Value) -> bool {
    what.as_str().is_some_and(|what| what.contains("[auth] file"))
}

async fn ask(client: &Client, resource: &str) -> Response {
    client.acquire(json!({"resource": resource, "owner": "o", "ttl_ms": 30_000, "wait_ms": 0})).await
}

fn is_refused(answer: &Response) {
    assert_eq!((answer.status, answer.slug()), (503, "rules_differ"), "{}", answer.text);
}

/// Takes locks until it is told to stop. Returns how many it got; a refusal ends it.
fn works(client: &Client, over: &Arc<AtomicBool>) -> JoinHandle<Result<usize, Response>> {
    let (client, over, resource) = (client.clone(), over.clone(), fresh("work"));
    tokio::spawn(async move {
        let mut locks = 0;
        while !over.load(Relaxed) {
            let granted = ask(&client, &resource).await;
            if granted.status != 200 {
                return Err(granted);
            }
            assert_eq!(client.release(&granted.json).await.status, 200);
            locks += 1;
        }
        Ok(locks)
    })
}

on_both! {
    async fn a_new_file_reaches_one_proxy_after_another_and_no_lock_is_refused(kind: Kind) {
        let (url, token) = (database(kind).await, new_token());
        let file = |version| rules(version, &token, &format!("of-{version}"));
        let first = file(1);
        let one = Deployed::start(&url, 60, &token, &first).await;
        let other = Deployed::start(&url, 60, &token, &first).await;
        one.until_in_step().await;
        other.until_in_step().await;
        let over = Arc::new(AtomicBool::new(false));
        let work = [works(&one.client, &over), works(&other.client, &over)];
        let second = file(2);
        one.deploy(&second);
        eventually("the other proxy has noticed", async || {
            other.ready().await["warnings"].as_array().is_some_and(|all| all.iter().any(is_of_rules))
        })
        .await;
        other.deploy(&second);
        other.until_in_step().await;
        // Nobody raised the version, and all get the file within the grace.
        let third = rules(2, &token, "third");
        for proxy in [&other, &one] {
            proxy.deploy(&third);
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
        one.until_in_step().await;
        other.until_in_step().await;
        over.store(true, Relaxed);
        for work in work {
            let locks = work.await.unwrap().unwrap_or_else(|refused| panic!("{}", refused.text));
            assert!(locks > 10, "{locks}");
        }
    }

    async fn a_proxy_with_an_old_file_grants_nothing_after_the_grace(kind: Kind) {
        let (url, token) = (database(kind).await, new_token());
        let (first, second) = (rules(1, &token, "first"), rules(2, &token, "second"));
        let one = Deployed::start(&url, 1, &token, &first).await;
        let other = Deployed::start(&url, 1, &token, &first).await;
        one.until_in_step().await;
        other.until_in_step().await;
        let (held, taken) = (fresh("held"), fresh("taken"));
        let lease = other.client.lease(&held, 60_000).await;
        let holder = one.client.lease(&taken, 60_000).await;
        let waits = {
            let (client, taken) = (other.client.clone(), taken.clone());
            let body = json!({"resource": taken, "owner": "w", "ttl_ms": 30_000, "wait_ms": 60_000});
            tokio::spawn(async move { client.acquire(body).await })
        };
        other.client.until_queued(&taken, 1).await;

        one.deploy(&second);
        is_refused(&waits.await.unwrap());
        is_refused(&ask(&other.client, &fresh("new")).await);
        let begun = other.client.post("/v1/once/begin", &json!({"resource": fresh("once"), "owner": "o"})).await;
        is_refused(&begun);
        let ready = other.ready().await;
        assert_eq!(ready["status"], "not ready");
        let reason = ready["reasons"][0].to_string();
        assert!(reason.contains("give this proxy their file") && reason.contains("version = 3"), "{reason}");
        assert!(other.proxy.log().contains("the rules of who may do what are not those of the store"));
        assert_eq!(other.client.renew(&lease).await.status, 200);
        assert_eq!(other.client.release(&lease).await.status, 200);
        assert_eq!(other.client.get("/v1/locks").await.status, 200);
        assert_eq!(one.client.release(&holder).await.status, 200);
        assert_eq!(ask(&one.client, &fresh("new")).await.status, 200);

        // A restart does not give it another grace.
        let late = Deployed::start(&url, 1, &token, &first).await;
        for _ in 0..20 {
            let answer = ask(&late.client, &fresh("late")).await;
            assert_ne!(answer.status, 200, "{}", answer.text);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        late.until_refusing().await;

        for proxy in [&other, &late] {
            proxy.deploy(&second);
            proxy.until_in_step().await;
            assert_eq!(ask(&proxy.client, &fresh("new")).await.status, 200);
        }
    }

    async fn other_rules_with_the_same_version_grant_nothing_after_the_grace(kind: Kind) {
        let (url, token) = (database(kind).await, new_token());
        let first = rules(0, &token, "first");
        let one = Deployed::start(&url, 1, &token, &first).await;
        one.until_in_step().await;
        let over = Arc::new(AtomicBool::new(false));
        let work = works(&one.client, &over);

        let second = rules(0, &token, "second");
        let other = Deployed::start(&url, 1, &token, &second).await;
        other.until_refusing().await;
        let reason = other.ready().await["reasons"][0].to_string();
        assert!(reason.contains("with other content") && reason.contains("version = 1"), "{reason}");

        let sections = "[auth]\ngrace_s = 1\n".to_owned();
        let without = Proxy::with(Settings { url: url.clone(), sections, ..Settings::default() }).await;
        eventually("a proxy without rules grants nothing", async || {
            ask(&without.client(), &fresh("asked")).await.slug() == "rules_differ"
        })
        .await;
        assert_eq!(without.metric("lockkeeper_fleet_rules_differ", &[]).await, 1.0);
        let reason = without.admin().get("/ready").await.json["reasons"][0].to_string();
        assert!(reason.contains("this proxy has no [auth] file"), "{reason}");
        without.signal(rustix::process::Signal::TERM);
        over.store(true, Relaxed);
        let locks = work.await.unwrap().unwrap_or_else(|refused| panic!("{}", refused.text));
        assert!(locks > 10, "the proxy that was there first goes on: {locks}");

        one.deploy(&second);
        other.until_in_step().await;
        one.until_in_step().await;
        for proxy in [&one, &other] {
            assert_eq!(ask(&proxy.client, &fresh("new")).await.status, 200);
        }
    }
}

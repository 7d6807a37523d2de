//! Promise 5: the replacement of a policy loses no holder, no waiter and no request.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use http_body_util::BodyExt;

use super::*;

/// What the clients of a test know together: the holder of each resource, and the last token of each key.
#[derive(Default)]
struct Witness {
    holders: Mutex<HashMap<String, String>>,
    tokens: Mutex<HashMap<String, u64>>,
    cycles: AtomicUsize,
    stop: AtomicBool,
}

impl Witness {
    fn enter(&self, resource: &str, lease: &Value) {
        let owner = lease["owner"].as_str().unwrap().to_owned();
        let before = self.holders.lock().unwrap().insert(resource.to_owned(), owner.clone());
        assert_eq!(before, None, "{resource} is held by two: {owner} came in");
        let tokens = match &lease["tokens"] {
            Value::Array(tokens) => tokens.clone(),
            _ => vec![lease["token"].clone()],
        };
        for (key, token) in keys(lease).into_iter().zip(tokens) {
            let token = token.as_u64().unwrap();
            let before = self.tokens.lock().unwrap().insert(key.to_owned(), token);
            assert!(before.is_none_or(|before| before < token), "{key}: {token} came after {before:?}");
        }
    }

    fn leave(&self, resource: &str) {
        self.holders.lock().unwrap().remove(resource).expect("it was held");
        self.cycles.fetch_add(1, Relaxed);
    }
}

/// Takes and releases one lock after another until it is told to stop. Nothing may fail.
async fn work(client: Client, worker: usize, witness: Arc<Witness>) {
    for round in 0.. {
        if witness.stop.load(Relaxed) {
            return;
        }
        let resource = format!("orders/{}", (worker + round) % 5);
        let owner = format!("w{worker}-{round}");
        let body = json!({"resource": resource, "owner": owner, "wait_ms": 60_000, "ttl_ms": 30_000});
        let lease = granted(waiting(&client, body)).await;
        witness.enter(&resource, &lease);
        pause_ms(1).await;
        witness.leave(&resource);
        released(&client, &lease).await;
    }
}

/// Swaps ten times by push and ten times by file. Every second generation renames all keys.
async fn replace_twenty_times(deployment: &Deployment) {
    for swap in 0..20_u8 {
        let policy = if swap % 2 == 0 { &RENAMED } else { default_policy() };
        let component = variant(policy, swap);
        if swap < 10 {
            deployment.push(&component).await;
            continue;
        }
        deployment.deploy(&component);
        let wanted = u64::from(swap) + 2;
        eventually("the file is live", async || deployment.status().await["generation"] == wanted).await;
    }
}

on_both! {
    /// Promises 1, 2 and 5 under load: no request fails, no resource has two holders, and tokens increase.
    async fn twenty_swaps_fail_no_request(kind: Kind) {
        let deployment = Deployment::start(kind, default_policy()).await;
        let witness = Arc::new(Witness::default());
        let workers: Vec<_> = (0..12)
            .map(|n| tokio::spawn(work(deployment.proxy.client(), n, witness.clone())))
            .collect();
        replace_twenty_times(&deployment).await;
        witness.stop.store(true, Relaxed);
        for worker in workers {
            worker.await.expect("no request failed");
        }
        assert!(witness.cycles.load(Relaxed) > 100, "{:?} cycles", witness.cycles);
        let live = deployment.status().await;
        assert_eq!((live["generation"].as_u64(), live["faults"].as_u64()), (Some(21), Some(0)));
        assert_eq!(deployment.proxy.metric("lockkeeper_policy_loads_total", &["live"]).await, 20.0);
    }

    /// Promise 5: waiters survive a swap and keep their order.
    async fn waiters_keep_their_order_across_a_swap(kind: Kind) {
        let deployment = Deployment::start(kind, default_policy()).await;
        let client = deployment.proxy.client();
        let mut lease = client.lease("queue", 30_000).await;
        let mut waiters = line_up(&client, "queue", "before-", 4).await;
        deployment.push(&variant(default_policy(), 1)).await;
        waiters.extend(line_up(&client, "queue", "after-", 3).await);
        let order = queue(&client, "queue").await;
        for (waiter, owner) in waiters.into_iter().zip(order) {
            released(&client, &lease).await;
            lease = granted(waiter).await;
            assert_eq!(lease["owner"], owner);
        }
    }

    /// A held connection keeps its generation for its renewals after a swap. Later requests use the new generation.
    async fn a_hold_keeps_its_generation_after_a_swap(kind: Kind) {
        let deployment = Deployment::start(kind, &BAD).await;
        let client = deployment.proxy.client();
        let mut hold = hold(&deployment.proxy, json!({"resource": "held", "ttl_ms": 3_000})).await;
        let lease = line(&mut hold).await;
        let old = lease["policy"].as_str().unwrap().to_owned();
        let new = deployment.push(&variant(&BAD, 1)).await;
        // The renewals after those that were decided before the swap.
        for _ in 0..3 {
            assert_eq!(line(&mut hold).await["event"], "renewed");
        }
        let decisions = shown(&client, "held").await["decisions"].clone();
        let last = decisions.as_array().unwrap().last().unwrap().clone();
        assert_eq!((last["hook"].as_str(), last["by"].as_str()), (Some("renewal"), Some(old.as_str())));
        let later = client.lease("other", 1_000).await;
        assert!(later["policy"].as_str().is_some_and(|id| id != old && is_of(id, &new)), "{later}");
    }

    /// A rollback restores the previous generation as a new one, and can itself be rolled back. The status shows each
    /// step.
    async fn a_rollback_restores_the_previous_generation(kind: Kind) {
        let deployment = Deployment::start(kind, default_policy()).await;
        let (client, admin) = (deployment.proxy.client(), deployment.proxy.admin());
        let nothing = admin.send("POST", "/v1/policies/default/rollback", "").await;
        assert_eq!((nothing.status, nothing.slug()), (422, "refused"), "{}", nothing.text);
        assert!(nothing.text.contains("no earlier generation"), "{}", nothing.text);
        let first = deployment.status().await;
        assert_eq!(first["previous"], Value::Null);

        let pushed = deployment.push(&RENAMED).await;
        assert_eq!((pushed["outcome"].as_str(), pushed["generation"].as_u64()), (Some("live"), Some(2)));
        assert_eq!(pushed["previous"], first["digest"]);
        assert_eq!(keys(&client.lease("one", 60_000).await), ["x/one"]);
        assert_eq!(deployment.push(&RENAMED).await["outcome"], "unchanged");

        let back = admin.send("POST", "/v1/policies/default/rollback", "").await;
        assert_eq!((back.status, back.json["outcome"].as_str()), (200, Some("rolled_back")));
        let live = deployment.status().await;
        assert_eq!((&live["digest"], &live["previous"]), (&first["digest"], &pushed["digest"]));
        assert_eq!((live["generation"].as_u64(), live["last_error"].clone()), (Some(3), Value::Null));
        assert_eq!(keys(&client.lease("two", 60_000).await), ["two"]);
        let held = client.acquire(json!({"resource": "one"})).await;
        assert_eq!((held.status, held.slug()), (409, "contended"), "the lease of before the rollback");

        let forth = admin.send("POST", "/v1/policies/default/rollback", "").await;
        assert_eq!(forth.json["digest"], pushed["digest"]);
        let unknown = admin.send("POST", "/v1/policies/nobody/rollback", "").await;
        assert_eq!(unknown.status, 404, "{}", unknown.text);
    }

    /// A push stays live while the file does not change, and the next change of the file replaces it.
    async fn a_pushed_policy_stays_live_until_the_file_changes(kind: Kind) {
        let deployment = Deployment::start(kind, default_policy()).await;
        let pushed = deployment.push(&RENAMED).await;
        // Longer than the poll interval of the file.
        pause_ms(2_500).await;
        assert_eq!(deployment.status().await["digest"], pushed["digest"]);
        deployment.deploy(&variant(default_policy(), 7));
        eventually("the file is live", async || deployment.status().await["generation"] == 3).await;
    }
}

/// Whether a lease's policy id names the generation with this status.
fn is_of(id: &str, status: &Value) -> bool {
    let digest = status["digest"].as_str().unwrap();
    id.split_once('@').is_some_and(|(_, short)| digest.starts_with(short))
}

/// The lines of a held connection, which lasts until this is dropped.
pub(super) struct Lines {
    body: hyper::body::Incoming,
    held: Vec<u8>,
}

/// Holds a lock with a connection.
pub(super) async fn hold(proxy: &Proxy, body: Value) -> Lines {
    let connector = hyper_util::client::legacy::connect::HttpConnector::new();
    let executor = hyper_util::rt::TokioExecutor::new();
    let http = hyper_util::client::legacy::Client::builder(executor).build(connector);
    let request = hyper::Request::post(format!("http://{}/v1/hold", proxy.api_address()));
    let request = request.body(http_body_util::Full::new(bytes::Bytes::from(body.to_string()))).unwrap();
    let response = http.request(request).await.unwrap();
    assert_eq!(response.status(), 200);
    Lines { body: response.into_body(), held: Vec::new() }
}

/// The next line.
pub(super) async fn line(lines: &mut Lines) -> Value {
    loop {
        if let Some(end) = lines.held.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = lines.held.drain(..=end).collect();
            return serde_json::from_slice(&line).unwrap();
        }
        let frame = lines.body.frame().await.expect("the stream goes on").expect("the proxy answers");
        lines.held.extend(frame.into_data().unwrap());
    }
}

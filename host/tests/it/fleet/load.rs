//! Promises 1 and 2 over a whole fleet while its policy changes and its proxies die: over every grant, no
//! resource has two holders, whatever its keys are called, and the tokens of each key rise.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tokio_util::sync::CancellationToken;

use super::*;

const CLIENTS: usize = 12;
const RESOURCES: usize = 3;
/// Grants between two faults.
const ROUND: usize = 60;

on_both! {
    /// Changes one after another, pushed to each of the proxies in turn.
    async fn changes_make_no_second_holder(kind: Kind) {
        let fleet = Fleet::start(kind, 3, default_policy()).await;
        let load = Load::start(&fleet);
        for n in 0..6_u8 {
            load.another_round().await;
            pushed(&fleet.proxies[usize::from(n) % 3], &version(n)).await;
        }
        load.another_round().await;
        load.check().await;
    }

    /// A proxy is killed in the middle of a change.
    async fn a_proxy_killed_in_the_middle_makes_no_second_holder(kind: Kind) {
        let mut fleet = Fleet::start(kind, 3, default_policy()).await;
        let load = Load::start(&fleet);
        load.another_round().await;
        let push = pushing(&fleet.proxies[0], &RENAMED);
        eventually("the change is under way", async || phase(&fleet.proxies[0]).await == "both").await;
        fleet.proxies[1].kill();
        assert_eq!(push.await.unwrap().expect("an answer").status, 200);
        load.another_round().await;
        // One that starts with the older file, in the middle of the next change.
        let push = pushing(&fleet.proxies[2], &version(1));
        let late = fleet.add(default_policy(), "").await.api_address();
        load.set_address(1, late);
        assert_eq!(push.await.unwrap().expect("an answer").status, 200);
        load.another_round().await;
        load.check().await;
    }

    /// A proxy is paused before a change, with waiters and claims of its own, and goes on after the fleet
    /// has: nothing is granted on what it knew.
    async fn a_paused_proxy_grants_nothing_on_old_knowledge(kind: Kind) {
        let fleet = Fleet::start(kind, 3, default_policy()).await;
        let load = Load::start(&fleet);
        load.another_round().await;
        stop(&fleet.proxies[1]);
        // Held up until the paused one is counted as gone.
        pushed(&fleet.proxies[0], &RENAMED).await;
        // Held elsewhere by the new keys alone when it goes on.
        let holders: Vec<Value> = load.hold_all(&fleet.proxies[2].client()).await;
        go_on(&fleet.proxies[1]);
        pause_ms(6 * BEAT_MS).await;
        load.release_all(&fleet.proxies[2].client(), holders).await;
        fleet.until_members(3).await;
        load.another_round().await;
        // There and back again while it is away.
        stop(&fleet.proxies[1]);
        pushed(&fleet.proxies[0], &version(1)).await;
        let holders: Vec<Value> = load.hold_all(&fleet.proxies[2].client()).await;
        pushed(&fleet.proxies[0], &RENAMED).await;
        go_on(&fleet.proxies[1]);
        pause_ms(6 * BEAT_MS).await;
        load.release_all(&fleet.proxies[2].client(), holders).await;
        fleet.until_members(3).await;
        load.another_round().await;
        load.check().await;
    }
}

/// Policies that name keys by turns one way and the other.
fn version(n: u8) -> Vec<u8> {
    if n.is_multiple_of(2) { variant(&RENAMED, n) } else { variant(default_policy(), n) }
}

/// What a client was told of a lease, and what it did with it.
#[derive(Clone)]
struct Held {
    by: String,
    tokens: Vec<(String, u64)>,
    asked: Instant,
    /// When the client began to be certain, and when that ended.
    from: Instant,
    until: Instant,
}

struct World {
    proxies: Mutex<Vec<SocketAddr>>,
    held: Mutex<HashMap<String, Vec<Held>>>,
    stop: CancellationToken,
}

struct Load {
    world: Arc<World>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    fn start(fleet: &Fleet) -> Load {
        let proxies = fleet.proxies.iter().map(Proxy::api_address).collect();
        let world =
            World { proxies: Mutex::new(proxies), held: Mutex::default(), stop: CancellationToken::new() };
        let world = Arc::new(world);
        let clients = (0..CLIENTS).map(|n| tokio::spawn(client(world.clone(), n))).collect();
        Load { world, clients }
    }

    fn set_address(&self, n: usize, address: SocketAddr) {
        self.world.proxies.lock().unwrap()[n] = address;
    }

    async fn another_round(&self) {
        let goal = self.world.grants() + ROUND;
        eventually("leases are granted again", async || self.world.grants() >= goal).await;
    }

    /// Takes all resources at once and keeps them for long; nobody else is granted one until then.
    async fn hold_all(&self, client: &Client) -> Vec<Value> {
        let mut leases = Vec::new();
        for n in 0..RESOURCES {
            let body =
                json!({"resource": resource(n), "owner": "keeper", "ttl_ms": 60_000, "wait_ms": 30_000});
            let asked = Instant::now();
            let granted = client.acquire(body).await;
            assert_eq!(granted.status, 200, "{}", granted.text);
            let from = Instant::now();
            let held = held(&granted, "keeper", asked, from, from);
            self.world.note(&resource(n), held);
            leases.push(granted.json);
        }
        leases
    }

    async fn release_all(&self, client: &Client, leases: Vec<Value>) {
        for (n, lease) in leases.iter().enumerate() {
            {
                let mut held = self.world.held.lock().unwrap();
                let token = lease["token"].as_u64().unwrap();
                let of = held.get_mut(&resource(n)).unwrap().iter_mut();
                let held = of.filter(|held| held.by == "keeper").find(|held| held.tokens[0].1 == token);
                held.unwrap().until = Instant::now();
            }
            assert_eq!(client.release(lease).await.status, 200);
        }
    }

    async fn check(self) {
        self.world.stop.cancel();
        for client in self.clients {
            client.await.expect("a client of the test");
        }
        self.world.check();
    }
}

impl World {
    fn grants(&self) -> usize {
        self.held.lock().unwrap().values().map(Vec::len).sum()
    }

    fn note(&self, resource: &str, held: Held) {
        self.held.lock().unwrap().entry(resource.to_owned()).or_default().push(held);
    }

    fn check(&self) {
        let mut by_key: HashMap<String, Vec<(Instant, Instant, u64)>> = HashMap::new();
        for (resource, held) in self.held.lock().unwrap().iter_mut() {
            held.sort_by_key(|held| held.from);
            let mut last: Option<&Held> = None;
            for held in held.iter() {
                let certain = held.from < held.until;
                if let Some(last) = last.filter(|_| certain) {
                    let over = last.until.saturating_duration_since(held.from);
                    assert!(
                        over.is_zero(),
                        "{resource}: {} {:?} overlaps {} {:?} by {over:?}",
                        last.by,
                        last.tokens,
                        held.by,
                        held.tokens
                    );
                }
                if certain && last.is_none_or(|last| last.until < held.until) {
                    last = Some(held);
                }
                for (key, token) in &held.tokens {
                    by_key.entry(key.clone()).or_default().push((held.asked, held.from, *token));
                }
            }
        }
        assert!(by_key.len() > RESOURCES, "the policy has renamed nothing: {:?}", by_key.keys());
        for (key, grants) in by_key {
            check_tokens(&key, &grants);
        }
    }
}

/// A grant that was asked for after another one had arrived has the higher token.
fn check_tokens(key: &str, grants: &[(Instant, Instant, u64)]) {
    let mut arrived: Vec<(Instant, u64)> = grants.iter().map(|(_, from, token)| (*from, *token)).collect();
    arrived.sort_unstable();
    let mut asked: Vec<(Instant, u64)> = grants.iter().map(|(asked, _, token)| (*asked, *token)).collect();
    asked.sort_unstable();
    let (mut highest, mut next) = (0, 0);
    for (at, token) in asked {
        while arrived[next].0 < at {
            highest = highest.max(arrived[next].1);
            next += 1;
        }
        assert!(token > highest, "{key}: {token} was granted after {highest}");
    }
    let mut tokens: Vec<u64> = grants.iter().map(|(_, _, token)| *token).collect();
    tokens.sort_unstable();
    assert!(tokens.is_sorted_by(|a, b| a < b), "{key}: a token was given out twice");
}

fn resource(n: usize) -> String {
    format!("orders/{n}")
}

fn held(granted: &Response, by: &str, asked: Instant, from: Instant, until: Instant) -> Held {
    let names = keys(&granted.json).into_iter().map(str::to_owned);
    let tokens: Vec<u64> = match &granted.json["tokens"] {
        Value::Array(tokens) => tokens.iter().filter_map(Value::as_u64).collect(),
        _ => vec![granted.number("token")],
    };
    Held { by: by.to_owned(), tokens: names.zip(tokens).collect(), asked, from, until }
}

/// Acquires, works, renews and releases, each through any of the proxies, until it is told to stop.
async fn client(world: Arc<World>, n: usize) {
    let any = || Client::new(world.proxies.lock().unwrap()[rand::random_range(0..3)]);
    while !world.stop.is_cancelled() {
        // A paused proxy answers when it goes on: longer than anything else takes here.
        let limit = Duration::from_secs(if rand::random_bool(0.5) { 2 } else { 14 });
        let turn = tokio::time::timeout(limit, turn(&world, any(), any(), n));
        if !matches!(turn.await, Ok(true)) {
            pause_ms(20).await;
        }
    }
}

/// Whether a lease was had.
async fn turn(world: &World, client: Client, other: Client, n: usize) -> bool {
    let resource = resource(rand::random_range(0..RESOURCES));
    // Some wait longer than a proxy is paused.
    let (ttl_ms, wait_ms) = (rand::random_range(300..1_500), rand::random_range(0..8_000));
    let by = format!("client-{n}");
    let body = json!({"resource": resource, "owner": by, "ttl_ms": ttl_ms, "wait_ms": wait_ms});
    let asked = Instant::now();
    let Some(granted) = client.try_send("POST", "/v1/acquire", body.to_string()).await else { return false };
    let from = Instant::now();
    if granted.status != 200 {
        return false;
    }
    // The proxy began to wait after it was asked, and counted the rest of the lease after it had waited.
    let told = Duration::from_millis(granted.number("waited_ms") + granted.number("expires_in_ms"));
    let mut held = held(&granted, &by, asked, from, asked + told);
    pause_ms(rand::random_range(0..60)).await;
    // Told too late to be certain of anything, as by a proxy that was paused: an empty time.
    held.until = held.until.min(Instant::now());
    world.note(&resource, held);
    let id = json!({"lease_id": granted.json["lease_id"]}).to_string();
    let through = if rand::random_bool(0.5) { &client } else { &other };
    let _ = tokio::time::timeout(Duration::from_secs(1), through.try_send("POST", "/v1/release", id)).await;
    true
}

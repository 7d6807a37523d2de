//! Clients that lock a few keys without end, and the checks of what they were told: promises 1 and 2.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::{Client, fresh, within};

const CLIENTS: usize = 16;
const KEYS: usize = 3;
/// Grants between two faults.
const ROUND: usize = 60;

/// What a client was told of a lease, and what it did with it.
struct Held {
    token: u64,
    asked: Instant,
    /// When the client began to be certain, and when that ended.
    from: Instant,
    until: Instant,
}

/// Clients that never stop, and what they were told.
pub struct World {
    shared: Arc<Shared>,
    clients: Vec<JoinHandle<()>>,
}

struct Shared {
    keys: Vec<String>,
    proxies: Mutex<Vec<SocketAddr>>,
    held: Mutex<HashMap<String, Vec<Held>>>,
    /// Whether the store may forget what it has granted: a replica takes the place of its source.
    forgets: AtomicBool,
    stop: CancellationToken,
}

impl World {
    /// Starts clients of these two proxies.
    pub fn start(proxies: &[SocketAddr]) -> World {
        let shared = Arc::new(Shared {
            keys: (0..KEYS).map(|_| fresh("excluded")).collect(),
            proxies: Mutex::new(proxies.to_owned()),
            held: Mutex::default(),
            forgets: AtomicBool::new(false),
            stop: CancellationToken::new(),
        });
        let clients = (0..CLIENTS).map(|n| tokio::spawn(client(shared.clone(), n))).collect();
        World { shared, clients }
    }

    /// From now on a lease may be lost before its end, as long as its holder is told.
    pub fn may_forget(&self) {
        self.shared.forgets.store(true, Ordering::Relaxed);
    }

    pub fn set_address(&self, n: usize, address: SocketAddr) {
        self.shared.proxies.lock().unwrap()[n] = address;
    }

    /// Waits until so many leases more were granted that a fault in between has been met. A fail-over to a
    /// server that lacks what was granted takes 22 s where nothing is slow: the mark of the lost one (4 s),
    /// patience with it (10 s), the longest lease (2 s) and the margin (6 s).
    pub async fn another_round(&self) {
        let goal = self.shared.grants() + ROUND;
        let limit = Duration::from_secs(90);
        within(limit, "leases are granted again", async || self.shared.grants() >= goal).await;
    }

    /// How long after this moment the first lease was asked for and granted, and its token.
    pub fn first_grant_since(&self, moment: Instant) -> Option<(Duration, u64)> {
        let held = self.shared.held.lock().unwrap();
        let since = held.values().flatten().filter(|held| held.asked > moment);
        let first = since.min_by_key(|held| held.from)?;
        Some((first.from - moment, first.token))
    }

    /// Stops the clients, and checks what they were told.
    pub async fn finish(self) {
        self.shared.stop.cancel();
        for client in self.clients {
            client.await.expect("a client of the test");
        }
        self.shared.check();
    }
}

impl Shared {
    fn grants(&self) -> usize {
        self.held.lock().unwrap().values().map(Vec::len).sum()
    }

    fn note(&self, key: &str, held: Held) {
        self.held.lock().unwrap().entry(key.to_owned()).or_default().push(held);
    }

    fn check(&self) {
        for (key, mut held) in self.held.lock().unwrap().drain() {
            held.sort_by_key(|held| held.from);
            for pair in held.windows(2) {
                let (before, after) = (&pair[0], &pair[1]);
                let over = before.until.saturating_duration_since(after.from);
                assert!(over.is_zero(), "{key}: {} overlaps {} by {over:?}", before.token, after.token);
            }
            check_tokens(&key, &held);
        }
    }
}

/// A grant that was asked for after another one had arrived has the higher token.
fn check_tokens(key: &str, held: &[Held]) {
    let mut arrived: Vec<(Instant, u64)> = held.iter().map(|held| (held.from, held.token)).collect();
    arrived.sort_unstable();
    let mut asked: Vec<(Instant, u64)> = held.iter().map(|held| (held.asked, held.token)).collect();
    asked.sort_unstable();
    let (mut highest, mut next) = (0, 0);
    for (at, token) in asked {
        while arrived[next].0 < at {
            highest = highest.max(arrived[next].1);
            next += 1;
        }
        assert!(token > highest, "{key}: {token} was granted after {highest}");
    }
    let mut tokens: Vec<u64> = held.iter().map(|held| held.token).collect();
    tokens.sort_unstable();
    assert!(tokens.is_sorted_by(|a, b| a < b), "{key}: a token was given out twice");
}

/// Acquires, works, stalls, renews and releases until it is told to stop.
async fn client(world: Arc<Shared>, n: usize) {
    while !world.stop.is_cancelled() {
        let address = world.proxies.lock().unwrap()[rand::random_range(0..2)];
        let key = &world.keys[rand::random_range(0..KEYS)];
        let turn = tokio::time::timeout(Duration::from_secs(4), turn(&world, Client::new(address), key, n));
        if !matches!(turn.await, Ok(true)) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Whether a lease was had.
async fn turn(world: &Shared, client: Client, key: &str, n: usize) -> bool {
    let ttl_ms = rand::random_range(150..500);
    let wait_ms = if rand::random_bool(0.7) { 1_000 } else { 0 };
    let body = json!({"resource": key, "owner": format!("client-{n}"), "ttl_ms": ttl_ms, "wait_ms": wait_ms});
    let asked = Instant::now();
    let Some(granted) = client.try_send("POST", "/v1/acquire", body.to_string()).await else { return false };
    let from = Instant::now();
    if granted.status != 200 {
        return false;
    }
    // The proxy began to wait after it was asked, and counted the rest of the lease after it had waited.
    let told = Duration::from_millis(granted.number("waited_ms") + granted.number("expires_in_ms"));
    let mut held = Held { token: granted.number("token"), asked, from, until: asked + told };
    tokio::time::sleep(Duration::from_millis(rand::random_range(0..30))).await;
    if rand::random_bool(0.3) {
        renew(world, &client, &granted.json, &mut held).await;
    }
    if rand::random_bool(0.1) {
        // Stalled past its end: what it does then must do nothing to the next holder.
        tokio::time::sleep(held.until.saturating_duration_since(Instant::now())).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    held.until = held.until.min(Instant::now());
    world.note(key, held);
    let id = json!({"lease_id": granted.json["lease_id"]});
    client.try_send("POST", "/v1/release", id.to_string()).await;
    true
}

async fn renew(world: &Shared, client: &Client, lease: &Value, held: &mut Held) {
    let asked = Instant::now();
    let id = json!({"lease_id": lease["lease_id"]});
    let Some(renewed) = client.try_send("POST", "/v1/renew", id.to_string()).await else { return };
    match renewed.status {
        200 => held.until = held.until.max(asked + Duration::from_millis(renewed.number("expires_in_ms"))),
        410 if world.forgets.load(Ordering::Relaxed) => {}
        410 => assert!(Instant::now() >= held.until, "lost {} before its end", held.token),
        _ => {}
    }
}

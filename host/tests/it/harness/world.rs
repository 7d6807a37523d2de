//! Clients that lock a few resources without end, with each call through a random proxy, and the checks of what they
//! were told: promises 1 and 2.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::ledger::{Ledger, Noted, Said};
use super::{Client, Response, fresh, within};

/// The number of grants between two faults.
const ROUND: usize = 60;
/// The prefix of resources whose policy has the primitive `once`.
const ONCE: &str = "once/";
/// For how many seconds clients want the same work done.
const WANTED_S: u64 = 2;

/// The behaviour of the clients.
pub struct Habits {
    /// The prefix of the clients' names.
    pub name: String,
    pub clients: usize,
    pub resources: Vec<String>,
    pub ttl_ms: RangeInclusive<u64>,
    /// The ttl of one lease in twenty, whose holder stalls until after its end.
    pub long_ttl_ms: u64,
    /// The wait of seven in ten clients; the others do not wait.
    pub wait_ms: RangeInclusive<u64>,
    /// The pause between two calls.
    pub work_ms: RangeInclusive<u64>,
    /// How long a client waits for an answer: one or the other.
    pub patience: [Duration; 2],
}

/// Clients that never stop, with their ledger.
pub struct World {
    shared: Arc<Shared>,
    clients: Vec<JoinHandle<()>>,
}

struct Shared {
    habits: Habits,
    proxies: Mutex<Vec<SocketAddr>>,
    ledger: Ledger,
    /// Whether the store may forget grants, because a replica replaces its source.
    forgets: AtomicBool,
    stop: CancellationToken,
}

impl Default for Habits {
    fn default() -> Habits {
        Habits {
            name: "client".to_owned(),
            clients: 16,
            resources: (0..3).map(|_| fresh("excluded")).collect(),
            ttl_ms: 150..=500,
            long_ttl_ms: 2_000,
            wait_ms: 1_000..=1_000,
            work_ms: 0..=30,
            patience: [Duration::from_secs(2), Duration::from_secs(10)],
        }
    }
}

impl World {
    /// Starts clients of these proxies.
    pub fn start(proxies: &[SocketAddr]) -> World {
        World::with(proxies, Habits::default())
    }

    /// Starts clients with these habits.
    pub fn with(proxies: &[SocketAddr], habits: Habits) -> World {
        World::of(proxies, habits, Ledger::default())
    }

    /// Starts clients whose ledger also sends its records to another process.
    pub fn that_says(proxies: &[SocketAddr], habits: Habits, says: UnboundedSender<Said>) -> World {
        World::of(proxies, habits, Ledger::that_says(says))
    }

    fn of(proxies: &[SocketAddr], habits: Habits, ledger: Ledger) -> World {
        let clients = habits.clients;
        let shared = Arc::new(Shared {
            habits,
            proxies: Mutex::new(proxies.to_owned()),
            ledger,
            forgets: AtomicBool::new(false),
            stop: CancellationToken::new(),
        });
        let client = |n| {
            let by = format!("{}-{n}", shared.habits.name);
            let client = Locking { world: shared.clone(), by, known: HashMap::new() };
            tokio::spawn(client.run())
        };
        World { clients: (0..clients).map(client).collect(), shared }
    }

    /// From now on a lease may be lost before its end, but its holder must be told.
    pub fn may_forget(&self) {
        self.shared.forgets.store(true, Ordering::Relaxed);
    }

    /// Call this before the proxy is killed.
    pub fn killed(&self, address: SocketAddr) {
        self.ledger().killed(address);
    }

    /// Replaces the address of a proxy.
    pub fn set_address(&self, n: usize, address: SocketAddr) {
        self.shared.proxies.lock().unwrap()[n] = address;
    }

    /// Adds a proxy, at the end of the list.
    pub fn joins(&self, address: SocketAddr) {
        self.shared.proxies.lock().unwrap().push(address);
    }

    /// Removes the last proxy of the list.
    pub fn leaves(&self) {
        self.shared.proxies.lock().unwrap().pop();
    }

    /// Whether a client has found a broken promise and ended.
    pub fn is_broken(&self) -> bool {
        self.clients.iter().any(JoinHandle::is_finished)
    }

    /// Waits for enough further grants that clients have met the last fault. A fail-over to a server that lacks recent
    /// grants takes 22 s if nothing is slow: the in-use heartbeat of the lost server (4 s), patience with it (10 s), the
    /// longest lease (2 s) and the margin (6 s).
    pub async fn another_round(&self) {
        let goal = self.ledger().grants() + ROUND;
        let limit = Duration::from_secs(90);
        within(limit, "leases are granted again", async || self.ledger().grants() >= goal).await;
    }

    /// What the clients were told so far. Others may add records to it.
    pub fn ledger(&self) -> &Ledger {
        &self.shared.ledger
    }

    /// Stops the clients, and checks what they were told. Returns the keys that were granted.
    pub async fn finish(self) -> Vec<String> {
        let shared = self.shared.clone();
        self.stop().await;
        shared.ledger.check()
    }

    /// Stops the clients.
    pub async fn stop(self) {
        self.shared.stop.cancel();
        for client in self.clients {
            client.await.expect("a client of the test");
        }
    }
}

/// A client. It renews and releases a lease through any proxy.
struct Locking {
    world: Arc<Shared>,
    by: String,
    known: HashMap<SocketAddr, Client>,
}

impl Locking {
    /// Acquires, works, renews, stalls and releases, until it is told to stop.
    async fn run(mut self) {
        while !self.world.stop.is_cancelled() {
            if !self.turn().await {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    /// Makes one acquire and uses the lease. Returns whether there was a lease.
    async fn turn(&mut self) -> bool {
        let world = self.world.clone();
        let habits = &world.habits;
        let resource = &habits.resources[rand::random_range(0..habits.resources.len())];
        let is_long = rand::random_bool(0.05);
        let ttl_ms = if is_long { habits.long_ttl_ms } else { rand::random_range(habits.ttl_ms.clone()) };
        let wait_ms = if rand::random_bool(0.7) { rand::random_range(habits.wait_ms.clone()) } else { 0 };
        let (path, resource) = if resource.starts_with(ONCE) {
            // All client processes share the clock of the machine.
            let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is later").as_secs();
            ("/v1/once/begin", &format!("{resource}/{}", now / WANTED_S))
        } else {
            ("/v1/acquire", resource)
        };
        let body = json!({"resource": resource, "owner": self.by, "ttl_ms": ttl_ms, "wait_ms": wait_ms});
        let (asked, proxy) = (Instant::now(), self.any_proxy());
        let granted = match self.call(proxy, path, &body).await {
            Some(answer) if answer.status == 200 => answer,
            _ => return false,
        };
        if granted.json["state"] == "done" {
            world.ledger.outcome(resource, &granted.json["outcome"]);
            return false;
        }
        let noted = world.ledger.granted(resource, &self.by, asked, proxy, &granted);
        // Only the proxy that granted it knows a lock that ends with its proxy.
        let only = (granted.json["ends_with"] == "session").then_some(proxy);
        self.work().await;
        while rand::random_bool(0.4) {
            self.renew(&granted.json, only, &noted).await;
            self.work().await;
        }
        if is_long || rand::random_bool(0.1) {
            // The client stalls past the end of its lease. What it does then must not affect the next holder.
            tokio::time::sleep_until(world.ledger.until(&noted).into()).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        world.ledger.ended(&noted);
        let proxy = only.unwrap_or_else(|| self.any_proxy());
        let lease_id = &granted.json["lease_id"];
        if granted.json["state"] == "first" && rand::random_bool(0.8) {
            let outcome = json!(format!("{} under {}", self.by, granted.json["token"]));
            let finish = json!({"lease_id": lease_id, "outcome": outcome});
            let finished = self.call(proxy, "/v1/once/finish", &finish).await;
            if finished.is_some_and(|finished| finished.status == 200) {
                world.ledger.outcome(resource, &outcome);
            }
        } else {
            self.call(proxy, "/v1/release", &json!({"lease_id": lease_id})).await;
        }
        true
    }

    async fn renew(&mut self, lease: &Value, only: Option<SocketAddr>, noted: &Noted) {
        let world = self.world.clone();
        let (asked, proxy) = (Instant::now(), only.unwrap_or_else(|| self.any_proxy()));
        let body = json!({"lease_id": lease["lease_id"]});
        let Some(renewed) = self.call(proxy, "/v1/renew", &body).await else { return };
        match renewed.status {
            200 => world.ledger.renewed(noted, asked, &renewed),
            // The session that the lock depended on is gone.
            410 if only.is_some() => world.ledger.ended(noted),
            410 if world.forgets.load(Ordering::Relaxed) => {}
            410 => {
                let left = world.ledger.until(noted).saturating_duration_since(Instant::now());
                assert!(left.is_zero(), "lost {lease} {left:?} before its end: {}", renewed.text);
            }
            _ => {}
        }
    }

    fn any_proxy(&self) -> SocketAddr {
        let proxies = self.world.proxies.lock().unwrap();
        proxies[rand::random_range(0..proxies.len())]
    }

    async fn work(&self) {
        let ms = rand::random_range(self.world.habits.work_ms.clone());
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }

    /// Makes a call. `None` if no answer comes in time. Each call has its own time limit, so earlier grants are
    /// recorded by then.
    async fn call(&mut self, address: SocketAddr, path: &str, body: &Value) -> Option<Response> {
        let client = self.known.entry(address).or_insert_with(|| Client::new(address));
        let limit = self.world.habits.patience[rand::random_range(0..2)];
        tokio::time::timeout(limit, client.try_send("POST", path, body.to_string())).await.ok()?
    }
}

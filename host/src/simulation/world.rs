//! One run: servers, proxies and clients, until the time is over or a promise is broken.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use tokio::sync::broadcast;
use tokio::task::JoinSet;

use super::check::{Checks, Violation};
use super::clients::{Client, request};
use super::host::Host;
use super::network::{Fate, Network, Route, Trip};
use super::server::Server;
use super::simulate;
use crate::clock;
use crate::config::{EngineLimits, Limits, PolicyConfig, PolicySource, Route as PolicyRoute, StoreConfig};
use crate::fleet::{self, Fleet};
use crate::lock::Space;
use crate::mysql::{Advisory, MysqlStore, Row};
use crate::policy::{Engine, Policies};
use crate::service::{Alone, Notice, NoticeKind, Parts, Request, Service};
use crate::store::{Router, Store};
use crate::telemetry::Metrics;

/// What a run is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    pub seed: u64,
    pub proxies: usize,
    pub clients: usize,
    /// Resources of each primitive.
    pub resources: usize,
    /// For how long clients ask, in virtual time.
    pub lasts: Duration,
    /// Of 1,000 packets, how many have a fault.
    pub packet_faults_per_mille: u32,
    /// Of 1,000 pauses of some seconds, how many end with a fault of a server or of a proxy.
    pub process_faults_per_mille: u32,
    /// Whether the report has all that happened.
    pub tells_all: bool,
}

impl Options {
    /// What a seed decides of itself.
    pub fn of(seed: u64) -> Options {
        let mut random = StdRng::seed_from_u64(seed);
        Options {
            seed,
            proxies: random.random_range(1..=3),
            clients: random.random_range(2..=24),
            resources: random.random_range(1..=4),
            lasts: Duration::from_secs(random.random_range(10..=60)),
            packet_faults_per_mille: *[0, 1, 5, 20].choose(&mut random).unwrap_or(&0),
            process_faults_per_mille: *[0, 300, 1_000].choose(&mut random).unwrap_or(&0),
            tells_all: false,
        }
    }
}

/// What a run has come to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub grants: u64,
    pub renewals: u64,
    pub releases: u64,
    /// By kind.
    pub faults: BTreeMap<String, u64>,
    /// A number that two runs have in common that were the same.
    pub fingerprint: u64,
    /// What happened, as lines of text.
    pub time_line: String,
}

/// A run that broke a promise.
#[derive(Clone, Debug)]
pub struct Failed {
    pub options: Options,
    pub violation: Violation,
    pub time_line: String,
    /// As [`Report::fingerprint`].
    pub fingerprint: u64,
}

/// Runs one world to its end.
///
/// # Errors
/// The first promise that was broken.
///
/// # Panics
/// Where another simulation runs on this thread.
pub fn run(options: &Options) -> Result<Report, Box<Failed>> {
    simulate(options.seed, async { World::start(options).run().await })
}

/// An exchange on which a lock rests is given up after this at the latest.
const LONGEST_EXCHANGE: Duration = Duration::from_secs(11);

/// The network between all proxies and one server.
struct FaultyNetwork {
    random: Mutex<StdRng>,
    packet_faults_per_mille: AtomicU64,
    /// By kind, how many there were.
    happened: Mutex<BTreeMap<String, u64>>,
    /// When a connection last broke.
    broke_at: AtomicU64,
}

impl FaultyNetwork {
    /// A connection breaks, or is given up later.
    fn breaks(&self, within: Duration) {
        self.broke_at.fetch_max(clock::now().0 + within.as_micros() as u64, Relaxed);
    }

    fn count(&self, kind: &str) {
        *lock(&self.happened).entry(kind.to_owned()).or_default() += 1;
    }
}

impl Network for FaultyNetwork {
    fn trip(&self) -> Trip {
        let mut random = lock(&self.random);
        let mut way = || Duration::from_micros(random.random_range(100..1_000));
        let (there, back) = (way(), way());
        if u64::from(random.random_range(0..1_000_u32)) >= self.packet_faults_per_mille.load(Relaxed) {
            return Trip { there, back, fate: Fate::Delivered };
        }
        let fates = [Fate::Refused, Fate::Lost, Fate::Unanswered, Fate::AnswerLost];
        let slow = Duration::from_millis(random.random_range(1..6_000));
        self.breaks(LONGEST_EXCHANGE);
        match random.random_range(0..6_u32) {
            4 => {
                self.count("a packet is slow");
                Trip { there: slow, back, fate: Fate::Delivered }
            }
            5 => {
                self.count("an answer is slow");
                Trip { there, back: slow, fate: Fate::Delivered }
            }
            n => {
                let fate = fates[n as usize];
                self.count(match fate {
                    Fate::Refused => "a connection breaks before its packet",
                    Fate::Lost => "a packet is lost",
                    Fate::Unanswered => "a connection breaks before its answer",
                    _ => "an answer is lost",
                });
                Trip { there, back, fate }
            }
        }
    }
}

/// One life of a proxy.
#[derive(Clone)]
pub struct Proxy {
    pub index: usize,
    pub host: Arc<Host>,
    pub service: Service,
    fleet: Fleet,
    store: Arc<MysqlStore>,
    notices: Arc<Mutex<broadcast::Receiver<Notice>>>,
}

struct World {
    options: Options,
    server: Arc<Server>,
    network: Arc<FaultyNetwork>,
    shared: Arc<Shared>,
}

/// What clients share.
pub struct Shared {
    network: Arc<FaultyNetwork>,
    proxies: Mutex<Vec<Proxy>>,
    pub checks: Mutex<Checks>,
    violation: Mutex<Option<Violation>>,
    pub over: AtomicBool,
}

impl Shared {
    pub fn check(&self, check: impl FnOnce(&mut Checks) -> Result<(), Violation>) {
        let mut checks = lock(&self.checks);
        for proxy in lock(&self.proxies).iter() {
            let mut notices = lock(&proxy.notices);
            while let Ok(notice) = notices.try_recv() {
                if notice.kind == NoticeKind::Lost {
                    checks.note(
                        clock::now(),
                        format!("{} is told that {} is lost", notice.owner, notice.key.as_str()),
                    );
                    checks.session_lost(&notice.owner, notice.token);
                }
            }
        }
        checks.broke_at = crate::lock::Instant(self.network.broke_at.load(Relaxed));
        let checked = check(&mut checks);
        drop(checks);
        if let Err(violation) = checked {
            self.broken(violation);
        }
    }

    pub fn broken(&self, violation: Violation) {
        lock(&self.violation).get_or_insert(violation);
        self.over.store(true, Relaxed);
    }

    pub fn proxy(&self, index: usize) -> Proxy {
        lock(&self.proxies)[index].clone()
    }

    /// Whether a call may have taken longer than it should: its proxy stood still.
    pub fn was_paused(&self) -> bool {
        lock(&self.proxies).iter().any(|proxy| proxy.host.was_paused())
    }

    fn all(&self) -> Vec<Proxy> {
        lock(&self.proxies).clone()
    }

    pub fn note(&self, what: String) {
        lock(&self.checks).note(clock::now(), what);
    }
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The longest lease that clients ask for.
pub const LONGEST_TTL_MS: u32 = 3_000;
pub const TIMEOUT_MS: u32 = 5_000;

/// Policies, with the primitive of each.
pub const POLICIES: [&str; 3] = ["lease", "advisory", "row"];

fn policies() -> Policies {
    // One engine for all runs: what it has compiled stays.
    static ENGINE: OnceLock<(Engine, Policies)> = OnceLock::new();
    let (engine, _) = ENGINE.get_or_init(|| {
        let limits = EngineLimits { instances: 4, time: Duration::from_secs(60), ..EngineLimits::default() };
        let engine = Engine::new(&limits).unwrap_or_else(|error| panic!("no engine: {error}"));
        let loaded = load(&engine);
        (engine, loaded)
    });
    load(engine)
}

fn load(engine: &Engine) -> Policies {
    let policy = |name: &&str| PolicyConfig {
        name: (*name).to_owned(),
        source: PolicySource::Builtin("default".to_owned()),
        settings: [("primitive".to_owned(), (*name).into())].into_iter().collect(),
    };
    let configs: Vec<PolicyConfig> = POLICIES.iter().map(policy).collect();
    let loaded = Policies::load(engine, &configs, &limits(), &Metrics::default());
    loaded.unwrap_or_else(|error| panic!("{error:?}"))
}

fn routes() -> Vec<PolicyRoute> {
    let route = |name: &&str| PolicyRoute { resource: format!("{name}/*"), policy: (*name).to_owned() };
    POLICIES.iter().map(route).collect()
}

fn limits() -> Limits {
    Limits { max_ttl_ms: 60_000, ..Limits::default() }
}

impl World {
    fn start(options: &Options) -> World {
        let server = Server::new("server-1");
        let network = Arc::new(FaultyNetwork {
            random: Mutex::new(StdRng::seed_from_u64(options.seed ^ 1)),
            packet_faults_per_mille: AtomicU64::new(0),
            happened: Mutex::default(),
            broke_at: AtomicU64::new(0),
        });
        let shared = Arc::new(Shared {
            checks: Mutex::default(),
            violation: Mutex::default(),
            network: network.clone(),
            proxies: Mutex::default(),
            over: AtomicBool::new(false),
        });
        let world = World { options: options.clone(), server, network, shared };
        for index in 0..options.proxies {
            let proxy = world.start_proxy(index);
            lock(&world.shared.proxies).push(proxy);
        }
        world
    }

    fn start_proxy(&self, index: usize) -> Proxy {
        let host = Arc::new(Host::default());
        let (service, fleet, store) = host.enter(|| self.parts());
        let notices = Arc::new(Mutex::new(service.watch()));
        Proxy { index, host, service, fleet, store, notices }
    }

    fn parts(&self) -> (Service, Fleet, Arc<MysqlStore>) {
        let route = Route { server: self.server.clone(), network: self.network.clone() };
        let config = StoreConfig {
            lanes: 2,
            renewal_lanes: 1,
            timeout: Duration::from_millis(TIMEOUT_MS.into()),
            clean_after: Duration::from_secs(2),
            ..StoreConfig::default()
        };
        let metrics = Metrics::default();
        let store =
            Arc::new(MysqlStore::simulated(&config, vec![route], limits().max_ttl_ms, metrics.clone()));
        let registry = Arc::new(store.registry());
        let others: Vec<(Space, Arc<dyn Store>)> = vec![
            (Space::Advisory, Arc::new(Advisory::new(&store, config.batch, config.max_queued))),
            (Space::Row, Arc::new(Row::new(&store, config.row_connections, config.max_queued))),
        ];
        let router = Router::new(store.clone(), others);
        let policies = policies();
        let service = Service::start_closed(Parts {
            store: Arc::new(router),
            bell: Arc::new(Alone),
            policies: policies.clone(),
            routes: routes(),
            limits: limits(),
            store_timeout_ms: TIMEOUT_MS,
            metrics: metrics.clone(),
        });
        let fleet = Fleet::start(fleet::Parts {
            registry,
            service: service.clone(),
            policies,
            routes: routes(),
            naming: BTreeMap::new(),
            beat: Duration::from_secs(1),
            metrics,
            address: String::new(),
        });
        (service, fleet, store)
    }

    async fn run(self) -> Result<Report, Box<Failed>> {
        self.until_all_grant().await;
        self.network.packet_faults_per_mille.store(self.options.packet_faults_per_mille.into(), Relaxed);
        let mut clients = JoinSet::new();
        for n in 0..self.options.clients {
            let client = Client {
                name: format!("client-{n}"),
                random: StdRng::seed_from_u64(self.options.seed.wrapping_mul(1_000).wrapping_add(n as u64)),
                proxies: self.options.proxies,
                shared: self.shared.clone(),
                resources: self.options.resources,
            };
            clients.spawn(client.run());
        }
        let until = clock::now().plus_ms(self.options.lasts.as_millis() as u32);
        let mut random = StdRng::seed_from_u64(self.options.seed ^ 2);
        while clock::now() < until && !self.shared.over.load(Relaxed) {
            let pause = Duration::from_millis(random.random_range(500..5_000));
            tokio::time::sleep(pause.min(Duration::from_micros(until.us_since(clock::now())))).await;
            if random.random_range(0..1_000) < self.options.process_faults_per_mille {
                self.inject_fault(&mut random).await;
            }
        }
        self.shared.over.store(true, Relaxed);
        while let Some(ended) = clients.join_next().await {
            if let Err(error) = ended {
                self.shared.broken(Violation(format!("a client has panicked: {error}")));
            }
        }
        self.network.packet_faults_per_mille.store(0, Relaxed);
        if lock(&self.shared.violation).is_none() {
            self.nothing_is_left().await;
        }
        self.report().await
    }

    /// One fault of a server or of a proxy.
    async fn inject_fault(&self, random: &mut StdRng) {
        let index = random.random_range(0..self.options.proxies);
        let proxy = self.shared.proxy(index);
        match random.random_range(0..6_u32) {
            0 => {
                self.happened("a proxy is killed", &format!("proxy {index}"));
                proxy.host.kill();
                lock(&self.shared.checks).sessions_end(Some(index));
                tokio::time::sleep(Duration::from_millis(random.random_range(0..3_000))).await;
                let next = self.start_proxy(index);
                lock(&self.shared.proxies)[index] = next;
            }
            1 | 2 => {
                let pause_ms = *[100, 1_000, 4_000, 12_000, 40_000].choose(random).unwrap_or(&100);
                self.happened("a proxy is paused", &format!("proxy {index}, for {pause_ms} ms"));
                proxy.host.pause();
                tokio::time::sleep(Duration::from_millis(pause_ms)).await;
                self.shared.note(format!("proxy {index} goes on"));
                proxy.host.resume();
            }
            3 => {
                self.happened("the server crashes and is started again", "");
                self.server.crash();
                lock(&self.shared.checks).sessions_end(None);
            }
            4 => {
                let stall_ms = *[200, 2_000, 4_000, 9_000].choose(random).unwrap_or(&200);
                self.happened("commits stall", &format!("for {stall_ms} ms"));
                self.network.breaks(Duration::from_millis(stall_ms.into()) + LONGEST_EXCHANGE);
                self.server.stall_commits_until(clock::now().plus_ms(stall_ms).0);
            }
            _ => {
                let by_ms = *[-60_000, -2_000, -300, 300, 2_000, 60_000_i64].choose(random).unwrap_or(&300);
                self.happened("the server's clock is set", &format!("by {by_ms} ms"));
                self.server.set_clock(by_ms * 1_000);
            }
        }
    }

    fn happened(&self, kind: &str, how: &str) {
        self.network.count(kind);
        self.shared.note(format!("{kind} {how}"));
    }

    async fn until_all_grant(&self) {
        for proxy in self.shared.all() {
            let mut tries = 0;
            while let Err(error) = proxy.service.acquire(request("lease/warm", "nobody")).await {
                tries += 1;
                assert!(tries < 600, "a proxy does not grant: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }

    /// Once all leases have ended nobody holds anything, and everybody is granted everything.
    async fn nothing_is_left(&self) {
        tokio::time::sleep(Duration::from_millis(u64::from(4 * LONGEST_TTL_MS + 2 * TIMEOUT_MS) + 600_000))
            .await;
        for (n, proxy) in self.shared.all().into_iter().enumerate() {
            for policy in POLICIES {
                for resource in 0..self.options.resources {
                    let name = format!("{policy}/{resource}");
                    // Clean-up locks the rows that it looks at, for a moment.
                    let patient = Request { wait_ms: Some(2_000), ..request(&name, "the end") };
                    let asked = proxy.service.acquire(patient).await;
                    match asked {
                        Ok(lease) => drop(proxy.service.release(lease.lease).await),
                        Err(error) => {
                            let why = format!("{name} is not free at the end, through proxy {n}: {error}");
                            self.shared.broken(Violation(why));
                        }
                    }
                }
            }
        }
    }

    async fn report(self) -> Result<Report, Box<Failed>> {
        for proxy in self.shared.all() {
            proxy.fleet.leave().await;
            proxy.store.close().await;
        }
        let checks = lock(&self.shared.checks);
        if let Some(violation) = lock(&self.shared.violation).clone() {
            let time_line = checks.time_line(if self.options.tells_all { usize::MAX } else { 60 });
            return Err(Box::new(Failed {
                options: self.options.clone(),
                violation,
                time_line,
                fingerprint: fingerprint(&checks.history),
            }));
        }
        Ok(Report {
            grants: checks.grants,
            renewals: checks.renewals,
            releases: checks.releases,
            faults: lock(&self.network.happened).clone(),
            fingerprint: fingerprint(&checks.history),
            time_line: if self.options.tells_all { checks.time_line(usize::MAX) } else { String::new() },
        })
    }
}

fn fingerprint(history: &[(crate::lock::Instant, String)]) -> u64 {
    use std::hash::{Hash, Hasher};
    let mut hasher = std::hash::DefaultHasher::new();
    for (at, what) in history {
        (at.0, what).hash(&mut hasher);
    }
    hasher.finish()
}

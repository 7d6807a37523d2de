//! A single run: servers, proxies and clients, until the time is over or a promise is broken.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::broadcast;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::application;
use super::check::{Checks, Violation};
use super::clients::{Client, request};
use super::end;
use super::faults::{Fault, FaultyNetwork, Planned, Succession, Tally};
use super::network::Route;
use super::options::{Options, Second};
use super::pair::Pair;
use super::peers::{PeerClient, PeerNetwork};
use super::principals::{GRACE, rules};
use super::server::Server;
use super::simulate;
use crate::audit::Audit;
use crate::auth::Auth;
use crate::clock;
use crate::config::{FleetConfig, HttpLimits, Limits, UpstreamLimits, naming};
use crate::fleet::{self, Fleet};
use crate::guard::{Front, Guard};
use crate::latest;
use crate::lock::{Instant, Space};
use crate::mutex::Mutex;
use crate::mysql::{Advisory, MysqlStore, Row};
use crate::policy::Policies;
use crate::recording::Recorder;
use crate::service::{Notice, NoticeKind, Parts, Service};
use crate::store::{Bounds, Delegations, Member, Quorum, Router, Store};
use crate::telemetry::Metrics;
use crate::vital;
use crate::vital::process::Process;

mod changes;
mod parts;

use parts::{Edited, policies, routes, store_config};

/// The result of a run that broke no promise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub grants: u64,
    /// The number of events of each kind.
    pub counts: BTreeMap<&'static str, u64>,
    /// A hash of all events: runs with the same fingerprint were the same.
    pub fingerprint: u64,
    /// The events, as lines of text.
    pub time_line: String,
}

/// The result of a run that broke a promise.
#[derive(Clone, Debug)]
pub struct Failed {
    pub options: Options,
    pub violation: Violation,
    /// The time of the failure, counted from the start of the clients.
    pub at: Duration,
    pub time_line: String,
    /// See [`Report::fingerprint`].
    pub fingerprint: u64,
}

/// Runs one world to its end, or to the first promise that is broken. No other simulation may run on this thread.
pub fn run(options: &Options) -> Result<Report, Box<Failed>> {
    simulate(options.seed, async { World::start(options).run().await })
}

/// A proxy from its start to its end. A proxy that is started again is another one.
#[derive(Clone)]
pub struct Proxy {
    pub index: usize,
    /// Unique for each start of a proxy.
    pub life: u64,
    pub process: Arc<Process>,
    pub service: Service,
    /// Cancelled when the proxy shuts down: held connections are told.
    pub draining: CancellationToken,
    /// The front of its guarded routes.
    pub front: Arc<Front>,
    guard: Arc<Guard>,
    fleet: Fleet,
    pub auth: Auth,
    pub policies: Policies,
    /// The store, followed by the members of the quorum.
    pub stores: Vec<Arc<MysqlStore>>,
    notices: Arc<Mutex<broadcast::Receiver<Arc<Notice>>>>,
}

struct World {
    options: Options,
    /// The store's server, followed by the members of the quorum.
    servers: Vec<Arc<Server>>,
    /// The store's two servers, if it has a second one.
    pair: Option<Arc<Pair>>,
    /// The network of each proxy.
    networks: Vec<Arc<FaultyNetwork>>,
    peers: Arc<PeerNetwork>,
    /// The `life` of the next proxy.
    next_life: AtomicU64,
    /// The settings that were edited in the files of proxies: a proxy that starts later uses them.
    edited: Mutex<Edited>,
    /// The version of the names that the proxies' files give to guarded requests.
    naming: latest::Sender<u32>,
    /// The versions of the files of principals of the proxies.
    rules: Mutex<Vec<u64>>,
    /// Held while a proxy is paused, stopped or started.
    lives: Vec<tokio::sync::Mutex<()>>,
    shared: Arc<Shared>,
}

/// State that clients share.
pub struct Shared {
    pub servers: Vec<Arc<Server>>,
    proxies: Mutex<Vec<Proxy>>,
    pub checks: Mutex<Checks>,
    /// The first violation, and its time.
    violation: Mutex<Option<(Violation, Instant)>>,
    /// The time when the clients started.
    began: OnceLock<Instant>,
    pub tally: Arc<Tally>,
    pub over: AtomicBool,
}

impl Shared {
    /// Runs a check, after taking account of ended sessions and lost leases. A violation ends the run.
    pub fn check(&self, check: impl FnOnce(&mut Checks) -> Result<(), Violation>) {
        let mut checks = self.checks.lock();
        for server in &self.servers {
            checks.sessions_end(server.take_ended(), clock::now());
        }
        for proxy in self.proxies.lock().iter() {
            let mut notices = proxy.notices.lock();
            while let Ok(notice) = notices.try_recv() {
                if notice.kind == NoticeKind::Lost {
                    checks.note(
                        clock::now(),
                        format!("{} is told that {} is lost", notice.owner, notice.key.as_str()),
                    );
                }
            }
        }
        let servers = || {
            self.servers.iter().find_map(|server| server.broken()).map_or(Ok(()), |why| Err(Violation(why)))
        };
        let checked = check(&mut checks).and_then(|()| checks.time_passes()).and_then(|()| servers());
        drop(checks);
        if let Err(violation) = checked {
            self.broken(violation);
        }
    }

    pub fn broken(&self, violation: Violation) {
        let now = clock::now();
        self.checks.lock().ends(now, &violation);
        self.violation.lock().get_or_insert((violation, now));
        self.over.store(true, Relaxed);
    }

    pub fn is_broken(&self) -> bool {
        self.violation.lock().is_some()
    }

    pub fn proxy(&self, index: usize) -> Proxy {
        self.proxies.lock()[index].clone()
    }

    pub fn all(&self) -> Vec<Proxy> {
        self.proxies.lock().clone()
    }

    pub fn note(&self, what: String) {
        self.checks.lock().note(clock::now(), what);
    }
}

/// The time-out of the proxies' calls to the store.
pub const TIMEOUT_MS: u32 = 5_000;

/// How long a quorum operation whose majority is undecided waits for the remaining members.
const QUORUM_PATIENCE: Duration = Duration::from_millis(500);
/// How long a shutdown of a proxy waits for locks that would end with the proxy.
const DRAIN: Duration = Duration::from_secs(2);
/// How long operators wait for a change of a policy.
const CHANGE: Duration = Duration::from_secs(60);

impl World {
    fn start(options: &Options) -> World {
        let server = |n| Server::new(&format!("server-{n}"));
        let servers: Vec<Arc<Server>> = (1..=options.servers()).map(server).collect();
        let first = servers[0].clone();
        let pair = options.second.map(|second| Arc::new(Pair::of(second, first, options.second_ahead_ms)));
        let second = pair.as_ref().map(|pair| pair.second());
        let tally = Arc::new(Tally::default());
        let network = |n| Arc::new(FaultyNetwork::new(options.seed ^ (100 + n as u64), tally.clone()));
        let networks = (0..options.proxies).map(network).collect();
        let shared = Arc::new(Shared {
            servers: servers.iter().cloned().chain(second).collect(),
            checks: Mutex::new(Checks::new(options)),
            violation: Mutex::default(),
            began: OnceLock::new(),
            proxies: Mutex::default(),
            tally,
            over: AtomicBool::new(false),
        });
        application::begin(&shared, options);
        let lives = (0..options.proxies).map(|_| tokio::sync::Mutex::default()).collect();
        let peers = Arc::new(PeerNetwork::default());
        let world = World {
            options: options.clone(),
            servers,
            pair,
            networks,
            peers,
            next_life: AtomicU64::new(0),
            edited: Mutex::default(),
            naming: latest::Sender::new(0),
            rules: Mutex::new(vec![0; options.proxies]),
            lives,
            shared,
        };
        for index in 0..world.options.proxies {
            let proxy = world.start_proxy(index);
            world.shared.proxies.lock().push(proxy);
        }
        world
    }

    fn start_proxy(&self, index: usize) -> Proxy {
        let process = Arc::new(Process::new(self.options.late_ms));
        process.clone().enter(|| self.parts(index, process))
    }

    fn parts(&self, index: usize, process: Arc<Process>) -> Proxy {
        let config = store_config();
        let limits = Limits { max_ttl_ms: self.options.limit_ms(), ..Limits::default() };
        let metrics = Metrics::default();
        let route = |servers| Route { from: index, servers, network: self.networks[index].clone() }.named();
        let open = |(n, server): (usize, &Arc<Server>)| {
            let second = self.pair.iter().filter(|_| n == 0).map(|pair| pair.second());
            let servers = std::iter::once(server.clone()).chain(second);
            let routes = match self.options.second {
                Some(Second::Balanced) => vec![route(servers.collect())],
                _ => servers.map(|server| route(vec![server])).collect(),
            };
            Arc::new(MysqlStore::simulated(&config, routes, limits.max_ttl_ms, metrics.clone()))
        };
        let stores: Vec<Arc<MysqlStore>> = self.servers.iter().enumerate().map(open).collect();
        let store = stores[0].clone();
        let registry = Arc::new(store.registry());
        let mut others: Vec<(Space, Arc<dyn Store>)> = vec![
            (Space::Advisory, Arc::new(Advisory::new(&store, &config))),
            (Space::Row, Arc::new(Row::new(&store, &config))),
        ];
        if stores.len() > 1 {
            let member = |(n, store): (usize, &Arc<MysqlStore>)| Member {
                name: format!("member-{n}"),
                store: store.clone(),
            };
            let members = stores.iter().enumerate().skip(1).map(member).collect();
            let fleet = store.clone();
            let allowed = Arc::new(move || fleet.may_write_until());
            others.push((Space::Quorum, Arc::new(Quorum::new(members, QUORUM_PATIENCE, allowed))));
        }
        let policies = policies(&limits, &self.options, &self.edited.lock());
        let bounds = Bounds {
            longest_ms: limits.max_ttl_ms,
            drift_per_mille: limits.drift_per_mille,
            timeout: config.timeout,
            // Few, so that they are used up in a run.
            tokens: 8,
        };
        let delegations = Delegations::new(store.clone(), bounds, store.lives(), metrics.clone());
        let peers = PeerClient::new(&self.peers, index, self.options.seed);
        let address = peers.address().to_owned();
        let service = Service::start_closed(Parts {
            store: Arc::new(Router::new(Arc::new(delegations), others)),
            peers: Arc::new(peers),
            policies: policies.clone(),
            routes: routes(),
            limits: limits.clone(),
            store_timeout_ms: TIMEOUT_MS,
            metrics: metrics.clone(),
            recorder: Recorder::off(),
        });
        self.peers.join(&address, &process, &service);
        let (named, ttl_ms) = (self.naming.subscribe(), self.options.guarded_ttl_ms());
        let naming_now = *named.borrow();
        let guards = application::routes(naming_now, ttl_ms);
        let auth = Auth::new(&rules(self.rules.lock()[index]));
        let fleet = Fleet::start(fleet::Parts {
            registry,
            service: service.clone(),
            policies: policies.clone(),
            routes: routes(),
            naming: naming(&guards),
            config: FleetConfig::default(),
            metrics: metrics.clone(),
            audit: Audit::off(),
            address,
            auth: auth.clone(),
            grace: GRACE,
            peer_secret: latest::Sender::new(None),
        });
        let (upstreams, http) = (UpstreamLimits::default(), HttpLimits::default());
        let guard = Arc::new(Guard::new(&guards, &upstreams, service.clone(), limits, http, metrics));
        let front = Arc::new(guard.fronts().pop().unwrap_or_else(|| panic!("no listener")));
        vital::spawn(
            "the guarded routes",
            application::follow(guard.clone(), fleet.clone(), (naming_now, ttl_ms), named),
        );
        let notices = Arc::new(Mutex::new(service.watch().expect("it is the only reader")));
        let draining = CancellationToken::new();
        let life = self.next_life.fetch_add(1, Relaxed);
        Proxy {
            index,
            life,
            process,
            service,
            draining,
            front,
            guard,
            fleet,
            auth,
            policies,
            stores,
            notices,
        }
    }

    async fn run(self) -> Result<Report, Box<Failed>> {
        let world = Arc::new(self);
        let replicate = |pair: Arc<Pair>| tokio::spawn(async move { pair.replicate().await });
        let _replication = world.pair.clone().map(replicate).map(AbortOnDropHandle::new);
        world.until_all_grant().await;
        if let Some(pair) = &world.pair {
            pair.catch_up().await;
        }
        world.networks.iter().for_each(|network| network.fail(world.options.packet_faults_per_mille));
        let mut clients = JoinSet::new();
        for n in 0..world.options.clients {
            let client = Client::new(n, &world.options, world.shared.clone());
            clients.spawn(client.run());
        }
        let mut faults = JoinSet::new();
        for Planned { at_ms, fault } in world.options.faults.clone() {
            let world = world.clone();
            faults.spawn(async move {
                tokio::time::sleep(Duration::from_millis(at_ms.into())).await;
                if !world.shared.over.load(Relaxed) {
                    world.inject(&fault).await;
                }
            });
        }
        let began = *world.shared.began.get_or_init(clock::now);
        let until = began.plus_ms(world.options.lasts.as_millis() as u32);
        while clock::now() < until && !world.shared.over.load(Relaxed) {
            let left = Duration::from_micros(until.us_since(clock::now()));
            tokio::time::sleep(left.min(Duration::from_millis(100))).await;
            world.shared.checks.lock().rules_are(world.servers[0].recorded_rules(), clock::now());
        }
        world.shared.over.store(true, Relaxed);
        for (what, mut tasks) in [("a client", clients), ("a fault", faults)] {
            while let Some(ended) = tasks.join_next().await {
                if let Err(error) = ended {
                    world.shared.broken(Violation(format!("{what} has panicked: {error}")));
                }
            }
        }
        world.networks.iter().for_each(|network| network.heal());
        let latest = world.rules.lock().iter().copied().max().unwrap_or(0);
        (0..world.options.proxies).for_each(|proxy| world.deploy(proxy, latest));
        if !world.shared.is_broken() {
            end::no_lease_is_left_behind(&world.shared, &world.options).await;
        }
        // A proxy that was started with new names grants nothing while a proxy with the old names runs.
        if world.options.renames_routes() {
            for index in 0..world.options.proxies {
                world.start_again(index, true, 0).await;
            }
        }
        if !world.shared.is_broken() {
            end::nothing_is_left(&world.shared, &world.options).await;
        }
        world.report().await
    }

    /// Carries out a fault of a server or a proxy, or a change of a policy.
    async fn inject(&self, fault: &Fault) {
        self.shared.tally.count(fault.kind());
        self.shared.note(fault.to_string());
        match fault {
            Fault::Kill { proxy, down_ms } => {
                self.start_again(proxy % self.options.proxies, false, *down_ms).await;
            }
            Fault::Restart { proxy, down_ms } => {
                self.start_again(proxy % self.options.proxies, true, *down_ms).await;
            }
            Fault::Pause { proxy, ms } => {
                let index = proxy % self.options.proxies;
                let _life = self.lives[index].lock().await;
                let process = self.shared.proxy(index).process;
                process.pause();
                tokio::time::sleep(Duration::from_millis((*ms).into())).await;
                self.shared.note(format!("proxy {index} goes on"));
                process.resume();
            }
            Fault::CutOff { proxy, ms } => self.networks[proxy % self.options.proxies].cut(*ms),
            Fault::Silence { proxy, ms } => self.networks[proxy % self.options.proxies].silence(*ms),
            Fault::SlowSessions { proxy, ms } => {
                self.networks[proxy % self.options.proxies].slow_sessions(*ms);
            }
            Fault::Crash { server } => self.server(*server).crash(),
            Fault::KillSession { server, nth } => self.server(*server).kill_session(*nth),
            Fault::StallCommits { server, ms } => {
                self.server(*server).stall_commits_until(clock::now().plus_ms(*ms).0);
            }
            Fault::PauseServer { server, ms } => {
                self.server(*server).pause();
                tokio::time::sleep(Duration::from_millis((*ms).into())).await;
                self.shared.note(format!("server {server} goes on"));
                self.server(*server).go_on();
            }
            Fault::SetClock { server, by_ms } => {
                self.shared.checks.lock().is_clock_set = true;
                self.server(*server).set_clock(by_ms * 1_000);
            }
            Fault::FailOver { how, gap_ms, back_ms } => {
                let Some(pair) = &self.pair else { return };
                // A node may confirm a write that the other node has undone. Behind a load balancer, proxies may use
                // both nodes.
                let is_balanced = self.options.second == Some(Second::Balanced);
                if is_balanced || (*how != Succession::Planned && pair.loses_writes()) {
                    self.shared.checks.lock().has_lost_writes = true;
                }
                self.shared.checks.lock().is_clock_set |= self.options.second_ahead_ms != 0;
                pair.fail_over(*how, (*gap_ms, *back_ms)).await;
                self.shared.note("the fail-over is over".to_owned());
            }
            Fault::NameRoutes { naming } => drop(self.naming.send_replace(*naming)),
            Fault::Replace { proxy, policy, settings } => {
                let proxy = self.shared.proxy(proxy % self.options.proxies);
                let replaced = changes::replace(&proxy.policies, &proxy.fleet, policy, settings);
                self.change(&proxy, (policy, settings.global_order), replaced).await;
            }
            Fault::Canary { proxy, policy, settings, percent, every_ms } => {
                let proxy = self.shared.proxy(proxy % self.options.proxies);
                let terms = changes::terms(*percent, *every_ms);
                let begun = changes::canary(&proxy.policies, &proxy.fleet, (policy, settings), terms);
                self.change(&proxy, (policy, settings.global_order), begun).await;
            }
            Fault::Promote { proxy, policy } => {
                let proxy = self.shared.proxy(proxy % self.options.proxies);
                self.change(&proxy, (policy, false), changes::promote(&proxy.fleet, policy)).await;
            }
            Fault::Edit { policy, settings } => {
                self.is_replaced(policy);
                self.edited.lock().insert(*policy, settings.clone());
            }
            Fault::Deploy { proxy, version } => self.deploy(proxy % self.options.proxies, *version),
            Fault::RollBack { proxy, policy } => {
                let proxy = self.shared.proxy(proxy % self.options.proxies);
                self.change(&proxy, (policy, false), changes::roll_back(&proxy.fleet, policy)).await;
            }
        }
    }

    /// Gives a proxy a file of principals, unless it has a later one.
    fn deploy(&self, proxy: usize, version: u64) {
        let mut files = self.rules.lock();
        files[proxy] = files[proxy].max(version);
        self.shared.proxy(proxy).auth.replace(&rules(files[proxy]));
    }

    fn is_replaced(&self, policy: &'static str) {
        if !self.options.keep_names {
            self.shared.checks.lock().is_renamed(policy);
        }
    }

    /// Makes a change through a proxy, as an operator would. `in_order`: whether the policy has a global queue if the
    /// change goes live.
    async fn change(
        &self,
        proxy: &Proxy,
        (policy, in_order): (&'static str, bool),
        change: impl Future<Output = Result<String, String>> + Send + 'static,
    ) {
        self.is_replaced(policy);
        let begun = self.shared.checks.lock().change_begins(policy, in_order);
        let changed = tokio::time::timeout(CHANGE, proxy.process.run(change)).await;
        let is_live = matches!(&changed, Ok(Some(Ok(what))) if what == "Live");
        if self.shared.checks.lock().change_ends(policy, begun, is_live && in_order) {
            self.shared.tally.count("an order over all proxies begins while clients wait");
        }
        let (kind, what) = match changed {
            Ok(Some(Ok(what))) if is_live => ("a policy's change is live", what),
            Ok(Some(Ok(what))) => ("a policy's change goes on", what),
            Ok(Some(Err(why))) => ("a policy's change is refused", why),
            Ok(None) => ("a policy's change loses its proxy", "the proxy is gone".to_owned()),
            Err(_elapsed) => ("a policy's change is not answered", "no answer".to_owned()),
        };
        self.shared.tally.count(kind);
        self.shared.note(format!("{kind}, through proxy {}: {what}", proxy.index));
    }

    fn server(&self, index: usize) -> &Server {
        &self.servers[index % self.servers.len()]
    }

    async fn start_again(&self, index: usize, in_order: bool, after_ms: u32) {
        let _life = self.lives[index].lock().await;
        let proxy = self.shared.proxy(index);
        if in_order {
            drain(&proxy).await;
        }
        // The proxy's sessions end now, with the locks that depend on them.
        self.shared.checks.lock().proxy_ends(index);
        if in_order {
            let _ = proxy.process.run(leave(proxy.clone())).await;
        }
        proxy.process.kill();
        self.shared.note(format!("proxy {index} is gone"));
        tokio::time::sleep(Duration::from_millis(after_ms.into())).await;
        let next = self.start_proxy(index);
        self.shared.proxies.lock()[index] = next;
        self.shared.note(format!("proxy {index} is started"));
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

    async fn report(&self) -> Result<Report, Box<Failed>> {
        for proxy in self.shared.all() {
            leave(proxy).await;
        }
        let checks = self.shared.checks.lock();
        if let Some((violation, at)) = self.shared.violation.lock().clone() {
            let began = self.shared.began.get().copied().unwrap_or_default();
            let time_line = checks.time_line(if self.options.tells_all { usize::MAX } else { 60 });
            return Err(Box::new(Failed {
                options: self.options.clone(),
                violation,
                at: Duration::from_micros(at.us_since(began)),
                time_line,
                fingerprint: checks.fingerprint(),
            }));
        }
        Ok(Report {
            grants: checks.grants(),
            counts: self.shared.tally.all(),
            fingerprint: checks.fingerprint(),
            time_line: if self.options.tells_all { checks.time_line(usize::MAX) } else { String::new() },
        })
    }
}

/// The first steps of a proxy's shutdown.
async fn drain(proxy: &Proxy) {
    proxy.draining.cancel();
    let (service, guard) = (proxy.service.clone(), proxy.guard.clone());
    let drain = proxy.process.run(async move {
        service.drain().await;
        guard.drain().await;
        service.rested().await;
    });
    let _ = tokio::time::timeout(DRAIN, drain).await;
}

/// The last steps of a proxy's shutdown.
async fn leave(proxy: Proxy) {
    proxy.fleet.leave().await;
    for store in proxy.stores {
        store.close().await;
    }
}

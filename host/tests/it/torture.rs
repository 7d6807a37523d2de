//! Real proxies, servers and clients with random faults, for as long as `cargo xtask torture` says. Without it the
//! test fails.

use std::collections::BTreeMap;
use std::env;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::process::Signal;
use serde_json::Value;

use crate::harness::{self, Kind, Proxy, Settings, eventually, folder, signal};
use crate::policies::{RENAMED, default_policy, variant};

mod crowd;
mod database;
mod way;

use crowd::Crowd;
use database::{Database, Programs, Server, Setup};
use way::{Direction, Way};

/// From time to time one more proxy joins.
const PROXIES: usize = 3;
/// The number of client processes, and of clients in each.
const CLIENTS: (usize, usize) = (4, 60);
/// Resources of each primitive that many clients want at the same time.
const HOT: usize = 20;
/// Further resources of each primitive that few clients want at the same time. `row` has none, because each of its
/// locks takes a connection.
const COLD: usize = 200;
/// How many times each resource of `once` and `quorum` is in the list from which clients choose.
const RARE: usize = 2;
/// The number of faults between two checks of everything that clients were told. At a check, everything must work
/// again.
const ROUND: usize = 25;
/// The longest pause between two faults.
const PAUSE_MS: u64 = 8_000;
/// The longest time that a disk is full. A server may stop at any time while its disk is full.
const DISK_IS_FULL: Duration = Duration::from_secs(6);
/// The longest time until a server has carried out a statement that mends a fault.
const MENDED_WITHIN: Duration = Duration::from_secs(60);
/// The longest time until a proxy has shut down.
const STOPS_WITHIN: Duration = Duration::from_secs(60);

/// A proxy that is silent for 4 s counts as gone, and after a fail-over the wait for the leases of the lost server is
/// short. A delegation lasts 2 s longer than its leases, which have at most 2 s.
const SECTIONS: &str = r#"
[fleet]
beat_ms = 250
[limits]
max_ttl_ms = 4_000
"#;

/// The policy of a primitive, for resources whose names begin with the primitive's name.
fn section_of(primitive: &str) -> String {
    format!(
        "[policies.{primitive}]\npath = \"builtin:default\"\nsettings = {{ primitive = \"{primitive}\" }}\n\
         [[routes]]\nresource = \"{primitive}/*\"\npolicy = \"{primitive}\"\n"
    )
}

#[test]
#[ignore = "goes on for as long as asked: cargo xtask torture"]
fn no_promise_is_broken_by_faults() {
    let setup = match asked::<String>("SERVER").as_str() {
        "mysql" => Setup::One(Kind::Mysql),
        "mariadb" => Setup::One(Kind::Mariadb),
        "galera" => Setup::Galera,
        "group-replication" => Setup::Group,
        other => panic!("no server is called {other}"),
    };
    let length = Duration::from_secs_f64(asked::<f64>("MINUTES") * 60.0);
    let disk = env::var_os("LOCKKEEPER_TORTURE_DISK").map(PathBuf::from);
    let programs = Programs { server: asked("PROGRAM"), faketime: asked("FAKETIME"), disk };
    let delegate: String = asked("DELEGATE");
    harness::run_without_limit(torture(setup, programs, length, asked("SEED"), &delegate));
}

/// An option of `cargo xtask torture`.
fn asked<T: FromStr>(name: &str) -> T {
    let value = env::var(format!("LOCKKEEPER_TORTURE_{name}")).ok();
    value.and_then(|value| value.parse().ok()).expect("`cargo xtask torture` says what to do")
}

async fn torture(setup: Setup, programs: Programs, length: Duration, seed: u64, delegate: &str) {
    // Build the policy now, and not in the middle of the test.
    LazyLock::force(&RENAMED);
    let dir = folder();
    let mut torture = Torture::start(setup, &programs, dir.path(), seed, delegate).await;
    let began = Instant::now();
    while began.elapsed() < length {
        for _ in 0..ROUND {
            torture.one_fault().await;
            assert!(!torture.crowd.is_broken(), "a client was told what cannot be");
        }
        torture.mend_all().await;
        torture.crowd.another_round().await;
        torture.crowd.check().await;
        let (grants, faults) = (torture.crowd.ledger().grants(), torture.faults.values().sum::<u64>());
        eprintln!(
            "{:>5.1} min: {grants} grants checked, {faults} faults",
            began.elapsed().as_secs_f64() / 60.0
        );
    }
    torture.finish(began.elapsed()).await;
}

/// A proxy, with its connections to the servers.
struct Place {
    ways: Vec<Way>,
    settings: Settings,
    proxy: Proxy,
    is_paused: bool,
}

impl Place {
    /// `n` is unique. The proxies list the servers in different orders.
    async fn new(database: &Database, dir: &Path, n: usize, settings: &Settings) -> Place {
        let way = |(m, server): (usize, &Server)| Way::new(&server.url, &dir.join(format!("way-{n}-{m}")));
        let ways: Vec<Way> = database.servers.iter().enumerate().map(way).collect();
        let (main, quorum) = ways.split_at(database.main);
        let (before, from) = main.split_at(n % main.len());
        let url = from.iter().chain(before).map(|way| &*way.url).collect::<Vec<_>>().join(",");
        let mut settings = Settings { url, ..settings.clone() };
        for (m, way) in quorum.iter().enumerate() {
            settings.sections += &format!("[stores.s{m}]\nurl = \"{}\"\n", way.url);
        }
        let proxy = Proxy::with(settings.clone()).await;
        Place { ways, settings, proxy, is_paused: false }
    }
}

/// How a fault that lasts for a time ends.
#[derive(Clone, Copy, Debug)]
enum Mend {
    ProxyGoesOn(usize),
    /// The process of the server with this number continues.
    ServerGoesOn(usize, u32),
    /// A statement on the server with this number succeeds. It is repeated until it does.
    Statement(usize, &'static str),
    Writable(usize),
    DiskHasRoom(usize),
}

struct Torture {
    database: Database,
    dir: PathBuf,
    settings: Settings,
    places: Vec<Place>,
    crowd: Crowd,
    random: StdRng,
    began: Instant,
    /// The faults that must be mended, with their times.
    broken: Vec<(Instant, Mend)>,
    /// The number of faults of each kind.
    faults: BTreeMap<&'static str, u64>,
    pushes: u8,
    /// The number of proxies that have joined since the start.
    joined: usize,
}

impl Torture {
    async fn start(setup: Setup, programs: &Programs, dir: &Path, seed: u64, delegate: &str) -> Torture {
        let database = Database::start(setup, programs, dir).await;
        let policy = dir.join("policy.wasm");
        std::fs::write(&policy, default_policy()).expect("a file");
        // Galera has no GET_LOCK. A quorum has its own servers.
        let (primitives, rare) = match setup {
            Setup::Galera => (&["lease", "row"][..], &["once"][..]),
            Setup::Group => (&["lease", "advisory", "row"][..], &["once"][..]),
            Setup::One(_) => (&["lease", "advisory", "row"][..], &["once", "quorum"][..]),
        };
        let mut sections = format!(
            "[policies.default]\npath = \"{}\"\nsettings = {{ delegate = \"{delegate}\" }}\n{SECTIONS}",
            policy.display()
        );
        // The default policy serves `lease`.
        let others = primitives.iter().chain(rare).filter(|primitive| **primitive != "lease");
        sections.extend(others.map(|primitive| section_of(primitive)));
        let settings = Settings { sections, ..Settings::default() };
        let mut places = Vec::new();
        for n in 0..PROXIES {
            let place = Place::new(&database, dir, n, &settings).await;
            place.proxy.until_ready().await;
            places.push(place);
        }
        let addresses: Vec<_> = places.iter().map(|place| place.proxy.api_address()).collect();
        let of_each = |primitives: &'static [&'static str]| {
            move |n: usize| primitives.iter().map(move |primitive| format!("{primitive}/{n}"))
        };
        // Clients choose from the list at random. A hot resource is in the list several times.
        let hot = (0..COLD).map(|n| n % HOT).flat_map(of_each(primitives));
        let cold = (HOT..HOT + COLD).flat_map(of_each(primitives)).filter(|name| !name.starts_with("row/"));
        let rare = (0..RARE * HOT).map(|n| n % HOT).flat_map(of_each(rare));
        let resources: Vec<String> = hot.chain(cold).chain(rare).collect();
        let crowd = Crowd::start(dir, CLIENTS, &resources, &addresses).await;
        Torture {
            database,
            dir: dir.to_owned(),
            settings,
            places,
            crowd,
            random: StdRng::seed_from_u64(seed),
            began: Instant::now(),
            broken: Vec::new(),
            faults: BTreeMap::new(),
            pushes: 0,
            joined: 0,
        }
    }

    /// Makes a fault, and waits for a while. Lasting faults overlap with the next ones.
    async fn one_fault(&mut self) {
        let made = match self.random.random_range(0..100) {
            0..12 => self.kill_proxy().await,
            12..20 => self.stop_proxy().await,
            20..32 => self.pause_proxy(),
            32..36 => self.kill_server().await,
            36..42 => self.pause_server().await,
            42..54 => self.kill_session().await,
            54..61 => self.read_only(),
            61..66 => self.few_connections().await,
            66..76 => self.cut(),
            76..84 => self.lose_answers(),
            84..88 => self.stall(),
            88..91 => self.join_or_leave().await,
            91..94 => self.set_clock(),
            94..96 => self.fill_disk(),
            _ => self.push_policy(),
        };
        if let Some(fault) = made {
            *self.faults.entry(fault).or_default() += 1;
            eprintln!("{:>9.3} s: {fault}", self.began.elapsed().as_secs_f64());
        }
        let until = Instant::now() + self.ms(0, PAUSE_MS);
        while Instant::now() < until {
            self.mend_due().await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn ms(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.random.random_range(from..=to))
    }

    /// A random proxy.
    fn any(&mut self) -> usize {
        self.random.random_range(0..self.places.len())
    }

    /// A random server: usually one that all proxies use, sometimes a member of the quorum.
    fn any_server(&mut self) -> usize {
        let (main, all) = (self.database.main, self.database.servers.len());
        let is_of_quorum = main < all && self.random.random_bool(0.3);
        self.random.random_range(if is_of_quorum { main..all } else { 0..main })
    }

    /// A server of the cluster that may fail. A cluster works while the majority of its servers does, so only one
    /// server is broken at a time, and only after all servers have joined.
    async fn spare_server(&mut self) -> Option<usize> {
        let n = self.any_server();
        let is_spare = !self.database.is_cluster()
            || (!self.broken.iter().any(|(_, mend)| matches!(mend, Mend::ServerGoesOn(..)))
                && self.database.is_whole().await);
        is_spare.then_some(n)
    }

    async fn kill_proxy(&mut self) -> Option<&'static str> {
        let n = self.any();
        self.crowd.killed(self.places[n].proxy.api_address());
        self.places[n].proxy.kill();
        self.start_proxy(n).await;
        Some("kill -9 of a proxy")
    }

    async fn start_proxy(&mut self, n: usize) {
        let proxy = Proxy::with(self.places[n].settings.clone()).await;
        self.crowd.set_address(n, proxy.api_address()).await;
        self.places[n].proxy = proxy;
        self.places[n].is_paused = false;
    }

    async fn stop_proxy(&mut self) -> Option<&'static str> {
        let n = self.any();
        self.stop_in_order(n).await;
        self.start_proxy(n).await;
        Some("a proxy stops in order")
    }

    async fn stop_in_order(&mut self, n: usize) {
        self.crowd.killed(self.places[n].proxy.api_address());
        self.places[n].proxy.signal(Signal::TERM);
        self.places[n].proxy.signal(Signal::CONT);
        self.places[n].is_paused = false;
        let began = Instant::now();
        while tokio::time::timeout(Duration::from_millis(50), self.places[n].proxy.ended()).await.is_err() {
            assert!(began.elapsed() < STOPS_WITHIN, "a proxy does not stop: {}", self.places[n].proxy.log());
            self.mend_due().await;
        }
    }

    /// Adds a proxy, or removes the proxy that was added last.
    async fn join_or_leave(&mut self) -> Option<&'static str> {
        let last = self.places.len() - 1;
        if last < PROXIES {
            self.joined += 1;
            let place = Place::new(&self.database, &self.dir, PROXIES + self.joined, &self.settings).await;
            self.crowd.joins(place.proxy.api_address()).await;
            self.places.push(place);
            return Some("a proxy joins");
        }
        let in_order = self.random.random_bool(0.5);
        if in_order {
            self.stop_in_order(last).await;
        } else {
            self.crowd.killed(self.places[last].proxy.api_address());
        }
        self.crowd.leaves().await;
        self.places.truncate(last);
        Some(if in_order { "a proxy leaves for good" } else { "kill -9 of a proxy that does not come back" })
    }

    fn pause_proxy(&mut self) -> Option<&'static str> {
        let (n, length) = (self.any(), self.ms(50, 8_000));
        if self.places[n].is_paused {
            return None;
        }
        self.places[n].proxy.signal(Signal::STOP);
        self.places[n].is_paused = true;
        self.broken.push((Instant::now() + length, Mend::ProxyGoesOn(n)));
        Some("SIGSTOP of a proxy")
    }

    async fn kill_server(&mut self) -> Option<&'static str> {
        let n = self.spare_server().await?;
        self.database.servers[n].managed.pid()?;
        let since = Instant::now();
        self.database.servers[n].kill().await;
        self.sessions_are_lost(n, since);
        Some("kill -9 of a server")
    }

    async fn pause_server(&mut self) -> Option<&'static str> {
        let (n, length) = (self.spare_server().await?, self.ms(50, 6_000));
        let pid = self.database.servers[n].managed.pid()?;
        if self.broken.iter().any(|(_, mend)| matches!(mend, Mend::ServerGoesOn(..))) {
            return None;
        }
        signal(pid, Signal::STOP);
        self.broken.push((Instant::now() + length, Mend::ServerGoesOn(n, pid)));
        Some("SIGSTOP of a server")
    }

    async fn kill_session(&mut self) -> Option<&'static str> {
        let (n, since) = (self.any_server(), Instant::now());
        let any = "SELECT CAST(id AS CHAR) FROM information_schema.processlist WHERE user='lk' ORDER BY RAND() LIMIT 1";
        let rows = self.database.servers[n].ask(any).await?;
        let id: String = rows.into_iter().next().map(mysql_async::from_row)?;
        self.database.servers[n].ask(&format!("KILL CONNECTION {id}")).await?;
        self.sessions_are_lost(n, since);
        Some("KILL CONNECTION")
    }

    /// A replication group sets this option itself.
    fn read_only(&mut self) -> Option<&'static str> {
        let (n, length) = (self.any_server(), self.ms(50, 3_000));
        if self.database.setup == Setup::Group || !self.database.servers[n].turn_read_only() {
            return None;
        }
        self.broken.push((Instant::now() + length, Mend::Writable(n)));
        Some("a server is read-only")
    }

    async fn few_connections(&mut self) -> Option<&'static str> {
        let (n, m, length, since) = (self.any(), self.any_server(), self.ms(500, 3_000), Instant::now());
        self.broken.push((since + length, Mend::Statement(m, "SET GLOBAL max_connections=151")));
        self.database.servers[m].ask("SET GLOBAL max_connections=10").await?;
        self.places[n].ways[m].cut(Duration::ZERO);
        self.sessions_are_lost(m, since);
        Some("too many connections")
    }

    /// Sets a clock to up to half a minute before or after the machine's clock.
    fn set_clock(&mut self) -> Option<&'static str> {
        let ahead = f64::from(self.random.random_range(-30_000..=30_000)) / 1_000.0;
        let n = self.any_server();
        self.database.servers[n].set_clock(ahead)?;
        Some("the clock of a server is set")
    }

    fn fill_disk(&mut self) -> Option<&'static str> {
        let (n, length, since) = (self.any_server(), self.ms(50, 3_000), Instant::now());
        self.database.servers[n].fill_disk()?;
        // A server that cannot write its binary log stops by itself.
        self.sessions_are_lost(n, since);
        self.broken.push((since + length, Mend::DiskHasRoom(n)));
        Some("the disk is full")
    }

    fn cut(&mut self) -> Option<&'static str> {
        let (n, m, lingers, since) = (self.any(), self.any_server(), self.ms(0, 3_000), Instant::now());
        let at_once = self.random.random_bool(0.5);
        self.places[n].ways[m].cut(if at_once { Duration::ZERO } else { lingers });
        self.sessions_are_lost(m, since);
        Some(if at_once { "connections are cut" } else { "connections are cut, and the server keeps them" })
    }

    fn lose_answers(&mut self) -> Option<&'static str> {
        let (n, m) = (self.any(), self.any_server());
        // Locks on sessions are not written, so their connections survive.
        self.places[n].ways[m].lose_answers();
        Some("answers to writes are lost")
    }

    fn stall(&mut self) -> Option<&'static str> {
        let (n, m, length) = (self.any(), self.any_server(), self.ms(50, 6_000));
        let direction = if self.random.random_bool(0.5) { Direction::ToServer } else { Direction::ToProxy };
        self.places[n].ways[m].stall(direction, length);
        Some(match direction {
            Direction::ToServer => "nothing reaches the server",
            Direction::ToProxy => "no answer reaches a proxy",
        })
    }

    /// Renames keys back and forth. The test does not wait for the answer, because the change may have to wait for a
    /// proxy.
    fn push_policy(&mut self) -> Option<&'static str> {
        let n = self.any();
        self.pushes = self.pushes.wrapping_add(1);
        let component = if self.pushes.is_multiple_of(2) { default_policy() } else { &**RENAMED };
        let (admin, component) = (self.places[n].proxy.admin(), variant(component, self.pushes));
        tokio::spawn(async move { admin.try_send("PUT", "/v1/policies/default", component).await });
        Some("a policy is replaced")
    }

    /// The sessions of all proxies on this server may have ended at some time since that moment. No lock depends on a
    /// session on a member of the quorum.
    fn sessions_are_lost(&self, server: usize, since: Instant) {
        if server >= self.database.main {
            return;
        }
        for place in &self.places {
            self.crowd.ledger().lost_sessions(place.proxy.api_address(), since);
        }
    }

    async fn mend_due(&mut self) {
        let now = Instant::now();
        let due: Vec<Mend> = self.broken.extract_if(.., |(at, _)| *at <= now).map(|(_, mend)| mend).collect();
        for mend in due {
            self.mend(mend).await;
        }
    }

    async fn mend_all(&mut self) {
        let began = Instant::now();
        while !self.broken.is_empty() {
            assert!(began.elapsed() < MENDED_WITHIN, "not mended: {:?}", self.broken);
            for (_, mend) in std::mem::take(&mut self.broken) {
                self.mend(mend).await;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn mend(&mut self, mend: Mend) {
        match mend {
            Mend::ProxyGoesOn(n) if self.places.get(n).is_some_and(|place| place.is_paused) => {
                self.places[n].proxy.signal(Signal::CONT);
                self.places[n].is_paused = false;
            }
            // The proxy was killed meanwhile.
            Mend::ProxyGoesOn(_) => {}
            Mend::ServerGoesOn(n, pid) if self.database.servers[n].managed.pid() == Some(pid) => {
                signal(pid, Signal::CONT);
            }
            Mend::ServerGoesOn(..) => {}
            Mend::DiskHasRoom(n) => {
                self.database.servers[n].empty_disk();
                self.sessions_are_lost(n, Instant::now().checked_sub(DISK_IS_FULL).expect("the machine ran"));
            }
            Mend::Writable(n) => {
                if !self.database.servers[n].turn_writable().await {
                    self.broken.push((Instant::now() + Duration::from_millis(200), mend));
                }
            }
            Mend::Statement(n, statement) => {
                if self.database.servers[n].ask(statement).await.is_none() {
                    self.broken.push((Instant::now() + Duration::from_millis(200), mend));
                }
            }
        }
    }

    /// Checks that everything is free in the end.
    async fn finish(mut self, length: Duration) {
        self.crowd.finish().await;
        let grants = self.crowd.ledger().grants();
        let client = self.places[0].proxy.client();
        eventually("nothing is held", async || {
            let listed = client.try_send("GET", "/v1/locks", "").await;
            let locks =
                listed.filter(|listed| listed.status == 200).map(|listed| listed.json["locks"].clone());
            let is_free = |lock: &Value| lock["holders"].as_array().is_none_or(Vec::is_empty);
            locks.is_some_and(|locks| locks.as_array().is_some_and(|locks| locks.iter().all(is_free)))
        })
        .await;
        eprintln!("no violation in {:.1} minutes: {grants} grants checked", length.as_secs_f64() / 60.0);
        for (kind, grants) in self.crowd.ledger().grants_by_kind() {
            eprintln!("{grants:>7}  {kind}");
        }
        let outcomes = self.crowd.ledger().outcomes();
        assert!(outcomes > 0, "nothing was done once");
        eprintln!("{outcomes:>7}  outcomes that clients were told");
        for (fault, times) in &self.faults {
            eprintln!("{times:>7}  {fault}");
        }
        self.database.stop().await;
    }
}

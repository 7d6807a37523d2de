//! Real proxies, a real server and real clients, with faults at random for as long as asked. `cargo xtask torture` says
//! for how long; alone the test fails.

use std::collections::BTreeMap;
use std::env;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use lockkeeper::mysql::managed::ManagedServer;
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::process::Signal;
use serde_json::Value;

use crate::faults::plain_account;
use crate::harness::{
    self, Habits, Kind, Proxy, Settings, World, crash, eventually, folder, own_server, signal,
};
use crate::policies::{RENAMED, default_policy, variant};

mod way;

use way::{Direction, Way};

/// There is one more now and then.
const PROXIES: usize = 3;
/// Faults between two looks at all that the clients were told, when everything must go on again.
const ROUND: usize = 25;
/// The longest pause between two faults.
const PAUSE_MS: u64 = 6_000;
/// How long a statement on the server may take that makes a fault.
const STATEMENT: Duration = Duration::from_secs(3);
/// How long a proxy may take to stop in order.
const STOPS_WITHIN: Duration = Duration::from_secs(60);

/// Three primitives, of which two rest on sessions, and a proxy that is silent for 4 s is gone.
const SECTIONS: &str = r#"
[fleet]
beat_ms = 250
[policies.advisory]
path = "builtin:default"
[policies.advisory.settings]
primitive = "advisory"
[policies.row]
path = "builtin:default"
[policies.row.settings]
primitive = "row"
[[routes]]
resource = "advisory/*"
policy = "advisory"
[[routes]]
resource = "row/*"
policy = "row"
"#;

#[test]
#[ignore = "goes on for as long as asked: cargo xtask torture"]
fn no_promise_is_broken_by_what_goes_wrong() {
    let kind = match asked::<String>("SERVER").as_str() {
        "mysql" => Kind::Mysql,
        "mariadb" => Kind::Mariadb,
        other => panic!("no server is called {other}"),
    };
    let length = Duration::from_secs_f64(asked::<f64>("MINUTES") * 60.0);
    harness::run_without_limit(torture(kind, length, asked("SEED")));
}

/// What `cargo xtask torture` asks for.
fn asked<T: FromStr>(name: &str) -> T {
    let value = env::var(format!("LOCKKEEPER_TORTURE_{name}")).ok();
    value.and_then(|value| value.parse().ok()).expect("`cargo xtask torture` says what to do")
}

async fn torture(kind: Kind, length: Duration, seed: u64) {
    // It is built now, and not in the midst.
    LazyLock::force(&RENAMED);
    let dir = folder();
    let mut torture = Torture::start(kind, dir.path(), seed).await;
    let began = Instant::now();
    while began.elapsed() < length {
        for _ in 0..ROUND {
            torture.one_fault().await;
            assert!(!torture.world.is_broken(), "a client was told what cannot be");
        }
        torture.mend_all().await;
        torture.world.another_round().await;
        torture.world.ledger().check();
        let (grants, faults) = (torture.world.ledger().grants(), torture.faults.values().sum::<u64>());
        eprintln!(
            "{:>5.1} min: {grants} grants checked, {faults} faults",
            began.elapsed().as_secs_f64() / 60.0
        );
    }
    torture.finish(began.elapsed()).await;
}

/// A proxy, and its way to the server.
struct Place {
    way: Way,
    proxy: Proxy,
    is_paused: bool,
}

impl Place {
    /// No two have the same number `n`.
    async fn new(url: &str, dir: &Path, n: usize, settings: &Settings) -> Place {
        let way = Way::new(url, &dir.join(format!("way-{n}")));
        let proxy = Proxy::with(Settings { url: way.url.clone(), ..settings.clone() }).await;
        Place { way, proxy, is_paused: false }
    }
}

/// How a fault ends that lasts for a time.
#[derive(Clone, Copy, Debug)]
enum Mend {
    ProxyGoesOn(usize),
    ServerGoesOn(u32),
    /// A statement, which is repeated until it succeeds.
    Statement(&'static str),
}

struct Torture {
    server: ManagedServer,
    /// It is kept: where the server has too many connections, no other can be opened.
    admin: Option<Conn>,
    /// With a password, for proxies.
    url: String,
    dir: PathBuf,
    settings: Settings,
    places: Vec<Place>,
    world: World,
    random: StdRng,
    /// What is to be mended, and when.
    broken: Vec<(Instant, Mend)>,
    /// How often each fault was made.
    faults: BTreeMap<&'static str, u64>,
    pushes: u8,
    /// How many proxies have joined since the start.
    joined: usize,
}

impl Torture {
    async fn start(kind: Kind, dir: &Path, seed: u64) -> Torture {
        let server = own_server(kind, dir).await;
        let url = plain_account(&server, "secret").await;
        let policy = dir.join("policy.wasm");
        std::fs::write(&policy, default_policy()).expect("a file");
        let sections = format!("[policies.default]\npath = \"{}\"\n{SECTIONS}", policy.display());
        let settings = Settings { sections, ..Settings::default() };
        let mut places = Vec::new();
        for n in 0..PROXIES {
            let place = Place::new(&url, dir, n, &settings).await;
            place.proxy.until_ready().await;
            places.push(place);
        }
        let addresses: Vec<_> = places.iter().map(|place| place.proxy.api_address()).collect();
        let of_each = |n: usize| ["lease", "advisory", "row"].map(|primitive| format!("{primitive}/{n}"));
        let habits =
            Habits { clients: 64, resources: (0..10).flat_map(of_each).collect(), ..Habits::default() };
        Torture {
            server,
            admin: None,
            url,
            dir: dir.to_owned(),
            settings,
            places,
            world: World::with(&addresses, habits),
            random: StdRng::seed_from_u64(seed),
            broken: Vec::new(),
            faults: BTreeMap::new(),
            pushes: 0,
            joined: 0,
        }
    }

    /// Makes a fault, and waits for a while. Faults that last overlap the next ones.
    async fn one_fault(&mut self) {
        let made = match self.random.random_range(0..100) {
            0..12 => self.kill_proxy().await,
            12..20 => self.stop_proxy().await,
            20..32 => self.pause_proxy(),
            32..36 => self.kill_server().await,
            36..44 => self.pause_server(),
            44..56 => self.kill_session().await,
            56..64 => self.read_only().await,
            64..70 => self.few_connections().await,
            70..80 => self.cut(),
            80..88 => self.lose_answers(),
            88..92 => self.stall(),
            92..95 => self.join_or_leave().await,
            _ => self.push_policy(),
        };
        if let Some(fault) = made {
            *self.faults.entry(fault).or_default() += 1;
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

    fn any(&mut self) -> usize {
        self.random.random_range(0..self.places.len())
    }

    async fn kill_proxy(&mut self) -> Option<&'static str> {
        let n = self.any();
        self.world.killed(self.places[n].proxy.api_address());
        self.places[n].proxy.kill();
        self.start_proxy(n).await;
        Some("kill -9 of a proxy")
    }

    async fn start_proxy(&mut self, n: usize) {
        let url = self.places[n].way.url.clone();
        let proxy = Proxy::with(Settings { url, ..self.settings.clone() }).await;
        self.world.set_address(n, proxy.api_address());
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
        self.world.killed(self.places[n].proxy.api_address());
        self.places[n].proxy.signal(Signal::TERM);
        self.places[n].proxy.signal(Signal::CONT);
        self.places[n].is_paused = false;
        let began = Instant::now();
        while tokio::time::timeout(Duration::from_millis(50), self.places[n].proxy.ended()).await.is_err() {
            assert!(began.elapsed() < STOPS_WITHIN, "a proxy does not stop: {}", self.places[n].proxy.log());
            self.mend_due().await;
        }
    }

    /// A proxy more, or the one that came last less.
    async fn join_or_leave(&mut self) -> Option<&'static str> {
        let last = self.places.len() - 1;
        if last < PROXIES {
            self.joined += 1;
            let place = Place::new(&self.url, &self.dir, PROXIES + self.joined, &self.settings).await;
            self.world.joins(place.proxy.api_address());
            self.places.push(place);
            return Some("a proxy joins");
        }
        let in_order = self.random.random_bool(0.5);
        if in_order {
            self.stop_in_order(last).await;
        } else {
            self.world.killed(self.places[last].proxy.api_address());
        }
        self.world.leaves();
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
        self.server.pid()?;
        let since = Instant::now();
        crash(&self.server).await;
        self.sessions_are_lost(since);
        Some("kill -9 of the server")
    }

    fn pause_server(&mut self) -> Option<&'static str> {
        let (pid, length) = (self.server.pid()?, self.ms(50, 6_000));
        if self.broken.iter().any(|(_, mend)| matches!(mend, Mend::ServerGoesOn(_))) {
            return None;
        }
        signal(pid, Signal::STOP);
        self.broken.push((Instant::now() + length, Mend::ServerGoesOn(pid)));
        Some("SIGSTOP of the server")
    }

    async fn kill_session(&mut self) -> Option<&'static str> {
        let since = Instant::now();
        let any = "SELECT CAST(id AS CHAR) FROM information_schema.processlist WHERE user='lk' ORDER BY RAND() LIMIT 1";
        let rows = self.ask(any).await?;
        let id: String = rows.into_iter().next().map(mysql_async::from_row)?;
        self.ask(&format!("KILL CONNECTION {id}")).await?;
        self.sessions_are_lost(since);
        Some("KILL CONNECTION")
    }

    async fn read_only(&mut self) -> Option<&'static str> {
        let length = self.ms(50, 3_000);
        self.broken.push((Instant::now() + length, Mend::Statement("SET GLOBAL read_only=0")));
        self.ask("SET GLOBAL read_only=1").await?;
        Some("the server is read-only")
    }

    async fn few_connections(&mut self) -> Option<&'static str> {
        let (n, length, since) = (self.any(), self.ms(500, 3_000), Instant::now());
        self.broken.push((Instant::now() + length, Mend::Statement("SET GLOBAL max_connections=151")));
        self.ask("SET GLOBAL max_connections=10").await?;
        self.places[n].way.cut(Duration::ZERO);
        self.sessions_are_lost(since);
        Some("too many connections")
    }

    fn cut(&mut self) -> Option<&'static str> {
        let (n, lingers, since) = (self.any(), self.ms(0, 3_000), Instant::now());
        let at_once = self.random.random_bool(0.5);
        self.places[n].way.cut(if at_once { Duration::ZERO } else { lingers });
        self.sessions_are_lost(since);
        Some(if at_once { "connections are cut" } else { "connections are cut, and the server keeps them" })
    }

    fn lose_answers(&mut self) -> Option<&'static str> {
        let n = self.any();
        // Locks of sessions are not written, so their connections last.
        self.places[n].way.lose_answers();
        Some("answers to writes are lost")
    }

    fn stall(&mut self) -> Option<&'static str> {
        let (n, length) = (self.any(), self.ms(50, 6_000));
        let direction = if self.random.random_bool(0.5) { Direction::ToServer } else { Direction::ToProxy };
        self.places[n].way.stall(direction, length);
        Some(match direction {
            Direction::ToServer => "nothing reaches the server",
            Direction::ToProxy => "no answer reaches a proxy",
        })
    }

    /// Names of keys go back and forth. Nobody waits for the answer: the change may have to wait for a proxy.
    fn push_policy(&mut self) -> Option<&'static str> {
        let n = self.any();
        self.pushes = self.pushes.wrapping_add(1);
        let component = if self.pushes.is_multiple_of(2) { default_policy() } else { &**RENAMED };
        let (admin, component) = (self.places[n].proxy.admin(), variant(component, self.pushes));
        tokio::spawn(async move { admin.try_send("PUT", "/v1/policies/default", component).await });
        Some("a policy is replaced")
    }

    /// Of any proxy, at some time since that moment.
    fn sessions_are_lost(&self, since: Instant) {
        for place in &self.places {
            self.world.ledger().lost_sessions(place.proxy.api_address(), since);
        }
    }

    /// `None` where the server does not answer.
    async fn ask(&mut self, statement: &str) -> Option<Vec<mysql_async::Row>> {
        let (url, kept) = (self.server.url(), self.admin.take());
        let asked = async {
            if let Some(mut conn) = kept
                && let Ok(rows) = conn.query(statement).await
            {
                return Ok((conn, rows));
            }
            let mut conn = Conn::from_url(url).await?;
            let rows = conn.query(statement).await?;
            Ok::<_, mysql_async::Error>((conn, rows))
        };
        let (conn, rows) = tokio::time::timeout(STATEMENT, asked).await.ok()?.ok()?;
        self.admin = Some(conn);
        Some(rows)
    }

    async fn mend_due(&mut self) {
        let now = Instant::now();
        let due: Vec<Mend> = self.broken.extract_if(.., |(at, _)| *at <= now).map(|(_, mend)| mend).collect();
        for mend in due {
            self.mend(mend).await;
        }
    }

    async fn mend_all(&mut self) {
        while !self.broken.is_empty() {
            for (_, mend) in std::mem::take(&mut self.broken) {
                self.mend(mend).await;
            }
        }
    }

    async fn mend(&mut self, mend: Mend) {
        match mend {
            Mend::ProxyGoesOn(n) if self.places.get(n).is_some_and(|place| place.is_paused) => {
                self.places[n].proxy.signal(Signal::CONT);
                self.places[n].is_paused = false;
            }
            // It was killed since.
            Mend::ProxyGoesOn(_) => {}
            Mend::ServerGoesOn(pid) if self.server.pid() == Some(pid) => signal(pid, Signal::CONT),
            Mend::ServerGoesOn(_) => {}
            Mend::Statement(statement) => {
                if self.ask(statement).await.is_none() {
                    self.broken.push((Instant::now() + Duration::from_millis(200), mend));
                }
            }
        }
    }

    /// Everything is free in the end.
    async fn finish(self, length: Duration) {
        let grants = self.world.ledger().grants();
        self.world.finish().await;
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
        for (fault, times) in &self.faults {
            eprintln!("{times:>7}  {fault}");
        }
        self.server.stop().await;
    }
}

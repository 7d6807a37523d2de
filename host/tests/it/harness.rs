//! Servers, proxies and clients for tests.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, OnceLock};
use std::time::{Duration, Instant};

use lockkeeper::config::{ManagedConfig, ServerBinary};
use lockkeeper::mysql::managed::ManagedServer;
use mysql_async::prelude::Queryable;
use rustix::process::{Pid, Signal, kill_process};

mod client;
mod ledger;
pub mod minisign;
mod proxy;
mod raw;
pub mod registry;
mod replicas;
mod statements;
mod upstream;
mod world;

pub use client::{Client, Lines, Response};
pub use ledger::{Ledger, Noted, Said, kind};
pub use proxy::{Proxy, Settings, lockkeeper, program};
pub use raw::{Raw, parsed};
pub use replicas::Node;
pub use statements::Statements;
pub use upstream::Upstream;
pub use world::{Habits, World};

/// The kind of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Mysql,
    Mariadb,
}

/// Defines a test for each of the functions on each server: `on_both! { fn name(kind) { … } }` with async bodies.
#[macro_export]
macro_rules! on_both {
    ($($(#[$meta:meta])* async fn $name:ident($kind:ident: Kind) $body:block)*) => {$(
        mod $name {
            use super::*;

            async fn test($kind: $crate::harness::Kind) $body

            $(#[$meta])*
            #[test]
            fn mysql() {
                $crate::harness::run(test($crate::harness::Kind::Mysql));
            }

            $(#[$meta])*
            #[test]
            fn mariadb() {
                $crate::harness::run(test($crate::harness::Kind::Mariadb));
            }
        }
    )*};
}

/// Runs a test on the runtime that all tests share. The time limit only ends tests that hang: some tests compile the
/// programs that they run, which takes minutes.
pub fn run(test: impl Future<Output = ()>) {
    runtime().block_on(async {
        let limit = Duration::from_secs(900);
        tokio::time::timeout(limit, test).await.expect("the test did not end within 15 minutes");
    });
}

/// As [`run`], for tests that run as long as they are told to.
pub fn run_without_limit(test: impl Future<Output = ()>) {
    runtime().block_on(test);
}

fn runtime() -> &'static tokio::runtime::Runtime {
    static RUNTIME: OnceLock<tokio::runtime::Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        heed_signals();
        tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime")
    })
}

/// Resets INT and QUIT to their default actions. A shell starts background jobs with these signals ignored, and the
/// programs of the tests would inherit that.
fn heed_signals() {
    for signal in [libc::SIGINT, libc::SIGQUIT] {
        // SAFETY: the default action runs no code of this process.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// A folder that is removed when the test ends. It is on a real disk, beside the test binary.
pub fn folder() -> tempfile::TempDir {
    let exe = std::env::current_exe().expect("this binary has a path");
    let beside = exe.parent().expect("it is in a folder");
    tempfile::Builder::new().prefix("it-").tempdir_in(beside).expect("a folder")
}

/// A name that no other test uses.
pub fn fresh(prefix: &str) -> String {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    format!("{prefix}-{}-{}", std::process::id(), SERIAL.fetch_add(1, Ordering::Relaxed))
}

/// A new database on the server that all tests of this kind share, for tests that do not disturb the server.
pub async fn database(kind: Kind) -> String {
    let server = shared(kind).await;
    let name = fresh("lk").replace('-', "_");
    server.url().replace("/lockkeeper?", &format!("/{name}?"))
}

async fn shared(kind: Kind) -> &'static ManagedServer {
    static MYSQL: tokio::sync::OnceCell<ManagedServer> = tokio::sync::OnceCell::const_new();
    static MARIADB: tokio::sync::OnceCell<ManagedServer> = tokio::sync::OnceCell::const_new();
    let cell = match kind {
        Kind::Mysql => &MYSQL,
        Kind::Mariadb => &MARIADB,
    };
    // The server lives as long as this process: then its guardian stops it. Its folder stays for the next run.
    cell.get_or_init(|| async move { start(kind, &lasting_folder(kind)).await }).await
}

/// The data folder of the shared server, under the target folder. It is created once and reused.
fn lasting_folder(kind: Kind) -> PathBuf {
    let exe = std::env::current_exe().expect("this binary has a path");
    let name = format!("it-shared-{kind:?}").to_lowercase();
    exe.parent().expect("it is in a folder").join(name)
}

/// Ports that nothing listens on now. Each port is returned only once. They are below the ports that Linux uses for
/// outgoing connections, because a connection of another test could take such a port before the server is up.
pub fn free_ports(count: usize) -> Vec<u16> {
    const PORTS: u64 = 20_000;
    static NEXT: LazyLock<AtomicU64> = LazyLock::new(|| AtomicU64::new(rand::random_range(0..PORTS)));
    let next = || 10_000 + (NEXT.fetch_add(1, Ordering::Relaxed) % PORTS) as u16;
    let mut free = std::iter::repeat_with(next)
        .take(PORTS as usize)
        .filter(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    let ports: Vec<u16> = free.by_ref().take(count).collect();
    assert_eq!(ports.len(), count, "no port is free");
    ports
}

/// A server for one test, which may kill and stop it.
pub async fn own_server(kind: Kind, dir: &Path) -> ManagedServer {
    start(kind, &dir.join("data")).await
}

async fn start(kind: Kind, data_dir: &Path) -> ManagedServer {
    start_with(kind, data_dir, &[]).await
}

async fn start_with(kind: Kind, data_dir: &Path, options: &[String]) -> ManagedServer {
    let binary = match kind {
        Kind::Mysql => ServerBinary::Mysql,
        Kind::Mariadb => ServerBinary::Mariadb,
    };
    let config = ManagedConfig { binary, data_dir: data_dir.to_owned() };
    ManagedServer::start_with(&config, options).await.unwrap_or_else(|error| panic!("{kind:?}: {error}"))
}

/// Runs statements on a server, without the proxy.
pub async fn sql(url: &str, statements: &str) -> Vec<mysql_async::Row> {
    let mut conn = mysql_async::Conn::from_url(url).await.expect("the server answers");
    let rows = conn.query(statements).await.expect(statements);
    conn.disconnect().await.expect("the server says goodbye");
    rows
}

/// Counts the deadlocks on a server.
pub struct Deadlocks {
    url: String,
    before: i64,
}

impl Deadlocks {
    /// Counts from now on.
    pub async fn from_now(url: &str) -> Deadlocks {
        Deadlocks { url: url.to_owned(), before: Deadlocks::count(url).await }
    }

    /// Checks the number of deadlocks. A failure shows the server's report of the last deadlock.
    pub async fn expect(&self, expected: i64) {
        let found = Deadlocks::count(&self.url).await - self.before;
        if found == expected {
            return;
        }
        let status: String = sql(&self.url, "SHOW ENGINE INNODB STATUS").await[0].get(2).expect("a text");
        let (_, last) = status.split_once("LATEST DETECTED DEADLOCK").unwrap_or_default();
        let last = last.split("\nTRANSACTIONS").next().unwrap_or_default();
        panic!("{found} deadlocks instead of {expected}, the last one: {last}");
    }

    async fn count(url: &str) -> i64 {
        let counted =
            "SELECT CAST(COUNT AS SIGNED) FROM information_schema.INNODB_METRICS WHERE NAME='lock_deadlocks'";
        sql(url, counted).await[0].get(0).expect("a number")
    }
}

/// Sends a signal to a process that the tests started. After STOP, returns when the process has stopped.
pub fn signal(pid: u32, signal: Signal) {
    let number = Pid::from_raw(pid.cast_signed()).expect("a process number");
    kill_process(number, signal).expect("a process of our own");
    while signal == Signal::STOP && !all_threads_stopped(pid) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// On a busy machine, other threads run on until one of the threads is scheduled and takes the signal.
fn all_threads_stopped(pid: u32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    threads.flatten().all(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['T', 't', 'Z', 'X']))
    })
}

/// Whether a process runs. A process that has ended and was not reaped does not run.
pub fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Kills the server, as a crash would. Its guardian starts it again.
pub async fn crash(server: &ManagedServer) {
    let pid = server.pid().expect("the server runs");
    signal(pid, Signal::KILL);
    eventually("the server is started again", async || server.pid().is_some_and(|now| now != pid)).await;
}

/// Waits until something is true, for up to 30 s. This is too short for anything that only happens when a lease of a
/// minute ends.
pub async fn eventually(what: &str, check: impl AsyncFnMut() -> bool) {
    within(Duration::from_secs(30), what, check).await;
}

/// Waits until something is true, up to a limit.
pub async fn within(limit: Duration, what: &str, mut check: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !check().await {
        assert!(began.elapsed() < limit, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

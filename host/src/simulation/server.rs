//! A database server in memory, with the part of MySQL that this program uses.
//!
//! It takes the same statements as a real server. It has transactions at READ COMMITTED, row locks with waits,
//! deadlocks, named locks, sessions that time out, and a clock that can be set. Any difference from MySQL and MariaDB
//! is a fault: the tests that every store passes run against this server as well.

use std::ops::Bound;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};

use tokio::sync::Notify;

use self::state::{SessionId, State};
use self::value::Value;
use crate::clock;
use crate::lock::Instant;
use crate::mutex::Mutex;

mod cluster;
mod evaluate;
mod execute;
mod parse;
mod replica;
mod state;
mod text;
pub mod value;

/// An error, with MySQL's error number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub code: u16,
    pub message: String,
}

impl Failure {
    /// An error with this number.
    pub fn new(code: u16, message: &str) -> Failure {
        Failure { code, message: message.to_owned() }
    }

    /// The error of a statement that this server does not know. The server must learn that statement.
    pub fn syntax(what: &str) -> Failure {
        Failure::new(1064, &format!("the simulated server does not understand {what}"))
    }
}

/// A server.
pub struct Server {
    pub name: String,
    state: Mutex<State>,
    /// Notifies of changes of locks or sessions.
    changed: Notify,
    /// The offset of the server's clock from true time, in microseconds.
    clock_off_us: AtomicI64,
    /// Commits stall until this true time.
    stalled_until_us: AtomicU64,
    /// Sessions that ended without their clients' wish, since the last call of [`Server::take_ended`].
    ended: Mutex<Vec<Ended>>,
    /// Whether the server is stopped: then nobody can connect.
    is_down: AtomicBool,
    /// The number of current pauses, which may overlap. The server does nothing during a pause.
    pauses: AtomicU32,
    /// How long each insertion takes, as with a trigger that sleeps.
    insertion_us: AtomicU64,
    /// Whether every other proxy cannot reach the server.
    is_hidden: AtomicBool,
    /// The other node of the cluster.
    peer: OnceLock<Weak<Server>>,
}

/// A session that had locks and ended without its client's wish.
#[derive(Clone, Debug)]
pub struct Ended {
    pub at: Instant,
    /// The proxy that opened the session.
    pub proxy: usize,
    /// The names of its named locks, and the primary keys of its locked rows.
    pub locked: Vec<Vec<u8>>,
}

/// The time on all servers' clocks at the start of a simulation: a day in 2026, in microseconds since 1970.
const EPOCH_US: u64 = 1_790_000_000_000_000;

/// The rows of a result, with their values.
pub type Set = Vec<Vec<Value>>;

impl Server {
    /// A server without tables.
    pub fn new(name: &str) -> Arc<Server> {
        let server = Server {
            name: name.to_owned(),
            state: Mutex::default(),
            changed: Notify::new(),
            clock_off_us: AtomicI64::new(0),
            stalled_until_us: AtomicU64::new(0),
            ended: Mutex::default(),
            is_down: AtomicBool::new(false),
            pauses: AtomicU32::new(0),
            insertion_us: AtomicU64::new(0),
            is_hidden: AtomicBool::new(false),
            peer: OnceLock::new(),
        };
        {
            let mut state = server.state.lock();
            for (setting, value) in [
                ("version", "9.7.4"),
                ("version_comment", "a simulated server"),
                ("innodb_flush_log_at_trx_commit", "1"),
                ("sync_binlog", "1"),
                ("log_bin", "ON"),
                ("binlog_format", "ROW"),
                ("read_only", "OFF"),
                ("super_read_only", "OFF"),
                ("server_uuid", name),
                ("server_id", "1"),
                ("port", "3306"),
            ] {
                state.settings.insert(setting.to_owned(), value.to_owned());
            }
        }
        server.number_from_start();
        Arc::new(server)
    }

    /// `UUID_SHORT` counts from the second of the server's start.
    fn number_from_start(&self) {
        let started_s = self.now_us() / 1_000_000;
        self.state.lock().next_number = (1 << 56) + (started_s << 24);
    }

    /// The time on the server's clock, in microseconds since 1970.
    pub fn now_us(&self) -> u64 {
        (EPOCH_US + clock::now().0).saturating_add_signed(self.clock_off_us.load(Relaxed))
    }

    /// Sets the clock forward or back.
    pub fn set_clock(&self, by_us: i64) {
        self.clock_off_us.fetch_add(by_us, Relaxed);
        self.state.lock().is_set_back |= by_us < 0;
    }

    /// Stalls the current and all later commits until then.
    pub fn stall_commits_until(&self, until_us: u64) {
        self.stalled_until_us.store(until_us, Relaxed);
    }

    /// Pauses the server. Statements wait until the server goes on.
    pub fn pause(&self) {
        self.pauses.fetch_add(1, Relaxed);
    }

    /// Ends one pause. The server goes on when all have ended.
    pub fn go_on(&self) {
        self.pauses.fetch_sub(1, Relaxed);
        self.changed.notify_waiters();
    }

    async fn until_it_goes_on(&self) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.pauses.load(Relaxed) == 0 {
                return;
            }
            changed.await;
        }
    }

    /// From now on, each insertion takes this long.
    pub fn slow_down(&self, each: std::time::Duration) {
        self.insertion_us.store(each.as_micros() as u64, Relaxed);
    }

    /// Opens a session for this proxy.
    pub fn connect(&self, proxy: usize) -> SessionId {
        self.state.lock().open_session(proxy)
    }

    /// Ends a session. Either its client has closed it, or it was idle for too long, or its connection was cut.
    pub fn end(&self, session: SessionId, is_closed: bool) {
        self.end_in(&mut self.state.lock(), session, is_closed);
        self.changed.notify_waiters();
    }

    fn end_in(&self, state: &mut State, session: SessionId, is_closed: bool) {
        if let Some((proxy, locked)) = state.end_session(session).filter(|_| !is_closed) {
            let mut ended = self.ended.lock();
            ended.push(Ended { at: clock::now(), proxy, locked });
        }
    }

    /// The sessions that ended without their clients' wish since the last call.
    pub fn take_ended(&self) -> Vec<Ended> {
        std::mem::take(&mut self.ended.lock())
    }

    /// The fault that occurred on this server, if any, in a sentence. Either the same revision of a lease's row had
    /// two contents, so that proxies which remember one of them would overwrite the other. Or transactions
    /// deadlocked, although row locks are taken in one order.
    pub fn broken(&self) -> Option<String> {
        self.state.lock().broken.take()
    }

    /// How long a session may be idle.
    pub fn idle_limit(&self, session: SessionId) -> Option<std::time::Duration> {
        self.state
            .lock()
            .session(session)
            .ok()
            .map(|session| std::time::Duration::from_secs(session.wait_timeout_s))
    }

    /// Crashes the server: all sessions end, and uncommitted changes are undone.
    pub fn crash(&self) {
        {
            let mut state = self.state.lock();
            let sessions: Vec<SessionId> = state.sessions.keys().copied().collect();
            for session in sessions {
                self.end_in(&mut state, session, false);
            }
        }
        self.changed.notify_waiters();
        self.number_from_start();
    }

    /// Ends one of the sessions that have locks, if there is one, as `KILL CONNECTION` does. The client notices when
    /// it sends something.
    pub fn kill_session(&self, nth: usize) {
        {
            let mut state = self.state.lock();
            let locking = state.sessions_with_locks();
            if let Some(session) = locking.get(nth % locking.len().max(1)) {
                self.end_in(&mut state, *session, false);
            }
        }
        self.changed.notify_waiters();
    }

    /// The version of the rules of who may do what that is recorded.
    pub fn recorded_rules(&self) -> u64 {
        let state = self.state.lock();
        let Ok(table) = state.table("lockkeeper_shared") else { return 0 };
        let keys = state.keys(table, (Bound::Unbounded, Bound::Unbounded)).into_iter();
        let mut rows = keys.filter_map(|key| state.visible(&(table, key), 0));
        let text = |value: &Value| String::from_utf8(value.text().unwrap_or_default()).unwrap_or_default();
        let rules = rows.find(|row| text(&row[0]) == "[[auth]]").map(|row| text(&row[1]));
        rules.and_then(|rules| rules.split_once(':')?.0.parse().ok()).unwrap_or(0)
    }

    /// The locks of each session, as text for people.
    pub fn locked(&self) -> String {
        format!("{}: {}", self.name, self.state.lock().locked().join(", "))
    }

    /// Runs the statements of a packet until one fails. Returns the rows of each statement that returns rows.
    pub async fn packet(
        &self,
        session: SessionId,
        sql: &[u8],
        parameters: &[Value],
    ) -> Result<Vec<Set>, Failure> {
        let parse::Packet { statements, values } = parse::packet(sql, parameters)?;
        self.until_it_goes_on().await;
        self.is_undone(session)?;
        let mut sets = Vec::new();
        for (n, statement) in statements.iter().enumerate() {
            self.until_it_goes_on().await;
            if n > 0 && self.peer.get().is_some() {
                tokio::time::sleep(cluster::STATEMENT).await;
            }
            // The session may have ended meanwhile. Then nothing would free new locks.
            self.state.lock().session(session)?;
            sets.extend(self.execute(session, statement, &values).await?);
        }
        Ok(sets)
    }

    async fn commit(&self, session: SessionId) -> Result<(), Failure> {
        let stalled_us = self.stalled_until_us.load(Relaxed).saturating_sub(clock::now().0);
        if stalled_us > 0 && self.state.lock().savepoint(session) > 0 {
            tokio::time::sleep(std::time::Duration::from_micros(stalled_us)).await;
        }
        let mut state = self.state.lock();
        state.session(session)?;
        if state.is_read_only() && state.savepoint(session) > 0 {
            state.rollback(session);
            return Err(read_only());
        }
        state.commit(session);
        Ok(())
    }
}

fn read_only() -> Failure {
    Failure::new(1290, "The MySQL server is running with the --read-only option")
}

//! The faults of a run: what the network does to packets, and what happens to servers, proxies and policies.

use std::collections::BTreeMap;
use std::fmt;

use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use serde_json::{Map, Value};

mod packets;
mod plan;

pub use packets::FaultyNetwork;
pub use plan::plan;

use super::application::GUARDED;
use crate::mutex::Mutex;

/// A fault, or an action of an operator, with its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// Milliseconds after the start of the clients.
    pub at_ms: u32,
    pub fault: Fault,
}

/// A fault, or an action of an operator. Indexes of proxies and servers wrap around if there are fewer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    Kill {
        proxy: usize,
        down_ms: u32,
    },
    Pause {
        proxy: usize,
        ms: u32,
    },
    /// The proxy is shut down in order, and started again.
    Restart {
        proxy: usize,
        down_ms: u32,
    },
    /// All packets between the proxy and the servers are lost or very late.
    CutOff {
        proxy: usize,
        ms: u32,
    },
    /// The proxy's heartbeats are lost. Everything else arrives.
    Silence {
        proxy: usize,
        ms: u32,
    },
    /// Packets on the proxy's sessions that have or request locks do not arrive in this time; they arrive at its end.
    SlowSessions {
        proxy: usize,
        ms: u32,
    },
    Crash {
        server: usize,
    },
    /// A session that has locks is ended.
    KillSession {
        server: usize,
        nth: usize,
    },
    StallCommits {
        server: usize,
        ms: u32,
    },
    PauseServer {
        server: usize,
        ms: u32,
    },
    SetClock {
        server: usize,
        by_ms: i64,
    },
    /// The store's second server takes over from its first.
    FailOver {
        how: Succession,
        gap_ms: u32,
        /// After this time, the old primary becomes a replica of the new one, or in a cluster a node again.
        back_ms: u32,
    },
    /// The files of all proxies give guarded requests other names.
    NameRoutes {
        naming: u32,
    },
    /// An operator changes the policy's settings, through this proxy.
    Replace {
        proxy: usize,
        policy: &'static str,
        settings: Settings,
    },
    /// Other settings of the policy decide for a share of the keys, and go live after a while, unless `every_ms` is 0.
    Canary {
        proxy: usize,
        policy: &'static str,
        settings: Settings,
        percent: u8,
        every_ms: u32,
    },
    /// The canary of the policy goes live.
    Promote {
        proxy: usize,
        policy: &'static str,
    },
    /// Proxies that start from now on have other settings of the policy in their files.
    Edit {
        policy: &'static str,
        settings: Settings,
    },
    RollBack {
        proxy: usize,
        policy: &'static str,
    },
    /// The file of principals with this version reaches the proxy.
    Deploy {
        proxy: usize,
        version: u64,
    },
}

/// How the second server takes over. A cluster node already has all writes: if the other node is not stopped, some
/// proxies cannot reach it for the time of the gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Succession {
    /// The primary becomes read-only. After the gap, the replica has all writes and takes over.
    Planned,
    /// The primary stops. After the gap, the replica takes over without the writes that it had not received.
    Sudden,
    /// As [`Succession::Sudden`], but at once. After the gap, the old primary is up again and takes writes as well.
    Split,
}

/// The policies that are replaced in a run. Below are the primitives that they may get.
pub const CHANGEABLE: [&str; 6] = ["lease", "advisory", "row", "pool", "version", GUARDED];
const PRIMITIVES: [&str; 3] = ["lease", "advisory", "row"];

/// Settings of the policy `default`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    pub primitive: &'static str,
    pub second_primitive: Option<&'static str>,
    pub stripes: u32,
    /// The number of keys of which a resource is any one; `None` if the resource has a single key.
    pub pool: Option<u32>,
    pub global_order: bool,
    pub permits: u32,
    /// Whether requests for some resources are refused, because a separator ends their names.
    pub refuses: bool,
    /// Whether a guarded request continues when its lease is lost.
    pub lets_finish: bool,
    /// When keys are delegated, if the primitive is `lease`.
    pub delegate: &'static str,
}

impl Settings {
    /// The settings that the policy starts with.
    pub fn of(policy: &'static str) -> Settings {
        let (primitive, pool) = match policy {
            POOL => ("lease", Some(2)),
            GUARDED => ("lease", None),
            policy => (policy, None),
        };
        Settings {
            primitive,
            second_primitive: None,
            stripes: 0,
            pool,
            global_order: false,
            permits: 2,
            refuses: false,
            lets_finish: false,
            delegate: "never",
        }
    }

    /// Random settings that the policy may get.
    fn any(random: &mut StdRng, policy: &'static str, what: &Failing<'_>) -> Settings {
        if what.keep_names {
            return Settings { global_order: random.random_bool(0.5), ..Settings::of(policy) };
        }
        if policy == "version" {
            // Other names that no two resources share, because these keys have stored values.
            let stripes = *[0, 999_983, 1_000_000].choose(random).unwrap_or(&0);
            return Settings { stripes, ..Settings::of(policy) };
        }
        if policy == GUARDED {
            // The application does not notice at once that a session ends.
            let stripes = *[0, 2, 1_000].choose(random).unwrap_or(&0);
            let refuses = random.random_bool(0.1);
            return Settings { stripes, refuses, ..Settings::of(policy) };
        }
        let primitives: &[&str] = if what.is_cluster { &["lease", "row"] } else { &PRIMITIVES };
        let mut one = || primitives.choose(random).copied().unwrap_or("lease");
        let (primitive, second) = (one(), one());
        let pool = Settings::of(policy).pool;
        let global_order = random.random_bool(0.3);
        // The separator stays the same, because some clients ask for several resources. Settings that refuse requests
        // have no global queue: a refused trial request would hide that the primitive lacks a global queue.
        Settings {
            primitive,
            second_primitive: (second != primitive && random.random_bool(0.2)).then_some(second),
            stripes: if pool.is_some() { 0 } else { *[0, 0, 1, 2].choose(random).unwrap_or(&0) },
            global_order,
            permits: *[1, 2, 2].choose(random).unwrap_or(&2),
            refuses: !global_order && pool.is_none() && !what.asks_for_several && random.random_bool(0.2),
            ..Settings::of(policy)
        }
    }

    /// The settings as the policy's table in config.toml.
    pub fn table(&self) -> Map<String, Value> {
        let mut table = Map::new();
        table.insert("primitive".to_owned(), self.primitive.into());
        if let Some(second) = self.second_primitive {
            table.insert("second_primitive".to_owned(), second.into());
        }
        if self.primitive == "lease" {
            table.insert("delegate".to_owned(), self.delegate.into());
        }
        table.insert("stripes".to_owned(), self.stripes.into());
        table.insert("global_order".to_owned(), self.global_order.into());
        match self.pool {
            None => table.insert("separator".to_owned(), if self.refuses { "1" } else { SEPARATOR }.into()),
            Some(pool) => table.insert("pool".to_owned(), pool.into()),
        };
        table.insert("permits".to_owned(), self.permits.into());
        table.insert("keep_ms".to_owned(), KEEP_MS.into());
        table.insert("on_loss".to_owned(), if self.lets_finish { "finish" } else { "cut" }.into());
        table
    }
}

/// The policy whose resources are any one of several keys.
pub const POOL: &str = "pool";
/// The policy that has a global queue in some runs.
pub const ORDERED: &str = "lease";
/// The policy whose waiters poll.
pub const BACKOFF: &str = "backoff";
/// Separates the resources in a name.
pub const SEPARATOR: &str = "+";
/// Settings of the policy `backoff`.
pub fn polling() -> Map<String, Value> {
    let mut table = Map::new();
    table.insert("sleep".to_owned(), "exponential".into());
    for (name, value) in [("min_ms", 5), ("max_ms", 300), ("permits", 2), ("wait_ms", 0)] {
        table.insert(name.to_owned(), value.into());
    }
    table
}

/// How long the outcome of a `once` is kept.
pub const KEEP_MS: u32 = 5_000;

impl Fault {
    /// The name under which the fault is counted.
    pub fn kind(&self) -> &'static str {
        match self {
            Fault::Kill { .. } => "a proxy is killed",
            Fault::Pause { .. } => "a proxy is paused",
            Fault::Restart { .. } => "a proxy is restarted in order",
            Fault::CutOff { .. } => "a proxy is cut off from the servers",
            Fault::Silence { .. } => "the beats of a proxy are lost",
            Fault::SlowSessions { .. } => "the sessions of a proxy are slow",
            Fault::Crash { .. } => "a server crashes and is started again",
            Fault::KillSession { .. } => "a session with locks is killed",
            Fault::StallCommits { .. } => "the commits of a server stall",
            Fault::PauseServer { .. } => "a server is paused",
            Fault::SetClock { .. } => "the clock of a server is set",
            Fault::FailOver { how: Succession::Planned, .. } => "a fail-over that was planned",
            Fault::FailOver { how: Succession::Sudden, .. } => "a fail-over that loses writes",
            Fault::FailOver { how: Succession::Split, .. } => {
                "a fail-over after which both servers take writes"
            }
            Fault::NameRoutes { .. } => "the guarded routes are edited",
            Fault::Replace { .. } => "a policy is replaced",
            Fault::Canary { .. } => "a canary begins or gets another share",
            Fault::Promote { .. } => "a canary is promoted",
            Fault::Edit { .. } => "the file of a policy's settings is edited",
            Fault::RollBack { .. } => "a policy is rolled back",
            Fault::Deploy { .. } => "a file of principals is deployed",
        }
    }

    fn any(random: &mut StdRng, kind: Kind, what: &Failing<'_>) -> Fault {
        let Failing { proxies, servers, .. } = *what;
        let proxy = random.random_range(0..proxies);
        let policy = what.policies.choose(random).copied().unwrap_or_default();
        let server = if random.random_bool(0.5) { 0 } else { random.random_range(0..servers) };
        let down_ms = random.random_range(0..3_000);
        let mut one_of = |of: &[u32]| of.choose(random).copied().unwrap_or(1_000);
        let ms = one_of(&[100, 1_000, 4_000, 12_000, 40_000]);
        match kind {
            Kind::Kill => Fault::Kill { proxy, down_ms },
            Kind::Pause => Fault::Pause { proxy, ms },
            Kind::Restart => Fault::Restart { proxy, down_ms },
            Kind::CutOff => Fault::CutOff { proxy, ms },
            // Most silences are longer than a membership.
            Kind::Silence => Fault::Silence { proxy, ms: one_of(&[4_000, 25_000, 40_000]) },
            Kind::SlowSessions => Fault::SlowSessions { proxy, ms: one_of(&[200, 1_000, 3_000]) },
            Kind::Crash => Fault::Crash { server },
            Kind::KillSession => Fault::KillSession { server, nth: random.random_range(0..64) },
            Kind::StallCommits => Fault::StallCommits { server, ms: one_of(&[200, 2_000, 4_000, 9_000]) },
            Kind::PauseServer => {
                Fault::PauseServer { server, ms: one_of(&[200, 2_000, 4_000, 9_000, 20_000]) }
            }
            Kind::SetClock => {
                // After a step back, earlier grants last for that much longer, and little is granted meanwhile.
                let by_ms = i64::from(one_of(&[80, 80, 300, 300, 2_000, 2_000, 5_000, 60_000]));
                Fault::SetClock { server, by_ms: if random.random_bool(0.5) { by_ms } else { -by_ms } }
            }
            Kind::FailOver => Fault::FailOver {
                how: *[Succession::Planned, Succession::Sudden, Succession::Split]
                    .choose(random)
                    .unwrap_or(&Succession::Sudden),
                gap_ms: *[0, 500, 3_000, 8_000, 20_000].choose(random).unwrap_or(&0),
                back_ms: *[0, 2_000, 15_000].choose(random).unwrap_or(&0),
            },
            Kind::NameRoutes => Fault::NameRoutes { naming: random.random_range(0..3) },
            Kind::Replace => Fault::Replace { proxy, policy, settings: Settings::any(random, policy, what) },
            Kind::RollBack => Fault::RollBack { proxy, policy },
            Kind::Canary => Fault::canary(random, proxy, policy, what),
            Kind::Promote => Fault::Promote { proxy, policy },
        }
    }
}

impl Fault {
    /// A canary with any settings, for any share.
    pub fn canary(random: &mut StdRng, proxy: usize, policy: &'static str, what: &Failing<'_>) -> Fault {
        let settings = Settings::any(random, policy, what);
        let percent = *[10, 50, 50, 90, 100].choose(random).unwrap_or(&50);
        let every_ms = *[0, 0, 1_000, 4_000].choose(random).unwrap_or(&0);
        Fault::Canary { proxy, policy, settings, percent, every_ms }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind())?;
        match self {
            Fault::Kill { proxy, down_ms } | Fault::Restart { proxy, down_ms } => {
                write!(f, ": proxy {proxy}, gone for {down_ms} ms")
            }
            Fault::Pause { proxy, ms }
            | Fault::CutOff { proxy, ms }
            | Fault::Silence { proxy, ms }
            | Fault::SlowSessions { proxy, ms } => {
                write!(f, ": proxy {proxy}, for {ms} ms")
            }
            Fault::Crash { server } | Fault::KillSession { server, .. } => write!(f, ": server {server}"),
            Fault::StallCommits { server, ms } | Fault::PauseServer { server, ms } => {
                write!(f, ": server {server}, for {ms} ms")
            }
            Fault::SetClock { server, by_ms } => write!(f, ": server {server}, by {by_ms} ms"),
            Fault::FailOver { gap_ms, back_ms, .. } => {
                write!(f, ": after {gap_ms} ms, and the old primary is a replica {back_ms} ms later")
            }
            Fault::NameRoutes { naming } => write!(f, ": naming {naming}"),
            Fault::Replace { proxy, policy, settings } => {
                let settings = Value::Object(settings.table());
                write!(f, ": `{policy}`, at proxy {proxy}, with {settings}")
            }
            Fault::Canary { proxy, policy, settings, percent, every_ms } => {
                let settings = Value::Object(settings.table());
                write!(f, ": `{policy}`, at proxy {proxy}, {percent} % for {every_ms} ms, with {settings}")
            }
            Fault::Promote { proxy, policy } => write!(f, ": `{policy}`, at proxy {proxy}"),
            Fault::Edit { policy, settings } => write!(f, ": `{policy}` gets {settings:?}"),
            Fault::RollBack { proxy, policy } => write!(f, ": `{policy}`, at proxy {proxy}"),
            Fault::Deploy { proxy, version } => write!(f, ": version {version}, to proxy {proxy}"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Kill,
    Pause,
    Restart,
    CutOff,
    Silence,
    SlowSessions,
    Crash,
    KillSession,
    StallCommits,
    PauseServer,
    SetClock,
    FailOver,
    NameRoutes,
    Replace,
    RollBack,
    Canary,
    Promote,
}

impl Kind {
    /// Kinds that are listed several times are chosen more often.
    const ALL: [Kind; 21] = [
        Kind::Kill,
        Kind::Pause,
        Kind::Pause,
        Kind::Restart,
        Kind::CutOff,
        Kind::Silence,
        Kind::SlowSessions,
        Kind::Crash,
        Kind::KillSession,
        Kind::StallCommits,
        Kind::PauseServer,
        Kind::SetClock,
        Kind::FailOver,
        Kind::NameRoutes,
        Kind::Replace,
        Kind::Replace,
        Kind::Replace,
        Kind::RollBack,
        Kind::Canary,
        Kind::Canary,
        Kind::Promote,
    ];

    /// For runs whose clocks are set again and again while some proxies do not notice.
    const OF_CLOCKS: [Kind; 5] = [Kind::SetClock, Kind::SetClock, Kind::Pause, Kind::Kill, Kind::Restart];

    /// For runs whose sessions end again and again while other requests use the locks of those sessions.
    const OF_SESSIONS: [Kind; 4] = [Kind::KillSession, Kind::KillSession, Kind::KillSession, Kind::Silence];

    /// For runs in which policies change while proxies whose clients hold locks on sessions count as gone.
    const OF_MEMBERSHIPS: [Kind; 7] = [
        Kind::Silence,
        Kind::Silence,
        Kind::Pause,
        Kind::Restart,
        Kind::SlowSessions,
        Kind::Replace,
        Kind::Replace,
    ];

    /// For runs in which members of the quorum are away again and again. The other members must not grant again what
    /// those have granted.
    const OF_QUORUM: [Kind; 4] = [Kind::PauseServer, Kind::PauseServer, Kind::Crash, Kind::CutOff];

    fn is_possible(self, what: &Failing<'_>) -> bool {
        match self {
            Kind::FailOver => what.has_second,
            Kind::NameRoutes => what.policies.contains(&GUARDED),
            Kind::Replace | Kind::RollBack | Kind::Canary | Kind::Promote => !what.policies.is_empty(),
            _ => true,
        }
    }

    /// The kinds of one run: all of them, or a few, or changes of policies with at most one other kind. If everything
    /// fails, little is granted, and one kind hides what another would break.
    fn of_a_run(random: &mut StdRng, what: &Failing<'_>) -> Vec<Kind> {
        let possible: Vec<Kind> = Kind::ALL.into_iter().filter(|kind| kind.is_possible(what)).collect();
        let shape = random.random_range(0..10_u32);
        let rests_on_sessions = what.policies.iter().any(|policy| ["advisory", "row"].contains(policy));
        let some = match shape {
            0..2 => return possible,
            2 => return Kind::OF_CLOCKS.to_vec(),
            3 if what.servers > 1 && random.random_bool(0.4) => return Kind::OF_QUORUM.to_vec(),
            3 if rests_on_sessions && random.random_bool(0.5) => return Kind::OF_SESSIONS.to_vec(),
            3 if rests_on_sessions => return Kind::OF_MEMBERSHIPS.to_vec(),
            3..7 => random.random_range(1..=3),
            7..9 => 1,
            _ => 0,
        };
        let mut kinds: Vec<Kind> = (0..some).filter_map(|_| possible.choose(random).copied()).collect();
        // A second server should be used.
        if what.has_second && random.random_bool(0.5) {
            kinds.push(Kind::FailOver);
        }
        if shape >= 7 {
            kinds.extend([Kind::Replace, Kind::Replace].into_iter().filter(|kind| kind.is_possible(what)));
        }
        kinds
    }
}

/// The parts of a run that may fail.
#[derive(Clone, Copy)]
pub struct Failing<'a> {
    pub proxies: usize,
    pub servers: usize,
    pub has_second: bool,
    /// Whether the second server is a node of a Galera cluster. Galera has no named locks.
    pub is_cluster: bool,
    /// The policies that may be replaced.
    pub policies: &'a [&'static str],
    /// Whether a policy that is replaced keeps its primitive and the names of its keys.
    pub keep_names: bool,
    pub asks_for_several: bool,
}

/// The number of events of each kind.
#[derive(Default)]
pub struct Tally(Mutex<BTreeMap<&'static str, u64>>);

impl Tally {
    pub fn count(&self, kind: &'static str) {
        *self.0.lock().entry(kind).or_default() += 1;
    }

    pub fn all(&self) -> BTreeMap<&'static str, u64> {
        self.0.lock().clone()
    }
}

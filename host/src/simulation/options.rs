//! The options of a run, which follow from its seed, and the options of smaller runs.

use std::fmt;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

mod focus;

use super::application::GUARDED;
use super::faults::{CHANGEABLE, Failing, Fault, ORDERED, Planned, Settings, plan};

/// The policies of a run. Each starts with the primitive of the same name, with three exceptions: a resource of
/// `pool` is any one of several leases, `backoff` polls for leases, and `guarded` serves the requests of guarded
/// routes.
pub const POLICIES: [&str; 9] =
    ["lease", "advisory", "row", "once", "version", "quorum", "pool", "backoff", GUARDED];

/// The options of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    pub seed: u64,
    pub proxies: usize,
    pub clients: usize,
    /// The number of resources of each policy.
    pub resources: usize,
    /// Whether clients ask for several resources at once.
    pub asks_for_several: bool,
    /// The longest work of a client between two renewals. The first resource of each policy has another limit.
    pub work_ms: u32,
    /// The share of leases, in thousandths, that clients do not release.
    pub forgets_per_mille: u32,
    /// The percentage of requests for `lease`, `quorum`, `row`, `pool` and `backoff` that ask for a shared lock.
    pub shared_percent: u32,
    /// The percentage of held connections that last very long.
    pub long_holds_percent: u32,
    /// Whether the policy [`ORDERED`] has a global queue from the start, and nothing goes wrong.
    pub in_order: bool,
    /// The longest lease that clients ask for, in milliseconds.
    pub longest_ttl_ms: u32,
    /// The policies that clients use, of [`POLICIES`].
    pub policies: Vec<&'static str>,
    /// How long clients make requests, in virtual time.
    pub lasts: Duration,
    /// The share of packets, in thousandths, that have a fault.
    pub packet_faults_per_mille: u32,
    pub faults: Vec<Planned>,
    /// The number of servers in the quorum.
    pub members: usize,
    /// Whether policies that are replaced keep their primitives and the names of their keys.
    pub keep_names: bool,
    /// The second server of the store, if any.
    pub second: Option<Second>,
    /// How far the second server's clock is ahead of the first server's, in milliseconds.
    pub second_ahead_ms: i64,
    /// The longest delay before a task of a proxy starts.
    pub late_ms: u32,
    /// Whether clients are authenticated. Each of them then also tries to use the leases of another principal.
    pub authenticates: bool,
    /// When keys are delegated to proxies: `never`, `contended` or `always`.
    pub delegate: &'static str,
    /// Whether the proxies allow leases that are as long as the longest delegation needs. Otherwise a key goes back for each
    /// lease that is nearly as long as the limit.
    pub delegates_long_leases: bool,
    /// The share of calls that go to the first proxy, in percent. The others go to any proxy.
    pub to_the_first_percent: u32,
    /// Whether the report includes the whole history.
    pub tells_all: bool,
}

/// The second server of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Second {
    /// A replica with this replication delay.
    Replica(Duration),
    /// A second node of a cluster, which also takes writes. Proxies know both nodes.
    Node,
    /// As [`Second::Node`], but behind a load balancer: proxies know one address, and a connection goes to the first
    /// node that is up.
    Balanced,
}

/// The usual limit of leases. It is short, so that many leases expire in a run.
const SHORT_MS: u32 = 3_000;
/// How much longer than requested the leases of policies may be.
pub const LONGER_MS: u32 = 1_000;
/// The longest delay of tasks on a proxy with little to do.
const PROMPT_MS: u32 = 4;
/// The limit of leases in some runs. Leases that nobody knows of are noticed if they would last long.
const LONG_MS: u32 = 120_000;

impl Options {
    /// The options that follow from a seed.
    pub fn of(seed: u64) -> Options {
        let mut random = StdRng::seed_from_u64(seed);
        let mut policies = POLICIES.to_vec();
        // With few policies, more clients compete for the same resources.
        let most = if random.random_bool(0.4) { 2 } else { POLICIES.len() };
        let kinds = random.random_range(1..=most);
        while policies.len() > kinds {
            policies.remove(random.random_range(0..policies.len()));
        }
        let lasts = Duration::from_secs(random.random_range(10..=60));
        let proxies = random.random_range(1..=3);
        let longest_ttl_ms = if random.random_bool(0.15) { LONG_MS } else { SHORT_MS };
        // After a fail-over, nothing is granted for as long as the longest lease.
        let replica = |behind_ms| Some(Second::Replica(Duration::from_millis(behind_ms)));
        let seconds = [
            None,
            None,
            None,
            replica(0),
            replica(50),
            replica(1_000),
            Some(Second::Node),
            Some(Second::Balanced),
        ];
        let second = seconds.choose(&mut random).copied().flatten();
        let second = second.filter(|_| longest_ttl_ms == SHORT_MS);
        let is_cluster = matches!(second, Some(Second::Node | Second::Balanced));
        if is_cluster {
            // Galera has no named locks.
            policies.retain(|policy| *policy != "advisory");
            if policies.is_empty() {
                policies.push("row");
            }
        }
        let changeable: Vec<&str> =
            policies.iter().copied().filter(|policy| CHANGEABLE.contains(policy)).collect();
        let members = *[3, 3, 4, 5].choose(&mut random).unwrap_or(&3);
        let keep_names = random.random_bool(0.3);
        let asks_for_several = random.random_bool(0.4);
        // If each client works for long, few locks are granted.
        let work_ms = *[20, 80, 800].choose(&mut random).unwrap_or(&80);
        let failing = Failing {
            proxies,
            servers: servers(&policies, members),
            has_second: second.is_some(),
            is_cluster,
            policies: &changeable,
            keep_names,
            asks_for_several,
        };
        // If clients release their leases, few leases expire.
        let forgets_per_mille = match () {
            () if longest_ttl_ms > SHORT_MS => 0,
            () if random.random_bool(0.15) => 300,
            () => 10 + work_ms / 20,
        };
        let packet_faults_per_mille = *[0, 1, 5, 20].choose(&mut random).unwrap_or(&0);
        let faults = plan(&mut random, lasts, &failing);
        // If a task starts late, its client may already be gone.
        let late_ms = *[PROMPT_MS, PROMPT_MS, PROMPT_MS, 200].choose(&mut random).unwrap_or(&PROMPT_MS);
        // Only in a calm run do waiters join the global queue without delay.
        let is_calm = is_calm(packet_faults_per_mille, &faults);
        let options = Options {
            seed,
            proxies,
            // With few clients, a resource is often free, and changes of its policy go live soon.
            clients: {
                let most = if random.random_bool(0.15) { 6 } else { 64 };
                random.random_range(2..=most)
            },
            resources: *[1, 2, 4, 8, 16, 32].choose(&mut random).unwrap_or(&4),
            asks_for_several,
            work_ms,
            forgets_per_mille,
            shared_percent: 20,
            // Such a lock may outlive its proxy's membership, or the use of a server.
            long_holds_percent: *[1, 1, 1, 30].choose(&mut random).unwrap_or(&1),
            in_order: is_calm && late_ms == PROMPT_MS && random.random_bool(0.7),
            longest_ttl_ms,
            packet_faults_per_mille,
            faults,
            members,
            keep_names,
            second,
            // The clocks of two servers seldom agree.
            second_ahead_ms: match second {
                Some(_) => *[0, 0, 300, -300, 2_000, 60_000].choose(&mut random).unwrap_or(&0),
                None => 0,
            },
            policies,
            lasts,
            late_ms,
            tells_all: false,
            authenticates: false,
            delegate: "never",
            delegates_long_leases: false,
            to_the_first_percent: 0,
        };
        let is_focused = random.random_bool(0.4);
        let options = if is_focused { options.focus(&mut random) } else { options };
        // Drawn last, so that the rest of a run does not depend on it.
        let mut options =
            Options { authenticates: options.authenticates || random.random_bool(0.3), ..options };
        // After a fail-over, the store may have lost the record of the rules, and after a step of the clock, its age is
        // not known.
        let is_simple = |planned: &Planned| !matches!(planned.fault, Fault::SetClock { .. });
        let may_deploy =
            options.second.is_none() && options.faults.iter().all(is_simple) && !options.is_calm();
        if options.proxies > 1 && may_deploy && random.random_bool(0.4) {
            options.deploy(&mut random);
        }
        let delegate = *["never", "never", "contended", "always"].choose(&mut random).unwrap_or(&"never");
        if delegate != "never" && !is_focused && random.random_bool(0.8) {
            options = options.with_few_delegated_keys(&mut random);
            options.delegates_long_leases = random.random_bool(0.7);
        }
        options.delegate(delegate);
        options
    }

    /// Lets proxies grant keys from their memory, by all policies of the run.
    fn delegate(&mut self, when: &'static str) {
        self.delegate = when;
        self.planned_settings().for_each(|settings| settings.delegate = when);
    }

    /// The settings that policies get in the run.
    fn planned_settings(&mut self) -> impl Iterator<Item = &mut Settings> {
        self.faults.iter_mut().filter_map(|planned| match &mut planned.fault {
            Fault::Replace { settings, .. }
            | Fault::Edit { settings, .. }
            | Fault::Canary { settings, .. } => Some(settings),
            _ => None,
        })
    }

    /// Adds files of principals that reach one proxy after another, and do not reach some of them for a long time.
    fn deploy(&mut self, random: &mut StdRng) {
        let lasts_ms = self.lasts.as_millis() as u32;
        for version in 1..=random.random_range(1..=3) {
            let begun_ms = random.random_range(0..lasts_ms);
            for proxy in 0..self.proxies {
                let way_ms = if random.random_bool(0.5) { 5_000 } else { 60_000 };
                let at_ms = begun_ms + random.random_range(0..way_ms);
                self.faults.push(Planned { at_ms, fault: Fault::Deploy { proxy, version } });
            }
        }
        self.faults.retain(|planned| planned.at_ms < lasts_ms);
        self.faults.sort_by_key(|planned| planned.at_ms);
    }

    /// Whether nothing goes wrong and no policy is replaced.
    pub fn is_calm(&self) -> bool {
        is_calm(self.packet_faults_per_mille, &self.faults)
    }

    /// Whether no packet of a waiter that joins the global queue is late or lost.
    pub fn joins_in_order(&self) -> bool {
        let is_change = |planned: &Planned| {
            matches!(planned.fault, Fault::Replace { .. } | Fault::Edit { .. } | Fault::RollBack { .. })
        };
        self.packet_faults_per_mille == 0 && self.faults.iter().all(is_change)
    }

    /// Whether all waiters join the global queue at once when a change of their policy introduces it.
    pub fn may_come_into_order(&self) -> bool {
        self.joins_in_order() && self.keep_names && self.late_ms == PROMPT_MS
    }

    /// Whether guarded requests may continue after their leases are lost.
    pub fn lets_finish(&self) -> bool {
        let lets_finish = |planned: &Planned| matches!(&planned.fault, Fault::Replace { settings, .. } | Fault::Canary { settings, .. } if settings.lets_finish);
        self.faults.iter().any(lets_finish)
    }

    /// Whether the names that guarded routes give to requests change.
    pub fn renames_routes(&self) -> bool {
        self.faults.iter().any(|planned| matches!(planned.fault, Fault::NameRoutes { .. }))
    }

    /// Whether leases that nobody releases outlast the run.
    pub fn has_long_leases(&self) -> bool {
        self.longest_ttl_ms > SHORT_MS
    }

    /// The ttl of a guarded request's lease, in milliseconds.
    pub fn guarded_ttl_ms(&self) -> u32 {
        if self.has_long_leases() { LONG_MS } else { 2_000 }
    }

    /// The longest lease that the proxies allow, in milliseconds. A delegation lasts at least 2 s longer than its leases.
    pub fn limit_ms(&self) -> u32 {
        self.longest_ttl_ms + LONGER_MS + if self.delegates_long_leases { 2_000 } else { 0 }
    }

    /// The number of servers: the store's server, and the servers of the quorum if clients use it. The second server
    /// of the store does not count.
    pub fn servers(&self) -> usize {
        servers(&self.policies, self.members)
    }

    /// Options that are smaller in one respect, so that less happens in the run. `failed_at`: when this run failed,
    /// counted from the start of the clients.
    pub fn smaller(&self, failed_at: Duration) -> Vec<Options> {
        let mut smaller = Vec::new();
        let mut add = |change: &dyn Fn(&mut Options)| {
            let mut options = self.clone();
            change(&mut options);
            let is_possible = options.proxies > 0
                && options.resources > 0
                && options.clients > 0
                && !options.policies.is_empty();
            if is_possible && options.lasts >= Duration::from_secs(1) && options != *self {
                smaller.push(options);
            }
        };
        // Events after the failure are not needed.
        add(&|options| {
            options.lasts = options.lasts.min(failed_at + Duration::from_secs(1));
            options.faults.retain(|planned| u128::from(planned.at_ms) <= failed_at.as_millis());
        });
        add(&|options| options.second_ahead_ms = 0);
        add(&|options| {
            (options.second, options.second_ahead_ms) = (None, 0);
            options.faults.retain(|planned| !matches!(planned.fault, Fault::FailOver { .. }));
        });
        add(&|options| options.faults.clear());
        let half = self.faults.len() / 2;
        add(&|options| drop(options.faults.drain(half..)));
        add(&|options| drop(options.faults.drain(..half)));
        add(&|options| options.packet_faults_per_mille = 0);
        add(&|options| options.proxies -= 1);
        for n in 0..self.policies.len() {
            add(&|options| {
                options.policies.remove(n);
            });
        }
        add(&|options| options.authenticates = false);
        add(&|options| options.delegate("never"));
        add(&|options| options.delegates_long_leases = false);
        add(&|options| options.to_the_first_percent = 0);
        add(&|options| options.asks_for_several = false);
        add(&|options| options.in_order = false);
        add(&|options| options.late_ms = PROMPT_MS);
        add(&|options| options.resources -= 1);
        add(&|options| options.clients /= 2);
        add(&|options| options.clients -= 1);
        add(&|options| options.lasts = options.lasts * 3 / 4);
        for n in 0..self.faults.len() {
            add(&|options| {
                options.faults.remove(n);
            });
        }
        smaller
    }
}

fn is_calm(packet_faults_per_mille: u32, faults: &[Planned]) -> bool {
    packet_faults_per_mille == 0 && faults.is_empty()
}

fn servers(policies: &[&str], members: usize) -> usize {
    if policies.contains(&"quorum") { 1 + members } else { 1 }
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options {
            proxies, clients, resources, policies, lasts, packet_faults_per_mille, late_ms, ..
        } = self;
        writeln!(
            f,
            "{proxies} proxies, {clients} clients, {resources} resources of each of {}, {:.1} s, {packet_faults_per_mille} of \
             1,000 packets with a fault",
            policies.join(", "),
            lasts.as_secs_f64()
        )?;
        writeln!(
            f,
            "clients work for up to {} ms between two renewals, with leases of up to {} ms",
            self.work_ms, self.longest_ttl_ms
        )?;
        if *late_ms > PROMPT_MS {
            writeln!(f, "tasks of proxies start up to {late_ms} ms late")?;
        }
        if self.in_order {
            writeln!(f, "`{ORDERED}` has one order of waiters for all proxies")?;
        }
        if self.delegate != "never" {
            writeln!(f, "keys are delegated: {}", self.delegate)?;
        }
        if self.delegates_long_leases {
            writeln!(f, "proxies allow leases of up to {} ms", self.limit_ms())?;
        }
        if self.to_the_first_percent > 0 {
            writeln!(f, "{} % of the calls go to the first proxy", self.to_the_first_percent)?;
        }
        if self.authenticates {
            writeln!(f, "clients are authenticated, and try to use each other's leases")?;
        }
        if self.asks_for_several {
            writeln!(f, "clients ask for several resources at once")?;
        }
        if policies.contains(&"quorum") {
            writeln!(f, "{} servers of the quorum", self.members)?;
        }
        match self.second {
            None => {}
            Some(Second::Replica(behind)) => {
                writeln!(f, "the store has a replica, which is {} ms behind", behind.as_millis())?;
            }
            Some(Second::Node) => writeln!(f, "the store is a cluster of two nodes")?,
            Some(Second::Balanced) => {
                writeln!(f, "the store is a cluster of two nodes behind a load balancer")?;
            }
        }
        if self.second_ahead_ms != 0 {
            writeln!(f, "the clock of the second server is {} ms ahead", self.second_ahead_ms)?;
        }
        for Planned { at_ms, fault } in &self.faults {
            writeln!(f, "after {at_ms} ms: {fault}")?;
        }
        Ok(())
    }
}

//! Metrics and logs. Label values are bounded: policies, hooks, reasons and outcomes, but never keys.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::config::LogConfig;

mod policies;
mod process;

use policies::Policies;

/// All metrics of the proxy. Cheap to clone.
#[derive(Clone)]
pub struct Metrics {
    inner: Arc<Inner>,
}

struct Inner {
    registry: Registry,
    policies: Policies,
    grants: Family<Guard, Counter>,
    renewals: Family<Outcome, Counter>,
    releases: Family<Outcome, Counter>,
    commits: Family<Outcome, Counter>,
    holds: Family<How, Histogram>,
    batch_operations: Histogram,
    batch_seconds: Histogram,
    store_errors: Family<Reason, Counter>,
    waiters: Gauge,
    leases: Gauge,
    fleet_members: Gauge,
    fleet_changes: Family<Outcome, Counter>,
    requests: Family<Answered, Counter>,
    guarded: Family<Outcome, Counter>,
    guard_lost: Counter,
    config_loads: Family<Outcome, Counter>,
    process: process::Process,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Guard {
    primitive: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct How {
    how: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    front: &'static str,
    status: u32,
}

impl Metrics {
    /// Counts an answered acquire. `outcome` is `granted` or the problem's slug.
    pub fn acquire(&self, policy: &str, outcome: &'static str, waited: Duration) {
        self.inner.policies.acquire(policy, outcome, waited);
    }

    /// Counts a failed policy call. The request was refused, or the built-in answer was used.
    pub fn policy_fault(&self, policy: &str, hook: &'static str, reason: &'static str) {
        self.inner.policies.fault(policy, hook, reason);
    }

    /// Counts an answered policy call.
    pub fn policy_call(&self, policy: &str, hook: &'static str, took: Duration) {
        self.inner.policies.call(policy, hook, took);
    }

    /// Counts a load or push that went live (`live`) or was refused (`refused`).
    pub fn policy_load(&self, policy: &str, outcome: &'static str) {
        self.inner.policies.load(policy, outcome);
    }

    /// Counts a granted lease.
    pub fn grant(&self, primitive: &'static str) {
        self.inner.grants.get_or_create(&Guard { primitive }).inc();
    }

    /// Counts a renewal.
    pub fn renewal(&self, outcome: &'static str) {
        self.inner.renewals.get_or_create(&Outcome { outcome }).inc();
    }

    /// Counts a release.
    pub fn release(&self, outcome: &'static str) {
        self.inner.releases.get_or_create(&Outcome { outcome }).inc();
    }

    /// Counts an answered commit of a version. `outcome` is `committed` or the problem's slug.
    pub fn commit(&self, outcome: &'static str) {
        self.inner.commits.get_or_create(&Outcome { outcome }).inc();
    }

    /// Counts the end of a lease, `held` after its grant. `how` is `released`, `expired`, `handed_off` or `lost`.
    pub fn lease_ended(&self, how: &'static str, held: Duration) {
        self.inner.holds.get_or_create(&How { how }).observe(held.as_secs_f64());
    }

    /// Counts a committed transaction of `operations`.
    pub fn batch(&self, operations: usize, took: Duration) {
        self.inner.batch_operations.observe(operations as f64);
        self.inner.batch_seconds.observe(took.as_secs_f64());
    }

    /// Counts a failure of the store; `reason` is a stable slug.
    pub fn store_error(&self, reason: &'static str) {
        self.inner.store_errors.get_or_create(&Reason { reason }).inc();
    }

    /// Sets the number of acquires that wait for a lock.
    pub fn waiters(&self, now: usize) {
        self.inner.waiters.set(i64::try_from(now).unwrap_or(i64::MAX));
    }

    /// Sets the number of leases that this proxy granted or keeps alive.
    pub fn leases(&self, now: usize) {
        self.inner.leases.set(i64::try_from(now).unwrap_or(i64::MAX));
    }

    /// Sets the number of proxies of this store that are not gone, as of the last heartbeat.
    pub fn fleet_members(&self, now: usize) {
        self.inner.fleet_members.set(i64::try_from(now).unwrap_or(i64::MAX));
    }

    /// Counts a policy change that this proxy followed with its fleet. `outcome` is `live` or `called_off`.
    pub fn fleet_change(&self, outcome: &'static str) {
        self.inner.fleet_changes.get_or_create(&Outcome { outcome }).inc();
    }

    /// Counts an HTTP request that `front` (`api`, `admin` or `guard`) answered.
    pub fn http(&self, front: &'static str, status: u16) {
        self.inner.requests.get_or_create(&Answered { front, status: status.into() }).inc();
    }

    /// Counts an answered request on a guarded route. `outcome` is `passed` (no lock), `locked`, `unlocked`,
    /// `replayed`, or the problem's slug.
    pub fn guarded(&self, outcome: &'static str) {
        self.inner.guarded.get_or_create(&Outcome { outcome }).inc();
    }

    /// Counts a changed configuration that went live (`live`) or was refused (`refused`).
    pub fn config_load(&self, outcome: &'static str) {
        self.inner.config_loads.get_or_create(&Outcome { outcome }).inc();
    }

    /// Counts a guarded request whose lease was lost while the upstream worked.
    pub fn guard_lost(&self) {
        self.inner.guard_lost.inc();
    }

    /// All metrics as OpenMetrics text.
    pub fn encode(&self) -> String {
        self.inner.process.update();
        let mut text = String::with_capacity(16 * 1024);
        // Writing to a String cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.inner.registry);
        text
    }
}

/// Converts OpenMetrics text to the older Prometheus format (0.0.4), which declares a counter by the name of its
/// sample.
pub fn to_prometheus(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.lines() {
        if line.starts_with("# HELP ") {
            help = Some(line);
            continue;
        }
        if line.starts_with("# UNIT ") || line == "# EOF" {
            continue;
        }
        if let Some(name) = line.strip_prefix("# TYPE ").and_then(|rest| rest.strip_suffix(" counter")) {
            let about =
                help.take().and_then(|help| help.get("# HELP ".len() + name.len()..)).unwrap_or_default();
            text.push_str(&format!("# HELP {name}_total{about}\n# TYPE {name}_total counter\n"));
            continue;
        }
        for line in help.take().into_iter().chain([line]) {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

impl Default for Metrics {
    fn default() -> Metrics {
        let mut registry = Registry::default();
        let lockkeeper = registry.sub_registry_with_prefix("lockkeeper");
        let policies = Policies::register(lockkeeper);
        let grants = Family::default();
        lockkeeper.register("grants", "Leases that were granted, by primitive", grants.clone());
        let renewals = Family::default();
        lockkeeper.register("renewals", "Renewals, by outcome", renewals.clone());
        let releases = Family::default();
        lockkeeper.register("releases", "Releases, by outcome", releases.clone());
        let commits = Family::default();
        lockkeeper.register("commits", "Commits of a version, by outcome", commits.clone());
        let holds: Family<How, Histogram> = Family::new_with_constructor(long);
        lockkeeper.register_with_unit(
            "hold",
            "From the grant of a lease to its end",
            Unit::Seconds,
            holds.clone(),
        );
        let batch_operations =
            Histogram::new([1., 2., 4., 8., 16., 32., 64., 128., 256., 512., 1024., 2048.]);
        lockkeeper.register(
            "store_batch_operations",
            "Operations in a transaction",
            batch_operations.clone(),
        );
        let batch_seconds = Histogram::new(BATCH);
        lockkeeper.register_with_unit(
            "store_batch",
            "From sending a transaction to its commit",
            Unit::Seconds,
            batch_seconds.clone(),
        );
        let store_errors = Family::default();
        lockkeeper.register("store_errors", "Failures of the store, by reason", store_errors.clone());
        let (waiters, leases) = (Gauge::default(), Gauge::default());
        lockkeeper.register("waiters", "Acquires that wait for a lock", waiters.clone());
        lockkeeper.register("leases", "Leases that this proxy granted or keeps alive", leases.clone());
        let fleet_members = Gauge::default();
        lockkeeper.register("fleet_members", "Proxies of this store that live", fleet_members.clone());
        let fleet_changes = Family::default();
        let changes = "Changes of a policy on all proxies, by outcome";
        lockkeeper.register("fleet_changes", changes, fleet_changes.clone());
        let requests = Family::default();
        lockkeeper.register("http_requests", "HTTP requests that were answered", requests.clone());
        let guarded = Family::default();
        lockkeeper.register("guard_requests", "Requests on guarded routes, by outcome", guarded.clone());
        let guard_lost = Counter::default();
        let lost = "Guarded requests whose lease was lost while the upstream worked";
        lockkeeper.register("guard_lost", lost, guard_lost.clone());
        let config_loads = Family::default();
        let loads = "Changes of the configuration's guarded routes, by outcome";
        lockkeeper.register("config_loads", loads, config_loads.clone());
        let process = process::Process::register(&mut registry);
        let inner = Inner {
            registry,
            policies,
            grants,
            renewals,
            releases,
            commits,
            holds,
            batch_operations,
            batch_seconds,
            store_errors,
            waiters,
            leases,
            fleet_members,
            fleet_changes,
            requests,
            guarded,
            guard_lost,
            config_loads,
            process,
        };
        Metrics { inner: Arc::new(inner) }
    }
}

const BATCH: [f64; 12] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1., 5.];

/// Buckets for waits and holds: from a millisecond to an hour.
fn long() -> Histogram {
    Histogram::new([
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1., 2.5, 5., 10., 30., 60., 300., 3600.,
    ])
}

/// Buckets for policy calls: from a microsecond to the longest that is allowed.
fn short() -> Histogram {
    Histogram::new([2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1])
}

/// A gauge for a size, which is never negative.
type Size = Gauge<f64, AtomicU64>;

/// Starts to log to standard error. An error names an invalid filter.
pub fn init_logs(log: &LogConfig) -> Result<(), String> {
    let filter = tracing_subscriber::EnvFilter::try_new(&log.filter)
        .map_err(|error| format!("log.filter: `{}` is not a filter: {error}", log.filter))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = if log.json {
        builder.json().flatten_event(true).try_init()
    } else {
        use std::io::IsTerminal;
        builder.with_ansi(std::io::stderr().is_terminal()).try_init()
    };
    started.map_err(|error| format!("logs are already being written: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_has_its_documented_name() {
        let metrics = Metrics::default();
        metrics.acquire("default", "granted", Duration::from_millis(3));
        metrics.acquire("default", "contended", Duration::from_millis(3));
        metrics.acquire("default", "something-new", Duration::ZERO);
        metrics.policy_fault("default", "plan", "trap");
        metrics.policy_call("default", "choose", Duration::from_micros(9));
        metrics.policy_load("default", "live");
        metrics.grant("advisory");
        metrics.renewal("renewed");
        metrics.release("released");
        metrics.lease_ended("expired", Duration::from_secs(2));
        metrics.batch(17, Duration::from_millis(2));
        metrics.store_error("timeout");
        metrics.waiters(5);
        metrics.leases(6);
        metrics.http("api", 409);
        metrics.guarded("locked");
        metrics.guard_lost();
        let text = metrics.encode();
        for line in [
            "lockkeeper_acquire_total{policy=\"default\",outcome=\"granted\"} 1",
            "lockkeeper_acquire_total{policy=\"default\",outcome=\"contended\"} 1",
            "lockkeeper_acquire_total{policy=\"default\",outcome=\"other\"} 1",
            "lockkeeper_wait_seconds_count{policy=\"default\"} 1",
            "lockkeeper_policy_faults_total{policy=\"default\",hook=\"plan\",reason=\"trap\"} 1",
            "lockkeeper_policy_call_seconds_count{policy=\"default\",hook=\"choose\"} 1",
            "lockkeeper_policy_loads_total{policy=\"default\",outcome=\"live\"} 1",
            "lockkeeper_grants_total{primitive=\"advisory\"} 1",
            "lockkeeper_renewals_total{outcome=\"renewed\"} 1",
            "lockkeeper_releases_total{outcome=\"released\"} 1",
            "lockkeeper_hold_seconds_count{how=\"expired\"} 1",
            "lockkeeper_store_batch_operations_sum 17",
            "lockkeeper_store_batch_seconds_count 1",
            "lockkeeper_store_errors_total{reason=\"timeout\"} 1",
            "lockkeeper_waiters 5",
            "lockkeeper_leases 6",
            "lockkeeper_http_requests_total{front=\"api\",status=\"409\"} 1",
            "lockkeeper_guard_requests_total{outcome=\"locked\"} 1",
            "lockkeeper_guard_lost_total 1",
            "process_resident_memory_bytes ",
            "process_start_time_seconds ",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn the_older_format_declares_counters_by_their_samples() {
        let metrics = Metrics::default();
        metrics.http("api", 200);
        let text = to_prometheus(&metrics.encode());
        let counter = "# HELP lockkeeper_http_requests_total HTTP requests that were answered.\n\
                       # TYPE lockkeeper_http_requests_total counter\n\
                       lockkeeper_http_requests_total{front=\"api\",status=\"200\"} 1\n";
        assert!(text.contains(counter), "{text}");
        assert!(text.contains("# TYPE lockkeeper_waiters gauge\nlockkeeper_waiters 0\n"), "{text}");
        assert!(!text.contains("# EOF") && !text.contains("# UNIT"), "{text}");
    }

    #[test]
    fn policy_names_are_bounded() {
        let metrics = Metrics::default();
        for n in 0..2_000 {
            metrics.acquire(&format!("p{n}"), "granted", Duration::ZERO);
        }
        let text = metrics.encode();
        assert!(text.contains("policy=\"other\""));
        assert!(text.matches("lockkeeper_wait_seconds_count").count() < 300);
    }
}

//! Tests of the simulation, and of the simulated server as a store.

use std::sync::Arc;
use std::time::Duration;

use super::application::GUARDED;
use super::conditions::{ALL, open};
use super::faults::{Fault, Planned};
use super::options::Options;
use super::search::{Search, search};
use super::server::Server;
use super::simulate;
use super::world::run;
use crate::config::StoreConfig;
use crate::lock::Space;
use crate::mysql::{Advisory, Row};
use crate::store::{Health, Router, Store, contract};

/// As on MySQL and MariaDB.
#[test]
fn the_simulated_server_meets_all_conditions() {
    ALL.iter().for_each(|(name, meet)| {
        eprintln!("{name}");
        meet();
    });
}

#[test]
fn the_store_keeps_its_contract() {
    simulate(0, async {
        let (lasting, forgetful) = (Server::new("server-1"), Server::new("server-2"));
        contract::run_all(|kind| {
            let mut config = StoreConfig::default();
            let server = match kind {
                contract::Kind::Lasting => lasting.clone(),
                contract::Kind::Forgetful => {
                    config.clean_after = contract::FORGETS_AFTER;
                    forgetful.clone()
                }
            };
            async move {
                let store = open(&config, server);
                let health = store.ready(Duration::from_secs(10)).await;
                assert!(matches!(health, Health::Ready { .. }), "{health:?}");
                Arc::new(store) as Arc<dyn Store>
            }
        })
        .await;
    });
}

/// Enough connections for the contract's row locks.
fn many_rows() -> StoreConfig {
    StoreConfig { row_connections: 200, ..StoreConfig::default() }
}

#[test]
fn session_locks_keep_the_applicable_part_of_the_contract() {
    simulate(0, async {
        let server = Server::new("server-1");
        let open = || open(&StoreConfig::default(), server.clone());
        let (one, other) = (open(), open());
        let advisory = |store| Arc::new(Advisory::new(store, &StoreConfig::default()));
        contract::run_session_locks(advisory(&one), advisory(&other), Space::Advisory).await;
        let row = |store| Arc::new(Row::new(store, &many_rows()));
        contract::run_session_locks(row(&one), row(&other), Space::Row).await;
        contract::run_any(row(&one), Space::Row).await;
        contract::run_shared(row(&one), row(&other), Space::Row).await;
    });
}

#[test]
fn leases_of_two_spaces_keep_the_applicable_part_of_the_contract() {
    simulate(0, async {
        let server = Server::new("server-1");
        let open = || Arc::new(open(&StoreConfig::default(), server.clone()));
        let (one, other) = (open(), open());
        let both = |space, beside: Arc<dyn Store>| Arc::new(Router::new(one.clone(), vec![(space, beside)]));
        let advisory = |store| Arc::new(Advisory::new(store, &StoreConfig::default()));
        let of_both = both(Space::Advisory, advisory(&one));
        contract::run_both(of_both, advisory(&other), Space::Advisory, one.clone()).await;
        let row = |store| Arc::new(Row::new(store, &many_rows()));
        contract::run_both(both(Space::Row, row(&one)), row(&other), Space::Row, one.clone()).await;
    });
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in [1, 2, 3, 4] {
        let mut options = Options::of(seed);
        options.lasts = Duration::from_secs(5);
        options.packet_faults_per_mille = 5;
        if seed == 4 {
            // Many requests wait while their routes are replaced.
            let named = |n: u32| Planned { at_ms: n * 600, fault: Fault::NameRoutes { naming: n % 3 } };
            options.faults = (1..8).map(named).collect();
            (options.policies, options.proxies) = (vec![GUARDED], 1);
            (options.clients, options.resources) = (24, 2);
        }
        let runs = [run(&options), run(&options)]
            .map(|run| run.map_err(|failed| (failed.violation, failed.time_line)));
        assert_eq!(runs[0], runs[1], "seed {seed}");
    }
    // In these runs several tasks wait for the same value.
    for seed in [4, 12, 53, 66] {
        let runs = [(); 2].map(|()| run(&Options::of(seed)).map_err(|failed| failed.time_line));
        assert_eq!(runs[0], runs[1], "seed {seed}");
    }
}

/// One proxy gets a new file of principals, and the other one gets it long after the grace.
#[test]
fn a_proxy_with_an_old_file_of_principals_grants_nothing_after_the_grace() {
    let deploy = |at_ms, proxy| Planned { at_ms, fault: Fault::Deploy { proxy, version: 1 } };
    let options = Options {
        proxies: 2,
        clients: 8,
        second: None,
        second_ahead_ms: 0,
        policies: vec!["lease"],
        lasts: Duration::from_secs(45),
        packet_faults_per_mille: 0,
        faults: vec![deploy(5_000, 0), deploy(35_000, 1)],
        in_order: false,
        ..Options::of(1)
    };
    let report =
        run(&options).unwrap_or_else(|failed| panic!("{}\n{}", failed.violation.0, failed.time_line));
    let refused = report.counts.get("a request is refused because of other rules").copied().unwrap_or(0);
    assert!(refused > 20, "{:?}", report.counts);
}

/// The first runs of the search, which `cargo xtask sim` continues.
#[test]
fn the_promises_are_kept_in_some_runs() {
    for seed in 1..=12 {
        if let Err(failed) = run(&Options::of(seed)) {
            panic!(
                "{}\n{}\nseed {seed}: cargo xtask sim --seed {seed}",
                failed.violation.0, failed.time_line
            );
        }
    }
}

/// This is a separate step of `cargo xtask test`, which shows its output.
#[test]
#[ignore = "takes 90 seconds: cargo xtask test simulation"]
fn the_promises_are_kept_in_runs_of_new_seeds() {
    let first = rand::random_range(1..1_000_000_000);
    let limit = Duration::from_secs(90);
    let keeps = search(&Search {
        first,
        seeds: u64::MAX,
        limit,
        tells_all: false,
        tells_each: false,
        logs: false,
        shrinks: true,
    });
    assert!(keeps, "a promise is broken: see above");
}

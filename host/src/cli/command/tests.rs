//! `run` against a proxy that grants, and then behaves as the test wants.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use tokio_util::sync::CancellationToken;

use super::*;
use crate::config::HttpLimits;
use crate::http::{self, Handler, Kind, Peer, Problem, Response};
use crate::telemetry::Metrics;

fn held(ttl_ms: u32, left_ms: u32) -> Held {
    let grant = json!({
        "lease_id": "x", "token": 7, "keys": ["k"], "ttl_ms": ttl_ms, "expires_in_ms": left_ms, "waited_ms": 500,
    });
    Held::new(&grant, Instant(0)).unwrap()
}

#[test]
fn times_are_in_order() {
    for ttl_ms in [100, 1_000, 10_000, 3_600_000] {
        let lease = held(ttl_ms, ttl_ms - ttl_ms / 50);
        let times = [lease.renew_at, lease.stop_at(), lease.kill_at(), lease.valid_until];
        assert!(times.is_sorted_by(|a, b| a < b), "{ttl_ms}: {times:?}");
    }
}

#[test]
fn a_lease_counts_from_its_question_and_wait() {
    let lease = held(10_000, 9_900);
    assert_eq!(lease.valid_until, Instant(10_400_000));
    assert_eq!(lease.renew_at, Instant(3_833_000));
    assert_eq!(lease.environment()[2], ("LOCKKEEPER_TOKEN", "7".to_owned()));
}

#[derive(Clone, Copy, PartialEq)]
enum Renewals {
    Work,
    Fail,
    Hang,
    FindItLost,
}

struct FakeProxy {
    renewals: Renewals,
    renewed: Arc<AtomicU32>,
    released: Arc<AtomicU32>,
}

const TTL_MS: u32 = 900;

impl Handler for FakeProxy {
    const FRONT: &'static str = "fake";

    async fn handle(&self, request: http::Request, _peer: &Arc<Peer>) -> Response {
        match (request.uri().path(), self.renewals) {
            ("/v1/acquire", _) => http::json(&json!({
                "lease_id": "the-lease", "token": 7, "keys": ["k"], "ttl_ms": TTL_MS, "expires_in_ms": TTL_MS,
                "waited_ms": 0,
            })),
            ("/v1/release", _) => {
                self.released.fetch_add(1, SeqCst);
                http::json(&json!({"released": true}))
            }
            ("/v1/renew", Renewals::Work) => {
                self.renewed.fetch_add(1, SeqCst);
                http::json(&json!({"ttl_ms": TTL_MS, "expires_in_ms": TTL_MS}))
            }
            ("/v1/renew", Renewals::Fail) => Problem::new(Kind::StoreUnavailable, "down").into_response(),
            ("/v1/renew", Renewals::FindItLost) => Problem::new(Kind::Lost, "taken").into_response(),
            ("/v1/renew", Renewals::Hang) => std::future::pending().await,
            (path, _) => Problem::not_found(path).into_response(),
        }
    }
}

struct Ended {
    outcome: Result<u8, Failure>,
    took_ms: u32,
    renewed: u32,
    released: u32,
}

async fn run_under(renewals: Renewals, script: &str) -> Ended {
    let (renewed, released) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let proxy = FakeProxy { renewals, renewed: Arc::clone(&renewed), released: Arc::clone(&released) };
    let listener = http::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let server = format!("http://{}", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    tokio::spawn(http::serve(
        http::Listener::plain(listener),
        proxy,
        HttpLimits::default(),
        Metrics::default(),
        stop,
    ));

    use clap::Parser;
    let args = ["lockkeeper", "run", "--server", &server, "r", "--", "sh", "-c", script];
    let cli = crate::cli::Cli::try_parse_from(args).unwrap();
    let crate::cli::Command::Client(crate::cli::ClientCommand::Run(args)) = cli.command else {
        panic!("run")
    };
    let begun = clock::now();
    let outcome = run(args, &cli.options).await;
    let took_ms = clock::now().ms_since(begun);
    Ended { outcome, took_ms, renewed: renewed.load(SeqCst), released: released.load(SeqCst) }
}

#[tokio::test]
async fn a_command_runs_as_long_as_it_likes() {
    let ended = run_under(Renewals::Work, "sleep 1.5; test $LOCKKEEPER_LEASE_ID = the-lease && exit 9").await;
    assert_eq!(ended.outcome.unwrap(), 9);
    assert!(ended.renewed >= 3, "{}", ended.renewed);
    assert_eq!(ended.released, 1);
}

#[tokio::test]
async fn a_command_is_stopped_before_a_lease_that_cannot_be_renewed_ends() {
    for renewals in [Renewals::Fail, Renewals::Hang] {
        for script in ["sleep 30", "trap '' TERM; sleep 30 & wait; sleep 30"] {
            let ended = run_under(renewals, script).await;
            assert_eq!(ended.outcome.unwrap_err().code_of_run(), 114);
            assert!(ended.took_ms < TTL_MS, "{} ms", ended.took_ms);
        }
    }
}

#[tokio::test]
async fn a_command_is_stopped_when_its_lease_is_found_lost() {
    let ended = run_under(Renewals::FindItLost, "sleep 30").await;
    assert_eq!(ended.outcome.unwrap_err().code_of_run(), 114);
    assert!((TTL_MS / 3..TTL_MS).contains(&ended.took_ms), "{} ms", ended.took_ms);
    assert_eq!(ended.released, 0);
}

#[tokio::test]
async fn a_lock_is_released_where_the_command_cannot_run() {
    let ended = run_under(Renewals::Work, "exec /nowhere/at-all").await;
    assert_eq!(ended.outcome.unwrap(), 127);
    assert_eq!(ended.released, 1);
}

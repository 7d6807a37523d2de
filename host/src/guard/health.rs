//! Health checks of upstreams.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use http_body_util::Empty;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::GuardContext;
use super::routes::{Route, Routes};
use super::upstream::Target;

/// The time-out of one health check.
const PATIENCE: Duration = Duration::from_secs(2);

/// How often unused kept connections are closed.
const SWEEP: Duration = Duration::from_secs(1);

/// Checks each upstream of a route with a `health` path periodically, and closes kept connections that are unused.
pub async fn watch(shared: Arc<GuardContext>, routes: Vec<Arc<ArcSwap<Routes>>>, every: Duration) {
    let mut rounds = tokio::time::interval(every);
    rounds.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut sweeps = tokio::time::interval(SWEEP);
    loop {
        tokio::select! {
            biased;
            _ = rounds.tick() => round(&shared, &routes).await,
            _ = sweeps.tick() => shared.targets.all().iter().for_each(|target| target.sweep()),
        }
    }
}

async fn round(shared: &GuardContext, routes: &[Arc<ArcSwap<Routes>>]) {
    let routes: Vec<Arc<Routes>> = routes.iter().map(|routes| routes.load_full()).collect();
    let questions = shared.targets.all().into_iter().map(|target| {
        let leads_there = |route: &&Arc<Route>| route.targets.iter().any(|known| Arc::ptr_eq(known, &target));
        let routes = routes.iter().flat_map(|routes| routes.iter()).filter(leads_there);
        let paths: BTreeSet<String> = routes.filter_map(|route| route.config.health.clone()).collect();
        ask(target, paths)
    });
    futures_util::future::join_all(questions.collect::<Vec<_>>()).await;
}

/// Checks one target. A target without health paths counts as healthy.
async fn ask(target: Arc<Target>, paths: BTreeSet<String>) {
    let mut trouble = None;
    for path in paths {
        let answer = tokio::time::timeout(PATIENCE, probe(target.name(), &path)).await;
        let what = match answer {
            Ok(Ok(status)) if status.is_success() => continue,
            Ok(Ok(status)) => format!("answered {status}"),
            Ok(Err(error)) => format!("{error:#}"),
            Err(_elapsed) => format!("did not answer within {} ms", PATIENCE.as_millis()),
        };
        trouble = Some(format!("{path}: {what}"));
    }
    if target.note_health(trouble.is_some()) {
        match trouble {
            Some(why) => tracing::warn!(upstream = target.name(), why, "an upstream is not well"),
            None => tracing::info!(upstream = target.name(), "an upstream is well again"),
        }
    }
}

async fn probe(name: &str, path: &str) -> anyhow::Result<hyper::StatusCode> {
    let stream = TcpStream::connect(name).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let request = hyper::Request::get(path)
        .header(hyper::header::HOST, name)
        .header(hyper::header::CONNECTION, "close")
        .body(Empty::<bytes::Bytes>::new())?;
    let mut answer = std::pin::pin!(sender.send_request(request));
    let answer = tokio::select! {
        biased;
        answer = &mut answer => answer,
        // The head of the answer may have arrived just before the connection ended.
        _ = connection => answer.await,
    };
    Ok(answer?.status())
}

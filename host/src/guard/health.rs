//! Upstreams that are asked how they are.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use http_body_util::Empty;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::Shared;
use super::routes::Routes;
use super::upstream::Target;

/// One question may take this long.
const PATIENCE: Duration = Duration::from_secs(2);

/// Asks each upstream of a route with a `health` path, again and again, and closes connections that
/// nobody uses.
pub async fn watch(shared: Arc<Shared>, routes: Vec<Arc<ArcSwap<Routes>>>, every: Duration) {
    let mut rounds = tokio::time::interval(every);
    rounds.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        rounds.tick().await;
        for target in shared.targets.all() {
            target.sweep();
        }
        let mut asked = HashSet::new();
        let mut questions = Vec::new();
        for routes in routes.iter().map(|routes| routes.load_full()) {
            for route in routes.iter() {
                let Some(path) = &route.config.health else { continue };
                for target in &route.targets {
                    if asked.insert((target.name().to_owned(), path.clone())) {
                        questions.push(ask(target.clone(), path.clone()));
                    }
                }
            }
        }
        futures_util::future::join_all(questions).await;
    }
}

async fn ask(target: Arc<Target>, path: String) {
    let answer = tokio::time::timeout(PATIENCE, probe(target.name(), &path)).await;
    let trouble = match answer {
        Ok(Ok(status)) if status.is_success() => None,
        Ok(Ok(status)) => Some(format!("answered {status}")),
        Ok(Err(error)) => Some(format!("{error:#}")),
        Err(_elapsed) => Some(format!("did not answer within {} ms", PATIENCE.as_millis())),
    };
    if target.note_health(trouble.is_some()) {
        match trouble {
            Some(why) => tracing::warn!(upstream = target.name(), path, why, "an upstream is not well"),
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
    let (answer, _) = tokio::join!(sender.send_request(request), connection);
    Ok(answer?.status())
}

//! A connection that switched its protocol, for example to WebSocket, under the lock of its request.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWriteExt};
use tokio_util::io::InspectReader;

use super::locked::{Locked, lost};
use crate::clock;
use crate::lock::Instant;
use crate::net::Stream;

/// Passes bytes in both directions. Ends when both sides have closed, when neither side has sent anything for `idle`,
/// or when the lease is lost and the policy cuts off in that case.
pub async fn run(
    client: Stream,
    early: Bytes,
    upstream: OnUpgrade,
    lock: Option<Box<Locked>>,
    idle: Duration,
) {
    let lock = UntilClosed(lock);
    let cut = lock.0.as_ref().and_then(|lock| lock.cut());
    let heard_at = Arc::new(AtomicU64::new(clock::now().0));
    let pass = async {
        let upstream = TokioIo::new(upstream.await.map_err(io::Error::other)?);
        let (mut client, mut upstream) = (heard(client, &heard_at), heard(upstream, &heard_at));
        upstream.write_all(&early).await?;
        tokio::io::copy_bidirectional(&mut client, &mut upstream).await
    };
    tokio::select! {
        biased;
        passed = pass => if let Err(error) = passed {
            tracing::debug!(%error, "an upgraded connection broke");
        },
        () = silence(&heard_at, idle) => tracing::debug!(?idle, "an upgraded connection was idle for too long"),
        _ = lost(cut) => {}
    }
    lock.closed();
}

/// The lock of a connection. If the proxy shuts down and drops the connection, the upstream may not have noticed yet,
/// so the lease runs out.
struct UntilClosed(Option<Box<Locked>>);

impl UntilClosed {
    fn closed(mut self) {
        self.0 = None;
    }
}

impl Drop for UntilClosed {
    fn drop(&mut self) {
        if let Some(lock) = self.0.take() {
            lock.leave();
        }
    }
}

async fn silence(heard_at: &AtomicU64, idle: Duration) {
    loop {
        let until = Instant(heard_at.load(Relaxed)).plus_us(idle.as_micros() as u64);
        if clock::now() >= until {
            return;
        }
        clock::sleep_until(until).await;
    }
}

/// Records the time of each read.
fn heard<S: AsyncRead>(stream: S, at: &Arc<AtomicU64>) -> InspectReader<S, impl FnMut(&[u8])> {
    let at = at.clone();
    InspectReader::new(stream, move |_| at.store(clock::now().0, Relaxed))
}

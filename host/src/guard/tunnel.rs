//! A connection that changed its protocol, for example to WebSocket, under the lock of its request.

use bytes::Bytes;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWriteExt;

use super::locked::Locked;
use crate::http::Stream;

/// Passes bytes both ways until both sides have closed, or the lease is lost and the policy wants to
/// break off then.
pub async fn run(mut client: Stream, early: Bytes, upstream: OnUpgrade, lock: Option<Box<Locked>>) {
    let cut = lock.as_ref().and_then(|lock| lock.cut());
    let pass = async {
        let mut upstream = TokioIo::new(upstream.await.map_err(std::io::Error::other)?);
        upstream.write_all(&early).await?;
        tokio::io::copy_bidirectional(&mut client, &mut upstream).await
    };
    let cut = async {
        match cut {
            Some(cut) => drop(cut.await),
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        passed = pass => if let Err(error) = passed {
            tracing::debug!(%error, "an upgraded connection broke");
        },
        () = cut => {}
    }
    if let Some(lock) = lock {
        lock.end();
    }
}

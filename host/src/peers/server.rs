//! The receiving side: wakes waiters.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::places::Places;
use super::wire::{self, Conversation, FRAME_LIMIT, IDLE, MAX_FRAME, NONCE, PROOF};
use crate::latest;
use crate::lock::Key;
use crate::net::{self, Connection, Limits, Listener, Protocol, Stream, WhenFull};
use crate::random;
use crate::service::Service;
use crate::store::registry::PeerSecret;
use crate::telemetry::Metrics;

/// How many callers that have proven themselves are served at a time.
const CALLERS: usize = 256;
/// How many connections may be on their way to their first proven frame. A proxy needs such a place for about one
/// round trip: to keep it out, a stranger would have to open this many connections in that time.
const NEWCOMERS: usize = 256;
/// How many connections may be about to end.
const ENDING: usize = 64;

/// Accepts notifications and wakes waiters until `stop`. `secret` is what the store has; `None` as long as it is not
/// known, and then nobody is woken.
pub async fn serve(
    listener: Listener,
    name: String,
    secret: latest::Receiver<Option<PeerSecret>>,
    service: Service,
    metrics: Metrics,
    stop: CancellationToken,
) {
    let wake = move |key| service.wake(key);
    net::serve(listener, Notifications::new(name, secret, metrics, wake), stop).await;
}

struct Notifications<W> {
    /// The name of this proxy.
    name: String,
    secret: latest::Receiver<Option<PeerSecret>>,
    metrics: Metrics,
    /// Wakes the waiters of a key.
    wake: W,
    newcomers: Places,
    callers: Places,
    /// Whether a warning about callers without proofs was logged.
    warned: AtomicBool,
}

impl<W: Fn(Key) + Send + Sync + 'static> Protocol for Notifications<W> {
    const NAME: &'static str = "peers";

    fn limits(&self) -> Limits {
        Limits {
            max_connections: CALLERS + NEWCOMERS + ENDING,
            max_per_address: None,
            // A caller of an earlier version would take a refusal for the end of this proxy, and pass over its waiters.
            when_full: WhenFull::Wait,
            handshake_timeout: FRAME_LIMIT,
        }
    }

    async fn serve(self: Arc<Self>, connection: Connection) {
        let Connection { stream, handshake_deadline, stop, .. } = connection;
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = self.converse(stream, handshake_deadline) => {}
        }
    }
}

impl<W: Fn(Key)> Notifications<W> {
    fn new(
        name: String,
        secret: latest::Receiver<Option<PeerSecret>>,
        metrics: Metrics,
        wake: W,
    ) -> Notifications<W> {
        Notifications {
            name,
            secret,
            metrics,
            wake,
            newcomers: Places::new(NEWCOMERS),
            callers: Places::new(CALLERS),
            warned: AtomicBool::new(false),
        }
    }

    /// Wakes waiters as long as the caller proves each frame.
    async fn converse(&self, mut stream: Stream, first_until: tokio::time::Instant) {
        let nonce: [u8; NONCE] = random::number();
        let mut conversation = Conversation::new(&self.name, nonce);
        let newcomer = self.newcomers.take();
        let first = async {
            // Sent first of all, so that a caller never takes a connection that ends for the end of this proxy.
            stream.write_all(&[self.name.as_bytes(), b"\n", &nonce].concat()).await?;
            self.notification(&mut stream, &mut conversation).await
        };
        let first = tokio::select! {
            biased;
            () = newcomer.lost() => Err(io::ErrorKind::QuotaExceeded.into()),
            first = timeout_at(first_until, first) => first.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())),
        };
        drop(newcomer);
        if let Err(error) = first.map(|key| self.wakes(key)) {
            return self.refused(&error);
        }
        let place = self.callers.take();
        let others = async {
            while let Ok(key) = self.notification(&mut stream, &mut conversation).await {
                self.wakes(key);
            }
        };
        tokio::select! {
            biased;
            () = place.lost() => {}
            () = others => {}
        }
    }

    /// The next notification.
    async fn notification(&self, stream: &mut Stream, conversation: &mut Conversation) -> io::Result<Key> {
        let begun = timeout(2 * IDLE, stream.read_u8()).await??;
        let (frame, proof) = timeout(FRAME_LIMIT, async {
            let length = usize::from(u16::from_be_bytes([begun, stream.read_u8().await?]));
            let (mut frame, mut proof) = (vec![0; length.min(MAX_FRAME)], [0; PROOF]);
            stream.read_exact(&mut frame).await?;
            stream.read_exact(&mut proof).await?;
            io::Result::Ok((frame, proof))
        })
        .await??;
        let secret = self.secret.borrow().clone();
        match secret.is_some_and(|secret| conversation.is_proven(&secret, &frame, &proof)) {
            true => wire::key_of(&frame).ok_or_else(|| io::ErrorKind::InvalidData.into()),
            false => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }

    fn wakes(&self, key: Key) {
        self.metrics.fleet.notification("woken");
        (self.wake)(key);
    }

    fn refused(&self, error: &io::Error) {
        self.metrics.fleet.notification("refused");
        tracing::debug!(%error, "a connection to fleet.listen has proven nothing");
        let sent_none = matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::TimedOut);
        if sent_none && !self.warned.swap(true, Relaxed) {
            tracing::warn!(
                "a notification at fleet.listen was refused, because its sender did not prove that it is a proxy of \
                 this store; further ones are only counted, in lockkeeper_fleet_notifications_total"
            );
        }
    }
}

#[cfg(test)]
mod tests;

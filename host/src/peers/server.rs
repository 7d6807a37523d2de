//! The receiving side: wakes waiters.

use std::io;
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::sync::CancellationToken;

use super::wire::{self, CONNECT_LIMIT, IDLE};
use crate::net::{self, Connection, Limits, Listener, Protocol, Stream, WhenFull};
use crate::service::Service;

/// How many incoming connections are served at a time.
const CALLERS: usize = 256;

/// Accepts notifications and wakes waiters until `stop`.
pub async fn serve(listener: Listener, name: String, service: Service, stop: CancellationToken) {
    net::serve(listener, Notifications { name, service }, stop).await;
}

struct Notifications {
    /// The name of this proxy.
    name: String,
    service: Service,
}

impl Protocol for Notifications {
    const NAME: &'static str = "peers";

    fn limits(&self) -> Limits {
        Limits {
            max_connections: CALLERS,
            // A caller would take a refusal for the end of this proxy, and pass over its waiters.
            when_full: WhenFull::Wait,
            handshake_timeout: CONNECT_LIMIT,
        }
    }

    async fn serve(self: Arc<Self>, connection: Connection) {
        let Connection { stream, stop, .. } = connection;
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            _ = self.receive(stream) => {}
        }
    }
}

impl Notifications {
    async fn receive(&self, mut stream: Stream) -> io::Result<()> {
        stream.write_all(format!("{}\n", self.name).as_bytes()).await?;
        let mut frame = vec![0; wire::MAX_FRAME];
        loop {
            let length = tokio::time::timeout(2 * IDLE, stream.read_u16()).await??;
            let frame = frame.get_mut(..usize::from(length)).ok_or(io::ErrorKind::InvalidData)?;
            stream.read_exact(frame).await?;
            let key = wire::key_of(frame).ok_or(io::ErrorKind::InvalidData)?;
            self.service.wake(key);
        }
    }
}

//! Connections to a proxy through its Unix socket.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::Uri;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tower_service::Service;

/// Connects to one socket, whatever the URL of a request.
#[derive(Clone)]
pub struct UnixConnector {
    path: PathBuf,
    timeout: Duration,
}

impl UnixConnector {
    /// Connects to the socket at `path`. `timeout`: of each connection attempt.
    pub fn new(path: impl Into<PathBuf>, timeout: Duration) -> UnixConnector {
        UnixConnector { path: path.into(), timeout }
    }
}

impl Service<Uri> for UnixConnector {
    type Response = TokioIo<UnixStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<UnixStream>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let UnixConnector { path, timeout } = self.clone();
        Box::pin(async move {
            let connected = tokio::time::timeout(timeout, UnixStream::connect(path)).await;
            connected.map_err(|_| io::Error::from(ErrorKind::TimedOut))?.map(TokioIo::new)
        })
    }
}

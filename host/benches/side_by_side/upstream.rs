//! The application behind the guarded routes: a small HTTP server with one thread, in its own process.

use std::convert::Infallible;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::task::Poll;

use anyhow::{Context, Result};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

/// The length of an answer's body, if the request asks for none.
const SHORT: u64 = 100;

/// The pieces in which a long body is sent.
static PIECE: [u8; 64 * 1024] = [b'x'; 64 * 1024];

/// The process of the server. Dropping this kills the process.
pub struct Upstream {
    child: Child,
    pub address: SocketAddr,
}

impl Upstream {
    /// Starts the server.
    pub fn start() -> Result<Upstream> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--upstream").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start the upstream")?;
        let out = child.stdout.take().context("the upstream has no output")?;
        let mut upstream = Upstream { child, address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)) };
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line)?;
        upstream.address = line.trim().parse().context("the upstream did not say its address")?;
        Ok(upstream)
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        // The process may have ended by itself, so ignore errors.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Serves in this process. Prints its address to standard output, and ends when standard input ends, which is when
/// the parent is gone.
pub fn serve() -> Result<()> {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let mut out = std::io::stdout();
        writeln!(out, "{}", listener.local_addr()?)?;
        out.flush()?;
        loop {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            let service = hyper::service::service_fn(answer);
            let connection = hyper::server::conn::http1::Builder::new();
            // A client may leave at any time, so ignore errors.
            tokio::spawn(connection.serve_connection(TokioIo::new(stream), service));
        }
    })
}

/// Answers `?bytes=N` with that many bytes, and everything else with the number of bytes received.
async fn answer(request: Request<Incoming>) -> Result<Response<Text>, hyper::Error> {
    let query = request.uri().query().unwrap_or_default();
    let asked: Option<u64> = query.strip_prefix("bytes=").and_then(|bytes| bytes.parse().ok());
    let mut body = request.into_body();
    let mut received = 0;
    while let Some(frame) = body.frame().await {
        received += frame?.data_ref().map_or(0, Bytes::len) as u64;
    }
    let text = match asked {
        Some(bytes) => Text { beginning: Bytes::new(), left: bytes },
        None => {
            let beginning = format!("received {received} ");
            let left = SHORT.saturating_sub(beginning.len() as u64);
            Text { beginning: beginning.into(), left }
        }
    };
    Ok(Response::new(text))
}

/// A body: its beginning, and the number of filler bytes after it.
struct Text {
    beginning: Bytes,
    left: u64,
}

impl Body for Text {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.is_end_stream() {
            return Poll::Ready(None);
        }
        let room = PIECE.len() as u64;
        let next = self.left.min(room) as usize;
        self.left -= next as u64;
        let piece = Bytes::from_static(&PIECE[..next]);
        let beginning = std::mem::take(&mut self.beginning);
        // A body with a beginning is short.
        let piece = if beginning.is_empty() { piece } else { [beginning, piece].concat().into() };
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.beginning.is_empty() && self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.beginning.len() as u64 + self.left)
    }
}

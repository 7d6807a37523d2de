//! An application behind the proxy, in its own process: this test binary, started again.
//!
//! | path | answer |
//! | --- | --- |
//! | `/echo…` | the request that arrived, as JSON |
//! | `/task…?ms=` | after a while, `done`; counts concurrent requests on the same path |
//! | `/empty?ms=` | after a while, an answer without a body |
//! | `/bytes?n=` | this many bytes, in chunks |
//! | `/count` | the number of bytes in the body, and their sum |
//! | `/early` | `early`, before the request has ended |
//! | `/endless` | a byte from time to time, without end |
//! | `/trailers` | a body with a trailer; the request's trailers in the body |
//! | `/socket` | a 101; after that, each byte is sent back |
//! | `/status/N` | that status, with a cookie |
//! | `/cache/DIRECTIVE` | `secret`, with that directive in `Cache-Control` |
//! | `/never` | nothing, until the connection is closed |
//! | `/stats` | all counts |
//! | `/bad/NAME` | on the other port: bytes that no server should send |

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::HeaderMap;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::Client;

const ADDRESSES: &str = "IT_UPSTREAM_LISTEN";

/// The process of the application. Dropping this kills the process.
pub struct Upstream {
    child: Child,
    pub good: SocketAddr,
    pub bad: SocketAddr,
}

impl Upstream {
    /// Starts the application.
    pub async fn start() -> Upstream {
        Upstream::at("127.0.0.1:0").await
    }

    /// Starts the application on this address, for example where it was before.
    pub async fn at(listen: &str) -> Upstream {
        let listen = listen.to_owned();
        tokio::task::spawn_blocking(move || Upstream::spawn(&listen)).await.expect("the upstream starts")
    }

    fn spawn(listen: &str) -> Upstream {
        let exe = std::env::current_exe().expect("this binary has a path");
        let mut command = Command::new(exe);
        command.args(["--exact", "harness::upstream::an_upstream_is_a_process_of_its_own", "--nocapture"]);
        command.env(ADDRESSES, listen).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("this binary");
        let out = BufReader::new(child.stdout.take().expect("its output"));
        let line = out.lines().map_while(Result::ok).find(|line| line.contains("listening "));
        let line = line.expect("the upstream says where it listens");
        let (_, addresses) = line.split_once("listening ").expect("it was found");
        let mut addresses = addresses.split_whitespace().map(|address| address.parse().expect("an address"));
        let (good, bad) = (addresses.next().expect("two"), addresses.next().expect("two"));
        Upstream { child, good, bad }
    }

    /// Sends a signal to the application.
    pub fn signal(&self, signal: Signal) {
        super::signal(self.child.id(), signal);
    }

    /// Kills the application.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// The application's counts, without the proxy.
    pub async fn stats(&self) -> Value {
        Client::new(self.good).get("/stats").await.json
    }

    /// The number of requests for a path.
    pub async fn served(&self, path: &str) -> u64 {
        self.stats().await["served"][path].as_u64().unwrap_or(0)
    }

    /// The largest number of concurrent requests on a path.
    pub async fn together(&self, path: &str) -> u64 {
        self.stats().await["together"][path].as_u64().unwrap_or(0)
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.kill();
    }
}

#[test]
fn an_upstream_is_a_process_of_its_own() {
    match std::env::var(ADDRESSES) {
        Ok(listen) => {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(serve(&listen));
        }
        Err(_) => super::run(async {
            let upstream = Upstream::start().await;
            assert_eq!(Client::new(upstream.good).get("/task?ms=1").await.text, "done");
            assert_eq!((upstream.served("/task").await, upstream.together("/task").await), (1, 1));
        }),
    }
}

#[derive(Default)]
struct Counted {
    served: HashMap<String, u64>,
    now: HashMap<String, u64>,
    together: HashMap<String, u64>,
}

type Stats = Arc<Mutex<Counted>>;
type Answer = Response<BoxBody<Bytes, std::io::Error>>;

/// Serves until standard input ends, so that a test that was killed leaves nothing behind.
async fn serve(listen: &str) {
    let good = TcpListener::bind(listen).await.expect("a free port");
    let bad = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    println!("listening {} {}", good.local_addr().expect("bound"), bad.local_addr().expect("bound"));
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
    tokio::spawn(async move {
        while let Ok((stream, _)) = bad.accept().await {
            tokio::spawn(misbehave(stream));
        }
    });
    let stats = Stats::default();
    while let Ok((stream, _)) = good.accept().await {
        let stats = stats.clone();
        tokio::spawn(async move {
            let answers = service_fn(move |request| {
                let stats = stats.clone();
                async move { Ok::<_, std::convert::Infallible>(answer(request, &stats).await) }
            });
            let http = hyper::server::conn::http1::Builder::new();
            let _ = http.serve_connection(TokioIo::new(stream), answers).with_upgrades().await;
        });
    }
}

/// Counts a request on a path until it is dropped.
struct OnPath(Stats, String);

impl OnPath {
    fn enter(stats: &Stats, path: &str) -> OnPath {
        let mut counted = stats.lock().expect("nobody panics with it");
        *counted.served.entry(path.to_owned()).or_default() += 1;
        let now = counted.now.entry(path.to_owned()).or_default();
        *now += 1;
        let now = *now;
        let most = counted.together.entry(path.to_owned()).or_default();
        *most = now.max(*most);
        OnPath(stats.clone(), path.to_owned())
    }
}

impl Drop for OnPath {
    fn drop(&mut self) {
        if let Some(now) = self.0.lock().expect("nobody panics with it").now.get_mut(&self.1) {
            *now -= 1;
        }
    }
}

fn parameter(request: &Request<Incoming>, name: &str) -> u64 {
    let pairs = request.uri().query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    pairs.filter(|(known, _)| *known == name).filter_map(|(_, value)| value.parse().ok()).next().unwrap_or(0)
}

fn full(text: impl Into<Bytes>) -> Answer {
    Response::new(Full::new(text.into()).map_err(|never| match never {}).boxed())
}

async fn answer(mut request: Request<Incoming>, stats: &Stats) -> Answer {
    let path = request.uri().path().to_owned();
    if path == "/stats" {
        let counted = stats.lock().expect("nobody panics with it");
        return full(
            json!({"served": counted.served, "now": counted.now, "together": counted.together}).to_string(),
        );
    }
    let here = OnPath::enter(stats, &path);
    match path.as_str() {
        "/never" => std::future::pending().await,
        "/socket" => socket(&mut request),
        "/bytes" => bytes_of(parameter(&request, "n")),
        "/count" => count(request.into_body()).await,
        "/early" => early(request.into_body(), stats.clone()),
        "/endless" => endless(here),
        "/trailers" => trailers(request.into_body()).await,
        "/empty" => {
            tokio::time::sleep(Duration::from_millis(parameter(&request, "ms"))).await;
            full("")
        }
        path if path.starts_with("/task") => {
            let ms = parameter(&request, "ms");
            let _ = request.into_body().collect().await;
            tokio::time::sleep(Duration::from_millis(ms)).await;
            full("done")
        }
        path if path.starts_with("/cache/") => {
            let mut answer = full("secret");
            let directive = path["/cache/".len()..].parse().expect("a header");
            answer.headers_mut().insert("cache-control", directive);
            answer
        }
        path if path.starts_with("/status/") => {
            let status = path["/status/".len()..].parse().expect("a status");
            let mut answer = full(format!("status {status}"));
            *answer.status_mut() = hyper::StatusCode::from_u16(status).expect("a status");
            answer.headers_mut().append("set-cookie", "a=1".parse().expect("a header"));
            answer.headers_mut().append("set-cookie", "b=2".parse().expect("a header"));
            answer.headers_mut().append("link", "</a>".parse().expect("a header"));
            answer.headers_mut().append("link", "</b>".parse().expect("a header"));
            answer.headers_mut().append("lock-status", "mine".parse().expect("a header"));
            answer
        }
        _ => echo(request).await,
    }
}

async fn echo(request: Request<Incoming>) -> Answer {
    let (parts, body) = request.into_parts();
    let mut headers: HashMap<&str, Vec<String>> = HashMap::new();
    for (name, value) in &parts.headers {
        headers.entry(name.as_str()).or_default().push(String::from_utf8_lossy(value.as_bytes()).into());
    }
    let target = parts.uri.to_string();
    let head = json!({"method": parts.method.as_str(), "target": target, "headers": headers});
    let body = body.collect().await.map(|body| String::from_utf8_lossy(&body.to_bytes()).into_owned());
    let mut head = head;
    head["body"] = body.unwrap_or_default().into();
    full(head.to_string())
}

fn bytes_of(mut left: u64) -> Answer {
    const PIECE: &[u8] = &[b'x'; 16 * 1024];
    let pieces = stream::poll_fn(move |_| {
        let take = left.min(PIECE.len() as u64);
        left -= take;
        std::task::Poll::Ready(
            (take > 0).then(|| Ok(Frame::data(Bytes::from_static(&PIECE[..take as usize])))),
        )
    });
    Response::new(BodyExt::boxed(StreamBody::new(pieces)))
}

/// Answers at once and continues to read. Counts how the request ends.
fn early(body: Incoming, stats: Stats) -> Answer {
    tokio::spawn(async move {
        let end = if body.collect().await.is_ok() { "/early/whole" } else { "/early/broken" };
        drop(OnPath::enter(&stats, end));
    });
    full("early")
}

fn endless(here: OnPath) -> Answer {
    let (send, mut pieces) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        let _here = here;
        while send.send(Ok(Frame::data(Bytes::from_static(b"x")))).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    let pieces = stream::poll_fn(move |cx| pieces.poll_recv(cx));
    Response::new(BodyExt::boxed(StreamBody::new(pieces)))
}

async fn count(mut body: Incoming) -> Answer {
    let (mut bytes, mut sum) = (0_u64, 0_u64);
    while let Some(Ok(frame)) = body.frame().await {
        if let Ok(data) = frame.into_data() {
            bytes += data.len() as u64;
            sum += data.iter().map(|byte| u64::from(*byte)).sum::<u64>();
        }
    }
    full(json!({"bytes": bytes, "sum": sum}).to_string())
}

async fn trailers(body: Incoming) -> Answer {
    let collected = body.collect().await.expect("the request is whole");
    let got = collected.trailers().map(|trailers| format!("{trailers:?}")).unwrap_or_default();
    let mut map = HeaderMap::new();
    map.insert("x-check", "42".parse().expect("a header"));
    let frames = [Ok(Frame::data(Bytes::from(got))), Ok(Frame::trailers(map))];
    let mut answer = Response::new(BodyExt::boxed(StreamBody::new(stream::iter(frames))));
    answer.headers_mut().insert("trailer", "x-check".parse().expect("a header"));
    answer
}

fn socket(request: &mut Request<Incoming>) -> Answer {
    let upgrade = hyper::upgrade::on(request);
    tokio::spawn(async move {
        let Ok(upgraded) = upgrade.await else { return };
        let (mut read, mut write) = tokio::io::split(TokioIo::new(upgraded));
        let _ = tokio::io::copy(&mut read, &mut write).await;
    });
    let mut answer = Response::new(Empty::new().map_err(|never| match never {}).boxed());
    *answer.status_mut() = hyper::StatusCode::SWITCHING_PROTOCOLS;
    answer.headers_mut().insert("connection", "upgrade".parse().expect("a header"));
    answer.headers_mut().insert("upgrade", "echo".parse().expect("a header"));
    answer
}

/// Reads the head of a request, and answers with the bytes that its path asks for.
async fn misbehave(mut stream: TcpStream) {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut byte).await {
            Ok(1) => head.push(byte[0]),
            _ => return,
        }
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let name = head.split_whitespace().nth(1).and_then(|path| path.strip_prefix("/bad/")).unwrap_or_default();
    let bytes: Pin<Box<dyn Future<Output = Vec<u8>> + Send>> = match name {
        "reset" => {
            let _ = stream.set_zero_linger();
            return;
        }
        "close" => Box::pin(async { Vec::new() }),
        "half" => Box::pin(async { b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf".to_vec() }),
        "half-chunk" => {
            Box::pin(async { b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n64\r\nhalf".to_vec() })
        }
        "half-head" => Box::pin(async { b"HTTP/1.1 200 OK\r\ncontent-".to_vec() }),
        "both-lengths" => Box::pin(async {
            b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
                .to_vec()
        }),
        "two-lengths" => Box::pin(async {
            b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd".to_vec()
        }),
        "large-head" => Box::pin(async {
            let mut bytes = b"HTTP/1.1 200 OK\r\n".to_vec();
            for n in 0..50 {
                bytes.extend(format!("x-{n}: {}\r\n", "y".repeat(4_000)).bytes());
            }
            bytes.extend(b"content-length: 0\r\n\r\n");
            bytes
        }),
        "garbage" => Box::pin(async { b"\0\0 what\r\n\r\n".to_vec() }),
        "old" => Box::pin(async { b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nold".to_vec() }),
        _ => Box::pin(std::future::pending()),
    };
    let _ = stream.write_all(&bytes.await).await;
    let _ = stream.shutdown().await;
    // Read what the client still sends, so that the client receives no reset.
    let _ = tokio::time::timeout(Duration::from_secs(1), stream.read_to_end(&mut Vec::new())).await;
}

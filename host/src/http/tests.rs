//! Tests of the server with real sockets.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::*;

mod encrypted;
mod framing;
mod proxying;

/// Never answers `/wait`, answers `/slow` after 200 ms, `/stream` with an endless stream, and any other path with the
/// length of the body.
#[derive(Clone)]
struct Echo {
    limits: HttpLimits,
    waiting: Arc<AtomicUsize>,
}

struct Waiting(Arc<AtomicUsize>);

impl Waiting {
    fn new(count: &Arc<AtomicUsize>) -> Waiting {
        count.fetch_add(1, SeqCst);
        Waiting(Arc::clone(count))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Handler for Echo {
    const FRONT: &'static str = "test";

    async fn handle(&self, request: Request, _peer: &Arc<Peer>) -> Response {
        let path = request.uri().path().to_owned();
        match read_body(request, self.limits.max_body_bytes, self.limits.body_timeout).await {
            Err(error) => Problem::from(error).into_response(),
            Ok(body) => {
                let _here = Waiting::new(&self.waiting);
                match path.as_str() {
                    "/wait" => std::future::pending().await,
                    "/slow" => tokio::time::sleep(Duration::from_millis(200)).await,
                    "/stream" => return Response::new(endless(Waiting::new(&self.waiting))),
                    _ => {}
                }
                json(&body.len())
            }
        }
    }
}

fn endless(waiting: Waiting) -> Body {
    Body::stream(futures_util::stream::unfold(waiting, |waiting| async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        Some((bytes::Bytes::from_static(b"tick\n"), waiting))
    }))
}

struct Server {
    address: SocketAddr,
    waiting: Arc<AtomicUsize>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

fn limits() -> HttpLimits {
    HttpLimits {
        max_connections: 50,
        max_per_address: None,
        max_header_bytes: 8 * 1024,
        max_body_bytes: 1000,
        header_timeout: Duration::from_millis(300),
        body_timeout: Duration::from_millis(300),
        idle_timeout: Duration::from_millis(600),
        max_streams: 16,
        hosts: Vec::new(),
    }
}

fn start(limits: HttpLimits) -> Server {
    let waiting = Arc::new(AtomicUsize::new(0));
    let echo = Echo { limits: limits.clone(), waiting: Arc::clone(&waiting) };
    start_with(echo, limits, waiting)
}

fn start_with(handler: impl Handler, limits: HttpLimits, waiting: Arc<AtomicUsize>) -> Server {
    start_on(Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap(), handler, limits, waiting)
}

fn start_on(
    listener: Listener,
    handler: impl Handler,
    limits: HttpLimits,
    waiting: Arc<AtomicUsize>,
) -> Server {
    let address = listener.address().unwrap().to_string().parse().unwrap();
    let stop = CancellationToken::new();
    let task = tokio::spawn(serve(listener, handler, limits, Metrics::default(), stop.clone()));
    Server { address, waiting, stop, task }
}

impl Server {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    async fn send(&self, text: &str) -> TcpStream {
        let mut stream = self.connect().await;
        stream.write_all(text.as_bytes()).await.unwrap();
        stream
    }

    /// Sends, and reads until the server closes.
    async fn exchange(&self, text: &str) -> String {
        read_all(&mut self.send(text).await).await
    }

    async fn waiting_becomes(&self, count: usize) {
        for _ in 0..200 {
            if self.waiting.load(SeqCst) == count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{} handlers are there instead of {count}", self.waiting.load(SeqCst));
    }
}

async fn read_all(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut bytes)).await;
    read.expect("the server leaves the connection open").expect("the connection is reset");
    String::from_utf8(bytes).unwrap()
}

async fn read_some(stream: &mut TcpStream) -> String {
    let mut bytes = [0; 4096];
    let read = tokio::time::timeout(Duration::from_secs(5), stream.read(&mut bytes)).await;
    String::from_utf8(bytes[..read.expect("an answer").unwrap()].to_vec()).unwrap()
}

fn assert_problem(answer: &str, status: u16, slug: &str) {
    assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    assert!(answer.contains(&format!("\"type\":\"{slug}\"")), "{answer}");
    assert!(answer.contains("application/problem+json") && answer.contains("x-request-id: "), "{answer}");
}

#[tokio::test]
async fn a_connection_is_kept_alive_and_echoes_request_ids() {
    let server = start(limits());
    let mut stream = server.send("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc").await;
    let first = read_some(&mut stream).await;
    assert!(first.starts_with("HTTP/1.1 200 ") && first.ends_with("\r\n\r\n3"), "{first}");
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\n\r\n").await.unwrap();
    assert!(read_some(&mut stream).await.contains("x-request-id: mine\r\n"));
}

#[tokio::test]
async fn slow_headers_get_408() {
    let server = start(limits());
    for half in ["G", "PRI * HT", "GET / HTTP/1.1\r\nhost: x\r\nx-half"] {
        let begun = Instant::now();
        assert_problem(&server.exchange(half).await, 408, "timeout");
        assert!(begun.elapsed() >= Duration::from_millis(290), "{half}: {:?}", begun.elapsed());
    }
}

#[tokio::test]
async fn headers_that_arrive_byte_by_byte_get_408() {
    let server = start(limits());
    let (mut read, mut write) = server.connect().await.into_split();
    let drip = tokio::spawn(async move {
        for byte in b"GET / HTTP/1.1\r\nx: 1234567890123456789012345678901234567890".iter().cycle() {
            if write.write_all(&[*byte]).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let answer = tokio::time::timeout(Duration::from_secs(2), async {
        let mut bytes = vec![0; 4096];
        let len = read.read(&mut bytes).await.unwrap();
        String::from_utf8(bytes[..len].to_vec()).unwrap()
    });
    assert_problem(&answer.await.unwrap(), 408, "timeout");
    drip.abort();
}

#[tokio::test]
async fn slow_headers_after_an_answer_get_408() {
    let server = start(limits());
    let mut stream = server.send("GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(read_some(&mut stream).await.starts_with("HTTP/1.1 200 "));
    tokio::time::sleep(Duration::from_millis(200)).await;
    stream.write_all(b"GET / HTT").await.unwrap();
    let begun = Instant::now();
    assert_problem(&read_all(&mut stream).await, 408, "timeout");
    assert!(begun.elapsed() < Duration::from_millis(550), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn an_incomplete_request_behind_a_complete_request_gets_408() {
    let server = start(limits());
    let answers = server.exchange("GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nho").await;
    assert!(answers.starts_with("HTTP/1.1 200 "), "{answers}");
    assert!(answers.contains("HTTP/1.1 408 "), "{answers}");
}

#[tokio::test]
async fn idle_connections_are_closed_without_an_answer() {
    let server = start(limits());
    assert_eq!(server.exchange("").await, "");
    let answer = server.exchange("GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{answer}");
}

#[tokio::test]
async fn a_slow_body_gets_408() {
    let server = start(limits());
    let answer = server.exchange("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nhalf").await;
    assert_problem(&answer, 408, "timeout");
}

#[tokio::test]
async fn large_headers_get_431() {
    let server = start(limits());
    let long = format!("GET / HTTP/1.1\r\nhost: x\r\nx-long: {}\r\n\r\n", "a".repeat(20_000));
    assert_problem(&server.exchange(&long).await, 431, "headers_too_large");
    // The end of the headers never arrives: the size alone decides.
    assert_problem(&server.exchange(&long[..19_000]).await, 431, "headers_too_large");
    let many: String = (0..200).map(|n| format!("x-{n}: 1\r\n")).collect();
    let many = format!("GET / HTTP/1.1\r\nhost: x\r\n{many}\r\n");
    assert_problem(&server.exchange(&many).await, 431, "headers_too_large");
}

#[tokio::test]
async fn bytes_that_are_no_request_get_400() {
    let server = start(limits());
    assert_problem(&server.exchange("this is no request\r\n\r\n").await, 400, "invalid");
}

#[tokio::test]
async fn large_bodies_get_413() {
    let server = start(limits());
    let announced =
        format!("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n{}", "a".repeat(200_000));
    assert_problem(&server.exchange(&announced).await, 413, "too_large");
    let chunk = format!("200\r\n{}\r\n", "a".repeat(512));
    let chunked =
        format!("POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n{}", chunk.repeat(300));
    assert_problem(&server.exchange(&chunked).await, 413, "too_large");
    let fits = format!("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{}", "a".repeat(1000));
    assert!(read_some(&mut server.send(&fits).await).await.ends_with("\r\n\r\n1000"));
}

#[tokio::test]
async fn a_handler_is_dropped_when_its_client_disconnects() {
    let server = start(limits());
    let get = "GET /wait HTTP/1.1\r\nhost: x\r\n\r\n";
    let post = "POST /wait HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc";
    let stream = "GET /stream HTTP/1.1\r\nhost: x\r\n\r\n";
    for request in [get, post, stream] {
        let stream = server.send(request).await;
        server.waiting_becomes(1).await;
        drop(stream);
        server.waiting_becomes(0).await;
    }
}

#[tokio::test]
async fn a_connection_with_a_waiting_request_is_not_idle() {
    let server = start(limits());
    let _stream = server.send("GET /wait HTTP/1.1\r\nhost: x\r\n\r\n").await;
    server.waiting_becomes(1).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    server.waiting_becomes(1).await;
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let server = start(limits());
    let one =
        |body: &str| format!("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let all = one("1") + &one("22") + &one("333");
    let answers = server.exchange(&all).await;
    let lengths: Vec<_> =
        answers.split("HTTP/1.1 200 OK").skip(1).map(|part| part.split("\r\n\r\n").nth(1).unwrap()).collect();
    assert_eq!(lengths, ["1", "2", "3"], "{answers}");
}

#[tokio::test]
async fn connections_over_the_limit_get_503() {
    let server = start(HttpLimits { max_connections: 2, ..limits() });
    let first = server.send("GET /wait HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let _second = server.send("GET /wait HTTP/1.1\r\nhost: x\r\n\r\n").await;
    server.waiting_becomes(2).await;
    let answer = server.exchange("GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_problem(&answer, 503, "overloaded");
    assert!(answer.contains("retry-after: 1\r\n"), "{answer}");
    drop(first);
    server.waiting_becomes(1).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let answer = server.exchange("GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

#[tokio::test]
async fn a_shutdown_finishes_requests_in_progress() {
    let server = start(HttpLimits { idle_timeout: Duration::from_secs(30), ..limits() });
    let mut used = server.send("GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
    read_some(&mut used).await;
    let mut fresh = server.connect().await;
    let mut slow = server.send("GET /slow HTTP/1.1\r\nhost: x\r\n\r\n").await;
    server.waiting_becomes(1).await;
    server.stop.cancel();
    assert_eq!(read_all(&mut used).await, "");
    assert_eq!(read_all(&mut fresh).await, "");
    assert!(read_all(&mut slow).await.starts_with("HTTP/1.1 200 "));
    drop(slow);
    tokio::time::timeout(Duration::from_secs(1), server.task).await.expect("the server ends").unwrap();
    assert!(TcpStream::connect(server.address).await.is_err());
}

type H2 = hyper::client::conn::http2::SendRequest<Full<bytes::Bytes>>;

async fn http2(server: &Server) -> (H2, JoinHandle<hyper::Result<()>>, std::net::TcpStream) {
    let stream = server.connect().await.into_std().unwrap();
    let socket = stream.try_clone().unwrap();
    let io = hyper_util::rt::TokioIo::new(TcpStream::from_std(stream).unwrap());
    let executor = hyper_util::rt::TokioExecutor::new();
    let (send, connection) = hyper::client::conn::http2::handshake(executor, io).await.unwrap();
    (send, tokio::spawn(connection), socket)
}

fn h2_request(path: &str, body: &'static str) -> hyper::Request<Full<bytes::Bytes>> {
    hyper::Request::post(format!("http://x{path}")).body(Full::from(body)).unwrap()
}

#[tokio::test]
async fn http2_is_served_and_resets_drop_handlers() {
    let server = start(limits());
    let (mut send, _connection, socket) = http2(&server).await;
    let answer = send.send_request(h2_request("/", "four")).await.unwrap();
    assert_eq!(answer.status(), 200);
    assert!(answer.headers().contains_key("x-request-id"));
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "4");

    let waiting = tokio::spawn(send.send_request(h2_request("/wait", "")));
    server.waiting_becomes(1).await;
    waiting.abort();
    server.waiting_becomes(0).await;

    let _waiting = tokio::spawn(send.send_request(h2_request("/wait", "")));
    server.waiting_becomes(1).await;
    socket.shutdown(std::net::Shutdown::Both).unwrap();
    server.waiting_becomes(0).await;
}

#[tokio::test]
async fn http2_has_the_same_limits() {
    let server = start(limits());
    let (mut send, connection, _socket) = http2(&server).await;
    let mut large = h2_request("/", "");
    large.headers_mut().insert("x-long", "a".repeat(9_000).parse().unwrap());
    assert_eq!(send.send_request(large).await.unwrap().status(), 431);
    let long: &'static str = "a".repeat(1_001).leak();
    assert_eq!(send.send_request(h2_request("/", long)).await.unwrap().status(), 413);
    // Idle for too long.
    let ended = tokio::time::timeout(Duration::from_secs(3), connection).await;
    assert!(ended.is_ok(), "an idle connection is closed");
}

#[tokio::test]
async fn http2_shuts_down_gracefully() {
    let server = start(limits());
    let (mut send, _connection, _socket) = http2(&server).await;
    let slow = tokio::spawn(send.send_request(h2_request("/slow", "")));
    server.waiting_becomes(1).await;
    server.stop.cancel();
    assert_eq!(slow.await.unwrap().unwrap().status(), 200);
    tokio::time::timeout(Duration::from_secs(2), server.task).await.expect("the server ends").unwrap();
}

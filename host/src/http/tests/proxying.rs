//! What a reverse proxy needs of the server: the client's identity, upgrades, and streamed bodies.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::body::{Frame, SizeHint};
use tokio::sync::Semaphore;

use super::*;
use crate::net::Stream;

/// Answers `/peer` with the peer's address, `/switch` by echoing capitals on the raw connection, `/whole`, `/chunks`
/// and `/broken` as [`Script`] does, `/late` with the body and the trailers once the test allows it, and `/unread`
/// without reading the body.
struct Front {
    waiting: Arc<AtomicUsize>,
    let_read: Arc<Semaphore>,
}

/// A body that returns a frame at every second poll.
struct Script {
    frames: VecDeque<Result<Frame<Bytes>, BrokenBody>>,
    len: Option<u64>,
    ready: bool,
}

impl Script {
    fn body(len: Option<u64>, last: Result<Frame<Bytes>, BrokenBody>) -> Body {
        let data = |text| Ok(Frame::data(Bytes::from_static(text)));
        Body::proxied(Script {
            frames: VecDeque::from([data(b"one"), data(b"two"), last]),
            len,
            ready: false,
        })
    }
}

impl hyper::body::Body for Script {
    type Data = Bytes;
    type Error = BrokenBody;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenBody>>> {
        self.ready = !self.ready;
        if self.ready {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(self.frames.pop_front())
    }

    fn size_hint(&self) -> SizeHint {
        self.len.map(SizeHint::with_exact).unwrap_or_default()
    }
}

fn check_trailer() -> HeaderMap {
    HeaderMap::from_iter([("check".parse().unwrap(), "abc".parse().unwrap())])
}

impl Handler for Front {
    const FRONT: &'static str = "test";

    async fn handle(&self, request: Request, peer: &Arc<Peer>) -> Response {
        match request.uri().path() {
            "/peer" => Response::new(Body::full(peer.address.to_string())),
            "/switch" | "/regretted" => self.switch(&request, peer),
            "/whole" => Response::new(Script::body(Some(9), Ok(Frame::data(Bytes::from_static(b"six"))))),
            "/chunks" => {
                let mut response = Response::new(Script::body(None, Ok(Frame::trailers(check_trailer()))));
                response.headers_mut().insert("trailer", "check".parse().unwrap());
                response
            }
            "/broken" => {
                let len = request.uri().query().map(|len| len.parse().unwrap());
                Response::new(Script::body(len, Err(BrokenBody::new("the test said so"))))
            }
            "/late" => {
                let _here = Waiting::new(&self.waiting);
                self.let_read.acquire().await.unwrap().forget();
                let read = request.into_body().collect().await.unwrap();
                let trailers = format!("{:?}", read.trailers());
                Response::new(Body::full([read.to_bytes(), trailers.into()].concat()))
            }
            "/unread" => json(&"unread"),
            _ => json(&0),
        }
    }
}

impl Front {
    fn switch(&self, request: &Request, peer: &Peer) -> Response {
        let waiting = Arc::clone(&self.waiting);
        peer.upgrade(|stream, early| {
            Box::pin(async move {
                let _here = Waiting::new(&waiting);
                shout(stream, &early).await;
            })
        });
        let mut response = Response::new(Body::full(""));
        if request.uri().path() == "/switch" {
            *response.status_mut() = hyper::StatusCode::SWITCHING_PROTOCOLS;
            response.headers_mut().insert("upgrade", "shout".parse().unwrap());
            response.headers_mut().insert("connection", "upgrade".parse().unwrap());
        }
        response
    }
}

/// Echoes what arrives, in capitals, until the client ends.
async fn shout(mut stream: Stream, early: &[u8]) {
    stream.write_all(&early.to_ascii_uppercase()).await.unwrap();
    let mut bytes = [0; 64];
    while let Ok(read @ 1..) = stream.read(&mut bytes).await {
        stream.write_all(&bytes[..read].to_ascii_uppercase()).await.unwrap();
    }
}

fn front(limits: HttpLimits) -> Server {
    letting(limits).0
}

/// A server, and the handle that lets `/late` continue.
fn letting(limits: HttpLimits) -> (Server, Arc<Semaphore>) {
    let waiting = Arc::new(AtomicUsize::new(0));
    let let_read = Arc::new(Semaphore::new(0));
    let front = Front { waiting: Arc::clone(&waiting), let_read: Arc::clone(&let_read) };
    (start_with(front, limits, waiting), let_read)
}

const SWITCH: &str = "GET /switch HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: shout\r\n\r\n";

async fn expect_bytes(stream: &mut TcpStream, expected: &str) {
    let mut bytes = vec![0; expected.len()];
    let read = tokio::time::timeout(Duration::from_secs(5), stream.read_exact(&mut bytes)).await;
    read.expect("too few bytes").expect("the connection ended");
    assert_eq!(String::from_utf8(bytes).unwrap(), expected);
}

#[tokio::test]
async fn a_handler_knows_its_peer() {
    let server = front(limits());
    let mut stream = server.send("GET /peer HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let own = stream.local_addr().unwrap().to_string();
    assert!(read_some(&mut stream).await.ends_with(&format!("\r\n\r\n{own}")));
}

#[test]
fn an_ipv4_peer_of_an_ipv6_listener_is_an_ipv4_peer() {
    let peer = net::Peer::new("[::ffff:10.1.2.3]:80".parse::<SocketAddr>().unwrap(), false);
    assert_eq!(peer.address.to_string(), "10.1.2.3:80");
}

#[tokio::test]
async fn an_upgraded_connection_belongs_to_its_handler() {
    let server = front(HttpLimits { max_connections: 1, ..limits() });
    let mut stream = server.send(SWITCH).await;
    let answer = read_some(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 101 ") && answer.contains("upgrade: shout\r\n"), "{answer}");
    // Longer than any HTTP timeout, and not valid HTTP.
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        stream.write_all(b"\n\0abc").await.unwrap();
        expect_bytes(&mut stream, "\n\0ABC").await;
    }
    server.waiting_becomes(1).await;
    assert_problem(&server.exchange("GET / HTTP/1.1\r\nhost: x\r\n\r\n").await, 503, "overloaded");
    drop(stream);
    server.waiting_becomes(0).await;
}

#[tokio::test]
async fn bytes_sent_before_the_101_must_be_http_and_reach_the_handler() {
    let server = front(limits());
    for early in ["GET / HTTP/1.1\r\nhost: x\r\n\r\n", "GET / HT"] {
        let mut stream = server.send(&[SWITCH, early].concat()).await;
        stream.shutdown().await.unwrap();
        assert!(read_all(&mut stream).await.ends_with(&["\r\n\r\n", &early.to_ascii_uppercase()].concat()));
    }
    let mut stream = server.send(&[SWITCH, "no http\r\n"].concat()).await;
    assert!(read_all(&mut stream).await.ends_with("\r\n\r\n"));
}

#[tokio::test]
async fn a_shutdown_ends_upgraded_connections() {
    let server = front(limits());
    let mut stream = server.send(SWITCH).await;
    read_some(&mut stream).await;
    server.waiting_becomes(1).await;
    server.stop.cancel();
    assert_eq!(read_all(&mut stream).await, "");
    tokio::time::timeout(Duration::from_secs(1), server.task).await.expect("the server ends").unwrap();
}

#[tokio::test]
async fn a_connection_is_not_upgraded_without_a_101() {
    let server = front(limits());
    let mut stream = server.send(&SWITCH.replace("/switch", "/regretted")).await;
    assert!(read_some(&mut stream).await.starts_with("HTTP/1.1 200 "));
    stream.write_all(b"GET /peer HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    assert!(read_some(&mut stream).await.starts_with("HTTP/1.1 200 "));
    assert_eq!(read_all(&mut stream).await, "");
    assert_eq!(server.waiting.load(SeqCst), 0);
}

#[tokio::test]
async fn proxied_bodies_keep_their_length_or_their_chunks_and_trailers() {
    let server = front(limits());
    let whole = server.exchange("GET /whole HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    assert!(whole.contains("content-length: 9\r\n") && whole.ends_with("\r\n\r\nonetwosix"), "{whole}");
    let get = "GET /chunks HTTP/1.1\r\nhost: x\r\nte: trailers\r\nconnection: close\r\n\r\n";
    let chunks = server.exchange(get).await;
    assert!(chunks.contains("transfer-encoding: chunked\r\n"), "{chunks}");
    assert!(chunks.ends_with("3\r\none\r\n3\r\ntwo\r\n0\r\ncheck: abc\r\n\r\n"), "{chunks}");
}

#[tokio::test]
async fn a_broken_body_ends_the_connection_of_the_client() {
    let server = front(limits());
    let chunks = server.exchange("GET /broken HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(chunks.ends_with("3\r\none\r\n3\r\ntwo\r\n"), "{chunks}");
    let whole = server.exchange("GET /broken?9 HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(whole.contains("content-length: 9\r\n") && whole.ends_with("\r\n\r\nonetwo"), "{whole}");
    // Here, the end of the connection marks the end of the answer, so a broken answer must not end that way.
    let mut old = server.send("GET /broken HTTP/1.0\r\n\r\n").await;
    let read = old.read_to_end(&mut Vec::new()).await;
    assert_eq!(read.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_broken_body_resets_its_http2_stream_only() {
    let server = front(limits());
    let (mut send, _connection, _socket) = http2(&server).await;
    let answer = send.send_request(h2_request("/broken", "")).await.unwrap();
    assert_eq!(answer.status(), 200);
    assert!(answer.into_body().collect().await.unwrap_err().to_string().contains("error reading a body"));
    let answer = send.send_request(h2_request("/chunks", "")).await.unwrap();
    let body = answer.into_body().collect().await.unwrap();
    assert_eq!(body.trailers(), Some(&check_trailer()));
    assert_eq!(body.to_bytes(), "onetwo");
}

#[tokio::test]
async fn a_client_gets_100_continue_only_when_its_body_is_read() {
    let (server, let_read) = letting(limits());
    let post = |path| {
        format!("POST {path} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n")
    };
    let mut stream = server.send(&post("/late")).await;
    server.waiting_becomes(1).await;
    let early = tokio::time::timeout(Duration::from_millis(100), stream.read_u8()).await;
    assert!(early.is_err(), "{early:?}");
    let_read.add_permits(1);
    expect_bytes(&mut stream, "HTTP/1.1 100 Continue\r\n\r\n").await;
    stream.write_all(b"abc").await.unwrap();
    let answer = read_some(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\nabcNone"), "{answer}");

    let unread = server.exchange(&post("/unread")).await;
    assert!(unread.starts_with("HTTP/1.1 200 "), "{unread}");
}

#[tokio::test]
async fn trailers_of_a_request_reach_its_handler() {
    let (server, let_read) = letting(limits());
    let_read.add_permits(1);
    let chunked = "POST /late HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut stream = server.send(&format!("{chunked}3\r\nabc\r\n0\r\ncheck: abc\r\n\r\n")).await;
    let answer = read_some(&mut stream).await;
    assert!(answer.ends_with(&format!("abcSome({:?})", check_trailer())), "{answer}");
}

//! What a reverse proxy needs of the server: who asks, upgrades, and bodies as they come.

use super::*;

/// Answers `/peer` with the peer's address and `/switch` by echoing capitals on the raw connection.
struct Front {
    waiting: Arc<AtomicUsize>,
}

impl Handler for Front {
    const FRONT: &'static str = "test";

    async fn handle(&self, request: Request, peer: &Arc<Peer>) -> Response {
        match request.uri().path() {
            "/peer" => Response::new(Body::full(peer.address.to_string())),
            "/switch" | "/regretted" => self.switch(&request, peer),
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

/// Sends back what comes, in capitals, until the client ends.
async fn shout(mut stream: Stream, early: &[u8]) {
    stream.write_all(&early.to_ascii_uppercase()).await.unwrap();
    let mut bytes = [0; 64];
    while let Ok(read @ 1..) = stream.read(&mut bytes).await {
        stream.write_all(&bytes[..read].to_ascii_uppercase()).await.unwrap();
    }
}

fn front(limits: HttpLimits) -> Server {
    let waiting = Arc::new(AtomicUsize::new(0));
    start_with(Front { waiting: Arc::clone(&waiting) }, limits, waiting)
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
    let peer = Peer::new("[::ffff:10.1.2.3]:80".parse().unwrap(), false);
    assert_eq!(peer.address.to_string(), "10.1.2.3:80");
}

#[tokio::test]
async fn an_upgraded_connection_is_the_handlers() {
    let server = front(HttpLimits { max_connections: 1, ..limits() });
    let mut stream = server.send(SWITCH).await;
    let answer = read_some(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 101 ") && answer.contains("upgrade: shout\r\n"), "{answer}");
    // Longer than any timeout of HTTP, and nothing that HTTP would understand.
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
async fn no_upgrade_without_a_101() {
    let server = front(limits());
    let mut stream = server.send(&SWITCH.replace("/switch", "/regretted")).await;
    assert!(read_some(&mut stream).await.starts_with("HTTP/1.1 200 "));
    stream.write_all(b"GET /peer HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    assert!(read_some(&mut stream).await.starts_with("HTTP/1.1 200 "));
    assert_eq!(read_all(&mut stream).await, "");
    assert_eq!(server.waiting.load(SeqCst), 0);
}

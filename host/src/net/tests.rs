//! Tests of the limits and the drain, with a protocol that can serve as an example.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::*;

/// Sends back what the client sends.
struct Echo {
    limits: Limits,
    refused: Arc<AtomicUsize>,
}

impl Protocol for Echo {
    const NAME: &'static str = "echo";

    fn limits(&self) -> Limits {
        self.limits
    }

    fn refuse(&self, _too_many: TooMany) -> Vec<u8> {
        self.refused.fetch_add(1, SeqCst);
        b"full".to_vec()
    }

    async fn serve(self: Arc<Self>, connection: Connection) {
        let Connection { mut stream, stop, .. } = connection;
        loop {
            let byte = tokio::select! {
                biased;
                byte = stream.read_u8() => byte,
                () = stop.cancelled() => return,
            };
            let Ok(byte) = byte else { return };
            stream.write_all(&[byte]).await.unwrap();
        }
    }
}

struct Server {
    address: String,
    refused: Arc<AtomicUsize>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

fn start(when_full: WhenFull) -> Server {
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.address().unwrap().to_string();
    let limits = Limits {
        max_connections: 1,
        max_per_address: None,
        when_full,
        handshake_timeout: Duration::from_secs(1),
    };
    let (refused, stop) = (Arc::default(), CancellationToken::new());
    let echo = Echo { limits, refused: Arc::clone(&refused) };
    let task = tokio::spawn(serve(listener, echo, stop.clone()));
    Server { address, refused, stop, task }
}

impl Server {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.address).await.unwrap()
    }
}

/// What comes back for one byte: that byte, or all that the server says before it closes.
async fn answer(stream: &mut TcpStream) -> String {
    let _ = stream.write_all(b"x").await;
    let mut answer = [0; 4];
    let read = tokio::time::timeout(Duration::from_secs(5), stream.read(&mut answer)).await;
    let read = read.expect("an answer").unwrap();
    String::from_utf8(answer[..read].to_vec()).unwrap()
}

#[tokio::test]
async fn a_connection_over_the_limit_is_refused_with_the_answer_of_its_protocol() {
    let server = start(WhenFull::Refuse);
    let mut first = server.connect().await;
    assert_eq!(answer(&mut first).await, "x");
    assert_eq!(answer(&mut server.connect().await).await, "full");
    assert_eq!(server.refused.load(SeqCst), 1);
    drop(first);
    // The end of the first connection is noticed a moment later.
    for _ in 0..200 {
        if answer(&mut server.connect().await).await == "x" {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the connection that ended still counts");
}

#[tokio::test]
async fn a_connection_over_the_limit_waits_if_the_protocol_says_so() {
    let server = start(WhenFull::Wait);
    let mut first = server.connect().await;
    assert_eq!(answer(&mut first).await, "x");
    let mut second = server.connect().await;
    second.write_all(b"x").await.unwrap();
    let early = tokio::time::timeout(Duration::from_millis(100), second.read_u8()).await;
    assert!(early.is_err(), "{early:?}");
    drop(first);
    assert_eq!(answer(&mut second).await.chars().next(), Some('x'));
    assert_eq!(server.refused.load(SeqCst), 0);
}

#[tokio::test]
async fn a_stop_ends_the_listener_and_waits_for_the_connections() {
    let server = start(WhenFull::Refuse);
    let mut client = server.connect().await;
    assert_eq!(answer(&mut client).await, "x");
    server.stop.cancel();
    tokio::time::timeout(Duration::from_secs(1), server.task).await.expect("the server ends").unwrap();
    assert_eq!(client.read(&mut [0; 4]).await.unwrap(), 0);
    assert!(TcpStream::connect(&server.address).await.is_err());
}

//! A client that sends bytes that no HTTP library would send.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A connection that the test can break.
pub struct Raw(TcpStream);

impl From<TcpStream> for Raw {
    fn from(stream: TcpStream) -> Raw {
        Raw(stream)
    }
}

impl Raw {
    /// Connects to a proxy.
    pub async fn connect(address: SocketAddr) -> Raw {
        Raw(TcpStream::connect(address).await.expect("the proxy listens"))
    }

    /// Sends bytes. If the other side has closed, [`Raw::rest`] shows it.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = self.0.write_all(bytes.as_ref()).await;
    }

    /// Sends a complete request.
    pub async fn post(&mut self, path: &str, body: &Value) {
        let body = body.to_string();
        let length = body.len();
        self.send(format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}"
        ))
        .await;
    }

    /// Whether the other side sends something within this time.
    pub async fn hears_within(&self, time: Duration) -> bool {
        tokio::time::timeout(time, self.0.readable()).await.is_ok()
    }

    /// Closes the sending side, as a client that leaves. What the other side sends can still be read.
    pub async fn leave(&mut self) {
        let _ = self.0.shutdown().await;
    }

    /// Reads up to and including this text, within 20 s.
    pub async fn until(&mut self, end: &str) -> String {
        let mut bytes = Vec::new();
        let read = async {
            while !bytes.ends_with(end.as_bytes()) {
                bytes.push(self.0.read_u8().await.expect("the connection lives"));
            }
        };
        let read = tokio::time::timeout(Duration::from_secs(20), read).await;
        assert!(read.is_ok(), "{end:?} does not come after {:?}", String::from_utf8_lossy(&bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Reads and discards this many bytes, within a minute.
    pub async fn skip(&mut self, bytes: u64) {
        let (mut sink, mut part) = (tokio::io::sink(), (&mut self.0).take(bytes));
        let read = tokio::time::timeout(Duration::from_secs(60), tokio::io::copy(&mut part, &mut sink)).await;
        assert_eq!(read.expect("they come").ok(), Some(bytes));
    }

    /// Counts the bytes until the other side closes, within a minute.
    pub async fn count(&mut self) -> u64 {
        let mut sink = tokio::io::sink();
        let read =
            tokio::time::timeout(Duration::from_secs(60), tokio::io::copy(&mut self.0, &mut sink)).await;
        read.expect("the other side closes").unwrap_or(0)
    }

    /// Breaks the connection: the other side receives a reset.
    pub fn reset(self) {
        self.0.set_zero_linger().expect("a socket");
    }

    /// Reads everything until the other side closes, which it must do within 20 s.
    pub async fn rest(&mut self) -> String {
        let mut bytes = Vec::new();
        let read = tokio::time::timeout(Duration::from_secs(20), self.0.read_to_end(&mut bytes)).await;
        assert!(read.is_ok(), "the connection stays open after {:?}", String::from_utf8_lossy(&bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// The status and the problem of an HTTP/1.1 answer.
pub fn parsed(answer: &str) -> (u16, Value) {
    let status = answer.get(9..12).and_then(|status| status.parse().ok()).unwrap_or(0);
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    (status, serde_json::from_str(body).unwrap_or(Value::Null))
}

//! A minimal HTTP/1.1 client: its cost reduces the measured rates.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

/// The size of the pieces in which a body is written or read.
const PIECE: usize = 64 * 1024;

/// A keep-alive connection.
pub struct Client {
    stream: Stream,
    buffer: Vec<u8>,
    /// A header that goes with each request; empty if there is none.
    header: String,
}

enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    async fn write_all(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match self {
            Stream::Plain(stream) => stream.write_all(bytes).await,
            Stream::Tls(stream) => {
                stream.write_all(bytes).await?;
                stream.flush().await
            }
        }
    }

    async fn read_buf(&mut self, buffer: &mut Vec<u8>) -> std::io::Result<usize> {
        match self {
            Stream::Plain(stream) => stream.read_buf(buffer).await,
            Stream::Tls(stream) => stream.read_buf(buffer).await,
        }
    }

    async fn read(&mut self, piece: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Stream::Plain(stream) => stream.read(piece).await,
            Stream::Tls(stream) => stream.read(piece).await,
        }
    }
}

/// A lease that was granted over HTTP.
#[derive(Clone, Debug)]
pub struct Lease {
    pub id: String,
    pub token: u64,
}

impl Client {
    /// Connects to a server.
    pub async fn connect(address: SocketAddr) -> Result<Client> {
        let stream = TcpStream::connect(address).await.context("cannot connect")?;
        stream.set_nodelay(true)?;
        Ok(Client { stream: Stream::Plain(stream), buffer: Vec::with_capacity(1024), header: String::new() })
    }

    /// Connects to a server over TLS, and sends a token with each request.
    pub async fn encrypted(
        address: SocketAddr,
        name: ServerName<'static>,
        config: Arc<ClientConfig>,
        token: &str,
    ) -> Result<Client> {
        let stream = TcpStream::connect(address).await.context("cannot connect")?;
        stream.set_nodelay(true)?;
        let stream = TlsConnector::from(config).connect(name, stream).await.context("no handshake")?;
        let header = format!("Authorization: Bearer {token}\r\n");
        Ok(Client { stream: Stream::Tls(Box::new(stream)), buffer: Vec::with_capacity(1024), header })
    }

    /// Acquires a lease with a request from [`acquire`].
    pub async fn acquire(&mut self, request: &[u8]) -> Result<Lease> {
        self.send(request).await?;
        self.granted().await
    }

    /// Sends a request.
    pub async fn send(&mut self, request: &[u8]) -> Result<()> {
        if self.header.is_empty() {
            return Ok(self.stream.write_all(request).await?);
        }
        let line = find(request, b"\r\n").context("no request line")? + 2;
        let request = [&request[..line], self.header.as_bytes(), &request[line..]].concat();
        Ok(self.stream.write_all(&request).await?)
    }

    /// Reads the answer to an acquire.
    pub async fn granted(&mut self) -> Result<Lease> {
        let (status, body) = self.answer().await?;
        match lease(body) {
            Some(lease) if status == 200 => Ok(lease),
            _ => bail!("acquire was answered {status}: {body}"),
        }
    }

    /// Begins a `once`. Returns the lease, or `None` if the work was already done.
    pub async fn begin(&mut self, request: &[u8]) -> Result<Option<Lease>> {
        self.send(request).await?;
        let (status, body) = self.answer().await?;
        match (status, lease(body)) {
            (200, Some(lease)) => Ok(Some(lease)),
            (200, None) if body.contains("\"outcome\":{\"done\":1}") => Ok(None),
            _ => bail!("begin was answered {status}: {body}"),
        }
    }

    /// Finishes a `once`.
    pub async fn finish(&mut self, lease: &Lease) -> Result<()> {
        let body = format!("{{\"lease_id\":\"{}\",\"outcome\":{{\"done\":1}}}}", lease.id);
        self.send(&post("/v1/once/finish", &body)).await?;
        self.released().await
    }

    /// Releases a lease.
    pub async fn release(&mut self, lease: &Lease) -> Result<()> {
        self.send(&release(lease)).await?;
        self.released().await
    }

    /// Reads the answer to a release.
    pub async fn released(&mut self) -> Result<()> {
        match self.answer().await? {
            (200, _) => Ok(()),
            (status, body) => bail!("release was answered {status}: {body}"),
        }
    }

    /// The status of the answer to a `GET`.
    pub async fn status(&mut self, path: &str) -> Result<u16> {
        self.send(&get(path)).await?;
        self.answered().await
    }

    /// Reads an answer. Returns its status.
    pub async fn answered(&mut self) -> Result<u16> {
        Ok(self.answer().await?.0)
    }

    /// The body of the answer to a `GET`.
    pub async fn get(&mut self, path: &str) -> Result<&str> {
        self.send(&get(path)).await?;
        Ok(self.answer().await?.1)
    }

    /// Sends a request from [`get`] or [`post`] and returns the body of the answer. A status other than 200 is an
    /// error.
    pub async fn exchange(&mut self, request: &[u8]) -> Result<&str> {
        self.send(request).await?;
        match self.answer().await? {
            (200, body) => Ok(body),
            (status, body) => bail!("the request was answered {status}: {body}"),
        }
    }

    /// Sends a body of this many bytes and returns the body of the answer.
    pub async fn upload(&mut self, path: &str, bytes: u64) -> Result<&str> {
        let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {bytes}\r\n\r\n");
        self.send(head.as_bytes()).await?;
        let piece = vec![b'x'; PIECE];
        let mut left = bytes;
        while left > 0 {
            let next = left.min(PIECE as u64);
            self.send(&piece[..next as usize]).await?;
            left -= next;
        }
        match self.answer().await? {
            (200, body) => Ok(body),
            (status, body) => bail!("the upload was answered {status}: {body}"),
        }
    }

    /// Reads and discards a body of any length. Returns its length.
    pub async fn download(&mut self, path: &str) -> Result<u64> {
        self.send(&get(path)).await?;
        let (status, head, length) = self.head().await?;
        if status != 200 {
            bail!("the download was answered {status}");
        }
        let mut left = length.saturating_sub(self.buffer.len() - head);
        let mut piece = vec![0; PIECE];
        while left > 0 {
            match self.stream.read(&mut piece).await? {
                0 => bail!("the connection was closed {left} bytes before the end of the body"),
                read => left = left.saturating_sub(read),
            }
        }
        Ok(length as u64)
    }

    /// Reads an answer: status and body.
    async fn answer(&mut self) -> Result<(u16, &str)> {
        let (status, head, length) = self.head().await?;
        while self.buffer.len() < head + length {
            self.read_more().await?;
        }
        Ok((status, std::str::from_utf8(&self.buffer[head..head + length])?))
    }

    /// Reads the head of an answer, and possibly some of its body. Returns the status and the lengths of head and
    /// body.
    async fn head(&mut self) -> Result<(u16, usize, usize)> {
        self.buffer.clear();
        let head = loop {
            if let Some(at) = find(&self.buffer, b"\r\n\r\n") {
                break at + 4;
            }
            self.read_more().await?;
        };
        let text = std::str::from_utf8(&self.buffer[..head])?;
        let status: u16 = text.get(9..12).and_then(|status| status.parse().ok()).context("no status")?;
        let length = length(text).context("the answer has no content-length")?;
        Ok((status, head, length))
    }

    async fn read_more(&mut self) -> Result<()> {
        match self.stream.read_buf(&mut self.buffer).await? {
            0 => bail!("the connection was closed"),
            _ => Ok(()),
        }
    }
}

/// The request that begins a `once`.
pub fn begin(resource: &str) -> Vec<u8> {
    post("/v1/once/begin", &format!("{{\"resource\":\"{resource}\",\"ttl_ms\":60000}}"))
}

/// The request that acquires `resource` and waits for up to `wait_ms`.
pub fn acquire(resource: &str, owner: &str, wait_ms: u32) -> Vec<u8> {
    let body = format!(
        "{{\"resource\":\"{resource}\",\"owner\":\"{owner}\",\"ttl_ms\":60000,\"wait_ms\":{wait_ms}}}"
    );
    post("/v1/acquire", &body)
}

/// The request that releases a lease.
pub fn release(lease: &Lease) -> Vec<u8> {
    post("/v1/release", &format!("{{\"lease_id\":\"{}\"}}", lease.id))
}

/// A `GET` request.
pub fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").into_bytes()
}

/// A `POST` request.
pub fn post(path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n");
    format!("{head}Content-Length: {length}\r\n\r\n{body}").into_bytes()
}

fn lease(body: &str) -> Option<Lease> {
    let id = field(body, "\"lease_id\":")?.trim_matches('"').to_owned();
    let token = field(body, "\"token\":")?.parse().ok()?;
    Some(Lease { id, token })
}

fn length(head: &str) -> Option<usize> {
    head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    })
}

/// The text of a field, up to the next comma or bracket, which is enough for ids and numbers.
fn field<'a>(body: &'a str, name: &str) -> Option<&'a str> {
    let rest = &body[body.find(name)? + name.len()..];
    Some(rest[..rest.find([',', '}'])?].trim())
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

//! A client of the lock API and the admin API.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::ResponseFuture;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::net::UnixStream;

/// A client, which keeps its connections and is cheap to clone.
#[derive(Clone)]
pub struct Client {
    server: Server,
    token: Option<String>,
}

#[derive(Clone)]
enum Server {
    Tcp(Pooled<HttpConnector>, SocketAddr),
    Unix(Pooled<Socket>),
}

type Pooled<C> = hyper_util::client::legacy::Client<C, Full<Bytes>>;

/// Connects to the Unix socket at this path.
#[derive(Clone)]
struct Socket(PathBuf);

impl tower_service::Service<hyper::Uri> for Socket {
    type Response = TokioIo<UnixStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<UnixStream>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: hyper::Uri) -> Self::Future {
        let path = self.0.clone();
        Box::pin(async { UnixStream::connect(path).await.map(TokioIo::new) })
    }
}

/// An answer that is read line by line. Dropping it closes its connection.
pub struct Lines {
    pub status: u16,
    body: hyper::body::Incoming,
    buffer: Vec<u8>,
}

/// An answer with its JSON body; `Null` if the body is not JSON.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub headers: hyper::HeaderMap,
    pub text: String,
    pub json: Value,
}

impl Client {
    /// A client that uses HTTP/2 from the start.
    pub fn http2(address: SocketAddr) -> Client {
        let mut builder = hyper_util::client::legacy::Client::builder(TokioExecutor::new());
        Client { server: Server::Tcp(builder.http2_only(true).build_http(), address), token: None }
    }

    /// A client that uses HTTP/1.1.
    pub fn new(address: SocketAddr) -> Client {
        let http = hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build_http();
        Client { server: Server::Tcp(http, address), token: None }
    }

    /// A client that uses HTTP/1.1 through a Unix socket.
    pub fn unix(path: &Path) -> Client {
        let builder = hyper_util::client::legacy::Client::builder(TokioExecutor::new());
        Client { server: Server::Unix(builder.build(Socket(path.to_owned()))), token: None }
    }

    /// The same client, which sends this token with each request.
    pub fn with_token(&self, token: &str) -> Client {
        Client { token: Some(token.to_owned()), ..self.clone() }
    }

    /// The address of the server.
    pub fn address(&self) -> SocketAddr {
        match &self.server {
            Server::Tcp(_, address) => *address,
            Server::Unix(_) => panic!("the server has a Unix socket"),
        }
    }

    fn ask(&self, request: hyper::Request<Full<Bytes>>) -> ResponseFuture {
        match &self.server {
            Server::Tcp(http, _) => http.request(request),
            Server::Unix(http) => http.request(request),
        }
    }

    /// Sends a request. `None` if there is no complete answer.
    pub async fn try_send(&self, method: &str, path: &str, body: impl Into<Bytes>) -> Option<Response> {
        self.try_request(self.request(method, path, body)).await
    }

    /// Sends a request with headers, which must be answered.
    pub async fn send_with(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Response {
        let mut request = self.request(method, path, body);
        for (name, value) in headers {
            let name = hyper::header::HeaderName::from_bytes(name.as_bytes()).expect("a name");
            request.headers_mut().append(name, value.parse().expect("a value"));
        }
        let response = self.try_request(request).await;
        response.unwrap_or_else(|| panic!("{method} {path}: no answer"))
    }

    async fn try_request(&self, request: hyper::Request<Full<Bytes>>) -> Option<Response> {
        let response = self.ask(request).await.ok()?;
        let (parts, body) = response.into_parts();
        let body = body.collect().await.ok()?.to_bytes();
        let json = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let text = String::from_utf8_lossy(&body).into_owned();
        Some(Response { status: parts.status.as_u16(), headers: parts.headers, text, json })
    }

    fn request(&self, method: &str, path: &str, body: impl Into<Bytes>) -> hyper::Request<Full<Bytes>> {
        let host = match &self.server {
            Server::Tcp(_, address) => address.to_string(),
            Server::Unix(_) => "localhost".to_owned(),
        };
        let mut request = hyper::Request::builder().method(method).uri(format!("http://{host}{path}"));
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        request.body(Full::new(body.into())).expect("a request")
    }

    /// Sends a request whose answer is a stream.
    pub async fn stream(&self, method: &str, path: &str, body: impl Into<Bytes>) -> Lines {
        self.try_stream(method, path, body).await.expect("an answer")
    }

    /// As [`Client::stream`]; `None` if there is no answer.
    pub async fn try_stream(&self, method: &str, path: &str, body: impl Into<Bytes>) -> Option<Lines> {
        let response = self.ask(self.request(method, path, body)).await.ok()?;
        let status = response.status().as_u16();
        Some(Lines { status, body: response.into_body(), buffer: Vec::new() })
    }

    /// Holds a lock. Returns the stream of lines and its first line.
    pub async fn hold(&self, body: &Value) -> (Lines, Value) {
        let mut lines = self.stream("POST", "/v1/hold", body.to_string()).await;
        let first = lines.json().await.expect("a first line");
        assert_eq!((lines.status, &first["event"]), (200, &json!("granted")), "{first}");
        (lines, first)
    }

    /// The answer of `GET /v1/locks/{name}`.
    pub async fn show(&self, name: &str) -> Value {
        self.get(&format!("/v1/locks/{name}")).await.json
    }

    /// Waits until `count` acquires wait for a key on this proxy.
    pub async fn until_queued(&self, name: &str, count: usize) {
        super::eventually(&format!("{count} wait for {name}"), async || {
            self.show(name).await["queue"].as_array().map_or(0, Vec::len) == count
        })
        .await;
    }

    /// Sends a request, which must be answered.
    pub async fn send(&self, method: &str, path: &str, body: impl Into<Bytes>) -> Response {
        let response = self.try_send(method, path, body).await;
        response.unwrap_or_else(|| panic!("{method} {path}: no answer"))
    }

    /// Sends a GET.
    pub async fn get(&self, path: &str) -> Response {
        self.send("GET", path, "").await
    }

    /// Sends a POST.
    pub async fn post(&self, path: &str, body: &Value) -> Response {
        self.send("POST", path, body.to_string()).await
    }

    /// Sends an acquire.
    pub async fn acquire(&self, body: Value) -> Response {
        self.post("/v1/acquire", &body).await
    }

    /// Acquires the resource, which must be free.
    pub async fn lease(&self, resource: &str, ttl_ms: u32) -> Value {
        let response = self.acquire(json!({"resource": resource, "ttl_ms": ttl_ms})).await;
        assert_eq!(response.status, 200, "{}", response.text);
        response.json
    }

    /// Releases a lease.
    pub async fn release(&self, lease: &Value) -> Response {
        self.post("/v1/release", &json!({"lease_id": lease["lease_id"]})).await
    }

    /// Renews a lease.
    pub async fn renew(&self, lease: &Value) -> Response {
        self.post("/v1/renew", &json!({"lease_id": lease["lease_id"]})).await
    }
}

impl Lines {
    /// The next line; `None` at the end of the stream, complete or not.
    pub async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line = self.buffer.drain(..=end).collect::<Vec<u8>>();
                return Some(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            let frame = self.body.frame().await?.ok()?;
            self.buffer.extend_from_slice(&frame.into_data().ok()?);
        }
    }

    /// The next line as JSON.
    pub async fn json(&mut self) -> Option<Value> {
        serde_json::from_str(&self.line().await?).ok()
    }
}

impl Response {
    /// A number in the body; 0 if it is missing.
    pub fn number(&self, member: &str) -> u64 {
        self.json[member].as_u64().unwrap_or_default()
    }

    /// The slug of a problem.
    pub fn slug(&self) -> &str {
        self.json["type"].as_str().unwrap_or_default()
    }
}

//! A client of the lock API and the admin API.

use std::net::SocketAddr;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

/// Keeps its connections; cheap to clone.
#[derive(Clone)]
pub struct Client {
    http: hyper_util::client::legacy::Client<HttpConnector, Full<Bytes>>,
    address: SocketAddr,
}

/// An answer with its JSON; `Null` where the body is something else.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub headers: hyper::HeaderMap,
    pub text: String,
    pub json: Value,
}

impl Client {
    pub fn new(address: SocketAddr) -> Client {
        let http = hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build_http();
        Client { http, address }
    }

    /// `None` where there is no whole answer.
    pub async fn try_send(&self, method: &str, path: &str, body: impl Into<Bytes>) -> Option<Response> {
        let request = hyper::Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.address))
            .body(Full::new(body.into()))
            .expect("a request");
        let response = self.http.request(request).await.ok()?;
        let (parts, body) = response.into_parts();
        let body = body.collect().await.ok()?.to_bytes();
        let json = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let text = String::from_utf8_lossy(&body).into_owned();
        Some(Response { status: parts.status.as_u16(), headers: parts.headers, text, json })
    }

    pub async fn send(&self, method: &str, path: &str, body: impl Into<Bytes>) -> Response {
        let response = self.try_send(method, path, body).await;
        response.unwrap_or_else(|| panic!("{method} {path}: no answer"))
    }

    pub async fn get(&self, path: &str) -> Response {
        self.send("GET", path, "").await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Response {
        self.send("POST", path, body.to_string()).await
    }

    pub async fn acquire(&self, body: Value) -> Response {
        self.post("/v1/acquire", &body).await
    }

    /// A lease of the resource, which must be free.
    pub async fn lease(&self, resource: &str, ttl_ms: u32) -> Value {
        let response = self.acquire(json!({"resource": resource, "ttl_ms": ttl_ms})).await;
        assert_eq!(response.status, 200, "{}", response.text);
        response.json
    }

    pub async fn release(&self, lease: &Value) -> Response {
        self.post("/v1/release", &json!({"lease_id": lease["lease_id"]})).await
    }

    pub async fn renew(&self, lease: &Value) -> Response {
        self.post("/v1/renew", &json!({"lease_id": lease["lease_id"]})).await
    }
}

impl Response {
    /// The slug of a problem.
    pub fn slug(&self) -> &str {
        self.json["type"].as_str().unwrap_or_default()
    }
}

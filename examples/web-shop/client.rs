//! The shop's customers: HTTP, and many at once.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use stage::{Context, Result};
use tokio::task::JoinSet;

#[derive(Clone)]
pub struct Client {
    http: legacy::Client<HttpConnector, Full<Bytes>>,
    /// As `http://` and an address.
    address: String,
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Bytes,
    /// That it was given to another request before.
    pub is_replayed: bool,
}

impl Client {
    pub fn new(address: &str) -> Client {
        let http = legacy::Client::builder(TokioExecutor::new()).build_http();
        Client { http, address: address.to_owned() }
    }

    pub async fn get(&self, path: &str) -> Result<Answer> {
        self.call("GET", path, None, String::new()).await
    }

    pub async fn post(&self, path: &str, body: String) -> Result<Answer> {
        self.call("POST", path, None, body).await
    }

    /// A request that says which one it is, so that it may be repeated.
    pub async fn post_again(&self, path: &str, key: &str) -> Result<Answer> {
        self.call("POST", path, Some(key), String::new()).await
    }

    async fn call(&self, method: &str, path: &str, key: Option<&str>, body: String) -> Result<Answer> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.address));
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let answer = self.http.request(request.body(Full::new(body.into()))?).await;
        let (head, body) = answer.with_context(|| format!("{path}: no answer"))?.into_parts();
        let body = body.collect().await.with_context(|| format!("{path}: no whole answer"))?.to_bytes();
        let is_replayed = head.headers.get("lock-replayed").is_some_and(|value| value == "true");
        Ok(Answer { status: head.status.as_u16(), body, is_replayed })
    }
}

/// Does as many things at once; what came of them, in no order.
pub async fn together<T, F>(count: u64, thing: impl Fn(u64) -> F) -> Result<Vec<T>>
where
    T: Send + 'static,
    F: Future<Output = Result<T>> + Send + 'static,
{
    let mut all: JoinSet<Result<T>> = (0..count).map(thing).collect();
    let mut done = Vec::new();
    while let Some(one) = all.join_next().await {
        done.push(one??);
    }
    Ok(done)
}

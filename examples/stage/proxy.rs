//! A client of the proxy: JSON over HTTP.

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

pub struct Proxy {
    http: Client<HttpConnector, Full<Bytes>>,
    address: String,
}

impl Proxy {
    pub fn new(address: &str) -> Proxy {
        Proxy { http: Client::builder(TokioExecutor::new()).build_http(), address: address.to_owned() }
    }

    /// The answer to a call that must go well.
    pub async fn post(&self, path: &str, body: Value) -> Result<Value> {
        match self.try_post(path, body).await? {
            (200, answer) => Ok(answer),
            (status, problem) => bail!("{path}: {status} {problem}"),
        }
    }

    /// The status and the answer of a call.
    pub async fn try_post(&self, path: &str, body: Value) -> Result<(u16, Value)> {
        self.call("POST", path, body.to_string()).await
    }

    pub(crate) async fn get(&self, path: &str) -> Result<(u16, Value)> {
        self.call("GET", path, String::new()).await
    }

    pub async fn delete(&self, path: &str) -> Result<(u16, Value)> {
        self.call("DELETE", path, String::new()).await
    }

    async fn call(&self, method: &str, path: &str, body: String) -> Result<(u16, Value)> {
        let request = Request::builder().method(method).uri(format!("{}{path}", self.address));
        let answer = self.http.request(request.body(Full::new(body.into()))?).await;
        let (head, body) = answer.with_context(|| format!("{path}: no answer"))?.into_parts();
        let body = body.collect().await.with_context(|| format!("{path}: no whole answer"))?.to_bytes();
        Ok((head.status.as_u16(), serde_json::from_slice(&body).unwrap_or_default()))
    }
}

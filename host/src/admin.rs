//! The admin API for operators: health, metrics, policies, and the forced release of locks.
//!
//! | call | file |
//! | --- | --- |
//! | `GET /live`, `GET /ready`, `GET /metrics` | `health` |
//! | `GET /v1/policies`, `PUT /v1/policies/{name}`, `POST /v1/policies/{name}/rollback` | `policies` |
//! | `GET /v1/fleet` | `fleet` |
//! | `DELETE /v1/locks/{key}` | here |
//!
//! The admin API has no authentication: it must listen on an address that only operators can reach.

use std::sync::Arc;

use hyper::Method;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::config::{EngineLimits, HttpLimits};
use crate::fleet::Fleet;
use crate::fronts::admit;
use crate::http::{self, Handler, Peer, Problem, Request, Response, decode_path};
use crate::latest;
use crate::lock::Key;
use crate::service::Service;
use crate::telemetry::Metrics;

mod fleet;
mod health;
mod policies;

/// The handler of the admin listener.
pub struct Admin {
    /// The interface to the locks.
    pub service: Service,
    /// This proxy's membership among the proxies of its store.
    pub fleet: Fleet,
    /// The metrics that `/metrics` returns.
    pub metrics: Metrics,
    /// The limits of pushed components.
    pub engine: EngineLimits,
    /// The limits on the requests and connections of HTTP clients.
    pub http: HttpLimits,
    /// The reason why the current configuration file is not used, if it was refused.
    pub config_refused: latest::Receiver<Option<String>>,
    /// Cancelled at shutdown: the proxy is then still live, but no longer ready.
    pub stop: CancellationToken,
}

impl Admin {
    async fn route(&self, request: Request) -> Result<Response, Problem> {
        let path = request.uri().path();
        match path {
            "/live" => {
                expect(&request, &[Method::GET, Method::HEAD], "GET, HEAD")?;
                Ok(http::json(&json!({"status": "live"})))
            }
            "/ready" => {
                expect(&request, &[Method::GET, Method::HEAD], "GET, HEAD")?;
                Ok(health::ready(self))
            }
            "/metrics" => {
                expect(&request, &[Method::GET, Method::HEAD], "GET, HEAD")?;
                Ok(health::metrics(self, &request))
            }
            "/v1/fleet" => {
                expect(&request, &[Method::GET, Method::HEAD], "GET, HEAD")?;
                Ok(fleet::show(self))
            }
            "/v1/policies" | "/v1/policies/" => {
                expect(&request, &[Method::GET, Method::HEAD], "GET, HEAD")?;
                Ok(policies::list(self))
            }
            _ => {
                if let Some(key) = path.strip_prefix("/v1/locks/") {
                    expect(&request, &[Method::DELETE], "DELETE")?;
                    return self.force_release(key).await;
                }
                let Some(rest) = path.strip_prefix("/v1/policies/") else {
                    return Err(Problem::not_found(path));
                };
                match rest.split_once('/') {
                    None => {
                        expect(&request, &[Method::PUT], "PUT")?;
                        let name = decoded("name", rest)?;
                        policies::push(self, &name, request).await
                    }
                    Some((name, "rollback")) => {
                        expect(&request, &[Method::POST], "POST")?;
                        policies::roll_back(self, &decoded("name", name)?).await
                    }
                    Some(_) => Err(Problem::not_found(path)),
                }
            }
        }
    }

    /// Releases all holders of a key. A key without a holder is no error: the answer counts the holders.
    async fn force_release(&self, key: &str) -> Result<Response, Problem> {
        let text = decoded("key", key)?;
        let key = Key::new(&text).ok_or_else(|| {
            let bound = format!("1 to {} bytes", Key::MAX_BYTES);
            Problem::invalid("key", format!("must have {bound}")).with("bound", bound)
        })?;
        let holders = self.service.force_release(key).await?;
        tracing::warn!(key = text, holders, "an operator took a lock away");
        Ok(http::json(&json!({"key": text, "holders": holders})))
    }
}

impl Handler for Admin {
    const FRONT: &'static str = "admin";

    async fn handle(&self, request: Request, _peer: &Arc<Peer>) -> Response {
        // Every client that is admitted counts as an operator.
        let answer = match admit(&request, &self.http) {
            Ok(_principal) => self.route(request).await,
            Err(problem) => Err(problem),
        };
        answer.unwrap_or_else(Problem::into_response)
    }
}

fn expect(request: &Request, methods: &[Method], allow: &'static str) -> Result<(), Problem> {
    if methods.contains(request.method()) { Ok(()) } else { Err(Problem::method_not_allowed(allow)) }
}

fn decoded(field: &'static str, text: &str) -> Result<String, Problem> {
    decode_path(text).ok_or_else(|| Problem::invalid(field, "the path is not percent-encoded UTF-8"))
}

//! The lock API: HTTP and JSON in front of the [`Service`].
//!
//! | call | file |
//! | --- | --- |
//! | `POST /v1/acquire` | `acquire` |
//! | `POST /v1/renew`, `POST /v1/release` | `leases` |
//! | `POST /v1/hold` | `hold` |
//! | `POST /v1/once/begin`, `POST /v1/once/finish` | `once` |
//! | `POST /v1/versions/read`, `POST /v1/versions/commit` | `versions` |
//! | `GET /v1/locks`, `GET /v1/locks/{name}` | `locks` |
//! | `GET /v1/watch` | `watch` |
//!
//! Requests that a web page makes a browser send are refused (`fronts::admit`). Bodies are JSON: a content type that
//! is neither JSON nor the one that `curl -d` sends is refused with 415.

use std::sync::Arc;

use bytes::Bytes;
use hyper::{Method, header};
use tokio_util::sync::CancellationToken;

use crate::config::{HttpLimits, Limits};
use crate::fronts::admit;
use crate::http::{Handler, Kind, Peer, Problem, Request, Response, decode_path, read_body};
use crate::service::{Principal, Service};

mod acquire;
#[cfg(test)]
mod end_to_end;
mod hold;
mod leases;
mod locks;
mod once;
mod versions;
mod watch;

/// The handler of the API's listener.
pub struct Api {
    service: Service,
    limits: Limits,
    http: HttpLimits,
    /// Ends the streams of `/v1/hold` and `/v1/watch` at shutdown: these streams have no end of their own.
    stop: CancellationToken,
}

impl Api {
    /// Builds the handler. `stop` is cancelled when the proxy shuts down.
    pub fn new(service: Service, limits: Limits, http: HttpLimits, stop: CancellationToken) -> Api {
        Api { service, limits, http, stop }
    }

    async fn route(
        &self,
        request: Request,
        peer: &Arc<Peer>,
        principal: Principal,
    ) -> Result<Response, Problem> {
        let Api { service, limits, stop, .. } = self;
        let path = request.uri().path();
        match path {
            "/v1/acquire" => acquire::acquire(service, limits, principal, self.body(request).await?).await,
            "/v1/renew" => leases::renew(service, limits, self.body(request).await?).await,
            "/v1/release" => leases::release(service, self.body(request).await?).await,
            "/v1/once/begin" => once::begin(service, limits, principal, self.body(request).await?).await,
            "/v1/once/finish" => once::finish(service, limits, self.body(request).await?).await,
            "/v1/versions/read" => {
                versions::read(service, limits, principal, self.body(request).await?).await
            }
            "/v1/versions/commit" => {
                versions::commit(service, limits, principal, self.body(request).await?).await
            }
            "/v1/hold" => hold::hold(service, limits, stop, principal, self.body(request).await?, peer).await,
            "/v1/locks" | "/v1/locks/" => {
                expect_get(&request)?;
                locks::list(service, request.uri().query()).await
            }
            "/v1/watch" => {
                expect_get(&request)?;
                watch::watch(service, stop, request.uri().query())
            }
            _ => {
                let Some(name) = path.strip_prefix("/v1/locks/") else {
                    return Err(Problem::not_found(path));
                };
                expect_get(&request)?;
                let name = decode_path(name)
                    .ok_or_else(|| Problem::invalid("name", "the path is not percent-encoded UTF-8"))?;
                locks::show(service, limits, &name).await
            }
        }
    }

    /// Checks the method and content type of a POST, and reads its body.
    async fn body(&self, request: Request) -> Result<Bytes, Problem> {
        if request.method() != Method::POST {
            return Err(Problem::method_not_allowed("POST"));
        }
        if let Some(kind) = request.headers().get(header::CONTENT_TYPE)
            && !is_accepted(kind.as_bytes())
        {
            let shown = String::from_utf8_lossy(kind.as_bytes());
            let detail = format!("the content type is {shown}; send application/json");
            return Err(Problem::new(Kind::UNSUPPORTED_MEDIA_TYPE, detail));
        }
        Ok(read_body(request, self.http.max_body_bytes, self.http.body_timeout).await?)
    }
}

impl Handler for Api {
    const FRONT: &'static str = "api";

    async fn handle(&self, request: Request, peer: &Arc<Peer>) -> Response {
        let answer = match admit(&request, &self.http) {
            Ok(principal) => self.route(request, peer, principal).await,
            Err(problem) => Err(problem),
        };
        answer.unwrap_or_else(Problem::into_response)
    }
}

fn expect_get(request: &Request) -> Result<(), Problem> {
    match *request.method() {
        Method::GET | Method::HEAD => Ok(()),
        _ => Err(Problem::method_not_allowed("GET, HEAD")),
    }
}

fn is_accepted(content_type: &[u8]) -> bool {
    let end = content_type.iter().position(|&byte| byte == b';').unwrap_or(content_type.len());
    let kind = content_type[..end].trim_ascii().to_ascii_lowercase();
    let is_json =
        kind == b"application/json" || (kind.starts_with(b"application/") && kind.ends_with(b"+json"));
    is_json || kind == b"application/x-www-form-urlencoded"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_accepted_with_a_json_media_type_or_the_default_of_curl() {
        for good in ["application/json", "Application/JSON; charset=utf-8", "application/merge-patch+json"] {
            assert!(is_accepted(good.as_bytes()), "{good}");
        }
        assert!(is_accepted(b"application/x-www-form-urlencoded"));
        for bad in ["text/plain", "multipart/form-data; boundary=x", "application/xml", ""] {
            assert!(!is_accepted(bad.as_bytes()), "{bad}");
        }
    }
}

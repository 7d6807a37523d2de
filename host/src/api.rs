//! The lock API: HTTP and JSON in front of the [`Service`].
//!
//! | call | file |
//! | --- | --- |
//! | `POST /v1/acquire` | `acquire` |
//! | `POST /v1/renew`, `POST /v1/release` | `leases` |
//! | `POST /v1/hold` | `hold` |
//! | `POST /v1/once/begin`, `POST /v1/once/finish` | `once` |
//! | `POST /v1/versions/read`, `POST /v1/versions/commit` | `versions` |
//! | `GET /v1/locks`, `GET /v1/locks/{name}` | `locks`; the waiters: `queued` |
//! | `GET /v1/watch` | `watch` |
//!
//! Requests that a web page makes a browser send are refused (`fronts::Access`). Bodies are JSON: a content type that
//! is neither JSON nor the one that `curl -d` sends is refused with 415.

use std::sync::Arc;

use bytes::Bytes;
use hyper::header;
use tokio_util::sync::CancellationToken;

use crate::auth::{Identity, Unauthenticated};
use crate::config::{Limits, Verb};
use crate::fronts::routes::{Methods, Needs, Route};
use crate::fronts::{Access, Admitted, Refusal};
use crate::http::{Handler, Kind, Peer, Problem, Request, Response, read_body};
use crate::service::{Principal, Service};

mod acquire;
#[cfg(test)]
mod end_to_end;
mod hold;
mod leases;
mod locks;
mod once;
mod queued;
mod versions;
mod watch;

/// The calls of the API.
#[derive(Clone, Copy, Debug)]
pub enum Call {
    /// A call with a body.
    Post(Post),
    /// A call without one.
    Get(Get),
}

/// The calls with a body, by their files.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Post {
    Acquire,
    Renew,
    Release,
    Hold,
    Begin,
    Finish,
    ReadVersion,
    Commit,
}

/// The calls without a body, by their files.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Get {
    List,
    Show,
    Watch,
}

/// The paths of the API. Which resources a client may lock and see is decided where they are known.
pub const ROUTES: &[Route<Call>] = &[
    post("/v1/acquire", Post::Acquire, &[Verb::Acquire]),
    post("/v1/renew", Post::Renew, &[Verb::Acquire]),
    // A client can always give up what it has, even if its right to it was withdrawn.
    post("/v1/release", Post::Release, &[]),
    post("/v1/hold", Post::Hold, &[Verb::Acquire]),
    post("/v1/once/begin", Post::Begin, &[Verb::Acquire]),
    post("/v1/once/finish", Post::Finish, &[Verb::Acquire]),
    post("/v1/versions/read", Post::ReadVersion, &[Verb::Acquire, Verb::ReadValue]),
    post("/v1/versions/commit", Post::Commit, &[Verb::Acquire]),
    get("/v1/locks", Get::List, &[Verb::Read]),
    get("/v1/locks/", Get::List, &[Verb::Read]),
    get("/v1/locks/{name...}", Get::Show, &[Verb::Read]),
    get("/v1/watch", Get::Watch, &[Verb::Watch]),
];

const fn post(path: &'static str, call: Post, verbs: &'static [Verb]) -> Route<Call> {
    let counts = !matches!(call, Post::Renew | Post::Release | Post::Finish);
    let needs = if verbs.is_empty() { Needs::Credentials } else { Needs::OneOf(verbs) };
    Route { methods: Methods::Post, path, call: Call::Post(call), needs, counts }
}

const fn get(path: &'static str, call: Get, verbs: &'static [Verb]) -> Route<Call> {
    Route { methods: Methods::Get, path, call: Call::Get(call), needs: Needs::OneOf(verbs), counts: true }
}

/// The handler of the API's listener.
pub struct Api {
    service: Service,
    limits: Limits,
    access: Access,
    /// Ends the streams of `/v1/hold` and `/v1/watch` at shutdown: these streams have no end of their own.
    stop: CancellationToken,
}

impl Api {
    /// Builds the handler. `stop` is cancelled when the proxy shuts down.
    pub fn new(service: Service, limits: Limits, access: Access, stop: CancellationToken) -> Api {
        Api { service, limits, access, stop }
    }

    async fn answer(&self, request: Request, peer: &Arc<Peer>) -> Result<Response, Problem> {
        let Admitted { call, name, principal, entry } =
            self.access.admit(Api::FRONT, &request, peer, ROUTES).await?;
        let counted = principal.identity().and_then(Identity::request);
        let mut answer = self.serve(call, name, principal, request, peer).await;
        match &mut answer {
            Ok(response) => response.body_mut().counts(counted),
            Err(problem) => self.access.refused(entry, problem).await,
        }
        answer
    }

    async fn serve(
        &self,
        call: Call,
        name: String,
        principal: Principal,
        request: Request,
        peer: &Arc<Peer>,
    ) -> Result<Response, Problem> {
        let Api { service, limits, stop, .. } = self;
        let call = match call {
            Call::Post(call) => call,
            Call::Get(Get::List) => return locks::list(service, &principal, request.uri().query()).await,
            Call::Get(Get::Show) => {
                let query = request.uri().query();
                return locks::show(service, limits, &principal, &name, query).await;
            }
            Call::Get(Get::Watch) => return watch::watch(service, stop, principal, request.uri().query()),
        };
        let body = self.body(request).await?;
        // The body may have taken a while.
        let principal = principal.refreshed().ok_or_else(|| Refusal::from(Unauthenticated::Unknown))?;
        match call {
            Post::Acquire => acquire::acquire(service, limits, principal, body).await,
            Post::Renew => leases::renew(service, limits, &principal, body).await,
            Post::Release => leases::release(service, &principal, body).await,
            Post::Hold => hold::hold(service, limits, stop, principal, body, peer).await,
            Post::Begin => once::begin(service, limits, principal, body).await,
            Post::Finish => once::finish(service, limits, &principal, body).await,
            Post::ReadVersion => versions::read(service, limits, principal, body).await,
            Post::Commit => versions::commit(service, limits, principal, body).await,
        }
    }

    /// Checks the content type of a body, and reads the body.
    async fn body(&self, request: Request) -> Result<Bytes, Problem> {
        if let Some(kind) = request.headers().get(header::CONTENT_TYPE)
            && !is_accepted(kind.as_bytes())
        {
            let shown = String::from_utf8_lossy(kind.as_bytes());
            let detail = format!("the content type is {shown}; send application/json");
            return Err(Problem::new(Kind::UNSUPPORTED_MEDIA_TYPE, detail));
        }
        Ok(read_body(request, self.access.http.max_body_bytes, self.access.http.body_timeout).await?)
    }
}

impl Handler for Api {
    const FRONT: &'static str = "api";

    async fn handle(&self, request: Request, peer: &Arc<Peer>) -> Response {
        self.answer(request, peer).await.unwrap_or_else(Problem::into_response)
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

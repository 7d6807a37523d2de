//! The requests of a connection: from the HTTP library to the handler, and back with an id, a metric and a log line.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use hyper::body::{Body as _, Incoming};
use hyper::header::{CONNECTION, HeaderValue};
use hyper::service::Service;
use hyper::{Method, StatusCode, Version};
use tracing::{Instrument, debug, debug_span, warn};

use super::activity::{Activity, UnderWay};
use super::body::{Request, Response};
use super::gate::{Refusal, check_http2_head};
use super::handler::{Handler, Http};
use super::peer::Peer;
use super::problem::{Problem, Told, Why};
use super::request_id::{self, RequestId};
use crate::clock;

/// Answers the requests of one connection.
pub struct Requests<H> {
    pub http: Arc<Http<H>>,
    pub activity: Arc<Activity>,
    pub peer: Arc<Peer>,
}

impl<H> Clone for Requests<H> {
    fn clone(&self) -> Requests<H> {
        Requests {
            http: Arc::clone(&self.http),
            activity: Arc::clone(&self.activity),
            peer: Arc::clone(&self.peer),
        }
    }
}

impl<H: Handler> Service<hyper::Request<Incoming>> for Requests<H> {
    type Response = Response;
    type Error = Infallible;
    // Boxed, so that an idle connection does not reserve memory for the largest handler.
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn call(&self, request: hyper::Request<Incoming>) -> Self::Future {
        let mut request: Request = Box::new(request);
        let under_way = self.activity.begin();
        let this = self.clone();
        let id = request_id::of(request.headers());
        request.extensions_mut().insert(RequestId(id.clone()));
        let version = request.version();
        if !tracing::enabled!(tracing::Level::DEBUG) {
            return Box::pin(async move {
                let response = this.ask(request).await;
                Ok(this.finish(response, id, version, under_way))
            });
        }
        let span = debug_span!("request", front = H::FRONT, id = ?id, method = %request.method(), path = request.uri().path());
        let answer = async move {
            let response = this.ask(request).await;
            debug!(status = response.status().as_u16(), "answered");
            Ok(this.finish(response, id, version, under_way))
        };
        Box::pin(answer.instrument(span))
    }
}

impl<H: Handler> Requests<H> {
    async fn ask(&self, request: Request) -> Response {
        // Over HTTP/1, the gate has refused it already.
        if request.method() == Method::CONNECT {
            return Problem::from(Refusal::Connect).into_response();
        }
        if request.version() >= Version::HTTP_2
            && let Err(refusal) = check_http2_head(&*request)
        {
            return Problem::from(refusal).into_response();
        }
        self.http.handler.handle(request, &self.peer).await
    }

    fn finish(
        &self,
        mut response: Response,
        id: HeaderValue,
        version: Version,
        under_way: UnderWay,
    ) -> Response {
        let status = response.status();
        self.http.metrics.http.answered(H::FRONT, status.as_u16());
        if status.is_server_error()
            && response.extensions().get::<Told>().is_none()
            && let Some(unsaid) = should_warn()
        {
            let why = response.extensions().get::<Why>().map(|why| why.0.as_str());
            warn!(front = H::FRONT, status = status.as_u16(), request_id = ?id, why, unsaid, "answered with an error");
        }
        if version >= Version::HTTP_2 {
            response.headers_mut().remove(CONNECTION);
        } else if status == StatusCode::SWITCHING_PROTOCOLS {
            self.peer.switch();
        }
        if version < Version::HTTP_11 && response.body().size_hint().exact().is_none() {
            self.activity.set_ended_by_close();
        }
        response.headers_mut().insert(request_id::X_REQUEST_ID, id);
        response.body_mut().keep(under_way);
        response
    }
}

/// Whether to log a warning for a failure, and how many failures were not logged since the last warning. At most ten
/// warnings a second are logged, so that an outage of the store does not flood the log.
fn should_warn() -> Option<u64> {
    static LAST: AtomicU64 = AtomicU64::new(0);
    static UNSAID: AtomicU64 = AtomicU64::new(0);
    let tenth = clock::now().0 / 100_000;
    if LAST.swap(tenth, Relaxed) == tenth {
        UNSAID.fetch_add(1, Relaxed);
        return None;
    }
    Some(UNSAID.swap(0, Relaxed))
}

//! `POST /v1/hold`: a lock that is held exactly as long as its connection.

use bytes::Bytes;
use futures_util::stream;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::Api;
use super::acquire::{self, Granted};
use crate::clock;
use crate::http::{Body, Problem, Response};
use crate::service::{Hold, HoldEvent};

/// Answers once the lock is granted, with a stream of JSON lines. Dropping the stream drops the
/// [`Hold`], which releases the lock.
pub async fn hold(api: &Api, body: Bytes) -> Result<Response, Problem> {
    let request = acquire::parse(&body, &api.limits)?;
    drop(body);
    let hold = api.service.hold(request).await?;
    let lines = stream::unfold(Next::Granted(hold, api.stop.clone()), next_line);
    let mut response = Response::new(Body::stream(lines));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

enum Next {
    Granted(Hold, CancellationToken),
    Event(Hold, CancellationToken),
    End,
}

async fn next_line(next: Next) -> Option<(Bytes, Next)> {
    match next {
        Next::Granted(hold, stop) => {
            let line = line(&Granted::new(&hold.lease, Some("granted")));
            Some((line, Next::Event(hold, stop)))
        }
        Next::Event(mut hold, stop) => {
            let event = tokio::select! {
                event = hold.next() => event,
                () = stop.cancelled() => HoldEvent::Lost { reason: "the proxy is shutting down".into() },
            };
            Some(match event {
                HoldEvent::Renewed(renewed) => {
                    let expires_in_ms = renewed.valid_until.ms_since(clock::now());
                    let event =
                        json!({"event": "renewed", "ttl_ms": renewed.ttl_ms, "expires_in_ms": expires_in_ms});
                    (line(&event), Next::Event(hold, stop))
                }
                HoldEvent::Lost { reason } => (line(&json!({"event": "lost", "reason": reason})), Next::End),
            })
        }
        Next::End => None,
    }
}

fn line(event: &impl serde::Serialize) -> Bytes {
    let mut line = serde_json::to_vec(event).unwrap_or_default();
    line.push(b'\n');
    line.into()
}

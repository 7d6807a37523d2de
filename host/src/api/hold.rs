//! `POST /v1/hold`: a lock that is held for as long as the connection is open.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::acquire::{self, Anchored, Granted};
use crate::auth::Identity;
use crate::clock;
use crate::config::{Limits, Verb};
use crate::fronts::fields::Fields;
use crate::fronts::lease_id;
use crate::http::{Body, Peer, Problem, Response};
use crate::lock::Instant;
use crate::service::{AcquireError, Hold, HoldEvent, Lease, Principal, Service};

/// Answers with a stream of JSON lines once the lock is granted. A body that has only a `lease_id` resumes that
/// lease, which may have been granted by another proxy. A client that closes its connection releases the lock.
pub async fn hold(
    service: &Service,
    limits: &Limits,
    stop: &CancellationToken,
    principal: Principal,
    body: Bytes,
    peer: &Arc<Peer>,
) -> Result<Response, Problem> {
    let begun = clock::now();
    let hold = begin(service, limits, stop, principal.clone(), body).await?;
    let held = Held { hold, begun, principal, stop: stop.clone(), peer: peer.clone(), over: false };
    let mut response = Response::new(Body::stream(stream::unfold(Next::Granted(held), next_line)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

async fn begin(
    service: &Service,
    limits: &Limits,
    stop: &CancellationToken,
    principal: Principal,
    body: Bytes,
) -> Result<Hold, Problem> {
    let mut fields = Fields::parse(&body)?;
    let Some(id) = lease_id::take(&mut fields)? else {
        let request = acquire::read(fields, principal, limits)?;
        // The wait can take an hour; free the body first.
        drop(body);
        return Ok(service.hold(request).await?);
    };
    fields.finish()?;
    if stop.is_cancelled() {
        return Err(AcquireError::ShuttingDown.into());
    }
    let lease = lease_id::parse(&id, &principal)?;
    principal.check_lease(&lease)?;
    Ok(service.resume(lease).await?)
}

/// A lock, with the request that holds it.
struct Held {
    hold: Hold,
    begun: Instant,
    principal: Principal,
    stop: CancellationToken,
    peer: Arc<Peer>,
    /// The lease has ended: the client can no longer be certain of the lock.
    over: bool,
}

/// A connection that breaks does not release the lock: the client may still count on its lease until the lease runs
/// out. Only a client that closes its connection releases the lock.
impl Drop for Held {
    fn drop(&mut self) {
        if !self.over && !self.peer.left() {
            self.hold.leave();
        }
    }
}

enum Next {
    Granted(Held),
    Event(Held),
    /// The client was told that its lock is lost, and may be certain of it until this instant.
    Lost(Held, Instant),
    End,
}

async fn next_line(next: Next) -> Option<(Bytes, Next)> {
    match next {
        Next::Granted(held) => Some((line(&Granted::line(&held.hold.lease, held.begun)), Next::Event(held))),
        Next::Event(held) => Some(held.event().await),
        Next::Lost(held, until) => {
            held.let_go(until).await;
            None
        }
        Next::End => None,
    }
}

impl Held {
    async fn event(mut self) -> (Bytes, Next) {
        let lease = self.hold.lease.clone();
        let event = tokio::select! {
            event = self.hold.next() => event,
            () = self.stop.cancelled() => self.hold.drain(),
            () = withdrawn(&self.principal, &lease) => {
                self.hold.give_up("the client may no longer lock this resource")
            }
        };
        match event {
            HoldEvent::Renewed(renewed) => {
                let time = Anchored::new(self.begun, renewed.valid_until);
                let said = line(&Line::Renewed { ttl_ms: renewed.ttl_ms, time });
                (said, Next::Event(self))
            }
            HoldEvent::Draining { valid_until } => {
                let lease_id = lease_id::encode(&self.hold.lease.lease);
                let time = Anchored::new(self.begun, valid_until);
                (line(&Line::Draining { lease_id: &lease_id, time }), Next::End)
            }
            HoldEvent::Lost { reason, valid_until } => {
                let time = Anchored::new(self.begun, valid_until);
                (line(&Line::Lost { reason: &reason, time }), Next::Lost(self, valid_until))
            }
        }
    }

    /// Waits until the client can no longer be certain of the lock. If the client closes its connection during the
    /// wait, dropping `self` releases the lock early.
    async fn let_go(mut self, until: Instant) {
        let stopped = async {
            self.stop.cancelled().await;
            match self.hold.drain() {
                HoldEvent::Draining { .. } => {}
                // The lock ends with the proxy, so the proxy's shutdown waits for this task.
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            () = clock::sleep_until(until) => self.over = true,
            () = stopped => {}
        }
    }
}

/// Waits until the client may no longer have the lease.
async fn withdrawn(principal: &Principal, lease: &Lease) {
    let may = |client: &Identity, name: &str| client.may(Verb::Acquire, name);
    let has = |client: &Identity| {
        // As in [`Principal::check_lease`].
        may(client, &lease.resource) && lease.lease.keys.iter().any(|key| may(client, key.as_str()))
    };
    principal.until_withdrawn(has).await;
}

/// The lines that follow the grant.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Line<'a> {
    Renewed {
        ttl_ms: u32,
        #[serde(flatten)]
        time: Anchored,
    },
    Draining {
        lease_id: &'a str,
        #[serde(flatten)]
        time: Anchored,
    },
    Lost {
        reason: &'a str,
        #[serde(flatten)]
        time: Anchored,
    },
}

fn line(event: &impl Serialize) -> Bytes {
    let mut line = serde_json::to_vec(event).unwrap_or_default();
    line.push(b'\n');
    line.into()
}

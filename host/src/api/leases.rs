//! `POST /v1/renew` and `/v1/release`.

use bytes::Bytes;
use serde::Serialize;

use crate::clock;
use crate::config::Limits;
use crate::fronts::fields::Fields;
use crate::fronts::lease_id;
use crate::http::{Problem, Response, json};
use crate::service::{Principal, Service};

/// `POST /v1/renew`.
pub async fn renew(
    service: &Service,
    limits: &Limits,
    principal: &Principal,
    body: Bytes,
) -> Result<Response, Problem> {
    let mut fields = Fields::parse(&body)?;
    let id = lease_id::take_required(&mut fields)?;
    let ttl_ms = fields.integer("ttl_ms", limits.min_ttl_ms..=limits.max_ttl_ms)?;
    fields.finish()?;
    let lease = lease_id::parse(&id, principal)?;
    principal.check_lease(&lease)?;
    let token = lease.token.map_or(0, |token| token.0);
    let renewed = service.renew(lease, ttl_ms).await?;
    let expires_in_ms = renewed.valid_until.ms_since(clock::now());
    Ok(json(&Renewal { lease_id: &id, token, ttl_ms: renewed.ttl_ms, expires_in_ms }))
}

/// `POST /v1/release`.
pub async fn release(service: &Service, principal: &Principal, body: Bytes) -> Result<Response, Problem> {
    let mut fields = Fields::parse(&body)?;
    let id = lease_id::take_required(&mut fields)?;
    fields.finish()?;
    service.release(lease_id::parse(&id, principal)?).await?;
    Ok(json(&Release { lease_id: &id, released: true }))
}

#[derive(Serialize)]
struct Renewal<'a> {
    lease_id: &'a str,
    token: u64,
    ttl_ms: u32,
    expires_in_ms: u32,
}

#[derive(Serialize)]
struct Release<'a> {
    lease_id: &'a str,
    released: bool,
}

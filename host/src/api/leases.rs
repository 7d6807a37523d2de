//! `POST /v1/acquire`, `/v1/renew` and `/v1/release`.

use bytes::Bytes;
use serde::Serialize;

use super::acquire::{self, Granted};
use super::fields::Fields;
use super::{Api, lease_id};
use crate::clock;
use crate::http::{Problem, Response, json};
use crate::lock::LeaseRef;
use crate::service::LeaseError;

/// `POST /v1/acquire`.
pub async fn acquire(api: &Api, body: Bytes) -> Result<Response, Problem> {
    let request = acquire::parse(&body, &api.limits)?;
    // The wait can take an hour; free the body first.
    drop(body);
    let lease = api.service.acquire(request).await?;
    Ok(json(&Granted::new(&lease)))
}

/// `POST /v1/renew`.
pub async fn renew(api: &Api, body: Bytes) -> Result<Response, Problem> {
    let mut fields = Fields::parse(&body)?;
    let id = lease_id_of(&mut fields)?;
    let ttl_ms = fields.integer("ttl_ms", api.limits.min_ttl_ms..=api.limits.max_ttl_ms)?;
    fields.finish()?;
    let lease = known_lease(&id)?;
    let token = lease.token.0;
    let renewed = api.service.renew(lease, ttl_ms).await?;
    let expires_in_ms = renewed.valid_until.ms_since(clock::now());
    Ok(json(&Renewal { lease_id: &id, token, ttl_ms: renewed.ttl_ms, expires_in_ms }))
}

/// `POST /v1/release`.
pub async fn release(api: &Api, body: Bytes) -> Result<Response, Problem> {
    let mut fields = Fields::parse(&body)?;
    let id = lease_id_of(&mut fields)?;
    fields.finish()?;
    api.service.release(known_lease(&id)?).await?;
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

/// Reads the required field `lease_id`.
pub fn lease_id_of(fields: &mut Fields<'_>) -> Result<String, Problem> {
    fields.required_text("lease_id", 1..=lease_id::MAX_BYTES)
}

/// Parses a lease id. An id that no proxy issued counts as a lost lease.
pub fn known_lease(id: &str) -> Result<LeaseRef, Problem> {
    lease_id::decode(id).ok_or_else(|| LeaseError::Lost.into())
}

//! `POST /v1/once/begin` and `/v1/once/finish`: the first client does the work, and the others get its outcome.

use bytes::Bytes;
use serde::Serialize;
use serde_json::value::RawValue;

use super::acquire::{self, Granted};
use crate::clock;
use crate::config::Limits;
use crate::fronts::fields::{Fields, kept_value, raw};
use crate::fronts::lease_id;
use crate::http::{Problem, Response, json};
use crate::lock::Mode;
use crate::lock::record::StoredValue;
use crate::service::{AcquireError, Begun, Principal, Service};

/// `POST /v1/once/begin`: grants the right to do the work, or returns the outcome if the work is done.
pub async fn begin(
    service: &Service,
    limits: &Limits,
    principal: Principal,
    body: Bytes,
) -> Result<Response, Problem> {
    let request = acquire::parse(&body, principal, limits)?;
    drop(body);
    if request.mode != Mode::Exclusive {
        return Err(Problem::invalid("mode", "must be \"exclusive\": one does what is done once"));
    }
    match service.begin(request).await {
        Ok(Begun::First(lease)) => Ok(json(&First { state: "first", lease: Granted::new(&lease) })),
        Ok(Begun::Done(kept)) => Ok(json(&Done::new(&kept)?)),
        Err(error @ AcquireError::Contended { .. }) => Err(Problem::from(error).with("state", "in_progress")),
        Err(error) => Err(error.into()),
    }
}

/// `POST /v1/once/finish`: stores the outcome and releases the lease.
pub async fn finish(
    service: &Service,
    limits: &Limits,
    principal: &Principal,
    body: Bytes,
) -> Result<Response, Problem> {
    let mut fields = Fields::parse(&body)?;
    let id = lease_id::take_required(&mut fields)?;
    let outcome = raw(&body, &mut fields, "outcome", limits.max_value_bytes)?;
    fields.finish()?;
    let outcome = outcome.map_or("null", RawValue::get);
    let lease = lease_id::parse(&id, principal)?;
    principal.check_lease(&lease)?;
    service.finish(lease, outcome.into()).await?;
    Ok(json(&Finished { lease_id: &id, finished: true }))
}

#[derive(Serialize)]
struct First<'a> {
    state: &'static str,
    #[serde(flatten)]
    lease: Granted<'a>,
}

#[derive(Serialize)]
struct Done<'a> {
    state: &'static str,
    outcome: &'a RawValue,
    /// When the work was finished.
    since: String,
    /// Until when the outcome is kept.
    until: String,
}

#[derive(Serialize)]
struct Finished<'a> {
    lease_id: &'a str,
    finished: bool,
}

impl<'a> Done<'a> {
    fn new(kept: &'a StoredValue) -> Result<Done<'a>, Problem> {
        Ok(Done {
            state: "done",
            outcome: kept_value(kept)?,
            since: clock::rfc3339(kept.since.0),
            until: clock::rfc3339(kept.until.0),
        })
    }
}

//! `POST /v1/versions/read` and `/v1/versions/commit`: optimistic locking. Of all clients that read the same version,
//! one can commit.

use bytes::Bytes;
use serde::Serialize;
use serde_json::value::RawValue;

use super::acquire::labels;
use crate::clock;
use crate::config::Limits;
use crate::fronts::Code;
use crate::fronts::fields::{Fields, kept_value, raw};
use crate::http::{Problem, Response, json};
use crate::lock::{Mode, Token};
use crate::service::{AcquireError, Principal, Request, Service};

/// The largest version: JSON numbers are exact up to 2^53 - 1.
const MAX_VERSION: u64 = (1 << 53) - 1;

/// `POST /v1/versions/read`.
pub async fn read(
    service: &Service,
    limits: &Limits,
    principal: Principal,
    body: Bytes,
) -> Result<Response, Problem> {
    let mut fields = Fields::parse(&body)?;
    let request = request(limits, principal, &mut fields)?;
    fields.finish()?;
    let read = service.read_version(&request).await?;
    let kept = read.version.kept.as_ref();
    let answer = Read {
        resource: &request.resource,
        key: read.key.as_str(),
        version: read.version.version.0,
        value: kept.map(kept_value).transpose()?,
        since: kept.map(|kept| clock::rfc3339(kept.since.0)),
        policy: &read.policy,
    };
    Ok(json(&answer))
}

/// `POST /v1/versions/commit`.
pub async fn commit(
    service: &Service,
    limits: &Limits,
    principal: Principal,
    body: Bytes,
) -> Result<Response, Problem> {
    let mut fields = Fields::parse(&body)?;
    let mut request = request(limits, principal, &mut fields)?;
    request.request_id = fields.text("request_id", 1..=limits.max_request_id_bytes)?;
    let version = fields.number("version", 0..=MAX_VERSION)?;
    let version = version.ok_or_else(|| Problem::invalid("version", "is required: the one that was read"))?;
    let value = raw(&body, &mut fields, "value", limits.max_value_bytes)?;
    fields.finish()?;
    let value = value.map(|value| value.get().into());
    match service.commit(&request, Token(version), value).await {
        Ok(committed) => Ok(json(&Committed {
            resource: &request.resource,
            key: committed.key.as_str(),
            version: committed.version.0,
            policy: &committed.policy,
        })),
        Err(AcquireError::Conflict(now)) => {
            let value: Option<serde_json::Value> = now.kept.as_ref().map(kept_value).transpose()?;
            let detail = format!("`{}` is at version {} by now", request.resource, now.version);
            Err(Problem::new(Code::Conflict, detail).with("version", now.version.0).with("value", value))
        }
        Err(error) => Err(error.into()),
    }
}

fn request(limits: &Limits, principal: Principal, fields: &mut Fields<'_>) -> Result<Request, Problem> {
    Ok(Request {
        principal,
        resource: fields.required_text("resource", 1..=limits.max_resource_bytes)?,
        owner: fields.text("owner", 1..=limits.max_owner_bytes)?.unwrap_or_default(),
        mode: Mode::Exclusive,
        ttl_ms: None,
        wait_ms: None,
        request_id: None,
        labels: labels(fields.take("labels"), limits)?,
    })
}

#[derive(Serialize)]
struct Read<'a> {
    resource: &'a str,
    key: &'a str,
    version: u64,
    /// The value of the last commit, if it had one.
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<String>,
    policy: &'a str,
}

#[derive(Serialize)]
struct Committed<'a> {
    resource: &'a str,
    key: &'a str,
    version: u64,
    policy: &'a str,
}

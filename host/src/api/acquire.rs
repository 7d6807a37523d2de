//! `POST /v1/acquire`: the body of a lock request, and the JSON of a grant. `/v1/hold` and `/v1/once/begin` use
//! both, too.

use bytes::Bytes;
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::clock;
use crate::config::Limits;
use crate::fronts::fields::{Fields, Json, shown};
use crate::fronts::mode::{self, Shown};
use crate::fronts::{Refusal, lease_id};
use crate::http::{Problem, Response, json};
use crate::lock::record::RESERVED;
use crate::lock::{Instant, Key};
use crate::random;
use crate::service::{Lease, PRINCIPAL, Principal, Request, Service};

/// `POST /v1/acquire`.
pub async fn acquire(
    service: &Service,
    limits: &Limits,
    principal: Principal,
    body: Bytes,
) -> Result<Response, Problem> {
    let request = parse(&body, principal, limits)?;
    // The wait can take an hour; free the body first.
    drop(body);
    let lease = service.acquire(request).await?;
    Ok(json(&Granted::new(&lease)))
}

/// Reads and checks the body of an acquire.
pub fn parse(body: &[u8], principal: Principal, limits: &Limits) -> Result<Request, Refusal> {
    read(Fields::parse(body)?, principal, limits)
}

/// As [`parse`], for a body from which some fields were already taken.
pub fn read(mut fields: Fields<'_>, principal: Principal, limits: &Limits) -> Result<Request, Refusal> {
    let request_id = fields.text("request_id", 1..=limits.max_request_id_bytes)?;
    let owner = fields.text("owner", 1..=limits.max_owner_bytes)?;
    let request = Request {
        principal,
        resource: fields.required_text("resource", 1..=limits.max_resource_bytes)?,
        owner: owner.unwrap_or_else(|| anonymous(request_id.as_deref())),
        mode: mode::parse(fields.take("mode"), limits.max_permits)?,
        ttl_ms: fields.integer("ttl_ms", limits.min_ttl_ms..=limits.max_ttl_ms)?,
        wait_ms: fields.integer("wait_ms", 0..=limits.max_wait_ms)?,
        request_id,
        labels: labels(fields.take("labels"), limits)?,
    };
    fields.finish()?;
    Ok(request)
}

/// Reads and checks the `labels` of a request; absent means none.
pub fn labels(value: Option<Json<'_>>, limits: &Limits) -> Result<Vec<(String, String)>, Refusal> {
    let members = match value {
        None => return Ok(Vec::new()),
        Some(Json::Object(members)) => members,
        Some(other) => return Err(other.not("labels", "an object of texts")),
    };
    if members.len() > limits.max_labels {
        let detail = format!("has {} members; may have {}", members.len(), limits.max_labels);
        return Err(Refusal::invalid("labels", detail).with("bound", limits.max_labels));
    }
    let mut labels: Vec<(String, String)> = Vec::with_capacity(members.len());
    for (name, value) in members {
        let field = format!("labels.{}", shown(&name));
        if labels.iter().any(|(before, _)| *before == name) {
            return Err(Refusal::invalid(field, "given twice"));
        }
        if name.starts_with(RESERVED) {
            return Err(Refusal::invalid(field, format!("a name may not begin with `{RESERVED}`")));
        }
        if name == PRINCIPAL {
            return Err(Refusal::invalid(field, "the proxy sets this label"));
        }
        let name = Json::Text(name).into_text("labels", &(1..=limits.max_label_bytes))?;
        labels.push((name, value.into_text(&field, &(0..=limits.max_label_bytes))?));
    }
    Ok(labels)
}

/// Makes an owner for a client that gives none. The owner is random, so no other client has it. With a `request_id`
/// it is derived from that id: a repeated request must have the same owner, or it would be a different request.
fn anonymous(request_id: Option<&str>) -> String {
    let id = request_id.map_or_else(random::number, |id| {
        let digest: [u8; 32] = Sha256::digest(id).into();
        u64::from_le_bytes(*digest.first_chunk().expect("it has 32 bytes"))
    });
    format!("anon-{id:016x}")
}

/// A grant, as its client sees it.
#[derive(Serialize)]
pub struct Granted<'a> {
    /// Set only in the lines of `/v1/hold`.
    #[serde(skip_serializing_if = "Option::is_none")]
    event: Option<&'static str>,
    lease_id: String,
    resource: &'a str,
    #[serde(serialize_with = "texts")]
    keys: &'a [Key],
    owner: &'a str,
    mode: Shown,
    token: u64,
    /// The token of each key, if the lease has several keys.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tokens: Vec<u64>,
    ttl_ms: u32,
    expires_in_ms: u32,
    /// Set only in the lines of `/v1/hold`.
    #[serde(skip_serializing_if = "Option::is_none")]
    since_ms: Option<u32>,
    /// The event that can end the lock before `expires_in_ms` is over; see [`ends_with`].
    ends_with: &'static str,
    waited_ms: u32,
    policy: &'a str,
    primitive: &'static str,
    /// How many times the owner holds the lock, if more than once.
    #[serde(skip_serializing_if = "Option::is_none")]
    levels: Option<u32>,
}

impl<'a> Granted<'a> {
    /// The JSON of a grant. `expires_in_ms` counts from this call and is rounded down.
    pub fn new(lease: &'a Lease) -> Granted<'a> {
        let several = lease.tokens.len() > 1;
        Granted {
            event: None,
            lease_id: lease_id::encode(&lease.lease),
            resource: &lease.resource,
            keys: &lease.lease.keys,
            owner: &lease.owner,
            mode: Shown(lease.mode),
            token: lease.lease.token.map_or(0, |token| token.0),
            tokens: if several { lease.tokens.iter().map(|token| token.0).collect() } else { Vec::new() },
            ttl_ms: lease.ttl_ms,
            expires_in_ms: lease.valid_until.ms_since(clock::now()),
            ends_with: ends_with(&lease.lease.keys),
            since_ms: None,
            waited_ms: lease.waited_ms,
            policy: &lease.policy,
            primitive: lease.primitive.as_str(),
            levels: (lease.levels > 1).then_some(lease.levels),
        }
    }

    /// The grant as a line of `/v1/hold`, whose request began at `begun`.
    pub fn line(lease: &'a Lease, begun: Instant) -> Granted<'a> {
        let Anchored { since_ms, expires_in_ms } = Anchored::new(begun, lease.valid_until);
        Granted { event: Some("granted"), since_ms: Some(since_ms), expires_in_ms, ..Granted::new(lease) }
    }
}

/// The time until which a client may be certain of its lock. `expires_in_ms` counts from `since_ms` after the start
/// of the request. The client knows when its request started, so a line that arrives late promises no more time.
#[derive(Serialize)]
pub struct Anchored {
    since_ms: u32,
    expires_in_ms: u32,
}

impl Anchored {
    /// The times of a line that is written now, for a request that began at `begun` and a lock that is valid until
    /// `until`.
    pub fn new(begun: Instant, until: Instant) -> Anchored {
        let now = clock::now();
        Anchored { since_ms: now.ms_since(begun), expires_in_ms: until.ms_since(now) }
    }
}

/// `lease`: the lock ends only by time or release. `session`: the lock also ends when the proxy stops, or when the
/// proxy's database session ends.
fn ends_with(keys: &[Key]) -> &'static str {
    match keys.iter().any(|key| key.space().rests_on_session()) {
        true => "session",
        false => "lease",
    }
}

fn texts<S: serde::Serializer>(keys: &&[Key], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(keys.iter().map(Key::as_str))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::{LeaseRef, Mode, Primitive, Space, Token};

    fn parsed(body: &str) -> Result<Request, String> {
        parse(body.as_bytes(), Principal::ANONYMOUS, &Limits::default()).map_err(|refusal| refusal.detail)
    }

    #[test]
    fn every_field_of_an_acquire_request_is_read() {
        let request = parsed(
            r#"{"resource": "orders/42", "owner": "w", "mode": {"permits": 3}, "ttl_ms": 10000,
                "wait_ms": 0, "request_id": "id", "labels": {"tenant": "a", "empty": ""}}"#,
        )
        .unwrap();
        assert_eq!((request.resource.as_str(), request.owner.as_str()), ("orders/42", "w"));
        assert_eq!(request.mode, Mode::Permits { count: 3, limit: 0 });
        assert_eq!((request.ttl_ms, request.wait_ms), (Some(10_000), Some(0)));
        assert_eq!(request.request_id.as_deref(), Some("id"));
        assert_eq!(request.labels, [("tenant".into(), "a".into()), ("empty".into(), String::new())]);
    }

    #[test]
    fn an_acquire_request_requires_only_a_resource() {
        let request = parsed(r#"{"resource": "r"}"#).unwrap();
        assert_eq!(request.mode, Mode::Exclusive);
        assert!(request.owner.starts_with("anon-") && request.owner.len() == 21, "{}", request.owner);
        assert_ne!(request.owner, parsed(r#"{"resource": "r"}"#).unwrap().owner);
        let named = |id| parsed(&format!(r#"{{"resource": "r", "request_id": "{id}"}}"#)).unwrap().owner;
        assert!(named("a") == named("a") && named("a") != named("b"), "{}", named("a"));
    }

    #[test]
    fn an_invalid_field_is_refused_by_its_name() {
        let long = "x".repeat(600);
        let many: Vec<String> = (0..17).map(|n| format!("\"l{n}\": \"v\"")).collect();
        let faults = [
            (r#""mode": "upsert""#.to_owned(), "mode: "),
            (
                r#""mode": {"permits": 0}"#.to_owned(),
                "mode.permits: is 0; must be a whole number from 1 to 1024",
            ),
            (r#""mode": {"permits": 1, "limit": 2}"#.to_owned(), "mode: "),
            (r#""mode": {}"#.to_owned(), "mode: "),
            (r#""mode": 1"#.to_owned(), "mode: "),
            (r#""ttl_ms": 0"#.to_owned(), "ttl_ms: is 0; must be a whole number from 100 to 3600000"),
            (r#""ttl_ms": 3600001"#.to_owned(), "ttl_ms: is 3600001"),
            (r#""wait_ms": 3600001"#.to_owned(), "wait_ms: is 3600001"),
            (r#""owner": """#.to_owned(), "owner: has 0 bytes"),
            (format!(r#""owner": "{long}""#), "owner: has 600 bytes; must have 1 to 256 bytes"),
            (format!(r#""request_id": "{long}""#), "request_id: has 600 bytes; must have 1 to 128 bytes"),
            (r#""labels": []"#.to_owned(), "labels: must be an object of texts, not a list"),
            (r#""labels": {"a": 1}"#.to_owned(), "labels.a: must be text, not a number"),
            (r#""labels": {"a": "1", "a": "2"}"#.to_owned(), "labels.a: given twice"),
            (format!(r#""labels": {{"a": "{long}"}}"#), "labels.a: has 600 bytes"),
            (format!(r#""labels": {{{}}}"#, many.join(",")), "labels: has 17 members; may have 16"),
            (r#""lable": {}"#.to_owned(), "unknown field `lable`"),
        ];
        for (member, expected) in faults {
            let detail = parsed(&format!(r#"{{"resource": "r", {member}}}"#)).unwrap_err();
            assert!(detail.starts_with(expected), "{member}: {detail}");
        }
        assert!(parsed(&format!(r#"{{"resource": "{long}"}}"#)).unwrap_err().contains("1 to 512 bytes"));
    }

    #[test]
    fn a_grant_is_written_as_documented() {
        let keys: Vec<Key> = ["a", "b"].iter().map(|key| Key::new(key).unwrap()).collect();
        let mut lease = Lease {
            lease: LeaseRef { keys: keys.into(), nonce: 1, token: Some(Token(17)), principal: None },
            resource: "orders/42".into(),
            owner: "w".into(),
            mode: Mode::Permits { count: 2, limit: 5 },
            tokens: vec![Token(17), Token(4)],
            ttl_ms: 10_000,
            valid_until: clock::now().plus_ms(9_950),
            waited_ms: 12,
            policy: "default@sha256:1a2b3c4d5e6f".into(),
            primitive: Primitive::Lease,
            levels: 1,
        };
        let grant = serde_json::to_value(Granted::new(&lease)).unwrap();
        assert_eq!(grant["keys"], serde_json::json!(["a", "b"]));
        assert_eq!(grant["tokens"], serde_json::json!([17, 4]));
        assert_eq!(grant["mode"], serde_json::json!({"permits": 2}));
        assert!((9_900..=9_950).contains(&grant["expires_in_ms"].as_u64().unwrap()));
        for absent in ["event", "since_ms", "levels"] {
            assert!(grant.get(absent).is_none(), "{grant}");
        }
        assert_eq!(grant["ends_with"], "lease");
        lease.lease.keys = lease.lease.keys[..1].into();
        lease.tokens.pop();
        let begun = Instant(clock::now().0 - 70_000);
        let grant = serde_json::to_value(Granted::line(&lease, begun)).unwrap();
        assert_eq!(grant["event"], "granted");
        assert!((70..120).contains(&grant["since_ms"].as_u64().unwrap()), "{grant}");
        assert!(grant.get("tokens").is_none());
        for (space, expected) in Space::ALL.into_iter().zip(["lease", "session", "session", "lease"]) {
            lease.lease.keys = lease.lease.keys.iter().map(|key| key.clone().within(space)).collect();
            assert_eq!(serde_json::to_value(Granted::new(&lease)).unwrap()["ends_with"], expected);
        }
    }
}

//! The lines of a recording.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::Limits;
use crate::lock::Mode;
use crate::policy::Plan;

/// The version of the format that this program writes and reads.
pub const VERSION: u32 = 1;

/// One line. Times are in microseconds since 1970 by the proxy's clock.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// The first line of each file.
    Header(Header),
    /// A generation of a policy, before the first request that it planned.
    Policy(PolicyLine),
    /// A request, once it has its answer.
    Ask(Box<Ask>),
    /// A lease that has ended.
    End(End),
    /// How long the store took since the line before of this kind.
    Store(StoreTimes),
    /// Lines that were dropped, because the disk was too slow or full.
    Gap {
        /// How many.
        dropped: u64,
    },
}

/// What a file was recorded with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Header {
    /// [`VERSION`].
    pub version: u32,
    /// When the proxy began to record.
    pub at_us: u64,
    /// The part of the keys that is recorded, from 0 to 1.
    pub share: f64,
    /// The limits on plans.
    pub limits: Limits,
    /// The parts of requests that are not as the clients sent them.
    pub masked: Vec<String>,
}

/// A generation of a policy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PolicyLine {
    /// The name in config.toml.
    pub name: String,
    /// `name@sha256:` and 12 digits.
    pub id: String,
    /// The settings.
    pub settings: Map<String, Value>,
    /// The file of the component, in the folder of the recording.
    pub component: String,
}

/// A request and its answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ask {
    /// When the proxy began to plan the request.
    pub at_us: u64,
    /// The [`PolicyLine::id`] of the generation that planned the request.
    pub by: String,
    /// The resource.
    pub resource: String,
    /// The owner.
    pub owner: String,
    /// The mode that the client asked for.
    #[serde(with = "mode", default = "exclusive", skip_serializing_if = "is_exclusive")]
    pub mode: Mode,
    /// The lease time that the client asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_ms: Option<u32>,
    /// The wait that the client asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u32>,
    /// The labels of the request, as names and values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<(String, String)>,
    /// What the policy saw of a guarded request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<Http>,
    /// The seed that the policy got.
    pub seed: u32,
    /// The plan, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanLine>,
    /// `granted`, `left` if the client was gone before its answer, or the type of the error.
    pub outcome: String,
    /// The policy's reason for a refusal, or the details of its fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The time from the beginning to the answer, in microseconds.
    pub waited_us: u64,
    /// The lease, if the request was granted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<LeaseName>,
}

/// What a policy saw of a guarded request, without its body.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Http {
    /// The method.
    pub method: String,
    /// The path.
    pub path: String,
    /// The values of the `{name}` captures of the route's path.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub captures: Vec<(String, String)>,
    /// The query parameters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub query: Vec<(String, String)>,
    /// The headers that `recording.headers` lists.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub headers: Vec<(String, String)>,
    /// Whether the policy also saw a body.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub had_body: bool,
}

/// The parts of a plan that decide who excludes whom.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanLine {
    /// The keys.
    pub keys: Vec<String>,
    /// The primitive.
    pub primitive: String,
    /// The mode, with the limit of permits.
    #[serde(with = "mode", default = "exclusive", skip_serializing_if = "is_exclusive")]
    pub mode: Mode,
    /// The lease time.
    pub ttl_ms: u32,
    /// The longest wait.
    pub wait_ms: u32,
    /// The group of the waiter.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub group: String,
}

/// Names a lease of a recording: its first key, and the fencing token for it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LeaseName {
    /// The first key.
    pub key: String,
    /// The token.
    pub token: u64,
}

/// A lease that has ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct End {
    /// When its client released it, or when the proxy learned of its end.
    pub at_us: u64,
    /// The lease.
    pub lease: LeaseName,
    /// `released`, `expired` or `lost`.
    pub how: String,
    /// How long the proxy knew of the lease, in milliseconds.
    pub held_ms: u32,
}

/// How long the store took, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreTimes {
    /// The mean.
    pub mean_us: u64,
    /// The median.
    pub p50_us: u64,
    /// The 99th percentile.
    pub p99_us: u64,
}

impl PlanLine {
    /// These parts of a plan.
    pub fn of(plan: &Plan) -> PlanLine {
        PlanLine {
            keys: plan.keys.iter().map(ToString::to_string).collect(),
            primitive: plan.primitive.as_str().to_owned(),
            mode: plan.mode,
            ttl_ms: plan.ttl_ms,
            wait_ms: plan.wait_ms,
            group: plan.group.to_string(),
        }
    }
}

fn exclusive() -> Mode {
    Mode::Exclusive
}

fn is_exclusive(mode: &Mode) -> bool {
    *mode == Mode::Exclusive
}

/// A mode as `exclusive`, `shared`, or `permits:COUNT/LIMIT`.
mod mode {
    use std::borrow::Cow;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::lock::Mode;

    pub fn serialize<S: Serializer>(mode: &Mode, serializer: S) -> Result<S::Ok, S::Error> {
        match mode {
            Mode::Exclusive => serializer.serialize_str("exclusive"),
            Mode::Shared => serializer.serialize_str("shared"),
            Mode::Permits { count, limit } => {
                serializer.collect_str(&format_args!("permits:{count}/{limit}"))
            }
        }
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<Mode, D::Error> {
        let text = Cow::<str>::deserialize(deserializer)?;
        let permits = |text: &str| {
            let (count, limit) = text.strip_prefix("permits:")?.split_once('/')?;
            Some(Mode::Permits { count: count.parse().ok()?, limit: limit.parse().ok()? })
        };
        match &*text {
            "exclusive" => Ok(Mode::Exclusive),
            "shared" => Ok(Mode::Shared),
            text => permits(text).ok_or_else(|| D::Error::custom(format!("{text} is no mode"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_it_was_written() {
        let ask = Ask {
            at_us: 7,
            by: "p@sha256:0".to_owned(),
            resource: "a/b".to_owned(),
            owner: "o".to_owned(),
            mode: Mode::Permits { count: 2, limit: 0 },
            ttl_ms: Some(5),
            wait_ms: None,
            labels: vec![("tenant".to_owned(), "x".to_owned())],
            http: None,
            seed: 3,
            plan: None,
            outcome: "refused".to_owned(),
            reason: Some("no".to_owned()),
            waited_us: 12,
            lease: None,
        };
        let text = serde_json::to_string(&Line::Ask(Box::new(ask))).unwrap();
        assert_eq!(
            text,
            r#"{"ask":{"at_us":7,"by":"p@sha256:0","resource":"a/b","owner":"o","mode":"permits:2/0","ttl_ms":5,"labels":[["tenant","x"]],"seed":3,"outcome":"refused","reason":"no","waited_us":12}}"#
        );
        let Line::Ask(read) = serde_json::from_str(&text).unwrap() else { panic!("{text}") };
        assert_eq!(serde_json::to_string(&Line::Ask(read)).unwrap(), text);
    }
}

//! The lines of a recording.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::Limits;
use crate::lock::Mode;

/// The version of the format that this program writes and reads.
pub const VERSION: u32 = 1;

/// One line. Times are in microseconds since 1970 by the proxy's clock.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line<'a> {
    /// The first line of each file.
    Header(Header),
    /// A generation of a policy, before the first request that it planned.
    Policy(PolicyLine),
    /// A request, once it has its answer.
    Ask(Box<Ask<'a>>),
    /// A lease that has ended.
    End(End<'a>),
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
    /// Names the policy, its component and its settings: see [`Generation::rules`](crate::policy::Generation::rules).
    pub id: String,
    /// The settings.
    pub settings: Map<String, Value>,
    /// The file of the component, in the folder of the recording.
    pub component: String,
}

/// A request and its answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ask<'a> {
    /// When the proxy began to plan the request.
    pub at_us: u64,
    /// What the client called: see [`Call::as_str`](crate::lock::Call::as_str).
    pub call: Cow<'a, str>,
    /// The [`PolicyLine::id`] of the generation that planned the request.
    pub by: Cow<'a, str>,
    /// The resource.
    pub resource: Cow<'a, str>,
    /// The owner.
    pub owner: Cow<'a, str>,
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
    pub labels: Pairs<'a>,
    /// What the policy saw of a guarded request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<Http<'a>>,
    /// The seed that the policy got.
    pub seed: u32,
    /// The plan, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanLine<'a>>,
    /// `granted`, `left` if the client was gone before its answer, or the type of the error.
    pub outcome: Cow<'a, str>,
    /// The policy's reason for a refusal, or the details of its fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<Cow<'a, str>>,
    /// The time from the beginning to the answer, in microseconds.
    pub waited_us: u64,
    /// The lease, if the request was granted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<LeaseName<'a>>,
}

/// What a policy saw of a guarded request, without its body.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Http<'a> {
    /// The method.
    pub method: Cow<'a, str>,
    /// The path.
    pub path: Cow<'a, str>,
    /// The values of the `{name}` captures of the route's path.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub captures: Pairs<'a>,
    /// The query parameters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub query: Pairs<'a>,
    /// The headers that `recording.headers` lists.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub headers: Pairs<'a>,
    /// Whether the policy also saw a body.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub had_body: bool,
}

/// The parts of a plan that decide who excludes whom.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanLine<'a> {
    /// The keys.
    pub keys: Vec<Cow<'a, str>>,
    /// The primitive.
    pub primitive: Cow<'a, str>,
    /// The mode, with the limit of permits.
    #[serde(with = "mode", default = "exclusive", skip_serializing_if = "is_exclusive")]
    pub mode: Mode,
    /// The lease time.
    pub ttl_ms: u32,
    /// The longest wait.
    pub wait_ms: u32,
    /// The group of the waiter.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub group: Cow<'a, str>,
}

/// Names a lease of a recording: its first key, and the fencing token for it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LeaseName<'a> {
    /// The first key.
    pub key: Cow<'a, str>,
    /// The token.
    pub token: u64,
}

/// A lease that has ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct End<'a> {
    /// When the proxy learned of its end.
    pub at_us: u64,
    /// The lease.
    pub lease: LeaseName<'a>,
    /// `released`, `expired` or `lost`.
    pub how: Cow<'a, str>,
    /// The time from the grant to the client's release, or to the moment at which the proxy learned of the end, in
    /// microseconds.
    pub held_us: u64,
}

/// How long the store took in some time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreTimes {
    /// The end of that time.
    pub at_us: u64,
    /// The mean, in microseconds.
    pub mean_us: u64,
    /// The times at [`StoreTimes::PARTS`] of all answers, in microseconds.
    pub quantiles_us: [u64; 6],
}

impl StoreTimes {
    /// The quantiles that are recorded.
    pub const PARTS: [f64; 6] = [0.05, 0.25, 0.5, 0.75, 0.95, 0.99];
}

/// Names and values.
pub type Pairs<'a> = Vec<(Cow<'a, str>, Cow<'a, str>)>;

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
            call: "acquire".into(),
            by: "p@sha256:0".into(),
            resource: "a/b".into(),
            owner: "o".into(),
            mode: Mode::Permits { count: 2, limit: 0 },
            ttl_ms: Some(5),
            wait_ms: None,
            labels: vec![("tenant".into(), "x".into())],
            http: None,
            seed: 3,
            plan: None,
            outcome: "refused".into(),
            reason: Some("no".into()),
            waited_us: 12,
            lease: None,
        };
        let text = serde_json::to_string(&Line::Ask(Box::new(ask))).unwrap();
        assert_eq!(
            text,
            r#"{"ask":{"at_us":7,"call":"acquire","by":"p@sha256:0","resource":"a/b","owner":"o","mode":"permits:2/0","ttl_ms":5,"labels":[["tenant","x"]],"seed":3,"outcome":"refused","reason":"no","waited_us":12}}"#
        );
        let Line::Ask(read) = serde_json::from_str(&text).unwrap() else { panic!("{text}") };
        assert_eq!(serde_json::to_string(&Line::Ask(read)).unwrap(), text);
    }
}

//! The format of a scenario file.

use std::collections::BTreeMap;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::bound::{self, Bound};
use crate::cli::args;

/// A scenario: requests, and what a policy must make of them.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// What it shows.
    pub about: Option<String>,
    /// The settings of the policy.
    pub settings: Option<Map<String, Value>>,
    /// How long the store takes for an answer.
    #[serde(default = "Time::of_store")]
    pub store: Time,
    /// The requests that clients send.
    #[serde(default)]
    pub requests: Vec<Requests>,
    /// What must become of them.
    #[serde(default)]
    pub expect: Vec<Expect>,
    /// Requests with the plans that the policy must make for them.
    #[serde(default)]
    pub plan: Vec<PlanCase>,
    /// What must hold for all requests of the file.
    #[serde(default)]
    pub properties: Properties,
}

/// What a client asks for. Texts may have `{client}` and `{n}`, the numbers of the client and of its request.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Ask {
    /// The resource; without it, the path of `request`.
    pub resource: Option<String>,
    pub owner: Option<String>,
    pub mode: Option<Mode>,
    pub ttl: Option<Time>,
    pub wait: Option<Time>,
    pub labels: BTreeMap<String, String>,
    /// The first line of a guarded request, such as `POST /orders/42/pay`.
    pub request: Option<String>,
    /// The path pattern of its route.
    pub path: Option<String>,
    pub headers: BTreeMap<String, String>,
    pub body: Option<String>,
}

/// Requests of one kind.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Requests {
    /// The name by which expectations mean them.
    pub name: String,
    pub ask: Ask,
    /// How many clients send them.
    #[serde(default = "one")]
    pub clients: u32,
    /// When each client sends its first one.
    #[serde(default)]
    pub at: Time,
    /// How many requests each client sends.
    pub repeat: Option<u32>,
    /// Instead of `repeat`: until when each client sends requests.
    pub until: Option<Time>,
    /// Each client sends a request in each such time, whatever becomes of the one before.
    pub every: Option<Time>,
    /// Without `every`: how long a client pauses after the end of its request before it sends the next one.
    pub pause: Option<Time>,
    /// How long a holder uses its lease.
    pub hold: Time,
    /// Whether a holder releases its lease. Otherwise the lease ends by itself, as after a crash.
    #[serde(default = "yes")]
    pub release: bool,
    /// Whether a holder renews its lease while it uses it.
    #[serde(default = "yes")]
    pub renew: bool,
    /// A client leaves if it has no lease after this time.
    pub leave: Option<Time>,
}

/// What must become of requests.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Expect {
    /// The names of the requests that are meant; without it, all of them.
    pub of: Names,
    /// The median of the waits of granted requests.
    #[serde(deserialize_with = "bound::of_time")]
    pub wait_p50: Option<Bound>,
    /// Their 99th percentile.
    #[serde(deserialize_with = "bound::of_time")]
    pub wait_p99: Option<Bound>,
    /// The longest wait, granted or not.
    #[serde(deserialize_with = "bound::of_time")]
    pub wait_max: Option<Bound>,
    /// How many requests are granted.
    #[serde(deserialize_with = "bound::of_count")]
    pub granted: Option<Bound>,
    /// How many requests have another outcome, by its name.
    pub outcomes: BTreeMap<String, Bound>,
    /// How many of all granted requests are these.
    #[serde(deserialize_with = "bound::of_percent")]
    pub share: Option<Bound>,
    /// The most leases that are held at the same time.
    #[serde(deserialize_with = "bound::of_number")]
    pub held_together: Option<Bound>,
    /// How many leases end while they are used.
    #[serde(deserialize_with = "bound::of_count")]
    pub outlived: Option<Bound>,
    /// Jain's index of the numbers of grants of the clients: 1 if all clients get as many.
    #[serde(deserialize_with = "bound::of_number")]
    pub jain: Option<Bound>,
}

/// One name or several.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(untagged)]
pub enum Names {
    #[default]
    All,
    One(String),
    Several(Vec<String>),
}

impl Names {
    /// The names; `None` for all.
    pub fn list(&self) -> Option<Vec<&str>> {
        match self {
            Names::All => None,
            Names::One(name) => Some(vec![name]),
            Names::Several(names) => Some(names.iter().map(String::as_str).collect()),
        }
    }
}

/// A request with its plan.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanCase {
    pub ask: Ask,
    /// Parts of the plan, as `lockkeeper --json policy try` names them.
    #[serde(default)]
    pub is: Map<String, Value>,
    /// The policy refuses the request, and the reason has this text.
    pub refused: Option<String>,
}

/// What must hold for all requests.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Properties {
    /// Requests that differ in one of these parts have no key in common.
    pub never_share: Vec<Part>,
    /// Requests that agree in one of these parts exclude each other, if one of them is exclusive.
    pub always_exclude: Vec<Part>,
    /// The keys of a request do not depend on these parts.
    pub keys_ignore: Vec<Part>,
}

/// A part of a request.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(try_from = "String", into = "String")]
pub enum Part {
    Resource,
    Owner,
    Mode,
    Ttl,
    Wait,
    Seed,
    Label(String),
}

impl TryFrom<String> for Part {
    type Error = String;

    fn try_from(text: String) -> Result<Part, String> {
        Ok(match &*text {
            "resource" => Part::Resource,
            "owner" => Part::Owner,
            "mode" => Part::Mode,
            "ttl" => Part::Ttl,
            "wait" => Part::Wait,
            "seed" => Part::Seed,
            _ => match text.strip_prefix("label:") {
                Some(name) if !name.is_empty() => Part::Label(name.to_owned()),
                _ => {
                    let known = "resource, owner, mode, ttl, wait, seed or label:NAME";
                    return Err(format!("`{text}` is no part of a request; it must be {known}"));
                }
            },
        })
    }
}

impl From<Part> for String {
    fn from(part: Part) -> String {
        match part {
            Part::Resource => "resource".to_owned(),
            Part::Owner => "owner".to_owned(),
            Part::Mode => "mode".to_owned(),
            Part::Ttl => "ttl".to_owned(),
            Part::Wait => "wait".to_owned(),
            Part::Seed => "seed".to_owned(),
            Part::Label(name) => format!("label:{name}"),
        }
    }
}

/// A time, written like `20ms`, `5s` or `2m`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    /// In microseconds.
    pub us: u64,
}

impl Time {
    fn of_store() -> Time {
        Time { us: 1_000 }
    }

    /// In whole milliseconds.
    pub fn ms(self) -> u32 {
        u32::try_from(self.us / 1_000).unwrap_or(u32::MAX)
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Time, D::Error> {
        let text = String::deserialize(from)?;
        let ms = args::exact_ms(&text).map_err(|why| de::Error::custom(format!("`{text}` {why}")))?;
        Ok(Time { us: (ms * 1_000.0).round() as u64 })
    }
}

/// The mode of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode(pub args::Mode);

impl<'de> Deserialize<'de> for Mode {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Mode, D::Error> {
        let text = String::deserialize(from)?;
        args::mode(&text).map(Mode).map_err(|why| de::Error::custom(format!("`{text}` {why}")))
    }
}

fn one() -> u32 {
    1
}

fn yes() -> bool {
    true
}

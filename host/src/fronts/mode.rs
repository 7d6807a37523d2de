//! `mode` in requests and answers: `"exclusive"`, `"shared"` or `{"permits": n}`.

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use super::fields::{Json, shown};
use super::refusal::Refusal;
use crate::lock::Mode;

/// Parses the mode that a client asks for; absent means exclusive.
///
/// # Errors
/// If the value is no mode, or asks for more than `max_permits` permits.
pub fn parse(value: Option<Json<'_>>, max_permits: u32) -> Result<Mode, Refusal> {
    const EXPECTED: &str = "\"exclusive\", \"shared\" or {\"permits\": n}";
    match value {
        None => Ok(Mode::Exclusive),
        Some(Json::Text(text)) => match &*text {
            "exclusive" => Ok(Mode::Exclusive),
            "shared" => Ok(Mode::Shared),
            other => Err(Refusal::invalid("mode", format!("must be {EXPECTED}, not `{}`", shown(other)))),
        },
        Some(Json::Object(mut members)) => match members.pop() {
            Some((name, count)) if name == "permits" && members.is_empty() => {
                let count = count.into_integer("mode.permits", &(1..=u64::from(max_permits)))?;
                Ok(Mode::Permits { count: u32::try_from(count).unwrap_or(max_permits), limit: 0 })
            }
            _ => Err(Refusal::invalid("mode", format!("must be {EXPECTED}"))),
        },
        Some(other) => Err(other.not("mode", EXPECTED)),
    }
}

/// Serializes a mode for clients.
pub struct Shown(pub Mode);

impl Shown {
    /// The mode as a JSON value.
    pub fn to_value(&self) -> serde_json::Value {
        match self.0 {
            Mode::Exclusive => "exclusive".into(),
            Mode::Shared => "shared".into(),
            Mode::Permits { count, .. } => serde_json::json!({ "permits": count }),
        }
    }
}

impl Serialize for Shown {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Mode::Exclusive => serializer.serialize_str("exclusive"),
            Mode::Shared => serializer.serialize_str("shared"),
            Mode::Permits { count, .. } => {
                let mut map = serializer.serialize_map(Some(1))?;
                map.serialize_entry("permits", &count)?;
                map.end()
            }
        }
    }
}

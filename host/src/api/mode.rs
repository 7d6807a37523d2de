//! `mode` in a request: `"exclusive"`, `"shared"` or `{"permits": n}`.

use super::fields::{Json, shown};
use crate::http::Problem;
use crate::lock::Mode;

/// Parses the mode that a client asks for; absent means exclusive.
pub fn parse(value: Option<Json<'_>>, max_permits: u32) -> Result<Mode, Problem> {
    const EXPECTED: &str = "\"exclusive\", \"shared\" or {\"permits\": n}";
    match value {
        None => Ok(Mode::Exclusive),
        Some(Json::Text(text)) => match &*text {
            "exclusive" => Ok(Mode::Exclusive),
            "shared" => Ok(Mode::Shared),
            other => Err(Problem::invalid("mode", format!("must be {EXPECTED}, not `{}`", shown(other)))),
        },
        Some(Json::Object(mut members)) => match members.pop() {
            Some((name, count)) if name == "permits" && members.is_empty() => {
                let count = count.into_integer("mode.permits", &(1..=u64::from(max_permits)))?;
                Ok(Mode::Permits { count: u32::try_from(count).unwrap_or(max_permits), limit: 0 })
            }
            _ => Err(Problem::invalid("mode", format!("must be {EXPECTED}"))),
        },
        Some(other) => Err(other.not("mode", EXPECTED)),
    }
}

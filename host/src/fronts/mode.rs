//! `mode` in requests and answers: `"exclusive"`, `"shared"` or `{"permits": n}`.

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use crate::lock::Mode;

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

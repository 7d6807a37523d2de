//! A plan as JSON, for commands and reports.

use std::num::NonZero;

use serde_json::{Map, Value, json};

use super::Plan;
use crate::lock::{Key, Mode, Primitive};

impl Plan {
    /// The parts of the plan, by their names. Times are in milliseconds.
    pub fn to_json(&self) -> Map<String, Value> {
        let Plan {
            keys,
            any,
            primitive,
            second,
            global_order,
            mode,
            ttl_ms,
            wait_ms,
            rank,
            group,
            weight,
            reentrant,
            max_waiters,
            lock_at_least_ms,
            keep_ms,
            lock_delay_ms,
            max_hold_ms,
            on_loss,
            delegate,
            labels,
        } = self;
        let labels: Map<String, Value> =
            labels.iter().map(|(name, value)| (name.to_string(), json!(value))).collect();
        let parts = [
            ("keys", json!(keys.iter().map(Key::as_str).collect::<Vec<_>>())),
            ("any_of_keys", json!(any)),
            ("primitive", json!(primitive.as_str())),
            ("second_primitive", json!(second.map(Primitive::as_str))),
            ("global_order", json!(global_order)),
            (
                "mode",
                match mode {
                    Mode::Exclusive => json!("exclusive"),
                    Mode::Shared => json!("shared"),
                    Mode::Permits { count, limit } => json!({"permits": count, "limit": limit}),
                },
            ),
            ("ttl_ms", json!(ttl_ms)),
            ("wait_ms", json!(wait_ms)),
            ("rank", json!(rank)),
            ("group", json!(group)),
            ("weight", json!(weight)),
            ("reentrant", json!(reentrant)),
            ("max_waiters", json!(max_waiters)),
            ("lock_at_least_ms", json!(lock_at_least_ms)),
            ("keep_ms", json!(keep_ms.map_or(0, NonZero::get))),
            ("lock_delay_ms", json!(lock_delay_ms)),
            ("max_hold_ms", json!(max_hold_ms)),
            ("on_loss", json!(on_loss.as_str())),
            ("delegate", json!(delegate.map(|when| format!("{when:?}").to_lowercase()))),
            ("labels", Value::Object(labels)),
        ];
        parts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

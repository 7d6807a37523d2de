//! Arguments that several commands share.

use std::collections::BTreeMap;

use clap::Args;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::lock;

/// The resource, mode and times of a lock request.
#[derive(Args, Clone, Debug)]
pub struct AcquireArgs {
    /// The resource to lock, e.g. orders/42
    pub resource: String,
    /// Time after which an unrenewed lease ends, e.g. 500ms, 10s, 2m [default: the policy's]
    #[arg(long, value_parser = duration_ms, value_name = "TIME")]
    pub ttl: Option<u32>,
    /// Longest wait for the lock, e.g. 5s; 0 tries once [default: the policy's]
    #[arg(long, value_parser = duration_ms, value_name = "TIME")]
    pub wait: Option<u32>,
    /// Mode of the lock: exclusive, shared, or permits=N
    #[arg(long, value_parser = mode, default_value = "exclusive")]
    pub mode: Mode,
    /// Name of the holder (default: user@host, with a hash of the request id or else the process id)
    #[arg(long)]
    pub owner: Option<String>,
    /// A label for the policy; may be given several times
    #[arg(long = "label", value_parser = label, value_name = "NAME=VALUE")]
    pub labels: Vec<(String, String)>,
    /// Id that makes this call safe to repeat: the same id gives the same lease
    #[arg(long, value_name = "ID")]
    pub request_id: Option<String>,
}

/// The mode of a lock, as given on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One holder at a time.
    Exclusive,
    /// Any number of shared holders at a time.
    Shared,
    /// The number of the key's permits that the holder takes, at least 1.
    Permits(u32),
}

impl From<Mode> for lock::Mode {
    /// The mode of a request. The policy sets the limit of permits.
    fn from(mode: Mode) -> lock::Mode {
        match mode {
            Mode::Exclusive => lock::Mode::Exclusive,
            Mode::Shared => lock::Mode::Shared,
            Mode::Permits(count) => lock::Mode::Permits { count, limit: 0 },
        }
    }
}

impl AcquireArgs {
    /// The JSON body of the call.
    pub fn to_json(&self) -> Value {
        let mut body = json!({
            "resource": self.resource,
            "owner": self.owner.clone().unwrap_or_else(|| default_owner(self.request_id.as_deref())),
            "mode": match self.mode {
                Mode::Exclusive => "exclusive".into(),
                Mode::Shared => "shared".into(),
                Mode::Permits(count) => json!({ "permits": count }),
            },
        });
        let mut set = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                body[name] = value;
            }
        };
        set("ttl_ms", self.ttl.map(Value::from));
        set("wait_ms", self.wait.map(Value::from));
        set("request_id", self.request_id.clone().map(Value::from));
        set("labels", labels_json(&self.labels));
        body
    }
}

/// Parses `500ms`, `10s`, `2m`, `1h` or `0` into milliseconds.
pub fn duration_ms(text: &str) -> Result<u32, String> {
    exact_ms(text).map(|ms| ms.round() as u32)
}

/// As [`duration_ms`], with parts of a millisecond.
pub fn exact_ms(text: &str) -> Result<f64, String> {
    const EXPECTED: &str = "must be a time like 500ms, 10s, 2m or 1h";
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').len();
    let (number, unit) = text.split_at(digits);
    let unit_ms = match unit {
        "ms" => 1.0,
        "s" => 1_000.0,
        "m" => 60_000.0,
        "h" => 3_600_000.0,
        "" if number == "0" => 1.0,
        _ => return Err(EXPECTED.to_owned()),
    };
    let number: f64 = number.parse().map_err(|_| EXPECTED.to_owned())?;
    let ms = number * unit_ms;
    if ms.round() > f64::from(u32::MAX) { Err("is too long".to_owned()) } else { Ok(ms) }
}

/// Parses a share of something, such as `5%` or `0.5`, into percent.
pub fn percent(text: &str) -> Result<f64, String> {
    let percent = text.trim_end_matches('%').parse();
    percent
        .ok()
        .filter(|percent| *percent > 0.0 && *percent <= 100.0)
        .ok_or("must be over 0% and at most 100%".to_owned())
}

/// Parses `exclusive`, `shared` or `permits=N`.
pub fn mode(text: &str) -> Result<Mode, String> {
    match text {
        "exclusive" => Ok(Mode::Exclusive),
        "shared" => Ok(Mode::Shared),
        other => match other.strip_prefix("permits=").map(str::parse) {
            Some(Ok(count @ 1..)) => Ok(Mode::Permits(count)),
            _ => Err("must be exclusive, shared or permits=N".to_owned()),
        },
    }
}

/// Parses `NAME=VALUE`.
pub fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("must be NAME=VALUE".to_owned()),
    }
}

/// The labels of a call as JSON, if it has any.
pub fn labels_json(labels: &[(String, String)]) -> Option<Value> {
    let labels: BTreeMap<_, _> = labels.iter().cloned().collect();
    (!labels.is_empty()).then(|| json!(labels))
}

/// Calls with the same request id have the same owner, whichever process makes them, because they are one call.
fn default_owner(request_id: Option<&str>) -> String {
    let user = std::env::var("USER").unwrap_or_else(|_| "unknown".to_owned());
    let host =
        std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "localhost".to_owned());
    // Others see the owner, and could repeat a request whose id they know.
    let call = request_id.map_or_else(|| std::process::id().to_string(), hashed);
    let mut owner = format!("{user}@{}, {call}", host.trim());
    owner.truncate(owner.floor_char_boundary(200));
    owner
}

fn hashed(request_id: &str) -> String {
    Sha256::digest(request_id).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_does_not_show_the_request_id() {
        let owner = default_owner(Some("pay-42"));
        assert!(!owner.contains("pay-42"), "{owner}");
        assert_eq!(owner, default_owner(Some("pay-42")));
        assert_ne!(owner, default_owner(Some("pay-43")));
    }

    #[test]
    fn shares_are_in_percent() {
        assert_eq!((percent("5%"), percent("0.5")), (Ok(5.0), Ok(0.5)));
        assert!(percent("0%").is_err() && percent("101%").is_err() && percent("x").is_err());
    }

    #[test]
    fn durations_need_a_unit() {
        let good = [
            ("500ms", 500),
            ("10s", 10_000),
            ("2m", 120_000),
            ("1h", 3_600_000),
            ("1.5s", 1_500),
            ("0", 0),
            ("0s", 0),
        ];
        for (text, ms) in good {
            assert_eq!(duration_ms(text), Ok(ms), "{text}");
        }
        for bad in ["", "10", "s", "-1s", "1.2.3s", "10 s", "1d", "99999h", "NaNs"] {
            assert!(duration_ms(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn modes_and_labels_are_parsed_or_refused() {
        assert_eq!(mode("permits=3"), Ok(Mode::Permits(3)));
        for bad in ["permits=0", "permits=", "permits", "Shared"] {
            assert!(mode(bad).is_err(), "{bad}");
        }
        assert_eq!(label("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert!(label("=b").is_err() && label("b").is_err());
    }
}

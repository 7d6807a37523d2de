//! `settings`: parses and checks the settings once, at load. They are passed to every call in a compact form.

use core::fmt::Display;
use core::ops::RangeInclusive;

use serde::{Serialize, de::DeserializeOwned};

use crate::Policy;
use crate::bindings::settings::exports::lockkeeper::policy::settings;

/// Checks that the setting `name` is within `bounds`, both ends included.
///
/// # Errors
/// A sentence that names the setting, its bounds and the value.
pub fn within<T: PartialOrd + Display + Copy>(
    name: &str,
    value: T,
    bounds: RangeInclusive<T>,
) -> Result<(), String> {
    if bounds.contains(&value) {
        return Ok(());
    }
    Err(format!("`{name}` must be between {} and {}, and is {value}", bounds.start(), bounds.end()))
}

impl<P: Policy> settings::Guest for P {
    fn configure(table: String) -> Result<Vec<u8>, String> {
        configure::<P>(&table)
    }
}

/// Checks the settings in a JSON object, and encodes them for [`decode`].
fn configure<P: Policy>(table: &str) -> Result<Vec<u8>, String> {
    let settings = parse::<P::Settings>(table)?;
    P::check(&settings)?;
    encode(&settings)
}

/// Decodes the settings that [`configure`] has encoded; the defaults if there are none.
///
/// # Panics
/// If another component has encoded the bytes, which the proxy rules out.
pub(crate) fn decode<S: DeserializeOwned + Default>(bytes: &[u8]) -> S {
    if bytes.is_empty() && size_of::<S>() != 0 {
        return S::default();
    }
    match postcard::from_bytes(bytes) {
        Ok(settings) => settings,
        Err(_) => panic!("settings of another component"),
    }
}

fn parse<S: DeserializeOwned + Default>(table: &str) -> Result<S, String> {
    // `()` deserializes from null, not from an object.
    if matches!(table.trim(), "" | "{}") {
        return Ok(serde_json::from_str("{}").unwrap_or_default());
    }
    serde_json::from_str(table).map_err(|error| {
        let message = error.to_string();
        if size_of::<S>() == 0 {
            return format!("this policy takes no settings ({message})");
        }
        // Remove line and column: they are those of the JSON, but the operator wrote TOML.
        message.split(" at line ").next().unwrap_or_default().to_owned()
    })
}

fn encode<S: Serialize + DeserializeOwned>(settings: &S) -> Result<Vec<u8>, String> {
    let broken = || {
        "the settings type does not survive its compact encoding: serde's `flatten`, `untagged`, `tag` \
         and `skip_serializing_if` cannot be used in it"
            .to_owned()
    };
    let bytes = postcard::to_allocvec(settings).map_err(|_| broken())?;
    let back: S = postcard::from_bytes(&bytes).map_err(|_| broken())?;
    let again = postcard::to_allocvec(&back).map_err(|_| broken())?;
    if bytes == again { Ok(bytes) } else { Err(broken()) }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::{Plan, Refusal, Request};

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    struct Sample {
        ttl_ms: u32,
        names: Vec<String>,
    }

    impl Default for Sample {
        fn default() -> Sample {
            Sample { ttl_ms: 5, names: vec!["a".into()] }
        }
    }

    struct Sampler;

    impl Policy for Sampler {
        type Settings = Sample;

        fn check(settings: &Sample) -> Result<(), String> {
            within("ttl_ms", settings.ttl_ms, 1..=10)
        }

        fn plan(_: &Sample, request: &Request) -> Result<Plan, Refusal> {
            Ok(Plan::of(request))
        }
    }

    #[test]
    fn settings_survive_encoding_and_decoding() {
        let bytes = configure::<Sampler>(r#"{"ttl_ms": 7, "names": ["x", "y"]}"#).unwrap();
        assert_eq!(decode::<Sample>(&bytes), Sample { ttl_ms: 7, names: vec!["x".into(), "y".into()] });
        assert_eq!(decode::<Sample>(&configure::<Sampler>("{}").unwrap()), Sample::default());
        assert_eq!(decode::<Sample>(&[]), Sample::default());
        decode::<()>(&[]);
    }

    #[test]
    fn refusals_name_the_setting() {
        let unknown = configure::<Sampler>(r#"{"tll_ms": 7}"#).unwrap_err();
        assert!(unknown.contains("unknown field `tll_ms`"), "{unknown}");
        assert!(!unknown.contains("line"), "{unknown}");
        let high = configure::<Sampler>(r#"{"ttl_ms": 11}"#).unwrap_err();
        assert_eq!(high, "`ttl_ms` must be between 1 and 10, and is 11");
    }

    #[test]
    fn serde_attributes_that_do_not_survive_are_refused_with_a_reason() {
        #[derive(Default, Serialize, Deserialize)]
        struct Skips {
            #[serde(default, skip_serializing_if = "Option::is_none")]
            a: Option<u32>,
            b: u32,
        }
        let error = encode(&Skips { a: None, b: 3 }).unwrap_err();
        assert!(error.contains("skip_serializing_if"), "{error}");
    }
}

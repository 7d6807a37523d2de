//! `policy canary`: a version of a policy decides for a share of the keys.

use clap::Args;
use hyper::Method;
use serde_json::Value;

use super::super::Options;
use super::super::client::{Client, encode_path};
use super::{PUSH_TIMEOUT, tools};
use crate::cli::args;
use crate::cli::failure::Failure;

/// The arguments of `policy canary`.
#[derive(Args, Debug)]
pub struct CanaryArgs {
    /// Name of the policy, as in config.toml
    pub name: String,
    /// The component: a file, or builtin:NAME
    #[arg(value_name = "FILE")]
    source: String,
    /// For which share of the keys it decides, e.g. 5%
    #[arg(long, value_name = "PERCENT", value_parser = args::percent)]
    share: f64,
    /// The shares that follow, e.g. 25%,100%; after the last one, the component goes live
    #[arg(long, value_name = "PERCENTS", value_parser = args::percent, value_delimiter = ',', requires = "every")]
    steps: Vec<f64>,
    /// How long each share lasts at least, e.g. 10m; it also lasts until a proxy has seen 200 requests for which the component
    /// decided. Without it, `policy promote` makes the component live
    #[arg(long, value_name = "TIME", value_parser = args::duration_ms)]
    every: Option<u32>,
    /// When the proxies end the canary by themselves: after more failed calls (faults=3), if it refuses more of the requests
    /// that the live version plans (refused=2%), if more of its requests get no lock in time, by more percentage points
    /// (ungranted=10%), or if its waits are longer (p99=3x). Several with commas [default:
    /// faults=0,refused=1%,ungranted=5%,p99=2x]
    #[arg(long, value_name = "BOUNDS", value_parser = bound, value_delimiter = ',')]
    guard: Vec<(&'static str, f64)>,
}

/// Runs `policy canary`; the proxy's answer.
pub async fn run(args: &CanaryArgs, options: &Options) -> Result<Value, Failure> {
    let component = tools::component(&args.source)?.1.into();
    let mut query = vec![format!("share={}", args.share)];
    if let Some(every) = args.every {
        let steps: Vec<String> = args.steps.iter().map(f64::to_string).collect();
        query.extend([format!("every_ms={every}"), format!("steps={}", steps.join(","))]);
    }
    query.extend(args.guard.iter().map(|(name, bound)| format!("{name}={bound}")));
    let path = format!("/v1/policies/{}/canary?{}", encode_path(&args.name), query.join("&"));
    Client::new(&options.admin, options)?.call(Method::PUT, &path, component, PUSH_TIMEOUT).await
}

fn bound(text: &str) -> Result<(&'static str, f64), String> {
    let wrong = || {
        "must be faults=NUMBER, refused=PERCENT, ungranted=PERCENT or p99=FACTOR, e.g. faults=3,p99=1.5x"
            .to_owned()
    };
    let (name, value) = text.split_once('=').ok_or_else(wrong)?;
    let (name, value) = match name {
        "faults" => ("faults", value),
        "refused" => ("refused", value.trim_end_matches('%')),
        "ungranted" => ("ungranted", value.trim_end_matches('%')),
        "p99" => ("p99", value.trim_end_matches('x')),
        _ => return Err(wrong()),
    };
    Ok((name, value.parse().ok().filter(|value: &f64| *value >= 0.0).ok_or_else(wrong)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_have_their_units() {
        assert_eq!(bound("faults=3"), Ok(("faults", 3.0)));
        assert_eq!(bound("refused=1%"), Ok(("refused", 1.0)));
        assert_eq!(bound("p99=1.5x"), Ok(("p99", 1.5)));
        assert!(bound("p99=fast").is_err() && bound("lost=1").is_err() && bound("faults").is_err());
    }
}

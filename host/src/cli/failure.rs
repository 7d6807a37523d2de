//! Failures of commands, and their exit codes.

use serde_json::{Value, json};

use super::output;

/// A failure of a command.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("{0}")]
    Usage(String),
    #[error("{}", no_proxy(url, why))]
    NoProxy {
        url: String,
        why: String,
        /// Whether the request may have reached the proxy.
        was_asked: bool,
    },
    #[error("{url} did not answer in time")]
    Silent { url: String },
    /// Another server that a command needs cannot be used now.
    #[error("{0}")]
    Unavailable(String),
    /// The problem that the proxy answered.
    #[error("{}", sentence(body))]
    Problem { status: u16, body: Value },
    /// The lease ended while it was in use.
    #[error("the lease is lost: {0}")]
    Lost(String),
    /// A component that a proxy would refuse to load.
    #[error("{0}")]
    Refused(String),
    /// A component whose call failed.
    #[error("{0}")]
    Fault(String),
    /// A command that could not be run under its lock, with the exit code for it.
    #[error("{what}")]
    Command { what: String, code: u8 },
    /// What a command was told to check is not as it should be.
    #[error("{0}")]
    Unmet(String),
    #[error("{0}")]
    Other(String),
}

impl Failure {
    /// A failure if something is not as it should be. `unmet`: what, in words.
    pub fn unless_met(unmet: &[String]) -> Result<(), Failure> {
        if unmet.is_empty() { Ok(()) } else { Err(Failure::Unmet(unmet.join("; "))) }
    }

    /// The exit code, as listed by `--help`.
    pub fn code(&self) -> u8 {
        match self {
            Failure::Usage(_) => 2,
            Failure::NoProxy { .. } | Failure::Silent { .. } | Failure::Unavailable(_) => 5,
            Failure::Lost(_) => 4,
            Failure::Refused(_) => 6,
            Failure::Unmet(_) => 7,
            Failure::Command { code, .. } => *code,
            Failure::Fault(_) | Failure::Other(_) => 1,
            Failure::Problem { body, .. } => match body["type"].as_str().unwrap_or_default() {
                "contended" | "conflict" | "too_many_waiters" => 3,
                "lost" => 4,
                "store_unavailable" | "rules_differ" | "shutting_down" | "overloaded"
                | "too_many_requests" => 5,
                "refused" | "policy_fault" | "unauthenticated" | "forbidden" => 6,
                "invalid" => 2,
                _ => 1,
            },
        }
    }

    /// Whether another proxy may succeed.
    pub fn is_of_the_server(&self) -> bool {
        self.code() == 5
    }

    /// The proxy's limit for this field, if the value exceeded it.
    pub fn bound_of(&self, field: &str) -> Option<usize> {
        match self {
            Failure::Problem { body, .. } if body["field"] == field => {
                body["bound"].as_u64().and_then(|bound| bound.try_into().ok())
            }
            _ => None,
        }
    }

    /// Whether another proxy may succeed and this one did nothing.
    pub fn was_not_heard(&self) -> bool {
        match self {
            Failure::NoProxy { was_asked, .. } => !was_asked,
            Failure::Problem { body, .. } => {
                body["type"] == "shutting_down" || body["type"] == "rules_differ"
            }
            _ => false,
        }
    }

    /// The exit code of `run`: low codes belong to its command.
    pub fn code_of_run(&self) -> u8 {
        match self {
            Failure::Command { code, .. } => *code,
            other => 110 + other.code(),
        }
    }

    /// Reports the failure: on standard error for people, on standard output as JSON.
    pub fn report(&self, as_json: bool) {
        match self {
            Failure::Problem { body, .. } if as_json => output::json(body),
            // The command has printed its JSON, which says so.
            Failure::Unmet(what) => output::complain(what),
            other if as_json => output::json(&json!({"type": other.slug(), "detail": other.to_string()})),
            other => output::complain(&other.to_string()),
        }
    }

    fn slug(&self) -> &'static str {
        match self {
            Failure::Usage(_) => "usage",
            Failure::NoProxy { .. } => "no_proxy",
            Failure::Silent { .. } => "timeout",
            Failure::Unavailable(_) => "unavailable",
            Failure::Lost(_) => "lost",
            Failure::Refused(_) => "refused",
            Failure::Fault(_) => "policy_fault",
            Failure::Command { .. } => "command",
            Failure::Unmet(_) => "unmet",
            Failure::Problem { .. } | Failure::Other(_) => "failure",
        }
    }
}

/// The message of a problem, for people.
/// What a failed connection means, with what helps.
fn no_proxy(url: &str, why: &str) -> String {
    if why.contains("invalid peer certificate") {
        return format!("the certificate of {url} is not trusted ({why}); name its authority by --ca-file");
    }
    if why.contains("fatal alert") {
        return format!("{url} refused the TLS connection ({why}); see --cert-file");
    }
    if why.contains("invalid HTTP version") {
        return format!("{url} does not answer in HTTP ({why}); it may need https://");
    }
    if why.contains("InvalidContentType") {
        return format!("{url} does not answer in TLS ({why}); it may need http://");
    }
    format!("no proxy at {url}; start one with `lockkeeper serve` ({why})")
}

fn sentence(body: &Value) -> String {
    let detail = body["detail"].as_str().or(body["title"].as_str()).unwrap_or("the proxy gave no reason");
    let mut text = detail.to_owned();
    if let Some(owner) = body["holder"]["owner"].as_str() {
        let token = &body["holder"]["token"];
        let until = body["holder"]["until"].as_str().unwrap_or("?");
        text.push_str(&format!(" by {owner} (token {token}) until {until}"));
    }
    if let Some(place @ 2..) = body["position"].as_u64() {
        text.push_str(&format!("; {} ahead in the queue", place - 1));
    }
    if body["type"] == "not_found" && detail.starts_with("no such path: /v1/") {
        text.push_str("; --server takes the address of the API, and --admin that of the admin API");
    }
    if body["type"] == "unauthenticated" {
        text.push_str("; see --credentials-file and --cert-file");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_have_documented_codes() {
        for (slug, code) in
            [("contended", 3), ("lost", 4), ("store_unavailable", 5), ("refused", 6), ("x", 1)]
        {
            assert_eq!(Failure::Problem { status: 400, body: json!({"type": slug}) }.code(), code, "{slug}");
        }
    }

    #[test]
    fn a_message_helps_if_the_addresses_or_the_protocols_are_mixed_up() {
        let body = json!({"type": "not_found", "detail": "no such path: /v1/acquire"});
        assert!(Failure::Problem { status: 404, body }.to_string().contains("--admin that of the admin API"));
        let why = "received corrupt message of type InvalidContentType";
        assert!(no_proxy("https://localhost:1", why).ends_with("it may need http://"));
    }

    #[test]
    fn a_contention_message_names_the_holder() {
        let body = json!({
            "type": "contended", "detail": "`r` is held", "position": 2,
            "holder": {"owner": "w", "token": 17, "until": "2026-01-01T00:00:00.000Z"},
        });
        let text = Failure::Problem { status: 409, body }.to_string();
        assert_eq!(text, "`r` is held by w (token 17) until 2026-01-01T00:00:00.000Z; 1 ahead in the queue");
    }
}

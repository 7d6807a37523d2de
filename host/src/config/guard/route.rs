//! `[[guard.routes]]`: a kind of request, its upstreams, and its limits of time. `lock` has the keys of its lock.

use std::time::Duration;

use super::lock::GuardLock;
use super::pattern::PathPattern;
use crate::config::limits::Limits;
use crate::config::policies::PolicyConfig;
use crate::config::reader::Section;

const MAX_UPSTREAMS: usize = 64;
/// The longest time of a request, in milliseconds.
const DAY_MS: u64 = 86_400_000;

/// What the extension of the last segment of a path means: the `.json` of `/orders/42/pay.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extension {
    /// A request whose lock depends on it is refused: some applications take it for the format of the answer.
    Refuse,
    /// It is no part of the path.
    Ignore,
    /// It is a part of the path.
    Exact,
}

/// A kind of request, and how the proxy handles it.
#[derive(Clone, Debug)]
pub struct GuardRoute {
    /// In upper case. An empty list stands for all methods; GET includes HEAD.
    pub methods: Vec<String>,
    /// The pattern that the path must match.
    pub path: PathPattern,
    /// Whether the case of letters in the path matters. If it does not, a request cannot avoid its lock by spelling
    /// the path in capital letters.
    pub exact_case: bool,
    /// What the extension of the last segment means, as in `pay.json`.
    pub extension: Extension,
    /// Whether to pass on paths that different applications interpret differently.
    pub ambiguous_paths: bool,
    /// Names in lower case; `None` matches any value.
    pub headers: Vec<(String, Option<String>)>,
    /// Upstreams as `host:port`, at least one.
    pub upstreams: Vec<String>,
    /// `None`: requests are passed on without a lock.
    pub lock: Option<GuardLock>,
    /// The time from the end of the request to the head of the answer.
    pub response_timeout: Duration,
    /// The time between two pieces of a body, in either direction.
    pub idle_timeout: Duration,
    /// A path that is requested periodically. An upstream whose answer is not a success is not used.
    pub health: Option<String>,
}

impl GuardRoute {
    /// A route of all requests with a path of this pattern, as strict as a route is by default, without a lock.
    #[cfg(any(test, feature = "simulation", feature = "fuzzing"))]
    pub(crate) fn at(pattern: &str) -> GuardRoute {
        GuardRoute {
            methods: Vec::new(),
            path: PathPattern::parse(pattern).unwrap_or_else(|why| panic!("{pattern}: {why}")),
            exact_case: false,
            extension: Extension::Refuse,
            ambiguous_paths: false,
            headers: Vec::new(),
            upstreams: vec!["127.0.0.1:9".to_owned()],
            lock: None,
            response_timeout: Duration::from_secs(1),
            idle_timeout: Duration::from_secs(1),
            health: None,
        }
    }

    /// Reads one of `[[guard.routes]]`. `None` if its path is missing or has a fault.
    pub(super) fn read(
        section: &Section<'_>,
        policies: &[PolicyConfig],
        limits: &Limits,
    ) -> Option<GuardRoute> {
        let matching = section.section("match");
        let methods = matching.texts("method", methods).unwrap_or_default();
        let path = matching.required("path", |text, _| PathPattern::parse(text));
        let headers = matching.pairs("headers").into_iter().map(|(name, value)| {
            if hyper::header::HeaderName::from_bytes(name.as_bytes()).is_err() {
                matching.complain("headers", format!("`{name}` is not the name of a header"));
            }
            (name.to_ascii_lowercase(), (value != "*").then_some(value))
        });
        let headers = headers.collect();
        let exact_case = matching.parsed("case", false, |text, _| match text {
            "ignore" => Ok(false),
            "exact" => Ok(true),
            other => Err(format!("is `{other}`; must be \"ignore\" or \"exact\"")),
        });
        let extension = matching.parsed("extension", Extension::Refuse, |text, _| match text {
            "refuse" => Ok(Extension::Refuse),
            "ignore" => Ok(Extension::Ignore),
            "exact" => Ok(Extension::Exact),
            other => Err(format!("is `{other}`; must be \"refuse\", \"ignore\" or \"exact\"")),
        });
        matching.finish();
        let upstreams = section.texts("upstream", upstream_list);
        if !section.holds("upstream") {
            section.complain("upstream", "is missing");
        }
        let route = GuardRoute {
            methods,
            exact_case,
            extension,
            ambiguous_paths: section.parsed("ambiguous_paths", false, |text, _| match text {
                "refuse" => Ok(false),
                "allow" => Ok(true),
                other => Err(format!("is `{other}`; must be \"refuse\" or \"allow\"")),
            }),
            headers,
            upstreams: upstreams.unwrap_or_default(),
            lock: GuardLock::read(section, path.as_ref(), policies, limits),
            response_timeout: section.milliseconds("response_timeout_ms", 10..=DAY_MS, 60_000),
            idle_timeout: section.milliseconds("idle_timeout_ms", 10..=DAY_MS, 60_000),
            health: section.parsed("health", None, |text, _| match text.starts_with('/') {
                true => text
                    .parse::<hyper::http::uri::PathAndQuery>()
                    .map(|_| Some(text.to_owned()))
                    .map_err(|e| e.to_string()),
                false => Err(format!("is `{text}`; must be a path that begins with `/`")),
            }),
            path: path?,
        };
        section.finish();
        Some(route)
    }

    /// Whether the route takes every request.
    pub(super) fn takes_all(&self) -> bool {
        self.methods.is_empty() && self.headers.is_empty() && self.path.takes_all()
    }
}

fn methods(texts: &[&str]) -> Result<Vec<String>, String> {
    let method = |text: &&str| match hyper::Method::from_bytes(text.as_bytes()) {
        Ok(method) if !text.is_empty() && !text.contains(char::is_lowercase) => Ok(method.to_string()),
        _ => Err(format!("`{text}` is not a method in upper case, like \"POST\"")),
    };
    texts.iter().map(method).collect()
}

fn upstream_list(texts: &[&str]) -> Result<Vec<String>, String> {
    if !(1..=MAX_UPSTREAMS).contains(&texts.len()) {
        return Err(format!("names {} upstreams; must name 1 to {MAX_UPSTREAMS}", texts.len()));
    }
    texts.iter().map(|text| upstream(text)).collect()
}

/// `http://host:port` as `host:port`.
fn upstream(text: &str) -> Result<String, String> {
    let wrong = || format!("`{text}` is not like http://127.0.0.1:9000 or http://[::1]:9000");
    let uri: hyper::Uri = text.parse().map_err(|_| wrong())?;
    if uri.scheme_str() == Some("https") {
        return Err(format!("`{text}`: only http:// can be behind the proxy"));
    }
    if uri.path().len() > 1 {
        return Err(format!("`{text}`: an upstream has no path; requests keep theirs"));
    }
    let bare = uri.path_and_query().is_none_or(|path| path.as_str() == "/");
    let authority = uri.authority().filter(|authority| !authority.as_str().contains('@'));
    match (uri.scheme_str(), authority) {
        (Some("http"), Some(authority)) if bare && !authority.host().is_empty() => {
            Ok(format!("{}:{}", authority.host(), authority.port_u16().unwrap_or(80)))
        }
        _ => Err(wrong()),
    }
}

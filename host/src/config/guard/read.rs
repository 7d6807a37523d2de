//! The keys of `[[guard]]` and `[upstreams]`: their names, bounds and defaults.

use std::net::SocketAddr;
use std::time::Duration;

use super::{
    GuardConfig, GuardLock, GuardRoute, MAX_SEEN_BYTES, Part, PathPattern, Template, TlsFiles, UpstreamLimits,
};
use crate::config::fault::suggestion;
use crate::config::raw::{MAX_DURATION_MS, NAME_RULE, address, is_plain_name, milliseconds};
use crate::config::reader::{Section, resolve};
use crate::config::{Limits, PolicyConfig};
use crate::lock::Mode;

const MAX_UPSTREAMS: usize = 64;
/// The longest name of an application, which becomes part of a name in the store.
const MAX_APPLICATION: usize = 48;
/// The value of `policy` that means that the route takes no lock.
pub const NO_LOCK: &str = "none";
const DEFAULT_RESPONSE: Duration = Duration::from_secs(60);
const DEFAULT_IDLE: Duration = Duration::from_secs(60);

/// Reads `[upstreams]`.
pub fn upstreams(section: &Section<'_>) -> UpstreamLimits {
    let defaults = UpstreamLimits::default();
    let limits = UpstreamLimits {
        connect_timeout: milliseconds(section, "connect_timeout_ms", 10..=60_000, defaults.connect_timeout),
        keepalive: milliseconds(section, "keepalive_ms", 0..=MAX_DURATION_MS, defaults.keepalive),
        max_requests: section.integer("max_requests", 1..=100_000, defaults.max_requests),
        max_header_bytes: section.integer("max_header_bytes", 8_192..=1_048_576, defaults.max_header_bytes),
        down: milliseconds(section, "down_ms", 0..=MAX_DURATION_MS, defaults.down),
        health_every: milliseconds(section, "health_every_ms", 100..=MAX_DURATION_MS, defaults.health_every),
    };
    section.finish();
    limits
}

/// Reads the listeners, and collects warnings for operators. `taken`: the addresses of the other listeners.
pub fn guards(
    top: &Section<'_>,
    policies: &[PolicyConfig],
    limits: &Limits,
    taken: &[SocketAddr],
) -> (Vec<GuardConfig>, Vec<String>) {
    let mut guards: Vec<GuardConfig> = Vec::new();
    let mut silent = Vec::new();
    for section in top.list("guard") {
        let listen = section.required("listen", address);
        if let Some(listen) = listen
            && listen.port() != 0
            && (taken.contains(&listen) || guards.iter().any(|guard| guard.listen == listen))
        {
            section.complain("listen", format!("is {listen}, which another listener has"));
        }
        let sections = section.list("routes");
        if sections.is_empty() {
            section.complain_of_it("has no [[guard.routes]]; it needs at least one");
        }
        let mut routes: Vec<GuardRoute> = Vec::new();
        for route in &sections {
            if routes.iter().any(takes_all) {
                route.complain_of_it("is never reached: a route before it takes every request");
            }
            if !route.holds("policy") {
                silent.push((guards.len(), routes.len()));
            }
            routes.extend(read_route(route, policies, limits));
        }
        let tls = section.holds("tls").then(|| tls(&section.section("tls"))).flatten();
        let application =
            section.parsed("application", "default".to_owned(), |text, _| match is_plain_name(text) {
                true if text.len() <= MAX_APPLICATION => Ok(text.to_owned()),
                true => Err(format!("has {} characters; may have {MAX_APPLICATION}", text.len())),
                false => Err(format!("is `{text}`; {NAME_RULE}")),
            });
        let trust_forwarded = section.boolean("trust_forwarded", false);
        let keep_headers = section.texts("keep_headers", header_names).unwrap_or_default();
        section.finish();
        if let Some(listen) = listen {
            guards.push(GuardConfig { listen, application, tls, trust_forwarded, keep_headers, routes });
        }
    }
    let warnings = unlocked(&guards, &silent);
    (guards, warnings)
}

/// Warnings about routes that do not say whether they take a lock, if other routes lock the same application.
fn unlocked(guards: &[GuardConfig], silent: &[(usize, usize)]) -> Vec<String> {
    let routes = || guards.iter().flat_map(|guard| &guard.routes);
    let is_locked =
        |upstream: &&String| routes().any(|route| route.lock.is_some() && route.upstreams.contains(upstream));
    let warning = |(n, m): &(usize, usize)| {
        let route = guards.get(*n)?.routes.get(*m)?;
        let upstream = route.upstreams.iter().find(is_locked)?;
        Some(format!(
            "guard[{n}].routes[{m}] passes requests for {} to http://{upstream} without a lock, and other routes lock \
             requests to it; say policy = \"{NO_LOCK}\" if that is meant",
            route.path
        ))
    };
    silent.iter().filter_map(warning).collect()
}

fn takes_all(route: &GuardRoute) -> bool {
    route.methods.is_empty() && route.headers.is_empty() && route.path.takes_all()
}

fn tls(section: &Section<'_>) -> Option<TlsFiles> {
    let file = |text: &str, place: &_| {
        let path = resolve(text, place);
        if path.is_file() { Ok(path) } else { Err(format!("there is no file {}", path.display())) }
    };
    let (cert, key) = (section.required("cert", file), section.required("key", file));
    section.finish();
    Some(TlsFiles { cert: cert?, key: key? })
}

fn read_route(section: &Section<'_>, policies: &[PolicyConfig], limits: &Limits) -> Option<GuardRoute> {
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
    matching.finish();
    let upstreams = section.texts("upstream", upstream_list);
    if !section.holds("upstream") {
        section.complain("upstream", "is missing");
    }
    let route = GuardRoute {
        methods,
        exact_case,
        ambiguous_paths: section.parsed("ambiguous_paths", false, |text, _| match text {
            "refuse" => Ok(false),
            "allow" => Ok(true),
            other => Err(format!("is `{other}`; must be \"refuse\" or \"allow\"")),
        }),
        headers,
        upstreams: upstreams.unwrap_or_default(),
        lock: lock(section, path.as_ref(), policies, limits),
        response_timeout: milliseconds(section, "response_timeout_ms", 10..=86_400_000, DEFAULT_RESPONSE),
        idle_timeout: milliseconds(section, "idle_timeout_ms", 10..=86_400_000, DEFAULT_IDLE),
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

/// Reads the lock of a route. Without a lock, keys that need one are faults.
fn lock(
    section: &Section<'_>,
    path: Option<&PathPattern>,
    policies: &[PolicyConfig],
    limits: &Limits,
) -> Option<GuardLock> {
    const WITH_POLICY: [&str; 10] = [
        "resource",
        "mode",
        "ttl_ms",
        "wait_ms",
        "labels",
        "see",
        "fail",
        "caller",
        "max_replay_bytes",
        "policy",
    ];
    WITH_POLICY.iter().for_each(|key| section.know(key));
    let none = section.parsed("policy", !section.holds("policy"), |text, _| Ok(text == NO_LOCK));
    if none {
        for key in WITH_POLICY.into_iter().filter(|key| *key != "policy" && section.holds(key)) {
            section.complain(key, "is for routes with a `policy`; without one there is no lock");
        }
        return None;
    }
    let names: Vec<&str> = policies.iter().map(|policy| policy.name.as_str()).collect();
    let policy = section.required("policy", |text, _| {
        if names.contains(&text) {
            return Ok(text.to_owned());
        }
        let hint = suggestion(text, &names);
        Err(format!("no policy is named `{text}`; there are {}{hint}", names.join(", ")))
    });
    let see = section.section("see");
    let see_headers = see.texts("headers", header_names).unwrap_or_default();
    let see_body_bytes = see.integer("body_bytes", 0..=MAX_SEEN_BYTES as u64, 0);
    see.finish();
    let check = |template: &Template| check(template, path, see_body_bytes);
    let template = |text: &str| Template::parse(text).and_then(|parsed| check(&parsed).map(|()| parsed));
    let resource = section.parsed("resource", Template::parse("{path}").ok()?, |text, _| template(text));
    let labels = section.pairs("labels").into_iter().filter_map(|(name, text)| match template(&text) {
        Ok(_) if name.starts_with(':') || name.len() > limits.max_label_bytes => {
            section.complain("labels", format!("`{name}` cannot be the name of a label"));
            None
        }
        Ok(template) => Some((name, template)),
        Err(what) => {
            section.complain("labels", format!("{name}: {what}"));
            None
        }
    });
    Some(GuardLock {
        resource,
        labels: labels.collect(),
        mode: mode(section, limits),
        ttl_ms: section.optional("ttl_ms", limits.min_ttl_ms.into()..=limits.max_ttl_ms.into()),
        wait_ms: section.optional("wait_ms", 0..=limits.max_wait_ms.into()),
        see_headers,
        see_body_bytes,
        fail_open: section.parsed("fail", false, |text, _| match text {
            "closed" => Ok(false),
            "open" => Ok(true),
            other => Err(format!("is `{other}`; must be \"closed\" or \"open\"")),
        }),
        caller: section
            .texts("caller", header_names)
            .unwrap_or_else(|| ["authorization", "cookie"].map(str::to_owned).to_vec()),
        max_replay_bytes: section.integer(
            "max_replay_bytes",
            0..=limits.max_value_bytes as u64,
            limits.max_value_bytes,
        ),
        policy: policy?,
    })
}

fn mode(section: &Section<'_>, limits: &Limits) -> Mode {
    if section.is_table("mode") {
        let mode = section.section("mode");
        let count = mode.integer("permits", 1..=u64::from(limits.max_permits), 1);
        mode.finish();
        return Mode::Permits { count, limit: 0 };
    }
    section.parsed("mode", Mode::Exclusive, |text, _| match text {
        "exclusive" => Ok(Mode::Exclusive),
        "shared" => Ok(Mode::Shared),
        other => Err(format!("is `{other}`; must be \"exclusive\", \"shared\" or {{ permits = 1 }}")),
    })
}

fn header_names(texts: &[&str]) -> Result<Vec<String>, String> {
    let name = |text: &&str| match hyper::header::HeaderName::from_bytes(text.as_bytes()) {
        Ok(name) => Ok(name.as_str().to_owned()),
        Err(_) => Err(format!("`{text}` is not the name of a header")),
    };
    texts.iter().map(name).collect()
}

/// Checks that a template can be filled from the requests of its route.
fn check(template: &Template, path: Option<&PathPattern>, body_bytes: usize) -> Result<(), String> {
    for part in template.parts() {
        match part {
            Part::Capture(name) if path.is_some_and(|path| !path.names().any(|known| known == name)) => {
                return Err(format!("`{part}` is not in the path of the route"));
            }
            Part::Json(_) if body_bytes == 0 => {
                return Err(format!("`{part}` needs see.body_bytes: how much of the body is read for it"));
            }
            _ => {}
        }
    }
    Ok(())
}

//! Routes a request through the guarded routes of a config.toml.

use std::path::Path;
use std::sync::Arc;

use hyper::http::request::Parts;
use serde_json::{Map, Value, json};

use super::tools::{self, Question};
use super::trial::{Line, TryArgs, text_or_file};
use crate::cli::failure::Failure;
use crate::config::{
    Config, GuardConfig, GuardLock, ListenAddress, Matched, PolicyConfig, PolicySource, process_env,
};
use crate::http::Problem;
use crate::policy::PlanRequest;
use crate::route::{self, Asked, Seen};

/// The route that a request takes.
pub struct Taken {
    /// The route's name in faults of config.toml: `guard[0].routes[2]`.
    name: String,
    listen: ListenAddress,
    path: String,
    upstreams: Vec<String>,
    /// `None` if the route takes no lock.
    resource: Option<String>,
    labels: Vec<(String, String)>,
    /// Routes of other listeners that match the request as well.
    others: Vec<String>,
}

/// A route, as indexes into the configuration, with its match.
struct Found {
    guard: usize,
    route: usize,
    matched: Matched,
}

/// Finds the route of a request, and the question to its policy. `None` instead of a question if the route takes no
/// lock.
pub fn ask(file: &Path, line: &Line, args: &TryArgs) -> Result<(Taken, Option<Question>), Failure> {
    let config = Config::load(Some(file), &process_env()).map_err(|faults| {
        Failure::Usage(faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
    })?;
    let parts = parts(line, &args.headers)?;
    let mut found = find(&config.guards, args.listen.as_ref(), &parts)?.into_iter();
    let first = found.next().ok_or_else(|| answered(&Problem::not_found(parts.uri.path())))?;
    let guard = &config.guards[first.guard];
    let route = &guard.routes[first.route];
    let mut taken = Taken {
        name: first.name(),
        listen: guard.listen.clone(),
        path: route.path.to_string(),
        upstreams: route.upstreams.clone(),
        resource: None,
        labels: Vec::new(),
        others: found.map(|other| other.name()).collect(),
    };
    let Some(lock) = &route.lock else { return Ok((taken, None)) };
    let mut body = args.body.as_deref().map(text_or_file).transpose()?.unwrap_or_default();
    let is_whole = body.len() <= lock.see_body_bytes;
    body.truncate(lock.see_body_bytes);
    let asked = route::asked(lock, &parts, first.matched, Seen { body, is_whole }, &config.limits);
    let asked = asked.map_err(|problem| taken.blamed(answered(&problem)))?;
    (taken.resource, taken.labels) = (Some(asked.resource.clone()), asked.labels.clone());
    let policy = config.policies.iter().find(|policy| policy.name == lock.policy);
    let policy = policy.ok_or_else(|| Failure::Other(format!("no policy is named `{}`", lock.policy)))?;
    let question = Question {
        name: policy.name.clone(),
        component: component(args.source.as_deref(), policy)?,
        settings: policy.settings.clone(),
        engine: config.engine.clone(),
        limits: config.limits.clone(),
        request: request(lock, asked, &args.owner),
    };
    Ok((taken, Some(question)))
}

/// The first matching route of each listener, or of the chosen listener.
fn find(
    guards: &[GuardConfig],
    listen: Option<&ListenAddress>,
    parts: &Parts,
) -> Result<Vec<Found>, Failure> {
    let is_chosen =
        |guard: &GuardConfig| listen.is_none_or(|listen| guard.listen.to_string() == listen.to_string());
    if !guards.iter().any(is_chosen) {
        let known: Vec<String> = guards.iter().map(|guard| guard.listen.to_string()).collect();
        return Err(Failure::Usage(match listen {
            Some(listen) if !known.is_empty() => {
                format!("no [[guard]] listens on {listen}; there are {}", known.join(", "))
            }
            _ => "the configuration has no [[guard]]".to_owned(),
        }));
    }
    let mut found = Vec::new();
    for (at, guard) in guards.iter().enumerate().filter(|(_, guard)| is_chosen(guard)) {
        match route::find(&guard.routes, parts) {
            Ok((route, matched)) => found.push(Found { guard: at, route, matched }),
            Err(problem) if problem.status_code() == 404 => {}
            Err(problem) => return Err(answered(&problem)),
        }
    }
    Ok(found)
}

/// The head of the request, as the proxy would receive it.
fn parts(line: &Line, headers: &[(String, String)]) -> Result<Parts, Failure> {
    let mut request = hyper::Request::builder().method(line.http.method.as_str()).uri(&line.target);
    for (name, value) in headers {
        request = request.header(name, value);
    }
    let request = request.body(()).map_err(|error| Failure::Usage(format!("--request: {error}")))?;
    Ok(request.into_parts().0)
}

/// The component to try: the given file, otherwise the configured one.
fn component(source: Option<&str>, policy: &PolicyConfig) -> Result<Vec<u8>, Failure> {
    let source = source.map(str::to_owned).unwrap_or_else(|| match &policy.source {
        PolicySource::Builtin(name) => format!("builtin:{name}"),
        PolicySource::File(file) => file.display().to_string(),
    });
    Ok(tools::component(&source)?.1)
}

fn request(lock: &GuardLock, asked: Asked, owner: &str) -> PlanRequest {
    PlanRequest {
        resource: asked.resource,
        owner: owner.to_owned(),
        mode: lock.mode,
        ttl_ms: lock.ttl_ms,
        wait_ms: lock.wait_ms,
        labels: asked.labels,
        http: Some(Arc::new(asked.http)),
        // A fixed seed, so that the same question always gives the same answer.
        seed: 1,
    }
}

/// The failure for a problem that the proxy would answer itself.
fn answered(problem: &Problem) -> Failure {
    Failure::Refused(format!("the proxy answers {}: {}", problem.status_code(), problem.detail()))
}

impl Found {
    fn name(&self) -> String {
        format!("guard[{}].routes[{}]", self.guard, self.route)
    }
}

impl Taken {
    /// Adds the name of the route to a failure.
    pub fn blamed(&self, failure: Failure) -> Failure {
        let name = &self.name;
        match failure {
            Failure::Refused(what) => Failure::Refused(format!("{name}: {what}")),
            Failure::Fault(what) => Failure::Fault(format!("{name}: {what}")),
            other => other,
        }
    }

    /// The route as JSON.
    pub fn json(&self) -> Value {
        let labels: Map<String, Value> =
            self.labels.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
        json!({
            "route": self.name,
            "listen": self.listen.to_string(),
            "path": self.path,
            "upstreams": self.upstreams,
            "resource": self.resource,
            "labels": labels,
            "other_routes": self.others,
        })
    }

    /// The route as rows of a table.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let others = match self.others.as_slice() {
            [] => String::new(),
            others => format!("; others by --listen: {}", others.join(", ")),
        };
        let route = format!("{}, {}, on {}{others}", self.name, self.path, self.listen);
        let mut rows = vec![("route", route), ("upstreams", self.upstreams.join("  "))];
        rows.push(match &self.resource {
            Some(resource) => ("resource", resource.clone()),
            None => ("policy", "none; the request passes without a lock".to_owned()),
        });
        if !self.labels.is_empty() {
            let labels = self.labels.iter().map(|(name, value)| format!("{name}={value}"));
            rows.push(("with labels", labels.collect::<Vec<_>>().join("  ")));
        }
        rows
    }
}

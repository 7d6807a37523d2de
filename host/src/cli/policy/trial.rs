//! `policy try`: shows the answer of a component to one request.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{ArgGroup, Args};
use hyper::header::{HeaderName, HeaderValue};
use lockkeeper_sdk::HttpRequest;
use serde_json::{Map, Value, json};

use super::routed::{self, Taken};
use super::tools::{self, Question, Tried};
use crate::cli::args::{self, Mode};
use crate::cli::failure::Failure;
use crate::cli::output;
use crate::config::{EngineLimits, Fit, Limits, ListenAddress, MAX_SEEN_BYTES, Matched, PathPattern};
use crate::lock;
use crate::lock::record::HttpView;
use crate::policy::{PlanRequest, RefusalResponse};

/// Options that the route and its policy determine under `--config`.
const FROM_CONFIG: [&str; 7] = ["path", "resource", "mode", "ttl", "wait", "labels", "settings"];

/// The arguments of `policy try`.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("asked").args(["request", "resource"]).required(true).multiple(true))]
pub struct TryArgs {
    /// The component: a file, or builtin:NAME. With --config, it replaces the component of the route's policy
    #[arg(value_name = "FILE", required_unless_present = "config")]
    pub(super) source: Option<String>,
    /// Take the route, its policy and all settings from this configuration file, as a proxy would
    #[arg(long, value_name = "FILE", requires = "request", conflicts_with_all = FROM_CONFIG)]
    config: Option<PathBuf>,
    /// The guarded listener of --config that receives the request [default: the first with a route for the request]
    #[arg(long, value_name = "ADDRESS", requires = "config")]
    pub(super) listen: Option<ListenAddress>,
    /// A guarded request: method and path, e.g. 'POST /orders/42/pay?x=1'
    #[arg(long, value_parser = line, value_name = "LINE")]
    request: Option<Line>,
    /// The path pattern of the route, which gives its {name}s their values, e.g. '/orders/{id}/pay'
    #[arg(long, value_parser = PathPattern::parse, value_name = "PATTERN", requires = "request")]
    path: Option<PathPattern>,
    /// A header that the policy sees; with --config, any header of the request. May be given several times
    #[arg(long = "header", value_parser = header, value_name = "NAME: VALUE", requires = "request")]
    pub(super) headers: Vec<(String, String)>,
    /// The body, or @FILE. The policy sees its first 8 KiB; with --config, as much as the route shows
    #[arg(long, value_name = "TEXT", requires = "request")]
    pub(super) body: Option<String>,
    /// The resource to lock [default: the path of the request]
    #[arg(long, value_name = "NAME")]
    resource: Option<String>,
    #[arg(long, default_value = "somebody")]
    pub(super) owner: String,
    /// Mode of the lock: exclusive, shared, or permits=N
    #[arg(long, value_parser = args::mode, default_value = "exclusive")]
    mode: Mode,
    /// Time until an unrenewed lease ends, e.g. 500ms, 10s, 2m [default: the policy's]
    #[arg(long, value_parser = args::duration_ms, value_name = "TIME")]
    ttl: Option<u32>,
    /// Longest wait for the lock [default: the policy's]
    #[arg(long, value_parser = args::duration_ms, value_name = "TIME")]
    wait: Option<u32>,
    /// A label of the request; may be given several times
    #[arg(long = "label", value_parser = args::label, value_name = "NAME=VALUE")]
    labels: Vec<(String, String)>,
    /// The policy's settings as JSON, or @FILE
    #[arg(long, value_name = "JSON", default_value = "{}")]
    settings: String,
    /// Also print the HTTP answer to a guarded request that does not get its lock
    #[arg(long, requires = "request")]
    contended: bool,
}

/// The first line of a request.
#[derive(Clone, Debug)]
pub struct Line {
    pub http: HttpRequest,
    /// Path and query, as sent.
    pub target: String,
}

/// Runs `policy try`.
pub fn run(args: TryArgs, as_json: bool) -> Result<(), Failure> {
    let contended = args.contended;
    let (taken, question) = match (&args.config, &args.request) {
        (Some(file), Some(line)) => {
            let (taken, question) = routed::ask(file, line, &args)?;
            (Some(taken), question)
        }
        _ => (None, Some(question(args)?)),
    };
    let blamed = |failure| match &taken {
        Some(taken) => taken.blamed(failure),
        None => failure,
    };
    let tried = question.map(|question| tools::try_request(&question, contended)).transpose();
    let tried = tried.map_err(blamed)?;
    if as_json {
        output::json(&told(taken.as_ref(), tried.as_ref()));
        return Ok(());
    }
    let mut rows = taken.as_ref().map(Taken::rows).unwrap_or_default();
    rows.extend(tried.as_ref().map(plan_rows).unwrap_or_default());
    output::pairs(&rows);
    if let Some((answer, own)) = tried.and_then(|tried| tried.answer) {
        print_answer(&answer, own);
    }
    Ok(())
}

/// The result as JSON.
fn told(taken: Option<&Taken>, tried: Option<&Tried>) -> Value {
    let mut told = taken.map_or_else(|| json!({}), Taken::json);
    told["policy"] = tried.map_or(Value::Null, |tried| json!(tried.by));
    told["plan"] = tried.map_or(Value::Null, |tried| Value::Object(tried.plan.to_json()));
    if let Some((answer, _)) = tried.and_then(|tried| tried.answer.as_ref()) {
        told["contended"] = answer_json(answer);
    }
    told
}

/// The question to a component under default limits.
fn question(args: TryArgs) -> Result<Question, Failure> {
    let source = args.source.as_deref().unwrap_or_default();
    let (name, component) = tools::component(source)?;
    let settings = settings(&args.settings)?;
    let (engine, limits) = (EngineLimits::default(), Limits::default());
    Ok(Question { name, component, settings, engine, limits, request: request(args)? })
}

/// Parses `--settings`.
pub fn settings(text: &str) -> Result<Map<String, Value>, Failure> {
    settings_of("--settings", text)
}

/// The settings that an option gives.
pub fn settings_of(option: &str, text: &str) -> Result<Map<String, Value>, Failure> {
    serde_json::from_slice(&text_or_file(text)?)
        .map_err(|error| Failure::Usage(format!("{option} is not a JSON object: {error}")))
}

fn request(args: TryArgs) -> Result<PlanRequest, Failure> {
    let http = match args.request {
        Some(line) => {
            let body = args.body.as_deref().map(text_or_file).transpose()?.unwrap_or_default();
            Some(view(line, args.path.as_ref(), args.headers, body).map_err(Failure::Usage)?)
        }
        None => None,
    };
    let path = http.as_ref().map(|http| http.path.clone()).unwrap_or_default();
    Ok(PlanRequest {
        resource: args.resource.unwrap_or(path),
        owner: args.owner,
        mode: args.mode.into(),
        ttl_ms: args.ttl,
        wait_ms: args.wait,
        labels: args.labels,
        http: http.map(Arc::new),
        // A fixed seed, so that the same question always gives the same answer.
        seed: 1,
    })
}

/// A guarded request as a policy sees it: its first line, the pattern of its path, its headers and its body.
pub(super) fn seen(
    first_line: &str,
    path: Option<&str>,
    headers: &[String],
    body: String,
) -> Result<HttpView, String> {
    let path = path.map(PathPattern::parse).transpose()?;
    let headers: Result<Vec<(String, String)>, String> = headers.iter().map(|text| header(text)).collect();
    view(line(first_line)?, path.as_ref(), headers?, body.into_bytes())
}

fn view(
    line: Line,
    path: Option<&PathPattern>,
    headers: Vec<(String, String)>,
    mut body: Vec<u8>,
) -> Result<HttpView, String> {
    let sent = line.target.split('?').next().unwrap_or_default();
    let matched = match (path.map(|path| path.fit(sent, false)), PathPattern::any().fit(sent, false)) {
        (Some(Fit::Yes(matched)), _) => matched,
        (None, Fit::Yes(matched)) => Matched { captures: Vec::new(), ..matched },
        (Some(_), _) => {
            let pattern = path.map(ToString::to_string).unwrap_or_default();
            return Err(format!("{pattern} is not the pattern of the path {sent}"));
        }
        (None, _) => return Err(format!("the path {sent} is not percent-encoded UTF-8")),
    };
    body.truncate(MAX_SEEN_BYTES);
    Ok(HttpView {
        method: line.http.method,
        path: matched.path,
        captures: matched.captures,
        query: line.http.query.into_iter().map(|pair| (pair.name, pair.value)).collect(),
        headers,
        body,
    })
}

fn line(text: &str) -> Result<Line, String> {
    let http = HttpRequest::parse(text)?;
    let target = text.split_once(' ').map_or("", |(_, target)| target);
    Ok(Line { http, target: target.to_owned() })
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("must be NAME: VALUE")?;
    let name = HeaderName::from_bytes(name.as_bytes())
        .map_err(|_| format!("`{name}` is not the name of a header"))?;
    let value = value.trim();
    HeaderValue::from_str(value).map_err(|_| format!("`{value}` cannot be the value of a header"))?;
    // `HeaderName` is in lower case.
    Ok((name.as_str().to_owned(), value.to_owned()))
}

/// The bytes of an argument, or of the file that `@FILE` names.
pub(super) fn text_or_file(text: &str) -> Result<Vec<u8>, Failure> {
    match text.strip_prefix('@') {
        Some(file) => super::read(Path::new(file)),
        None => Ok(text.as_bytes().to_vec()),
    }
}

fn plan_rows(tried: &Tried) -> Vec<(&'static str, String)> {
    let plan = &tried.plan;
    let keys: Vec<&str> = plan.keys.iter().map(lock::Key::as_str).collect();
    let time = |ms: u32| output::time(&json!(ms));
    let yes_no = |is: bool| if is { "yes" } else { "no" }.to_owned();
    let second = plan.second.map(|second| format!(", else {}", second.as_str())).unwrap_or_default();
    let kept = match plan.primitive.keeps_outcome() {
        true => ("outcome kept", time(plan.keep_ms.map_or(0, NonZero::get))),
        false => ("lock at least", time(plan.lock_at_least_ms)),
    };
    let labels: Vec<String> = plan.labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
    vec![
        ("policy", tried.by.clone()),
        (if plan.any { "any of keys" } else { "keys" }, keys.join("  ")),
        ("primitive", format!("{}{second}", plan.primitive.as_str())),
        (
            "mode",
            match plan.mode {
                lock::Mode::Exclusive => "exclusive".to_owned(),
                lock::Mode::Shared => "shared".to_owned(),
                lock::Mode::Permits { count, limit } => format!("permits={count} of {limit}"),
            },
        ),
        ("ttl", time(plan.ttl_ms)),
        ("wait", time(plan.wait_ms)),
        ("rank", plan.rank.to_string()),
        ("group", format!("{:?}, weight {}", plan.group, plan.weight)),
        ("global order", yes_no(plan.global_order)),
        ("reentrant", yes_no(plan.reentrant)),
        ("max waiters", plan.max_waiters.to_string()),
        kept,
        ("lock delay", time(plan.lock_delay_ms)),
        ("max hold", time(plan.max_hold_ms)),
        ("on loss", plan.on_loss.as_str().to_owned()),
        ("labels", labels.join("  ")),
    ]
}

fn answer_json(answer: &RefusalResponse) -> Value {
    let headers: Vec<Value> =
        answer.headers.iter().map(|(name, value)| json!({"name": name, "value": value})).collect();
    json!({
        "status": answer.status,
        "retry_after_ms": answer.retry_after_ms,
        "headers": headers,
        "detail": answer.detail,
    })
}

fn print_answer(answer: &RefusalResponse, own: bool) {
    let whose = if own { "the policy answers" } else { "the proxy answers, the policy leaves it to it" };
    output::line(&format!("\nwithout the lock ({whose})"));
    let headers: Vec<String> =
        answer.headers.iter().map(|(name, value)| format!("{name}: {value}")).collect();
    output::pairs(&[
        ("status", answer.status.to_string()),
        ("retry after", output::time(&json!(answer.retry_after_ms))),
        ("headers", headers.join("  ")),
        ("detail", answer.detail.clone()),
    ]);
}

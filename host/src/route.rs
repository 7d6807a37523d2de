//! How a guarded listener handles a request: the route that matches, the view of the request for its policy, and the
//! name of the resource to lock.
//!
//! Decisions only: the proxy and `lockkeeper policy try` share them.

use hyper::header::HeaderMap;
use hyper::http::request::Parts;

use crate::config::{Extension, Fit, GuardLock, GuardRoute, Limits, Matched, Part, Template};
use crate::http::{Kind, Problem, decode_form};
use crate::lock::record::HttpView;

mod spelling;

/// The limit of what a policy is shown besides the body. It is stored with the lease while the lease lasts.
const MAX_BYTES: usize = 8_192;
/// The size that a pair counts in addition to its texts.
const PAIR_BYTES: usize = 16;

/// The lock request for an HTTP request.
pub struct Asked {
    /// The name of the resource to lock.
    pub resource: String,
    pub labels: Vec<(String, String)>,
    /// The part of the request that the policy may see.
    pub http: HttpView,
}

/// Finds the index of the first route that matches, and the values that its path pattern captured.
///
/// A path may have several readings (see [`spelling`]). If some application could take the request for one that
/// another route locks, or that the same route locks by another name, the request is refused.
///
/// # Errors
/// No route matches, or applications may interpret the path in different ways.
pub fn find<'a>(
    routes: impl IntoIterator<Item = &'a GuardRoute, IntoIter: Clone>,
    parts: &Parts,
) -> Result<(usize, Matched), Problem> {
    if parts.method.as_str().contains(char::is_lowercase) {
        let detail = "has lower-case letters; some applications take it for the method in upper case";
        return Err(Problem::invalid("method", detail));
    }
    let path = parts.uri.path();
    if let Some(detail) = spelling::fault(path) {
        return Err(Problem::invalid("path", detail));
    }
    let routes = routes.into_iter();
    let ambiguity = spelling::ambiguity(path);
    let mut readings = readings(routes.clone(), path, ambiguity)?;
    let mut found = None;
    for (at, route) in routes.enumerate().filter(|(_, route)| takes(route, parts)) {
        let fit = if found.is_none() { fit(route, path) } else { Fit::No };
        if let Fit::Unclear(name) = fit {
            let detail = "is not a whole number as programs write it, but may be read as one";
            return Err(Problem::invalid(name, detail));
        }
        check(route, &fit, &mut readings)?;
        if let Fit::Yes(matched) = fit {
            if let Some(what) = ambiguity.filter(|_| !route.ambiguous_paths) {
                return Err(unclear(route, what, AMBIGUOUS_PATHS));
            }
            found = Some((at, matched));
        }
        if found.is_some() && readings.is_empty() {
            break;
        }
    }
    found.ok_or_else(|| Problem::not_found(path))
}

/// A way in which an application may take a path that differs from the proxy's own.
struct Reading {
    path: String,
    /// The ambiguous part of the path that allows this reading. `None` if only the extension is missing.
    ambiguity: Option<&'static str>,
}

const AMBIGUOUS_PATHS: &str = "ambiguous_paths = \"allow\"";
const EXTENSION: &str = "extension = \"ignore\" or \"exact\"";

/// The readings of a path that a route may have to refuse.
fn readings<'a>(
    mut routes: impl Iterator<Item = &'a GuardRoute> + Clone,
    path: &str,
    ambiguity: Option<&'static str>,
) -> Result<Vec<Reading>, Problem> {
    // If no route allows ambiguous paths, the route that matches refuses the path. If all routes do, none refuses it.
    let ambiguity = ambiguity.filter(|_| {
        let refuses = |route: &GuardRoute| route.lock.is_some() && !route.ambiguous_paths;
        routes.clone().any(refuses) && routes.any(|route| route.ambiguous_paths)
    });
    if ambiguity.is_some() && path.len() > spelling::MAX_AMBIGUOUS_BYTES {
        let bound = spelling::MAX_AMBIGUOUS_BYTES;
        let detail =
            format!("has {} bytes; with {} it may have {bound}", path.len(), ambiguity.unwrap_or_default());
        return Err(Problem::invalid("path", detail).with("bound", bound));
    }
    let ambiguous = ambiguity.map(|_| spelling::readings(path)).unwrap_or_else(|| [path.to_owned()].into());
    let mut readings = Vec::new();
    for reading in ambiguous {
        let ambiguity = ambiguity.filter(|_| reading != path);
        let shorter = spelling::without_extension(&reading);
        let paths = shorter.into_iter().chain(ambiguity.map(|_| reading));
        readings.extend(paths.map(|path| Reading { path, ambiguity }));
    }
    Ok(readings)
}

/// Checks the readings of a path whose own reading has this `fit` with a route. What is left are the readings that do
/// not match the route.
fn check(route: &GuardRoute, own: &Fit, readings: &mut Vec<Reading>) -> Result<(), Problem> {
    let mut refused = None;
    readings.retain(|reading| {
        let fit = route.path.fit(&reading.path, route.exact_case);
        let may_be_any = spelling::fault(&reading.path).is_some();
        let is_other = may_be_any || (fit != Fit::No && fit != *own);
        let (what, setting, is_allowed) = match reading.ambiguity {
            Some(what) => (what, AMBIGUOUS_PATHS, route.ambiguous_paths),
            None => ("an extension", EXTENSION, route.extension != Extension::Refuse),
        };
        if is_other && route.lock.is_some() && !is_allowed {
            refused = Some(unclear(route, what, setting));
        }
        may_be_any || fit == Fit::No
    });
    refused.map_or(Ok(()), Err)
}

fn unclear(route: &GuardRoute, what: &str, setting: &str) -> Problem {
    let pattern = &route.path;
    let detail = format!(
        "has {what}, which applications read in different ways; the route for {pattern} can allow it with {setting}"
    );
    Problem::invalid("path", detail)
}

/// The known part of a body: what the route lets the policy see, and whether that is the whole body.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The first bytes of the body.
    pub body: Vec<u8>,
    /// Whether `body` is the whole body.
    pub is_whole: bool,
}

impl Seen {
    /// The view of the same body for a route whose policy may see `bytes` of it. `None` if that is more than was
    /// read.
    pub fn limited_to(&self, bytes: usize) -> Option<Seen> {
        let Seen { body, is_whole } = self;
        let fits = body.len() <= bytes;
        let is_known = *is_whole || body.len() >= bytes;
        is_known.then(|| Seen { body: body[..body.len().min(bytes)].to_vec(), is_whole: *is_whole && fits })
    }
}

/// Derives the lock request from an HTTP request.
///
/// # Errors
/// The request lacks a part that its name is made of, or the part that the policy would see is too large.
pub fn asked(
    lock: &GuardLock,
    parts: &Parts,
    matched: Matched,
    seen: Seen,
    limits: &Limits,
) -> Result<Asked, Problem> {
    if lock.names_body() && !seen.is_whole {
        // A second member of the same name may follow, and the application may read that one.
        let bound = lock.see_body_bytes;
        let detail =
            format!("the body is over {bound} bytes, which is what this route reads to name its lock");
        return Err(Problem::new(Kind::TOO_LARGE, detail).with("bound", bound));
    }
    let http = view(parts, matched, lock, seen.body)?;
    let fill = |template| fill(template, parts, &http, limits);
    let resource = fill(&lock.resource)?;
    let labels = lock.labels.iter().map(|(name, template)| {
        let value = fill(template)?;
        match value.len() <= limits.max_label_bytes {
            true => Ok((name.clone(), value)),
            false => {
                let detail = format!("has {} bytes; may have {}", value.len(), limits.max_label_bytes);
                Err(Problem::invalid(format!("labels.{name}"), detail))
            }
        }
    });
    let labels = labels.collect::<Result<_, _>>()?;
    Ok(Asked { resource, labels, http })
}

/// Whether the route is for requests with this method and these headers.
fn takes(route: &GuardRoute, parts: &Parts) -> bool {
    // Applications answer HEAD like GET.
    let method = match parts.method.as_str() {
        "HEAD" if !route.methods.iter().any(|known| known == "HEAD") => "GET",
        method => method,
    };
    if !route.methods.is_empty() && !route.methods.iter().any(|known| known == method) {
        return false;
    }
    let has = |(name, wanted): &(String, Option<String>)| {
        let mut values = parts.headers.get_all(name).iter();
        values.any(|value| wanted.as_ref().is_none_or(|wanted| value.as_bytes() == wanted.as_bytes()))
    };
    route.headers.iter().all(has)
}

/// How the path, as the proxy reads it for this route, compares with the route's pattern.
fn fit(route: &GuardRoute, path: &str) -> Fit {
    let shorter = match route.extension {
        Extension::Ignore => spelling::without_extension(path),
        Extension::Refuse | Extension::Exact => None,
    };
    let shorter = shorter.map(|path| route.path.fit(&path, route.exact_case));
    shorter.filter(|fit| *fit != Fit::No).unwrap_or_else(|| route.path.fit(path, route.exact_case))
}

fn view(parts: &Parts, matched: Matched, lock: &GuardLock, body: Vec<u8>) -> Result<HttpView, Problem> {
    let view = HttpView {
        method: parts.method.as_str().to_owned(),
        path: matched.path,
        captures: matched.captures,
        query: query(parts.uri.query().unwrap_or_default()),
        headers: lock.see_headers.iter().flat_map(|name| values(&parts.headers, name)).collect(),
        body,
    };
    let pairs = [&view.captures, &view.query, &view.headers];
    let bytes: usize =
        pairs.into_iter().flatten().map(|(name, value)| name.len() + value.len() + PAIR_BYTES).sum::<usize>()
            + view.path.len();
    if bytes > MAX_BYTES {
        let detail = format!(
            "the path, the query and the headers that the policy sees have {bytes} bytes; may have {MAX_BYTES}"
        );
        return Err(Problem::new(Kind::HEADERS_TOO_LARGE, detail).with("bound", MAX_BYTES));
    }
    Ok(view)
}

fn query(query: &str) -> Vec<(String, String)> {
    form_urlencoded::parse(query.as_bytes()).into_owned().collect()
}

fn values<'a>(headers: &'a HeaderMap, name: &'a str) -> impl Iterator<Item = (String, String)> + 'a {
    let values = headers.get_all(name).iter();
    values.map(|value| (name.to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
}

/// Fills in a template. A part that the request lacks or contains twice is refused, because other requests would get
/// the same name.
fn fill(template: &Template, parts: &Parts, view: &HttpView, limits: &Limits) -> Result<String, Problem> {
    let mut text = String::new();
    for part in template.parts() {
        match part {
            Part::Text(piece) => text.push_str(piece),
            Part::Method => text.push_str(&view.method),
            Part::Path => text.push_str(&view.path),
            Part::Capture(name) => text.push_str(one(part, view.captures.iter(), name)?),
            Part::Query(name) => {
                let value = one(part, view.query.iter(), name)?;
                if !is_only(parts.uri.query().unwrap_or_default(), name, value) {
                    return Err(Problem::invalid(
                        name_of(part),
                        "is given in a way that is read differently",
                    ));
                }
                text.push_str(value);
            }
            Part::Header(name) => {
                let mut found = parts.headers.get_all(name).iter();
                match (found.next(), found.next()) {
                    // With U+FFFD in place of other bytes, two values would name the same lock.
                    (Some(value), None) if !value.is_empty() => match std::str::from_utf8(value.as_bytes()) {
                        Ok(value) => text.push_str(value),
                        Err(_) => return Err(Problem::invalid(name_of(part), "is not UTF-8")),
                    },
                    (None, _) => return Err(missing(part)),
                    _ => return Err(Problem::invalid(name_of(part), "is empty, or given twice")),
                }
            }
            Part::Json(path) => {
                let value = lockkeeper_sdk::json_field(&view.body, path);
                text.push_str(&value.ok_or_else(|| unreadable(part))?);
            }
        }
    }
    match text.len() {
        1.. if text.len() <= limits.max_resource_bytes => Ok(text),
        bytes => {
            let bound = format!("1 to {} bytes", limits.max_resource_bytes);
            let detail = format!("the route makes a name of {bytes} bytes of this request; may have {bound}");
            Err(Problem::invalid("resource", detail).with("bound", bound))
        }
    }
}

fn one<'a>(
    part: &Part,
    pairs: impl Iterator<Item = &'a (String, String)>,
    name: &str,
) -> Result<&'a str, Problem> {
    let mut found = pairs.filter(|(known, _)| known == name);
    match (found.next(), found.next()) {
        (Some((_, value)), None) => Ok(value),
        (None, _) => Err(missing(part)),
        _ => Err(Problem::invalid(name_of(part), "is given twice")),
    }
}

/// Whether every reader of the query finds only this value of the name. Some readers split pairs at `;`, ignore case,
/// or treat other names as the same name.
fn is_only(query: &str, name: &str, value: &str) -> bool {
    let wanted = stem(name);
    let pairs = query.split(['&', ';']).filter(|pair| !pair.is_empty());
    let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    // A name that cannot be read exactly may be any name.
    let mut found = pairs.filter(|(name, _)| decode_form(name).is_none_or(|name| stem(&name) == wanted));
    found.next().is_some_and(|(_, first)| decode_form(first).is_some_and(|first| first == value))
        && found.next().is_none()
}

/// What is left of a parameter's name if it is read as loosely as some applications do: Rack and qs take `name[]` and
/// `[name]` for it; PHP stops at a NUL, ignores spaces in front, and takes dots and spaces for `_`; ASP.NET ignores case.
fn stem(name: &str) -> String {
    let name = name.split('\0').next().unwrap_or_default();
    let name = name.trim_start_matches(|c: char| c.is_whitespace() || c == '[' || c == ']');
    let name = name.split(['[', ']']).next().unwrap_or_default().trim_end();
    name.replace(['.', ' '], "_").to_uppercase().to_lowercase()
}

fn missing(part: &Part) -> Problem {
    Problem::invalid(name_of(part), "is missing; this route's lock is named by it")
}

fn unreadable(part: &Part) -> Problem {
    let detail = "is missing, or no text, whole number or boolean, or the body is not JSON; this route's lock \
                  is named by it";
    Problem::invalid(name_of(part), detail)
}

fn name_of(part: &Part) -> String {
    part.to_string().trim_matches(['{', '}']).to_owned()
}

#[cfg(test)]
mod tests;

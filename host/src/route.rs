//! How a guarded listener handles a request: the route that matches, the view of the request for its policy, and the
//! name of the resource to lock.
//!
//! Decisions only: the proxy and `lockkeeper policy try` share them.

use hyper::header::HeaderMap;
use hyper::http::request::Parts;

use crate::config::{Fit, GuardLock, GuardRoute, Limits, Matched, Part, Template};
use crate::http::{Kind, Problem};
use crate::lock::record::HttpView;

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
/// # Errors
/// No route matches, or applications may interpret the path in different ways.
pub fn find<'a>(
    routes: impl IntoIterator<Item = &'a GuardRoute>,
    parts: &Parts,
) -> Result<(usize, Matched), Problem> {
    if parts.method.as_str().contains(char::is_lowercase) {
        let detail = "has lower-case letters; some applications take it for the method in upper case";
        return Err(Problem::invalid("method", detail));
    }
    let path = parts.uri.path();
    if let Some(detail) = never_clear(path) {
        return Err(Problem::invalid("path", detail));
    }
    for (at, route) in routes.into_iter().enumerate() {
        match fits(route, parts, path) {
            Fit::No => {}
            Fit::Unclear(name) => {
                let detail = "is not a whole number as programs write it, but may be read as one";
                return Err(Problem::invalid(name, detail));
            }
            Fit::Yes(matched) => {
                return match ambiguous(path).filter(|_| !route.ambiguous_paths) {
                    None => Ok((at, matched)),
                    Some(what) => {
                        let detail = format!(
                            "has {what}, which applications read in different ways; the route can allow it with \
                             ambiguous_paths = \"allow\""
                        );
                        Err(Problem::invalid("path", detail))
                    }
                };
            }
        }
    }
    Err(Problem::not_found(path))
}

/// Why no route accepts a path, whatever the routes' patterns.
fn never_clear(path: &str) -> Option<&'static str> {
    if path.starts_with("//") {
        Some("begins with `//`, and some applications take what follows for a host")
    } else if path.contains("%00") {
        Some("has an encoded NUL, where some applications stop to read")
    } else if has_dots(path) {
        Some("a part of the path is `.` or `..`, which would be read in different ways")
    } else {
        None
    }
}

/// A part of the path that some applications read as data and others as a separator.
fn ambiguous(path: &str) -> Option<&'static str> {
    const MARKS: [(&str, &str); 6] = [
        (";", "`;`"),
        ("%2f", "`%2F`"),
        ("%2F", "`%2F`"),
        ("\\", "a backslash"),
        ("%5c", "`%5C`"),
        ("%5C", "`%5C`"),
    ];
    MARKS.into_iter().find_map(|(mark, name)| path.contains(mark).then_some(name))
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

fn fits(route: &GuardRoute, parts: &Parts, path: &str) -> Fit {
    // Applications answer HEAD like GET.
    let method = match parts.method.as_str() {
        "HEAD" if !route.methods.iter().any(|known| known == "HEAD") => "GET",
        method => method,
    };
    if !route.methods.is_empty() && !route.methods.iter().any(|known| known == method) {
        return Fit::No;
    }
    let has = |(name, wanted): &(String, Option<String>)| {
        let mut values = parts.headers.get_all(name).iter();
        values.any(|value| wanted.as_ref().is_none_or(|wanted| value.as_bytes() == wanted.as_bytes()))
    };
    if !route.headers.iter().all(has) {
        return Fit::No;
    }
    route.path.fit(path, route.exact_case)
}

/// Whether a segment means the current or the parent folder, in any encoding.
fn has_dots(path: &str) -> bool {
    let dots = |part: &str| {
        let part = part.replace("%2e", ".").replace("%2E", ".");
        // Some applications take the text after a semicolon for a parameter, and only look at the text before it.
        let name = part.split(';').next().unwrap_or_default();
        name == "." || name == ".."
    };
    path.contains(['.', '%']) && path.split(['/', '\\']).flat_map(split_encoded).any(dots)
}

/// Splits at percent-encoded slashes and backslashes.
fn split_encoded(part: &str) -> impl Iterator<Item = &str> {
    part.split("%2f")
        .flat_map(|part| part.split("%2F"))
        .flat_map(|part| part.split("%5c"))
        .flat_map(|part| part.split("%5C"))
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
                let mut found = values(&parts.headers, name);
                match (found.next(), found.next()) {
                    (Some((_, value)), None) if !value.is_empty() => text.push_str(&value),
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
/// or treat `name[]` as the same name.
fn is_only(query: &str, name: &str, value: &str) -> bool {
    let loose = query.replace(';', "&");
    let is_alike = |found: &str| {
        let base = found.split('[').next().unwrap_or_default();
        base.to_lowercase() == name.to_lowercase()
    };
    let mut found = form_urlencoded::parse(loose.as_bytes()).filter(|(found, _)| is_alike(found));
    found.next().is_some_and(|(_, first)| first == value) && found.next().is_none()
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

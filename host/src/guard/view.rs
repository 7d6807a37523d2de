//! What a policy may see of a request, and the names that are made of it.

use std::borrow::Cow;

use hyper::header::HeaderMap;
use hyper::http::request::Parts;
use percent_encoding::percent_decode_str;

use crate::config::{GuardLock, Limits, Part, Template};
use crate::http::{Kind, Problem};
use crate::service::HttpView;

/// The most that a policy is shown, beside the body. It is kept with the lease, as long as that lasts.
const MAX_BYTES: usize = 8_192;

/// `body` is what was read of it.
pub fn view(
    parts: &Parts,
    captures: Vec<(String, String)>,
    lock: &GuardLock,
    body: Vec<u8>,
) -> Result<HttpView, Problem> {
    let view = HttpView {
        method: parts.method.as_str().to_owned(),
        path: decoded(parts.uri.path()).into_owned(),
        captures,
        query: query(parts.uri.query().unwrap_or_default()),
        headers: lock.see_headers.iter().flat_map(|name| values(&parts.headers, name)).collect(),
        body,
    };
    let pairs = [&view.captures, &view.query, &view.headers];
    let bytes: usize =
        pairs.into_iter().flatten().map(|(name, value)| name.len() + value.len()).sum::<usize>()
            + view.path.len();
    if bytes > MAX_BYTES {
        let detail = format!(
            "the path, the query and the headers that the policy sees have {bytes} bytes; may have {MAX_BYTES}"
        );
        return Err(Problem::new(Kind::HeadersTooLarge, detail).with("bound", MAX_BYTES));
    }
    Ok(view)
}

/// What is not UTF-8 is shown with replacements.
fn decoded(path: &str) -> Cow<'_, str> {
    percent_decode_str(path).decode_utf8_lossy()
}

fn query(query: &str) -> Vec<(String, String)> {
    form_urlencoded::parse(query.as_bytes()).into_owned().collect()
}

fn values<'a>(headers: &'a HeaderMap, name: &'a str) -> impl Iterator<Item = (String, String)> + 'a {
    let values = headers.get_all(name).iter();
    values.map(|value| (name.to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
}

/// Fills in a template. A part that the request lacks, or has twice, is refused: another request would
/// be locked by the same name.
pub fn fill(template: &Template, parts: &Parts, view: &HttpView, limits: &Limits) -> Result<String, Problem> {
    let mut text = String::new();
    for part in template.parts() {
        match part {
            Part::Text(piece) => text.push_str(piece),
            Part::Method => text.push_str(&view.method),
            Part::Path => {
                text.push('/');
                let segments = view.path.split('/').filter(|segment| !segment.is_empty());
                text.push_str(&segments.collect::<Vec<_>>().join("/"));
            }
            Part::Capture(name) => text.push_str(one(part, view.captures.iter(), name)?),
            Part::Query(name) => text.push_str(one(part, view.query.iter(), name)?),
            Part::Header(name) => {
                let mut found = values(&parts.headers, name);
                match (found.next(), found.next()) {
                    (Some((_, value)), None) if !value.is_empty() => text.push_str(&value),
                    (None, _) => return Err(missing(part)),
                    _ => return Err(Problem::invalid(part.to_string(), "is empty, or given twice")),
                }
            }
            Part::Json(path) => {
                let value = lockkeeper_sdk::json_field(&view.body, path).ok_or_else(|| missing(part))?;
                text.push_str(&value);
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
        _ => Err(Problem::invalid(part.to_string(), "is given twice")),
    }
}

fn missing(part: &Part) -> Problem {
    let what = part.to_string();
    let what = what.trim_matches(['{', '}']).to_owned();
    Problem::invalid(what, "is missing; this route's lock is named by it")
}

//! Paths with captures, and names made of parts of a request.

use std::fmt;

/// The path of a guarded route: `/orders/{id}/pay`, `/files/{*rest}`.
///
/// Segments are compared after percent-decoding; a trailing slash, empty segments and what follows a `;` do
/// not count, as many applications do not tell them apart either: a request must not get past its lock by
/// being spelt differently. Capital letters count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathPattern {
    /// As it is written.
    text: String,
    segments: Vec<Segment>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Literal(String),
    Capture(String),
    /// Takes all that is left, which may be nothing. Always the last.
    Rest(String),
}

impl PathPattern {
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn parse(text: &str) -> Result<PathPattern, String> {
        let Some(path) = text.strip_prefix('/') else {
            return Err(format!("`{text}` must begin with `/`"));
        };
        let mut segments = Vec::new();
        let mut parts = path.split('/').filter(|part| !part.is_empty()).peekable();
        while let Some(part) = parts.next() {
            let segment = segment(part)?;
            if let Segment::Rest(name) = &segment
                && parts.peek().is_some()
            {
                return Err(format!("`{{*{name}}}` must be the last part of `{text}`"));
            }
            segments.push(segment);
        }
        let pattern = PathPattern { text: text.to_owned(), segments };
        let names: Vec<&str> = pattern.names().collect();
        match names.iter().enumerate().find(|(at, name)| names[..*at].contains(name)) {
            Some((_, name)) => Err(format!("`{{{name}}}` is in `{text}` twice")),
            None => Ok(pattern),
        }
    }

    /// The names of its captures, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.segments.iter().filter_map(|segment| match segment {
            Segment::Capture(name) | Segment::Rest(name) => Some(name.as_str()),
            Segment::Literal(_) => None,
        })
    }

    /// Whether any path is such a path.
    pub fn takes_all(&self) -> bool {
        matches!(self.segments[..], [Segment::Rest(_)])
    }

    /// What the captures stand for in a path as it was sent; `None` where it is not such a path.
    ///
    /// An encoded slash is data to some applications and a slash to others, so a path that matches either
    /// way matches. One that parts nothing, as in `42%2F`, does not count: to the others it is the same path.
    pub fn captures(&self, path: &str) -> Option<Vec<(String, String)>> {
        let mut decoded: Vec<String> = parts(path).map(decode).collect::<Option<_>>()?;
        for part in decoded.iter_mut().filter(|part| part.contains('/')) {
            *part = pieces(part).collect::<Vec<_>>().join("/");
        }
        decoded.retain(|part| !part.is_empty());
        let as_sent = self.fit(&decoded);
        if as_sent.is_some() || !decoded.iter().any(|part| part.contains('/')) {
            return as_sent;
        }
        let joined = decoded.join("/");
        self.fit(&pieces(&joined).map(str::to_owned).collect::<Vec<_>>())
    }

    fn fit(&self, parts: &[String]) -> Option<Vec<(String, String)>> {
        let mut captures = Vec::new();
        let mut parts = parts.iter();
        for segment in &self.segments {
            match segment {
                Segment::Literal(text) => {
                    if parts.next()? != text {
                        return None;
                    }
                }
                Segment::Capture(name) => captures.push((name.clone(), parts.next()?.clone())),
                Segment::Rest(name) => {
                    let rest: Vec<&str> = parts.by_ref().map(String::as_str).collect();
                    captures.push((name.clone(), rest.join("/")));
                }
            }
        }
        parts.next().is_none().then_some(captures)
    }
}

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// What stands between the slashes.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    text.split('/').filter(|piece| !piece.is_empty())
}

/// The segments of a path as it was sent, without their parameters.
fn parts(path: &str) -> impl Iterator<Item = &str> {
    let segments = path.split('/').map(|part| part.split(';').next().unwrap_or_default());
    segments.filter(|part| !part.is_empty())
}

fn decode(part: &str) -> Option<String> {
    if !part.contains('%') {
        return Some(part.to_owned());
    }
    percent_encoding::percent_decode_str(part).decode_utf8().ok().map(Into::into)
}

fn segment(part: &str) -> Result<Segment, String> {
    let Some(inner) = part.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) else {
        return match part.contains(['{', '}']) {
            true => Err(format!("`{part}` must be a text or one `{{name}}`, not both")),
            false if part.contains('*') => Err(format!(
                "`{part}`: say {{name}} for one part of the path, {{*name}} for all that is left"
            )),
            false if part.contains(';') => Err(format!("`{part}`: what follows a `;` does not count")),
            false => decode(part)
                .map(Segment::Literal)
                .ok_or_else(|| format!("`{part}` is not percent-encoded UTF-8")),
        };
    };
    let (rest, name) = inner.strip_prefix('*').map_or((false, inner), |name| (true, name));
    if !is_name(name) {
        return Err(format!("`{part}`: a name has letters, digits, - and _"));
    }
    Ok(if rest { Segment::Rest(name.to_owned()) } else { Segment::Capture(name.to_owned()) })
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
}

/// A name made of parts of a request: `orders/{id}`, `{header.idempotency-key}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    parts: Vec<Part>,
}

/// A piece of a [`Template`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    Text(String),
    Method,
    /// Decoded, without empty segments.
    Path,
    Capture(String),
    /// In lower case.
    Header(String),
    Query(String),
    /// A dotted path into the JSON body.
    Json(String),
}

impl Template {
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn parse(text: &str) -> Result<Template, String> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some(open) = rest.find(['{', '}']) {
            let (before, from) = rest.split_at(open);
            let close = from.find('}').filter(|_| from.starts_with('{'));
            let close = close.ok_or_else(|| format!("`{text}` has a brace without its other half"))?;
            if !before.is_empty() {
                parts.push(Part::Text(before.to_owned()));
            }
            parts.push(part(&from[1..close])?);
            rest = &from[close + 1..];
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest.to_owned()));
        }
        if parts.is_empty() {
            return Err("is empty".to_owned());
        }
        Ok(Template { parts })
    }

    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Whether the body must be read for it.
    pub fn reads_body(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, Part::Json(_)))
    }
}

fn part(name: &str) -> Result<Part, String> {
    let plain = |name: &str, of: &str| match name.is_empty() {
        true => Err(format!("`{{{of}.}}` names no {of}")),
        false => Ok(name.to_owned()),
    };
    match name.split_once('.') {
        Some(("header", name)) => plain(&name.to_ascii_lowercase(), "header").map(Part::Header),
        Some(("query", name)) => plain(name, "query").map(Part::Query),
        Some(("json", path)) => plain(path, "json").map(Part::Json),
        None if name == "method" => Ok(Part::Method),
        None if name == "path" => Ok(Part::Path),
        None if is_name(name) => Ok(Part::Capture(name.to_owned())),
        _ => Err(format!(
            "`{{{name}}}` is not known; there are {{method}}, {{path}}, {{header.NAME}}, {{query.NAME}}, \
             {{json.FIELD}} and the names of the path"
        )),
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Part::Text(text) => f.write_str(text),
            Part::Method => f.write_str("{method}"),
            Part::Path => f.write_str("{path}"),
            Part::Capture(name) => write!(f, "{{{name}}}"),
            Part::Header(name) => write!(f, "{{header.{name}}}"),
            Part::Query(name) => write!(f, "{{query.{name}}}"),
            Part::Json(path) => write!(f, "{{json.{path}}}"),
        }
    }
}

#[cfg(test)]
mod tests;

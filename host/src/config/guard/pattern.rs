//! Path patterns with captures, and templates that build names from parts of a request.

use std::fmt;

/// The path of a guarded route: `/orders/{id}/pay`, `/orders/{id:int}`, `/files/{*rest}`.
///
/// Segments are compared after percent-decoding. A trailing slash, empty segments, and anything after a `;` in a
/// segment are ignored, because many applications ignore them: a different spelling must not let a request avoid its
/// lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathPattern {
    /// The pattern as written.
    text: String,
    segments: Vec<Segment>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Literal(String),
    Capture(String),
    /// A whole number in its only accepted spelling.
    Int(String),
    /// The rest of the path, which may be empty. Always the last segment.
    Rest(String),
}

/// The result of a path that matches a pattern.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matched {
    /// The names of the pattern's captures, with their values.
    pub captures: Vec<(String, String)>,
    /// The canonical spelling of the path: decoded, with the case of the pattern's letters, and without parameters
    /// and empty segments.
    pub path: String,
}

/// How a path compares with a pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fit {
    /// The path does not match.
    No,
    /// The path would match, but an application may read the text in place of this `{name:int}` as another number.
    Unclear(String),
    /// The path matches.
    Yes(Matched),
}

impl PathPattern {
    /// Parses a pattern.
    ///
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

    /// A pattern that matches every path.
    pub fn any() -> PathPattern {
        PathPattern { text: "/{*rest}".to_owned(), segments: vec![Segment::Rest("rest".to_owned())] }
    }

    /// The names of the captures, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.segments.iter().filter_map(|segment| match segment {
            Segment::Capture(name) | Segment::Int(name) | Segment::Rest(name) => Some(name.as_str()),
            Segment::Literal(_) => None,
        })
    }

    /// Whether the pattern matches every path.
    pub fn takes_all(&self) -> bool {
        matches!(self.segments[..], [Segment::Rest(_)])
    }

    /// Matches a path as it was sent. `exact_case`: whether letters must have the pattern's case.
    ///
    /// To some applications an encoded slash is data, and to others it separates segments. So a path matches if
    /// either reading matches. An encoded slash that separates nothing, as in `42%2F`, is ignored, because it does
    /// not change the path for the second kind of application.
    pub fn fit(&self, path: &str, exact_case: bool) -> Fit {
        let Some(mut decoded) = parts(path).map(decode).collect::<Option<Vec<String>>>() else {
            return Fit::No;
        };
        for part in decoded.iter_mut().filter(|part| part.contains('/')) {
            *part = pieces(part).collect::<Vec<_>>().join("/");
        }
        decoded.retain(|part| !part.is_empty());
        let as_sent = self.fit_parts(&decoded, exact_case);
        if as_sent != Fit::No || !decoded.iter().any(|part| part.contains('/')) {
            return as_sent;
        }
        let joined = decoded.join("/");
        self.fit_parts(&pieces(&joined).map(str::to_owned).collect::<Vec<_>>(), exact_case)
    }

    fn fit_parts(&self, parts: &[String], exact_case: bool) -> Fit {
        let mut matched = Matched::default();
        let mut unclear = None;
        let mut parts = parts.iter();
        for segment in &self.segments {
            let (name, text) = match segment {
                Segment::Rest(name) => {
                    let rest: Vec<&str> = parts.by_ref().map(String::as_str).collect();
                    (Some(name), rest.join("/"))
                }
                _ => {
                    let Some(part) = parts.next() else { return Fit::No };
                    match segment {
                        Segment::Literal(text)
                            if *text == *part || (!exact_case && are_alike(text, part)) =>
                        {
                            (None, text.clone())
                        }
                        Segment::Capture(name) => (Some(name), part.clone()),
                        Segment::Int(name) if part.contains(char::is_numeric) => {
                            unclear = unclear.or((!is_int(part)).then(|| name.clone()));
                            (Some(name), part.clone())
                        }
                        _ => return Fit::No,
                    }
                }
            };
            if !text.is_empty() || matched.path.is_empty() {
                matched.path.push('/');
            }
            matched.path.push_str(&text);
            matched.captures.extend(name.map(|name| (name.clone(), text)));
        }
        match (parts.next(), unclear) {
            (Some(_), _) => Fit::No,
            (None, Some(name)) => Fit::Unclear(name),
            (None, None) => {
                Fit::Yes(Matched { path: format!("/{}", matched.path.trim_start_matches('/')), ..matched })
            }
        }
    }
}

/// Whether two texts are equal apart from the case of their letters.
fn are_alike(one: &str, other: &str) -> bool {
    let folded = |text: &str| text.to_uppercase().to_lowercase();
    folded(one) == folded(other)
}

/// Whether the text is a non-negative whole number in the spelling that programs write.
fn is_int(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'))
}

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The non-empty pieces between slashes.
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
    let (kind, name): (fn(String) -> Segment, &str) = match (inner.strip_prefix('*'), inner.split_once(':')) {
        (Some(name), _) => (Segment::Rest, name),
        (None, Some((name, "int"))) => (Segment::Int, name),
        (None, Some((_, kind))) => {
            return Err(format!(
                "`{part}`: a capture can be of the kind `int`, or say none; `{kind}` is no kind"
            ));
        }
        (None, None) => (Segment::Capture, inner),
    };
    if !is_name(name) {
        return Err(format!("`{part}`: a name has letters, digits, - and _"));
    }
    Ok(kind(name.to_owned()))
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
}

/// A template of a name, built from parts of a request: `orders/{id}`, `{header.idempotency-key}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    parts: Vec<Part>,
}

/// A piece of a [`Template`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Literal text.
    Text(String),
    /// The request's method.
    Method,
    /// The path in the spelling of [`Matched::path`].
    Path,
    /// The value of a capture of the route's path, by the capture's name.
    Capture(String),
    /// A header, in lower case.
    Header(String),
    /// The value of a query parameter, by the parameter's name.
    Query(String),
    /// A dotted path into the JSON body.
    Json(String),
}

impl Template {
    /// Parses a template.
    ///
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

    /// The parts, in order.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Whether the template needs the body.
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

//! Models of how applications read a path: the documented rules of URL parsers, servers and routers.
//!
//! | reader | rules |
//! | --- | --- |
//! | WHATWG URL, "basic URL parser" (browsers, Node.js `new URL`, the crate `url`) | `\` separates like `/`; `.` and `..` are resolved, `%2e` as well; a target `//x/y` names the host x |
//! | Tomcat, `CoyoteAdapter.postParseRequest` | 1. `;` to the next `/` is cut off; 2. the path is decoded; 3. `normalize`: `\` as `/` with `allowBackslash`, `//` as `/`, dots resolved; `%2F` with `encodedSolidusHandling="decode"` |
//! | Jetty, `URIUtil` and `UriCompliance` | as Tomcat; `UriCompliance.UNSAFE` takes ambiguous separators, encodings and parameters |
//! | Rails, `Journey::Router::Utils.normalize_path`, `ActionDispatch::Routing::Mapper` | `//` as `/`, no slash at the end; `(.:format)` after each path; captures are decoded, and the path before them by servers that decode `PATH_INFO` |
//! | CGI, RFC 3875 4.1.5; WSGI, PEP 3333 | `PATH_INFO` is decoded before it is split |
//! | Python `re`, Django `re_path` | `$` matches before a line feed at the end |
//! | Express, `app.set("case sensitive routing")`, `"strict routing"` | any case; with or without a slash at the end; captures are decoded |
//! | IIS, http.sys `PercentUAllowed`, ASP.NET | `%uXXXX` is decoded; `\` separates; any case |
//! | C strings | a NUL ends the path |
//! | UTF-8 decoders before RFC 3629 | overlong forms of a character (`%C1%81` for `A`) |

use arbitrary::{Result, Unstructured};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

/// The rules of one application.
#[derive(Clone, Debug)]
pub struct Reader {
    whatwg: bool,
    backslash: bool,
    parameters: Parameters,
    decodes: Decodes,
    dots: bool,
    squeezes: bool,
    percent_u: bool,
    overlong: bool,
    nul_ends: bool,
    line_feed: bool,
    /// Letters of literals in any case.
    pub any_case: bool,
    /// The extension of the last segment is the format of the answer.
    pub format: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Parameters {
    Data,
    CutBeforeDecoding,
    CutAfterDecoding,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Decodes {
    Segments,
    WholePath,
    WholePathThenSegments,
}

impl Reader {
    /// An application that combines any of the rules.
    pub fn any(u: &mut Unstructured<'_>) -> Result<Reader> {
        let parameters = [Parameters::Data, Parameters::CutBeforeDecoding, Parameters::CutAfterDecoding];
        let decodes = [Decodes::Segments, Decodes::WholePath, Decodes::WholePathThenSegments];
        Ok(Reader {
            whatwg: u.ratio(1, 4)?,
            backslash: u.arbitrary()?,
            parameters: *u.choose(&parameters)?,
            decodes: *u.choose(&decodes)?,
            dots: u.arbitrary()?,
            squeezes: u.arbitrary()?,
            percent_u: u.arbitrary()?,
            overlong: u.arbitrary()?,
            nul_ends: u.arbitrary()?,
            line_feed: u.arbitrary()?,
            any_case: u.arbitrary()?,
            format: u.arbitrary()?,
        })
    }

    /// The segments of a path. `None` if the application refuses it.
    fn segments(&self, path: &str) -> Option<Vec<String>> {
        let segments = if self.whatwg { whatwg(path)? } else { self.split(path.as_bytes())? };
        let mut segments: Vec<Vec<u8>> = segments.into_iter().map(|segment| self.finish(segment)).collect();
        if self.squeezes {
            segments.retain(|segment| !segment.is_empty());
        } else if segments.last().is_some_and(Vec::is_empty) {
            segments.pop();
        }
        let segments: Option<Vec<String>> =
            segments.into_iter().map(|segment| String::from_utf8(segment).ok()).collect();
        let mut segments = segments?;
        if let Some(last) = segments.last_mut()
            && self.format
            && let Some((name, format)) = last.rsplit_once('.')
            && !name.is_empty()
            && !format.is_empty()
        {
            *last = name.to_owned();
        }
        Some(segments)
    }

    fn split(&self, path: &[u8]) -> Option<Vec<Vec<u8>>> {
        let mut path = path.to_vec();
        if self.parameters == Parameters::CutBeforeDecoding {
            path = cut_parameters(&path);
        }
        if self.decodes != Decodes::Segments {
            path = self.decode(&path);
            if self.nul_ends {
                path.truncate(path.iter().position(|byte| *byte == 0).unwrap_or(path.len()));
            }
        }
        if self.backslash {
            path.iter_mut().filter(|byte| **byte == b'\\').for_each(|byte| *byte = b'/');
        }
        if self.parameters == Parameters::CutAfterDecoding {
            path = cut_parameters(&path);
        }
        let mut segments: Vec<Vec<u8>> = Vec::new();
        for segment in path.strip_prefix(b"/")?.split(|byte| *byte == b'/') {
            let name = segment.to_ascii_lowercase();
            match String::from_utf8_lossy(&name).replace("%2e", ".").as_str() {
                "." if self.dots => {}
                ".." if self.dots => {
                    segments.pop()?;
                }
                _ => segments.push(segment.to_vec()),
            }
        }
        Some(segments)
    }

    fn finish(&self, mut segment: Vec<u8>) -> Vec<u8> {
        if self.whatwg || self.decodes != Decodes::WholePath {
            segment = self.decode(&segment);
        }
        if self.parameters == Parameters::CutAfterDecoding {
            segment = cut_parameters(&segment);
        }
        if self.nul_ends {
            segment.truncate(segment.iter().position(|byte| *byte == 0).unwrap_or(segment.len()));
        }
        if self.line_feed && segment.last() == Some(&b'\n') {
            segment.pop();
        }
        segment
    }

    fn decode(&self, text: &[u8]) -> Vec<u8> {
        decode(text, self.percent_u, self.overlong)
    }
}

/// The segments of the path that the crate `url` makes of a request's target.
fn whatwg(path: &str) -> Option<Vec<Vec<u8>>> {
    let base = url::Url::parse("http://host/").expect("a URL");
    let url = base.join(path).ok()?;
    Some(url.path_segments()?.map(|segment| segment.as_bytes().to_vec()).collect())
}

/// Cuts off each `;` with what follows up to the next `/`.
fn cut_parameters(path: &[u8]) -> Vec<u8> {
    let segments = path.split(|byte| *byte == b'/');
    let names = segments.map(|segment| segment.split(|byte| *byte == b';').next().unwrap_or_default());
    names.collect::<Vec<_>>().join(&b'/')
}

/// Decodes escapes, and leaves those that are broken.
pub fn decode(text: &[u8], percent_u: bool, overlong: bool) -> Vec<u8> {
    let hex = |digits: Option<&[u8]>| {
        let digits = digits.filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))?;
        u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
    };
    let (mut decoded, mut at) = (Vec::new(), 0);
    while at < text.len() {
        let escape = (text[at] == b'%').then(|| hex(text.get(at + 1..at + 3))).flatten();
        let wide = text[at..].starts_with(b"%u").then(|| hex(text.get(at + 2..at + 6))).flatten();
        match (escape, wide.filter(|_| percent_u).and_then(char::from_u32)) {
            (Some(byte), _) => {
                decoded.push(byte as u8);
                at += 3;
            }
            (None, Some(wide)) => {
                decoded.extend_from_slice(wide.to_string().as_bytes());
                at += 6;
            }
            (None, None) => {
                decoded.push(text[at]);
                at += 1;
            }
        }
    }
    if overlong { without_overlong(&decoded) } else { decoded }
}

/// Reads the overlong forms of ASCII characters in two bytes.
fn without_overlong(bytes: &[u8]) -> Vec<u8> {
    let (mut read, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        match bytes[at..] {
            [lead @ (0xc0 | 0xc1), next @ 0x80..=0xbf, ..] => {
                read.push((lead & 1) << 6 | next & 0x3f);
                at += 2;
            }
            _ => {
                read.push(bytes[at]);
                at += 1;
            }
        }
    }
    read
}

/// What an application does for a request: the place of its route, and what the route captures.
#[derive(Clone, Debug, PartialEq)]
pub struct Handled {
    /// The place of the route.
    pub route: usize,
    /// The texts that the route captures, in order.
    pub captures: Vec<String>,
}

impl Handled {
    /// What an application with these routes does for a request with this path. `None` if it refuses the request.
    pub fn by(reader: &Reader, routes: &[&str], path: &str) -> Option<Handled> {
        let segments = reader.segments(path)?;
        let mut handled = routes.iter().enumerate().filter_map(|(route, pattern)| {
            let captures = captures(pattern, &segments, reader.any_case)?;
            Some(Handled { route, captures })
        });
        handled.next()
    }

    /// The path that a careful client sends for the same work.
    pub fn path(&self, routes: &[&str]) -> String {
        let mut captures = self.captures.iter();
        let encoded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let segments = routes[self.route].split('/').skip(1).map(|part| match part.starts_with('{') {
            false => part.to_owned(),
            true => {
                let text = captures.next().map_or("", String::as_str);
                text.split('/')
                    .filter(|_| part.starts_with("{*"))
                    .map(encoded)
                    .reduce(|a, b| a + "/" + &b)
                    .unwrap_or_else(|| encoded(text))
            }
        });
        format!("/{}", segments.collect::<Vec<_>>().join("/"))
    }
}

fn captures(pattern: &str, segments: &[String], any_case: bool) -> Option<Vec<String>> {
    let (mut captures, mut left) = (Vec::new(), segments);
    for part in pattern.split('/').skip(1) {
        if part.starts_with("{*") {
            captures.push(left.join("/"));
            return Some(captures);
        }
        let (segment, rest) = left.split_first()?;
        left = rest;
        match part.strip_prefix('{') {
            Some(name) if name.ends_with(":int}") => captures.push(number(segment)?),
            Some(_) if segment.is_empty() => return None,
            Some(_) => captures.push(segment.clone()),
            None if segment == part => {}
            None if any_case && segment.to_lowercase() == part.to_lowercase() => {}
            None => return None,
        }
    }
    left.is_empty().then_some(captures)
}

/// A whole number as lenient readers take it: `parseInt` of JavaScript, `to_i` of Ruby, `int` of Python.
fn number(text: &str) -> Option<String> {
    let text = text.trim();
    let text = text.strip_prefix('+').unwrap_or(text);
    let arabic = |c: char| ('\u{660}'..='\u{669}').contains(&c).then(|| u32::from(c) - 0x660);
    let digits = text.chars().map_while(|c| c.to_digit(10).or_else(|| arabic(c)));
    let digits: String = digits.filter_map(|digit| char::from_digit(digit, 10)).collect();
    match digits.trim_start_matches('0') {
        "" if digits.is_empty() => None,
        "" => Some("0".to_owned()),
        digits => Some(digits.to_owned()),
    }
}

//! Decides which bytes may pass from an HTTP/1 client to the HTTP library: only messages that no other server could
//! interpret differently.
//!
//! A proxy and the server behind it must agree on where each request ends. Otherwise, one client's bytes become the
//! start of another client's request (request smuggling). The HTTP library parses leniently. So the gate parses
//! along: it follows heads, bodies and trailers, and refuses what RFC 9112 leaves to interpretation.
//!
//! Heads, trailers and chunk sizes pass when they are complete and valid; bodies pass as they arrive. The gate stores
//! nothing: bytes that may not pass yet are shown to it again together with the bytes that follow.
//! `http.max_header_bytes` bounds their number.
//!
//! Bytes that arrive before an upgrade is answered are checked as the next request: RFC 9110 requires clients to wait
//! for the 101.

use memchr::memchr;

use super::problem::{Kind, Problem};

/// The longest chunk extension, in bytes.
const MAX_EXTENSION: usize = 256;
/// The greatest number of hexadecimal digits of a u64.
const MAX_SIZE_DIGITS: usize = 16;
/// Size, semicolon, extension and line end.
const MAX_SIZE_LINE: usize = MAX_SIZE_DIGITS + 1 + MAX_EXTENSION + 2;

/// Follows the bytes of one client.
pub struct Gate {
    at: At,
    /// Where the current line begins, and up to where its end was searched for; both relative to the first byte that
    /// has not passed.
    line: usize,
    scanned: usize,
    /// The framing of the current head, once its request line was read.
    framing: Option<Framing>,
    heads: u32,
    max_head: usize,
    refusal: Option<Refusal>,
}

/// What the gate expects next.
#[derive(Clone, Copy)]
enum At {
    Head,
    Data { left: u64, chunked: bool },
    ChunkSize,
    ChunkEnd,
    Trailers,
}

/// Why bytes do not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the request line and headers, or the trailers, are over the limit in bytes")]
    TooLarge,
    #[error("this is not an HTTP/1.1 or HTTP/2 request")]
    RequestLine,
    #[error("CONNECT is not served")]
    Connect,
    #[error("a line ends with LF alone")]
    BareLf,
    #[error("a CR that ends no line")]
    BareCr,
    #[error("a control character in a line")]
    Control,
    #[error("a line that begins with white space")]
    Folded,
    #[error("a header without a colon")]
    NoColon,
    #[error("a header without a name")]
    NoName,
    #[error("white space before the colon of a header")]
    SpaceBeforeColon,
    #[error("a header name with a character that names do not have")]
    Name,
    #[error("no Host")]
    NoHost,
    #[error("more than one Host")]
    SecondHost,
    #[error("a Host that is none")]
    Host,
    #[error("a Host that differs from the authority")]
    OtherHost,
    #[error("a target of `*`, which is for OPTIONS alone")]
    Asterisk,
    #[error("a Content-Length that is not a whole number below 2^64")]
    Length,
    #[error("more than one Content-Length")]
    SecondLength,
    #[error("Content-Length together with Transfer-Encoding")]
    LengthAndEncoding,
    #[error("a Transfer-Encoding other than chunked")]
    Encoding,
    #[error("more than one Transfer-Encoding")]
    SecondEncoding,
    #[error("Transfer-Encoding in HTTP/1.0")]
    OldEncoding,
    #[error("a chunk size that is not 1 to 16 hexadecimal digits")]
    ChunkSize,
    #[error("a chunk extension of more than {MAX_EXTENSION} bytes")]
    Extension,
    #[error("a chunk that does not end with CRLF")]
    ChunkEnd,
    #[error("a trailer that only a header can be")]
    Trailer,
}

/// Checks the head of an HTTP/2 request, which does not pass a gate. There is one host, in `:authority` or in a `Host` header,
/// or in both alike; and at most one length.
///
/// # Errors
/// Why the request is refused.
pub fn check_http2_head<B>(request: &hyper::Request<B>) -> Result<(), Refusal> {
    if request.uri().path() == "*" && request.method() != hyper::Method::OPTIONS {
        return Err(Refusal::Asterisk);
    }
    if request.headers().get_all(hyper::header::CONTENT_LENGTH).iter().count() > 1 {
        return Err(Refusal::SecondLength);
    }
    let mut hosts = request.headers().get_all(hyper::header::HOST).iter().map(|host| host.as_bytes());
    let authority = request.uri().authority().map(|authority| authority.as_str().as_bytes());
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err(Refusal::SecondHost);
    }
    if !host.into_iter().chain(authority).all(is_host) {
        return Err(Refusal::Host);
    }
    match (host, authority) {
        (None, None) => Err(Refusal::NoHost),
        (Some(host), Some(authority)) if !authority.eq_ignore_ascii_case(host) => Err(Refusal::OtherHost),
        _ => Ok(()),
    }
}

/// The host in the target of an HTTP/1 request; `None` if the target is a path or `*`.
///
/// # Errors
/// The target is neither, or its host is none.
fn authority<'a>(method: &[u8], target: &'a [u8]) -> Result<Option<&'a [u8]>, Refusal> {
    match target {
        [b'/', ..] => Ok(None),
        b"*" if method == b"OPTIONS" => Ok(None),
        b"*" => Err(Refusal::Asterisk),
        _ => {
            let scheme = target.windows(3).position(|part| part == b"://").ok_or(Refusal::RequestLine)?;
            let rest = &target[scheme + 3..];
            let end = rest.iter().position(|byte| b"/?#".contains(byte)).unwrap_or(rest.len());
            let host = Some(&rest[..end]).filter(|host| !host.is_empty() && is_host(host));
            host.ok_or(Refusal::Host).map(Some)
        }
    }
}

fn is_host(text: &[u8]) -> bool {
    text.iter().all(|&byte| HOST[usize::from(byte)])
}

/// What a head says about the end of its message.
struct Framing {
    is_http11: bool,
    /// The host in the target, which the header must repeat.
    authority: Option<Box<[u8]>>,
    host_seen: bool,
    length: Option<u64>,
    chunked: bool,
}

impl Gate {
    /// A gate for a new connection. `max_head` limits a head or trailers, in bytes.
    pub fn new(max_head: usize) -> Gate {
        Gate { at: At::Head, line: 0, scanned: 0, framing: None, heads: 0, max_head, refusal: None }
    }

    /// Checks `bytes`: the bytes that did not pass last time, followed by new bytes.
    ///
    /// Returns how many of them may pass; the rest must be shown again with the bytes that follow. Nothing passes
    /// once there is a [refusal](Gate::refusal).
    pub fn judge(&mut self, bytes: &[u8]) -> usize {
        let mut passed = 0;
        while self.refusal.is_none() && passed < bytes.len() {
            match self.step(&bytes[passed..]) {
                Ok(0) => break,
                Ok(step) => passed += step,
                Err(refusal) => self.refusal = Some(refusal),
            }
        }
        passed
    }

    /// Why nothing more passes.
    pub fn refusal(&self) -> Option<Refusal> {
        self.refusal
    }

    /// The number of heads that were let through.
    pub fn heads(&self) -> u32 {
        self.heads
    }

    /// Whether the head of a message has passed whose end has not.
    pub fn is_within_message(&self) -> bool {
        !matches!(self.at, At::Head)
    }

    /// The number of bytes at the start of `bytes` that may pass; 0 if more bytes must be seen first.
    fn step(&mut self, bytes: &[u8]) -> Result<usize, Refusal> {
        match self.at {
            At::Head => self.head(bytes),
            At::Data { left, chunked } => {
                let part = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                let left = left - part as u64;
                self.at = match (left, chunked) {
                    (0, true) => At::ChunkEnd,
                    (0, false) => At::Head,
                    _ => At::Data { left, chunked },
                };
                Ok(part)
            }
            At::ChunkSize => self.chunk_size(bytes),
            At::ChunkEnd => match bytes {
                [b'\r', b'\n', ..] => {
                    self.at = At::ChunkSize;
                    Ok(2)
                }
                [b'\r'] => Ok(0),
                _ => Err(Refusal::ChunkEnd),
            },
            At::Trailers => self.trailers(bytes),
        }
    }

    fn head(&mut self, bytes: &[u8]) -> Result<usize, Refusal> {
        while let Some(line) = self.next_line(bytes, self.max_head, Refusal::TooLarge)? {
            match &mut self.framing {
                // RFC 9112 (2.2) asks servers to skip an empty line before a request.
                None if line.is_empty() => {}
                None => self.framing = Some(Framing::of_request_line(line)?),
                Some(framing) if line.is_empty() => {
                    let next = framing.body()?;
                    self.framing = None;
                    self.heads = self.heads.wrapping_add(1);
                    return Ok(self.end_section(next));
                }
                Some(framing) => {
                    let (name, value) = field(line)?;
                    framing.note(name, value)?;
                }
            }
        }
        Ok(0)
    }

    fn trailers(&mut self, bytes: &[u8]) -> Result<usize, Refusal> {
        while let Some(line) = self.next_line(bytes, self.max_head, Refusal::TooLarge)? {
            if line.is_empty() {
                return Ok(self.end_section(At::Head));
            }
            let (name, _) = field(line)?;
            if Known::of(name).is_some() {
                return Err(Refusal::Trailer);
            }
        }
        Ok(0)
    }

    fn chunk_size(&mut self, bytes: &[u8]) -> Result<usize, Refusal> {
        let Some(line) = self.next_line(bytes, MAX_SIZE_LINE, Refusal::Extension)? else { return Ok(0) };
        let digits = memchr(b';', line).unwrap_or(line.len());
        if line.len() > digits + 1 + MAX_EXTENSION {
            return Err(Refusal::Extension);
        }
        let next = match chunk_size(&line[..digits])? {
            0 => At::Trailers,
            left => At::Data { left, chunked: true },
        };
        Ok(self.end_section(next))
    }

    /// The next line without its end, if it is complete. Refused as `too_long` if the line ends more than `limit`
    /// bytes after the last byte that passed.
    fn next_line<'a>(
        &mut self,
        bytes: &'a [u8],
        limit: usize,
        too_long: Refusal,
    ) -> Result<Option<&'a [u8]>, Refusal> {
        let Some(end) = memchr(b'\n', &bytes[self.scanned..]).map(|at| self.scanned + at) else {
            self.scanned = bytes.len();
            return if bytes.len() > limit { Err(too_long) } else { Ok(None) };
        };
        if end >= limit {
            return Err(too_long);
        }
        let line = bytes[self.line..end].strip_suffix(b"\r").ok_or(Refusal::BareLf)?;
        self.line = end + 1;
        self.scanned = end + 1;
        // No early exit, so that the compiler can vectorize the loop.
        let bad = line.iter().fold(false, |bad, &byte| bad | (byte < b' ' && byte != b'\t') | (byte == 0x7f));
        match bad {
            false => Ok(Some(line)),
            true if line.contains(&b'\r') => Err(Refusal::BareCr),
            true => Err(Refusal::Control),
        }
    }

    /// Starts the next section. Returns the length of the section that has ended.
    fn end_section(&mut self, next: At) -> usize {
        self.at = next;
        self.scanned = 0;
        std::mem::take(&mut self.line)
    }
}

impl Framing {
    fn of_request_line(line: &[u8]) -> Result<Framing, Refusal> {
        let mut parts = line.split(|&byte| byte == b' ');
        let parts = (parts.next(), parts.next(), parts.next(), parts.next());
        let (Some(method), Some(target), Some(version), None) = parts else {
            return Err(Refusal::RequestLine);
        };
        let is_http11 = match version {
            b"HTTP/1.1" => true,
            b"HTTP/1.0" => false,
            _ => return Err(Refusal::RequestLine),
        };
        if !is_token(method) || target.is_empty() || target.contains(&b'\t') {
            return Err(Refusal::RequestLine);
        }
        if method == b"CONNECT" {
            return Err(Refusal::Connect);
        }
        let authority = authority(method, target)?.map(Box::from);
        Ok(Framing { is_http11, authority, host_seen: false, length: None, chunked: false })
    }

    fn note(&mut self, name: &[u8], value: &[u8]) -> Result<(), Refusal> {
        let Some(known) = Known::of(name) else { return Ok(()) };
        let value = value.trim_ascii();
        match known {
            Known::Host if self.host_seen => return Err(Refusal::SecondHost),
            Known::Host if !is_host(value) => return Err(Refusal::Host),
            Known::Host
                if self.authority.as_ref().is_some_and(|target| !target.eq_ignore_ascii_case(value)) =>
            {
                return Err(Refusal::OtherHost);
            }
            Known::Host => self.host_seen = true,
            Known::Length if self.chunked => return Err(Refusal::LengthAndEncoding),
            Known::Length if self.length.is_some() => return Err(Refusal::SecondLength),
            Known::Length => self.length = Some(content_length(value)?),
            Known::Encoding if self.length.is_some() => return Err(Refusal::LengthAndEncoding),
            Known::Encoding if self.chunked => return Err(Refusal::SecondEncoding),
            Known::Encoding if !self.is_http11 => return Err(Refusal::OldEncoding),
            Known::Encoding if !value.eq_ignore_ascii_case(b"chunked") => return Err(Refusal::Encoding),
            Known::Encoding => self.chunked = true,
        }
        Ok(())
    }

    /// What follows the head.
    fn body(&self) -> Result<At, Refusal> {
        if self.is_http11 && !self.host_seen {
            return Err(Refusal::NoHost);
        }
        Ok(match self.length {
            _ if self.chunked => At::ChunkSize,
            None | Some(0) => At::Head,
            Some(left) => At::Data { left, chunked: false },
        })
    }
}

/// The headers that determine the end of a message or its host.
enum Known {
    Host,
    Length,
    Encoding,
}

impl Known {
    fn of(name: &[u8]) -> Option<Known> {
        let (known, text) = match name.len() {
            4 => (Known::Host, "host"),
            14 => (Known::Length, "content-length"),
            17 => (Known::Encoding, "transfer-encoding"),
            _ => return None,
        };
        name.eq_ignore_ascii_case(text.as_bytes()).then_some(known)
    }
}

/// The name and the value of a header line that is not empty; the value includes the white space around it.
fn field(line: &[u8]) -> Result<(&[u8], &[u8]), Refusal> {
    if is_blank(line[0]) {
        return Err(Refusal::Folded);
    }
    let end = line.iter().position(|&byte| !TOKEN[usize::from(byte)]).unwrap_or(line.len());
    match (&line[..end], &line[end..]) {
        ([], [b':', ..]) => Err(Refusal::NoName),
        (name, [b':', value @ ..]) => Ok((name, value)),
        (_, rest) => match memchr(b':', rest) {
            None => Err(Refusal::NoColon),
            Some(colon) if is_blank(rest[colon - 1]) => Err(Refusal::SpaceBeforeColon),
            Some(_) => Err(Refusal::Name),
        },
    }
}

fn content_length(value: &[u8]) -> Result<u64, Refusal> {
    let digits =
        std::str::from_utf8(value).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    digits.and_then(|digits| digits.parse().ok()).ok_or(Refusal::Length)
}

fn chunk_size(digits: &[u8]) -> Result<u64, Refusal> {
    if !(1..=MAX_SIZE_DIGITS).contains(&digits.len()) || !digits.iter().all(u8::is_ascii_hexdigit) {
        return Err(Refusal::ChunkSize);
    }
    let digit = |&byte| char::from(byte).to_digit(16).map_or(0, u64::from);
    Ok(digits.iter().fold(0, |size, byte| size << 4 | digit(byte)))
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

fn is_token(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(|&byte| TOKEN[usize::from(byte)])
}

/// The characters of methods and header names (RFC 9110, 5.6.2).
static TOKEN: [bool; 256] = alphanumeric_and(b"!#$%&'*+-.^_`|~");
/// The characters of a host name or address and a port.
static HOST: [bool; 256] = alphanumeric_and(b"-._~!$&'()*+,;=%:[]");

const fn alphanumeric_and(others: &[u8]) -> [bool; 256] {
    let mut table = [false; 256];
    let mut byte = 0;
    while byte < 128 {
        table[byte] = (byte as u8).is_ascii_alphanumeric();
        byte += 1;
    }
    let mut at = 0;
    while at < others.len() {
        table[others[at] as usize] = true;
        at += 1;
    }
    table
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Problem {
        let detail = refusal.to_string();
        match refusal {
            Refusal::TooLarge => {
                Problem::new(Kind::HEADERS_TOO_LARGE, detail).with("bound", "http.max_header_bytes")
            }
            _ => Problem::new(Kind::INVALID, detail),
        }
    }
}

#[cfg(test)]
mod tests;

//! Kinds of values that several sections have.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::fault::Location;
use super::reader::resolve;

/// The longest duration that any key accepts, in milliseconds.
pub const MAX_DURATION_MS: u64 = 3_600_000;

const MAX_NAME: usize = 64;
/// The rule for names of policies, stores and applications, for error messages.
pub const NAME_RULE: &str = "a name must have 1 to 64 characters, each one of a-z, 0-9, - and _";

/// Whether a name keeps [`NAME_RULE`].
pub fn is_plain_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    (1..=MAX_NAME).contains(&name.len()) && name.chars().all(is_plain)
}

/// Parses an address with a port.
pub fn address(text: &str, _place: &Location) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| format!("`{text}` is not an address; must be like 127.0.0.1:7070 or [::1]:7070"))
}

/// The path of a file that exists.
pub fn file(text: &str, place: &Location) -> Result<PathBuf, String> {
    let path = resolve(text, place);
    if path.is_file() { Ok(path) } else { Err(format!("there is no file {}", path.display())) }
}

/// The names of headers, in lower case.
pub fn header_names(texts: &[&str]) -> Result<Vec<String>, String> {
    let name = |text: &&str| match hyper::header::HeaderName::from_bytes(text.as_bytes()) {
        Ok(name) => Ok(name.as_str().to_owned()),
        Err(_) => Err(format!("`{text}` is not the name of a header")),
    };
    texts.iter().map(name).collect()
}

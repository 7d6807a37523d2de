//! A value of the query that names a lock is the only one that any application finds under its name.
//!
//! | reader | rules |
//! | --- | --- |
//! | WHATWG, application/x-www-form-urlencoded | pairs between `&`; `+` is a space |
//! | Rack 2, `QueryParser` | also between `;`; `a[b]`, `[a]` and `a]` are about `a`; the last one counts |
//! | qs (Express), `parseKeys` | `a[b]` and `[a]` are about `a` |
//! | PHP, `php_register_variable_ex` | spaces in front are ignored; a NUL ends a name; `.` and space are `_` |
//! | ASP.NET, `HttpUtility.ParseQueryString` | any case; `%uXXXX` is decoded |
//! | HTML 4.01, B.2.2 | pairs between `;` |

use arbitrary::{Result, Unstructured};

use super::input::one_of;
use super::paths::{request, route};
use super::readers::decode;
use crate::config::{Extension, Limits};
use crate::route::{self, Seen};

/// The rules of one application.
#[derive(Debug)]
struct Reader {
    semicolon: bool,
    brackets: bool,
    php: bool,
    any_case: bool,
    percent_u: bool,
    overlong: bool,
}

const NAMES: [&str; 3] = ["sku", "a.b", "user[id]"];

pub fn hold(u: &mut Unstructured<'_>) -> Result<()> {
    let name = one_of(u, &NAMES)?;
    let reader = Reader {
        semicolon: u.arbitrary()?,
        brackets: u.arbitrary()?,
        php: u.arbitrary()?,
        any_case: u.arbitrary()?,
        percent_u: u.arbitrary()?,
        overlong: u.arbitrary()?,
    };
    let query = query(u, name)?;
    let route = route("/items", Some(&format!("{{query.{name}}}")), false, Extension::Refuse, false);
    let Some(parts) = request(&format!("/items?{query}")) else { return Ok(()) };
    let Ok((_, matched)) = route::find([&route], &parts) else { panic!("/items has no route") };
    let lock = route.lock.as_ref().expect("a lock");
    let seen = Seen { body: Vec::new(), is_whole: true };
    let Ok(asked) = route::asked(lock, &parts, matched, seen, &Limits::default()) else { return Ok(()) };
    let found = reader.values(parts.uri.query().unwrap_or_default(), name);
    let is_it = |value: &Vec<u8>| *value == asked.resource.as_bytes();
    let found_text: Vec<_> = found.iter().map(|value| String::from_utf8_lossy(value)).collect();
    assert!(
        !found.is_empty() && found.iter().all(is_it),
        "{query} is {asked:?}, and {found_text:?} for {reader:?}",
        asked = asked.resource
    );
    Ok(())
}

impl Reader {
    /// The values that the application may take for that of the name.
    fn values(&self, query: &str, name: &str) -> Vec<Vec<u8>> {
        let wanted = self.name(name.as_bytes());
        let pairs = query.split(|c| c == '&' || (self.semicolon && c == ';'));
        let pairs =
            pairs.filter(|pair| !pair.is_empty()).map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        let found = pairs.filter(|(name, _)| self.name(&self.decode(name)) == wanted);
        found.map(|(_, value)| self.decode(value)).collect()
    }

    fn decode(&self, text: &str) -> Vec<u8> {
        decode(text.replace('+', " ").as_bytes(), self.percent_u, self.overlong)
    }

    fn name(&self, name: &[u8]) -> Vec<u8> {
        let mut name = name.to_vec();
        if self.php {
            name.truncate(name.iter().position(|byte| *byte == 0).unwrap_or(name.len()));
            name = name.trim_ascii_start().to_vec();
            name.iter_mut().filter(|byte| b" .".contains(byte)).for_each(|byte| *byte = b'_');
        }
        if self.brackets {
            let start = name.iter().position(|byte| !b"[]".contains(byte)).unwrap_or(name.len());
            name.drain(..start);
            name.truncate(name.iter().position(|byte| b"[]".contains(byte)).unwrap_or(name.len()));
        }
        if self.any_case { String::from_utf8_lossy(&name).to_lowercase().into_bytes() } else { name }
    }
}

/// A query with a few pairs, whose names are that of the lock in some spelling, or others.
fn query(u: &mut Unstructured<'_>, name: &str) -> Result<String> {
    let mut query = String::new();
    for at in 0..u.int_in_range(1..=3)? {
        if at > 0 {
            query.push_str(one_of(u, &["&", "&", "&", ";", "&amp;", "&&", "&;", "%26"])?);
        }
        if u.ratio(1, 16)? {
            query.push_str(u.arbitrary::<&str>()?);
            continue;
        }
        let is_odd = u.ratio(1, 2)?;
        if is_odd {
            query.push_str(one_of(u, &["", "+", "%20", "[", "]", "%5B", "_", "x"])?);
        }
        for c in name.chars() {
            let byte = c as u8;
            match if is_odd { u.int_in_range(0..=9)? } else { 0 } {
                0..=4 => query.push(c),
                5 => query.push(c.to_ascii_uppercase()),
                6 => query.push_str(&format!("%u{byte:04x}")),
                7 => query.push_str(&format!("%{:02x}%{:02x}", 0xc0 | byte >> 6, 0x80 | byte & 0x3f)),
                8 if c == '.' => query.push('_'),
                _ => query.push_str(&format!("%{byte:02x}")),
            }
        }
        if is_odd {
            query.push_str(one_of(u, &["", "[]", "[x]", "]", "%00", "%00x", "+", "%5B%5D", ".x", "_"])?);
        }
        query.push_str(one_of(u, &["=", "=", "=", "", "==", "%3D"])?);
        query.push_str(one_of(
            u,
            &["A", "B", "A+B", "a%20b", "%41", "%u0041", "%C1%81", "A;B", "%", "%FF", ""],
        )?);
    }
    Ok(query)
}

#[test]
fn a_value_that_names_a_lock_is_the_only_one_that_any_application_finds() {
    super::input::check(hold);
}

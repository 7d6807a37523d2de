//! What any application takes for one path takes one lock.
//!
//! An application has the same routes as the guarded listener in front of it, and reads paths by any of the rules in
//! `readers`. Whatever work it does for a path: the proxy has locked this work, under the name that a careful client's
//! request for the same work has, or it has refused the request.

use arbitrary::{Result, Unstructured};
use hyper::http::request::Parts;

use super::input::one_of;
use super::readers::{Handled, Reader};
use crate::config::{Extension, GuardLock, GuardRoute, Limits};
use crate::route::{self, Seen};

/// The routes of the application and of the listener, with the names of their locks.
const ROUTES: [(&str, Option<&str>); 8] = [
    ("/public/{*file}", None),
    ("/orders/{id}/pay", Some("pay/{id}")),
    ("/orders/{id:int}", Some("{path}")),
    ("/tasks/{name}", Some("tasks/{name}")),
    ("/tasks/{name}/{of:int}/skip", Some("{path}|{of}")),
    ("/files/{*rest}", Some("{path}|{rest}")),
    ("/health", None),
    ("/{*all}", None),
];

/// How the proxy decides about a request.
#[derive(Clone, Debug, PartialEq)]
enum Decision {
    Refused,
    Unlocked,
    /// The route and the name of the lock.
    Locked(usize, String),
}

/// The settings of the listener.
struct Listener {
    routes: Vec<GuardRoute>,
}

pub fn hold(u: &mut Unstructured<'_>) -> Result<()> {
    let mut reader = Reader::any(u)?;
    let listener = Listener::any(u, &mut reader)?;
    let words = words(u)?;
    let paths = [spelt(u, &words)?, spelt(u, &words)?];
    let patterns = ROUTES.map(|(pattern, _)| pattern);
    let found = paths.iter().filter_map(|path| {
        let request = request(path)?;
        let handled = Handled::by(&reader, &patterns, request.uri.path())?;
        Some((path, listener.decide(&request), handled))
    });
    let found: Vec<(&String, Decision, Handled)> = found.collect();
    for (path, decision, handled) in &found {
        let plain = handled.path(&patterns);
        // A few things cannot be said plainly, such as a name with a dot for an application that cuts extensions off.
        let is_same = Handled::by(&reader, &patterns, &plain).as_ref() == Some(handled);
        let plainly = request(&plain).filter(|_| is_same);
        let expected = plainly.map_or(Decision::Refused, |request| listener.decide(&request));
        let is_kept = match &expected {
            Decision::Locked(route, _) if listener.routes[*route].ambiguous_paths => true,
            Decision::Locked(..) => [&Decision::Refused, &expected].contains(&decision),
            // The proxy may lock more than it must.
            Decision::Unlocked | Decision::Refused => true,
        };
        assert!(is_kept, "{path} is {decision:?}, and {plain} is {expected:?}: {handled:?} for {reader:?}");
    }
    if let [(one, first, handled), (other, second, same)] = &found[..]
        && handled == same
        && let (Decision::Locked(route, _), Decision::Locked(..)) = (first, second)
        && !listener.routes[*route].ambiguous_paths
    {
        assert_eq!(first, second, "{one} and {other} are {handled:?} for {reader:?}");
    }
    Ok(())
}

impl Listener {
    /// A listener with any settings that are true of the application.
    fn any(u: &mut Unstructured<'_>, reader: &mut Reader) -> Result<Listener> {
        let extension =
            *u.choose(&[Extension::Refuse, Extension::Refuse, Extension::Ignore, Extension::Exact])?;
        let exact_case = u.ratio(1, 4)?;
        reader.any_case &= !exact_case;
        reader.format &= extension != Extension::Exact;
        let mut routes = Vec::new();
        for (pattern, name) in ROUTES {
            let is_last = pattern == "/{*all}";
            let ambiguous_paths = u.ratio(1, if is_last { 2 } else { 8 })?;
            let name = if is_last && u.ratio(1, 4)? { Some("{path}") } else { name };
            routes.push(route(pattern, name, exact_case, extension, ambiguous_paths));
        }
        Ok(Listener { routes })
    }

    fn decide(&self, request: &Parts) -> Decision {
        let Ok((at, matched)) = route::find(&self.routes, request) else { return Decision::Refused };
        let Some(lock) = &self.routes[at].lock else { return Decision::Unlocked };
        let seen = Seen { body: Vec::new(), is_whole: true };
        match route::asked(lock, request, matched, seen, &Limits::default()) {
            Ok(asked) => Decision::Locked(at, asked.resource),
            Err(_) => Decision::Refused,
        }
    }
}

/// A route of a listener, with a lock of this name.
pub fn route(
    pattern: &str,
    name: Option<&str>,
    exact_case: bool,
    extension: Extension,
    ambiguous_paths: bool,
) -> GuardRoute {
    let lock = name.map(GuardLock::named);
    GuardRoute { exact_case, extension, ambiguous_paths, lock, ..GuardRoute::at(pattern) }
}

/// The head of a request with this target. `None` if the HTTP library refuses the target.
pub fn request(target: &str) -> Option<Parts> {
    hyper::Request::builder().uri(target).body(()).ok().map(|request| request.into_parts().0)
}

const WORDS: [&str; 18] = [
    "orders",
    "pay",
    "42",
    "7",
    "tasks",
    "skip",
    "files",
    "public",
    "health",
    "a",
    "caf\u{e9}",
    "a b",
    "k",
    "..",
    "x;y",
    "a/b",
    "007",
    "v1.2",
];

const REQUESTS: [&str; 8] = [
    "orders/42/pay",
    "orders/7",
    "tasks/k",
    "tasks/a b/7/skip",
    "files/a/caf\u{e9}",
    "health",
    "public/a",
    "a/42",
];

/// The segments of a request, mostly of one that has a route, and sometimes behind another segment.
fn words(u: &mut Unstructured<'_>) -> Result<Vec<&'static str>> {
    if u.ratio(1, 4)? {
        return (0..u.int_in_range(0..=4)?).map(|_| one_of(u, &WORDS)).collect();
    }
    let mut words: Vec<&str> = one_of(u, &REQUESTS)?.split('/').collect();
    if u.ratio(1, 4)? {
        words.insert(0, one_of(u, &WORDS)?);
    }
    Ok(words)
}

/// A path of these segments in any spelling.
fn spelt(u: &mut Unstructured<'_>, words: &[&str]) -> Result<String> {
    if u.ratio(1, 16)? {
        return Ok(format!("/{}", u.arbitrary::<&str>()?));
    }
    let mut path = String::new();
    for word in words {
        path.push_str(if u.ratio(3, 4)? { "/" } else { one_of(u, &SEPARATORS)? });
        let is_odd = u.ratio(1, 3)?;
        for c in word.chars() {
            spell(u, c, is_odd, &mut path)?;
        }
        if u.ratio(1, 8)? {
            path.push_str(one_of(u, &SUFFIXES)?);
        }
    }
    if u.ratio(1, 4)? {
        path.push_str(one_of(u, &SEPARATORS)?);
    }
    Ok(if path.starts_with('/') { path } else { format!("/{path}") })
}

const SEPARATORS: [&str; 22] = [
    "/",
    "//",
    "\\",
    "/\\",
    "%2F",
    "%2f/",
    "%5C",
    "%252f",
    "%255c",
    "/./",
    "/../",
    "/x/../",
    "/%2e/",
    "/x/%2E%2e/",
    "/x/..;/",
    "/x/%252e%252e/",
    "/;p/",
    "/%3Bp/",
    "%c0%af",
    "%u002f",
    "/%20/",
    "/%",
];

const SUFFIXES: [&str; 20] = [
    ";x",
    ";x=1;y",
    "%3bx",
    "%253Bx",
    ".json",
    "%2ejson",
    "%252ejson",
    ".",
    ".a.b",
    "%00",
    "%00x",
    "%2500",
    "%0a",
    "%250A",
    "%20",
    "+",
    "?q",
    "#f",
    "%u0000",
    "%c0%80",
];

fn spell(u: &mut Unstructured<'_>, c: char, is_odd: bool, path: &mut String) -> Result<()> {
    let mut bytes = [0; 4];
    let bytes = c.encode_utf8(&mut bytes).bytes();
    let is_plain = c.is_ascii_alphanumeric() || ".;/-".contains(c);
    let choice = if is_odd { u.int_in_range(0..=11)? } else { 0 };
    match choice {
        0..=4 if is_plain => path.push(c),
        5 if is_plain && c.is_ascii_lowercase() => path.push(c.to_ascii_uppercase()),
        6 if c == 'k' => path.push_str("%E2%84%AA"),
        7 => bytes.for_each(|byte| path.push_str(&format!("%25{byte:02x}"))),
        8 if c.is_ascii() => path.push_str(&format!("%u{:04x}", u32::from(c))),
        9 if c.is_ascii() => {
            let byte = c as u8;
            path.push_str(&format!("%{:02x}%{:02x}", 0xc0 | byte >> 6, 0x80 | byte & 0x3f));
        }
        10 => bytes.for_each(|byte| {
            let digits = format!("{byte:02x}");
            path.push('%');
            digits.bytes().for_each(|digit| path.push_str(&format!("%{digit:02x}")));
        }),
        11 => bytes.for_each(|byte| {
            path.push_str("%25");
            format!("{byte:02x}").bytes().for_each(|digit| path.push_str(&format!("%{digit:02x}")));
        }),
        _ => bytes.for_each(|byte| path.push_str(&format!("%{byte:02X}"))),
    }
    Ok(())
}

#[test]
fn what_any_application_takes_for_one_path_takes_one_lock() {
    super::input::check(hold);
}

//! Spellings of a path that applications read in different ways.
//!
//! A reading is the path as some applications take it, written as a path again. So every reading is compared with the
//! routes' patterns in the same way.

use std::collections::BTreeSet;

use percent_encoding::percent_decode_str;

/// The longest path with an ambiguous part that is compared with routes in all of its readings.
pub const MAX_AMBIGUOUS_BYTES: usize = 2_048;

/// The parts of a path that some applications read as data and others as something else, and their names.
const MARKS: [(&str, &str); 5] =
    [(";", "`;`"), ("%3b", "`%3B`"), ("%2f", "`%2F`"), ("\\", "a backslash"), ("%5c", "`%5C`")];

/// Why no route accepts a path, whatever the routes' patterns.
pub fn fault(path: &str) -> Option<&'static str> {
    if path.starts_with("//") {
        return Some("begins with `//`, and some applications take what follows for a host");
    }
    if path.contains('%') {
        if !has_whole_escapes(path) {
            return Some("has a `%` that begins no escape, which would be read in different ways");
        }
        if percent_decode_str(path).any(|byte| byte.is_ascii_control()) {
            return Some("has an encoded control character, where some applications stop to read");
        }
        if percent_decode_str(path).decode_utf8().is_err() {
            return Some("is not UTF-8, and would be read in different ways");
        }
    }
    let has_dots = has_dots(path) || decoded_again(path).is_some_and(|path| has_dots(&path));
    has_dots.then_some("a part of the path is `.` or `..`, which would be read in different ways")
}

/// A part of the path that some applications read as data and others as a separator, the begin of a parameter, or
/// another escape.
pub fn ambiguity(path: &str) -> Option<&'static str> {
    let lower = path.contains('%').then(|| path.to_ascii_lowercase());
    let lower = lower.as_deref().unwrap_or(path);
    let mark = MARKS.into_iter().find_map(|(mark, name)| lower.contains(mark).then_some(name));
    mark.or_else(|| decoded_again(path).map(|_| "an escape of an escape, as `%2541`,"))
}

/// The readings of a path with an [`ambiguity`]: each combination of what its ambiguous parts can mean.
pub fn readings(path: &str) -> BTreeSet<String> {
    const MEANINGS: [fn(&str) -> Option<String>; 6] = [
        decoded_again,
        |path| replaced(path, &["%3b"], ";"),
        |path| replaced(path, &["\\", "%5c"], "/"),
        // An encoded slash is part of a segment, or it separates two.
        |path| replaced(path, &["%2f"], "%252F"),
        |path| replaced(path, &["%2f"], "/"),
        |path| replaced(path, &[";"], "%3B"),
    ];
    let mut readings = BTreeSet::from([path.to_owned()]);
    for meaning in MEANINGS {
        let more: Vec<String> = readings.iter().filter_map(|reading| meaning(reading)).collect();
        readings.extend(more);
    }
    readings
}

/// The path without the extension of its last segment, which some applications take for the format of the answer:
/// `/orders/42` for `/orders/42.json`. `None` if there is none.
///
/// The last segment is the last one that has a name before its parameters, as in `/orders/42.json;v=1.2/;x/`.
pub fn without_extension(path: &str) -> Option<String> {
    let name = |start: usize| path[start..].split(['/', ';']).next().unwrap_or_default();
    let mut starts = path.rmatch_indices('/').map(|(slash, _)| slash + 1);
    let start = starts.find(|start| !name(*start).is_empty())?;
    let last = name(start);
    let dot = last.rfind('.').into_iter().chain(last.rfind("%2e")).chain(last.rfind("%2E")).max()?;
    (dot > 0).then(|| path[..start + dot].to_owned())
}

fn has_whole_escapes(path: &str) -> bool {
    let is_whole = |rest: &str| rest.bytes().take(2).filter(u8::is_ascii_hexdigit).count() == 2;
    path.split('%').skip(1).all(is_whole)
}

/// The path for an application that decodes it twice. `None` if that changes nothing.
fn decoded_again(path: &str) -> Option<String> {
    if !path.contains("%25") {
        return None;
    }
    let (mut text, mut rest, mut is_changed) = (String::new(), &*without_needless_escapes(path), false);
    while let Some(at) = rest.find("%25") {
        let after = &rest[at + 3..];
        let is_escape = after.bytes().take(2).filter(u8::is_ascii_hexdigit).count() == 2;
        is_changed |= is_escape;
        text.push_str(&rest[..at]);
        text.push_str(if is_escape { "%" } else { "%25" });
        rest = after;
    }
    text.push_str(rest);
    is_changed.then_some(text)
}

/// The path without the escapes of characters that need none.
fn without_needless_escapes(path: &str) -> String {
    let mut parts = path.split('%');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) => {
                text.push(byte.into());
                text.push_str(&part[2..]);
            }
            _ => {
                text.push('%');
                text.push_str(part);
            }
        }
    }
    text
}

/// The path with one text in place of others, which are in lower case. `None` if it has none of them.
fn replaced(path: &str, texts: &[&str], by: &str) -> Option<String> {
    let changed = texts
        .iter()
        .fold(path.to_owned(), |path, text| path.replace(text, by).replace(&text.to_ascii_uppercase(), by));
    (changed != path).then_some(changed)
}

/// Whether a segment means the current or the parent folder, in any encoding.
fn has_dots(path: &str) -> bool {
    let dots = |part: &str| {
        let part = part.replace("%2e", ".").replace("%2E", ".");
        // Some applications take the text after a semicolon for a parameter, and only look at the text before it.
        let name = part.split(';').next().unwrap_or_default();
        let name = name.split("%3b").flat_map(|name| name.split("%3B")).next().unwrap_or_default();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dot_segments_are_found_in_every_spelling() {
        for path in [
            "/a/../b",
            "/a/./b",
            "/..",
            "/a/%2e%2E/b",
            "/a/.%2e",
            "/a%2f..%2fb",
            "/a/..;x/b",
            "/a/..%3Bx/b",
            "/a\\..\\b",
            "/a/%2e%5c",
            "/a/%252e%252E/b",
            "/a/.%25%32e/b",
        ] {
            assert!(fault(path).is_some_and(|fault| fault.contains("`..`")), "{path}");
        }
        for path in ["/a.b/c", "/...", "/a/%20", "/.well-known/x", "/a..b"] {
            assert_eq!(fault(path), None, "{path}");
        }
    }

    #[test]
    fn what_is_no_plain_text_is_a_fault() {
        for path in
            ["/a%", "/a%4", "/a%zz", "/4%u0032", "/%%34%32", "/a%00", "/a%0A/b", "/a%7f", "//a", "/a.%C0%AFb"]
        {
            assert!(fault(path).is_some(), "{path}");
        }
        for path in ["/a%20b", "/%C3%A9", "/100%25", "/"] {
            assert_eq!(fault(path), None, "{path}");
        }
    }

    #[test]
    fn an_ambiguous_path_has_a_reading_for_each_meaning() {
        for (path, expected) in [
            ("/a\\b", &["/a/b", "/a\\b"][..]),
            ("/a%2fb", &["/a%252Fb", "/a%2fb", "/a/b"]),
            ("/a;b", &["/a%3Bb", "/a;b"]),
            ("/a%3bb", &["/a%3Bb", "/a%3bb", "/a;b"]),
            ("/p%2561y", &["/p%2561y", "/p%61y"]),
            ("/p%25%36%31y", &["/p%25%36%31y", "/p%61y"]),
            ("/a%252Fb", &["/a%252Fb", "/a%2Fb", "/a/b"]),
        ] {
            assert!(ambiguity(path).is_some(), "{path}");
            assert_eq!(readings(path).into_iter().collect::<Vec<_>>(), expected, "{path}");
        }
        for path in ["/a/b", "/100%25", "/100%25/ab", "/a%20b", "/a.b"] {
            assert_eq!(ambiguity(path), None, "{path}");
        }
    }

    #[test]
    fn an_extension_is_what_follows_the_last_dot() {
        for (path, expected) in [
            ("/orders/42.json", Some("/orders/42")),
            ("/orders/42%2ejson", Some("/orders/42")),
            ("/orders/42.a.json/", Some("/orders/42.a")),
            ("/orders/42.", Some("/orders/42")),
            ("/orders/42.json;v=1.2", Some("/orders/42")),
            ("/orders/42.json//;x/;y.z", Some("/orders/42")),
            ("/orders.v1/42", None),
            ("/.well-known", None),
            ("/", None),
        ] {
            assert_eq!(without_extension(path).as_deref(), expected, "{path}");
        }
    }
}

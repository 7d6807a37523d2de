//! Tests of different spellings of a path, and of invalid patterns and templates.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::*;

fn captures(pattern: &str, path: &str) -> Option<String> {
    let Fit::Yes(matched) = PathPattern::parse(pattern).unwrap().fit(path, true) else { return None };
    Some(matched.captures.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(","))
}

#[test]
fn a_path_matches_however_it_is_spelt() {
    for path in ["/orders/42/pay", "/orders/42/pay/", "//orders//42/pay", "/orders/%34%32/p%61y"] {
        assert_eq!(captures("/orders/{id}/pay", path).as_deref(), Some("id=42"), "{path}");
    }
    assert_eq!(captures("/orders/{id}/pay", "/orders%2F42/pay").as_deref(), Some("id=42"));
    assert_eq!(captures("/orders/{id}/pay", "/orders/a%2Fb/pay").as_deref(), Some("id=a/b"));
    assert_eq!(captures("/orders/{id}/pay", "/orders/%2F42%2f%2F/pay%2F").as_deref(), Some("id=42"));
    assert_eq!(captures("/orders/{id}/pay", "/orders;x=1/42;y/pay;").as_deref(), Some("id=42"));
    for path in ["/orders/42", "/orders/42/pay/now", "/orders/42/PAY", "/orders/%ff/pay", "/"] {
        assert_eq!(captures("/orders/{id}/pay", path), None, "{path}");
    }
}

#[test]
fn paths_match_in_any_case_unless_the_route_requires_the_exact_case() {
    let pattern = PathPattern::parse("/Orders/{id}/pay").unwrap();
    for path in ["/orders/Ab/pay", "/ORDERS/Ab/PAY/", "/%4frders/Ab/p%41y"] {
        assert_eq!(pattern.fit(path, true), Fit::No, "{path}");
        let Fit::Yes(matched) = pattern.fit(path, false) else { panic!("{path}") };
        assert_eq!(matched.path, "/Orders/Ab/pay", "what a name stands for keeps its case: {path}");
    }
    // Readers that ignore case take the long s and the Kelvin sign for s and k.
    assert_ne!(PathPattern::parse("/tasks").unwrap().fit("/ta%c5%bf%e2%84%aas", false), Fit::No);
}

#[test]
fn an_integer_capture_has_one_spelling() {
    for path in ["/orders/42/pay", "/orders/0/pay", "/orders/%34%32/pay"] {
        assert!(captures("/orders/{id:int}/pay", path).is_some(), "{path}");
    }
    let pattern = PathPattern::parse("/orders/{id:int}/pay").unwrap();
    for id in ["042", "+42", "%2042", "42.json", "4%D9%A2", "0x2a", "-1", "00"] {
        assert_eq!(pattern.fit(&format!("/orders/{id}/pay"), false), Fit::Unclear("id".to_owned()), "{id}");
        assert_eq!(pattern.fit(&format!("/orders/{id}/show"), false), Fit::No, "{id}");
    }
    assert_eq!(pattern.fit("/orders/new/pay", false), Fit::No);
}

/// A random segment without `/`.
fn any_segment(random: &mut StdRng) -> String {
    let letters: Vec<char> = "aZ09-._~!$&'()*+,;=:@%? #{}|\\\"é日🦀".chars().collect();
    (0..random.random_range(1..6)).map(|_| letters.choose(random).unwrap()).collect()
}

/// A random spelling of a segment: some bytes must be encoded, and some others are.
fn spelt(random: &mut StdRng, segment: &str) -> String {
    let mut text = String::new();
    for byte in segment.bytes() {
        // A plain semicolon begins a parameter, which is ignored. A pattern cannot contain asterisks.
        let plain = byte.is_ascii_alphanumeric() || b"-._~!$&'()+,=:@".contains(&byte);
        match (plain, random.random_range(0..4)) {
            (true, 0..3) => text.push(byte.into()),
            (_, 0..2) => text.push_str(&format!("%{byte:02x}")),
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

/// Joins segments with random separators; separators may also follow the last segment.
fn sent(random: &mut StdRng, segments: &[String], separators: &[&str]) -> String {
    let mut path = String::new();
    for segment in segments {
        path.push_str(separators.choose(random).unwrap());
        path.push_str(&spelt(random, segment));
    }
    match random.random() {
        true => path + separators.choose(random).unwrap(),
        false => path,
    }
}

#[test]
fn every_spelling_of_a_path_has_the_same_captures() {
    for seed in 0..20_000 {
        let random = &mut StdRng::seed_from_u64(seed);
        let segments: Vec<String> = (0..random.random_range(1..6)).map(|_| any_segment(random)).collect();
        let (mut pattern, mut expected) = (String::new(), Vec::new());
        let rest_from = random.random_range(0..segments.len() * 2);
        for (at, segment) in segments.iter().enumerate().take(rest_from) {
            if random.random() {
                pattern.push_str(&format!("/{{n{at}}}"));
                expected.push((format!("n{at}"), segment.clone()));
            } else {
                pattern.push_str(&format!("/{}", spelt(random, segment)));
            }
        }
        if rest_from <= segments.len() {
            pattern.push_str("/{*rest}");
            expected.push(("rest".to_owned(), segments[rest_from..].join("/")));
        }
        let parsed = PathPattern::parse(&pattern).unwrap();
        // An encoded slash beside another slash separates nothing more, in any order of decoding.
        for separators in [&["/"][..], &["/", "//", "///"], &["/", "/%2F", "%2f/", "/%2F%2f//"]] {
            let path = sent(random, &segments, separators);
            let Fit::Yes(matched) = parsed.fit(&path, true) else { panic!("{seed}: {pattern}: {path}") };
            assert_eq!(matched.captures, expected, "{seed}: {pattern}: {path}");
            assert_eq!(matched.path, format!("/{}", segments.join("/")), "{seed}: {pattern}: {path}");
        }
        let longer = [&segments[..], &["x".to_owned()]].concat();
        let matches = parsed.fit(&sent(random, &longer, &["/"]), true) != Fit::No;
        assert_eq!(matches, rest_from <= segments.len(), "{seed}: {pattern}: {longer:?}");
    }
}

#[test]
fn a_rest_capture_matches_any_remaining_path_or_none() {
    assert_eq!(captures("/files/{*rest}", "/files/a/b").as_deref(), Some("rest=a/b"));
    assert_eq!(captures("/files/{*rest}", "/files").as_deref(), Some("rest="));
    assert_eq!(captures("/{*rest}", "/").as_deref(), Some("rest="));
    assert_eq!(captures("/", "/").as_deref(), Some(""));
}

#[test]
fn an_invalid_pattern_is_refused_with_a_reason() {
    for (text, expected) in [
        ("orders", "must begin with `/`"),
        ("/a{id}", "not both"),
        ("/{*rest}/x", "must be the last"),
        ("/{}", "a name has"),
        ("/{id}/{id}", "twice"),
        ("/{id:uuid}", "no kind"),
        ("/%ff", "percent-encoded"),
        ("/a;b", "does not count"),
        ("/a/*", "{*name} for all that is left"),
    ] {
        let error = PathPattern::parse(text).unwrap_err();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn a_template_names_the_parts_of_a_request() {
    let template = Template::parse("{method} a/{id}-{header.X-Key}{query.q}{json.order.id}{path}").unwrap();
    let text = |text: &str| Part::Text(text.to_owned());
    let expected = [
        Part::Method,
        text(" a/"),
        Part::Capture("id".into()),
        text("-"),
        Part::Header("x-key".into()),
        Part::Query("q".into()),
        Part::Json("order.id".into()),
        Part::Path,
    ];
    assert_eq!(template.parts(), expected);
    assert!(template.reads_body());
    for (text, expected) in [
        ("", "empty"),
        ("{", "brace"),
        ("a}", "brace"),
        ("{cookie.x}", "not known"),
        ("{header.}", "no header"),
    ] {
        let error = Template::parse(text).unwrap_err();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

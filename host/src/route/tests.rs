//! Requests in equivalent spellings.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::*;

fn route(path: &str, resource: &str) -> GuardRoute {
    GuardRoute {
        extension: Extension::Exact,
        ambiguous_paths: true,
        lock: Some(GuardLock::named(resource)),
        ..GuardRoute::at(path)
    }
}

fn parts(target: &str) -> Parts {
    let request = hyper::Request::builder().method("PUT").uri(target).body(());
    request.unwrap_or_else(|error| panic!("{target}: {error}")).into_parts().0
}

/// The index of the route that a request takes, and the name of its lock.
fn named(routes: &[GuardRoute], target: &str) -> (usize, String) {
    let parts = parts(target);
    let (at, matched) = find(routes, &parts).unwrap_or_else(|problem| panic!("{target}: {problem:?}"));
    let lock = routes[at].lock.as_ref().unwrap();
    let asked = asked(lock, &parts, matched, Seen { body: Vec::new(), is_whole: true }, &Limits::default());
    (at, asked.unwrap_or_else(|problem| panic!("{target}: {problem:?}")).resource)
}

/// A random spelling of a text; it escapes bytes that must be encoded, and some that need not be.
fn spelt(random: &mut StdRng, text: &str) -> String {
    let mut sent = String::new();
    for byte in text.bytes() {
        let plain = byte.is_ascii_alphanumeric() || b"-._~!$'()*,:@".contains(&byte);
        match (plain, random.random_range(0..4)) {
            (true, 0..3) => sent.push(byte.into()),
            (_, 0..2) => sent.push_str(&format!("%{byte:02x}")),
            _ => sent.push_str(&format!("%{byte:02X}")),
        }
    }
    sent
}

fn one_of<'a>(random: &mut StdRng, texts: &[&'a str]) -> &'a str {
    texts.choose(random).unwrap()
}

/// Equivalent spellings of a request get the same lock.
#[test]
fn every_spelling_of_a_request_is_locked_by_the_same_name() {
    let routes = [
        route("/orders/{id}/pay", "pay/{id}"),
        route("/orders/{id}", "{method} {id} {query.of}"),
        route("/caf%C3%A9/{*rest}", "{path}|{rest}"),
        route("/{*all}", "{path}"),
    ];
    let letters: Vec<char> = "aZ09-_~!$&'()*+,=:@%? #{}|é日🦀".chars().collect();
    for seed in 0..20_000 {
        let random = &mut StdRng::seed_from_u64(seed);
        let id: String = (0..random.random_range(1..6)).map(|_| *letters.choose(random).unwrap()).collect();
        let cases = [
            (vec!["orders", &*id, "pay"], 0, format!("pay/{id}")),
            (vec!["orders", &*id], 1, format!("PUT {id} x{id}")),
            (vec!["café", "a", &*id], 2, format!("/café/a/{id}|a/{id}")),
            (vec!["other", &*id, "b", "c"], 3, format!("/other/{id}/b/c")),
        ];
        for (segments, at, name) in cases {
            let mut target = String::new();
            for segment in segments {
                target.push_str(one_of(random, &["/", "/", "//", "/%2F", "%2f/"]));
                target.push_str(&spelt(random, segment));
            }
            target.push_str(one_of(random, &["", "/", "//", "%2F"]));
            target.push_str(&format!("?{}={}&y", spelt(random, "of"), spelt(random, &format!("x{id}"))));
            // The first separator is neither an encoded one alone nor doubled.
            let target = format!("/{}", target.trim_start_matches('/'));
            assert_eq!(named(&routes, &target), (at, name), "{seed}: {target}");
        }
    }
}

#[test]
fn no_spelling_of_a_dot_segment_has_a_route() {
    let routes = [route("/{*all}", "{path}")];
    for seed in 0..20_000 {
        let random = &mut StdRng::seed_from_u64(seed);
        let mut path = "/a".to_owned();
        let separators = ["/", "//", "%2F", "%2f", "%5c", "%5C", "/%2F"];
        path.push_str(one_of(random, &separators));
        let step = one_of(random, &[".", ".."]);
        path.push_str(&spelt(random, step));
        path.push_str(one_of(random, &["", ";", ";x=1"]));
        if random.random() {
            path.push_str(&format!("{}b", one_of(random, &separators)));
        }
        let found = find(&routes, &parts(&path));
        assert!(found.is_err_and(|problem| problem.status_code() == 400), "{seed}: {path}");
    }
}

/// A route with the default settings.
fn strict(path: &str) -> GuardRoute {
    GuardRoute { lock: Some(GuardLock::named("{path}")), ..GuardRoute::at(path) }
}

fn unlocked(path: &str) -> GuardRoute {
    GuardRoute::at(path)
}

fn refused(routes: &[GuardRoute], parts: &Parts) -> String {
    let Err(problem) = find(routes, parts) else { panic!("{} has a route", parts.uri) };
    assert_eq!(problem.status_code(), 400, "{}", parts.uri);
    format!("{problem:?}")
}

/// A request that an application may take for another request does not reach a route without a lock.
#[test]
fn a_path_that_is_read_in_different_ways_is_refused_by_every_route() {
    let routes = [strict("/orders/{id}/pay"), strict("/{*all}")];
    for path in [
        "/orders/42;x/pay",
        "/orders;x/42/pay",
        "/orders%2F42/pay",
        "/a%5cb",
        "/orders/42/pay;",
        "/orders/42%3Bx/pay",
        "/orders/42/p%2561y",
    ] {
        assert!(refused(&routes, &parts(path)).contains("ambiguous_paths"), "{path}");
        let allowed = [route("/orders/{id}/pay", "{path}"), route("/{*all}", "{path}")];
        named(&allowed, path);
    }
    for path in [
        "//x/orders/42/pay",
        "//orders/42/pay",
        "/orders/42%00/pay",
        "/orders/42/pay%0A",
        "/orders/4%u0032/pay",
        "/orders/42/x%252F%252e%252e/pay",
    ] {
        refused(&[route("/{*all}", "{path}")], &parts(path));
    }
    assert_eq!(named(&routes, "/ORDERS//42/Pay/"), (0, "/orders/42/pay".to_owned()));
    let exact = [GuardRoute { exact_case: true, ..strict("/orders/{id}/pay") }, strict("/{*all}")];
    assert_eq!(named(&exact, "/ORDERS/42/pay"), (1, "/ORDERS/42/pay".to_owned()));
}

/// A route that allows ambiguous paths opens no way around a route that does not.
#[test]
fn a_path_that_may_be_that_of_a_locked_route_takes_no_other_route() {
    let open = GuardRoute { ambiguous_paths: true, ..unlocked("/{*all}") };
    let routes = [strict("/orders/{id}/pay"), open];
    for path in [
        "/orders\\42\\pay",
        "/orders%5C42/pay",
        "/orders/42%3Bx/pay%3By",
        "/orders/42/p%2561y",
        "/orders/;x/pay",
        "/orders%252F42/pay",
        "/orders/42/pay%3B.json",
        "/\\x/orders/42/pay",
        // The extension is not at the end of the path.
        "/orders/42/pay.json/;x/",
        "/orders/42/pay.json;v=1.2",
        "/%25%36%66rd%65r%73/42//pay%2ejson/%3Bp/",
    ] {
        assert!(refused(&routes, &parts(path)).contains("/orders/{id}/pay"), "{path}");
    }
    for path in ["/a;b", "/a%2Fb/c", "/orders;x/42", "/a\\b.js"] {
        assert_eq!(find(&routes, &parts(path)).unwrap().0, 1, "{path}");
    }
    // What the routes say of extensions does not matter if the path is ambiguous as well.
    let ignore = routes.clone().map(|route| GuardRoute { extension: Extension::Ignore, ..route });
    let detail = refused(&ignore, &parts("/orders/42/\\pay.json"));
    assert!(detail.contains("/orders/{id}/pay") && detail.contains("a backslash"), "{detail}");
    // An application that does not decode the slash may read `42%2Fpay` as the number 42.
    let pay = GuardRoute { ambiguous_paths: true, ..strict("/orders/{id}/pay") };
    let detail = refused(&[pay, strict("/orders/{id:int}")], &parts("/orders/42%2Fpay"));
    assert!(detail.contains("/orders/{id:int}"), "{detail}");
    let tasks = GuardRoute { ambiguous_paths: true, ..strict("/tasks/{name}") };
    let routes_behind = [tasks, strict("/{*all}")];
    assert_eq!(named(&routes_behind, "/tasks/a%3Bb").0, 0);
    assert!(
        refused(&routes_behind, &parts("/tasks/%3Bb")).contains("/{*all}"),
        "without the parameter it is /tasks"
    );
    let long = format!("/a;{}", "b".repeat(spelling::MAX_AMBIGUOUS_BYTES));
    assert!(refused(&routes, &parts(&long)).contains("2048"));
}

#[test]
fn an_extension_does_not_lead_around_a_lock() {
    let routes = [strict("/orders/{id}/pay"), strict("/orders/{id}"), unlocked("/{*all}")];
    for path in ["/orders/42/pay.json", "/orders/42.json", "/Orders/42/Pay%2ejson/", "/orders/42/pay."] {
        assert!(refused(&routes, &parts(path)).contains("extension"), "{path}");
    }
    for path in ["/app.js", "/orders.json", "/orders/4.2/pay/now", "/.well-known/x"] {
        assert_eq!(find(&routes, &parts(path)).unwrap().0, 2, "{path}");
    }
    assert_eq!(named(&routes, "/orders/4.2/pay"), (0, "/orders/4.2/pay".to_owned()));
    let of = |extension| routes.clone().map(|route| GuardRoute { extension, ..route });
    let ignore = of(Extension::Ignore);
    assert_eq!(named(&ignore, "/orders/42/pay.json"), (0, "/orders/42/pay".to_owned()));
    assert_eq!(named(&ignore, "/orders/42.json"), (1, "/orders/42".to_owned()));
    assert_eq!(named(&[GuardRoute { extension: Extension::Ignore, ..strict("/a.json") }], "/a.json").0, 0);
    let exact = of(Extension::Exact);
    assert_eq!(find(&exact, &parts("/orders/42/pay.json")).unwrap().0, 2);
    assert_eq!(named(&exact, "/orders/42.json"), (1, "/orders/42.json".to_owned()));
    // The path without its extension is that of a route without a lock.
    let free = [unlocked("/health"), strict("/{all}")];
    assert_eq!(named(&free, "/health.json"), (1, "/health.json".to_owned()));
}

#[test]
fn parameters_of_a_segment_are_no_part_of_a_name() {
    let routes = [route("/orders/{id}/pay", "{path}|{id}")];
    assert_eq!(named(&routes, "/orders;v=1/42;x/pay"), (0, "/orders/42/pay|42".to_owned()));
}

#[test]
fn a_number_that_has_another_spelling_is_refused() {
    let routes = [route("/orders/{id:int}", "orders/{id}"), route("/{*all}", "{path}")];
    assert_eq!(named(&routes, "/orders/42"), (0, "orders/42".to_owned()));
    assert_eq!(named(&routes, "/orders/new"), (1, "/orders/new".to_owned()));
    assert!(refused(&routes, &parts("/orders/42.json")).contains("whole number"));
}

#[test]
fn head_takes_the_route_of_get() {
    let only = |method: &str| GuardRoute { methods: vec![method.to_owned()], ..route("/a", "{path}") };
    let mut head = parts("/a");
    head.method = hyper::Method::HEAD;
    assert_eq!(find(&[only("POST"), only("GET")], &head).unwrap().0, 1);
    assert_eq!(
        find(&[GuardRoute { methods: vec!["GET".into(), "HEAD".into()], ..only("GET") }], &head).unwrap().0,
        0
    );
    assert!(find(&[only("POST")], &head).is_err());
}

#[test]
fn a_header_names_a_request_only_by_one_value_in_utf8() {
    let routes = [route("/items", "{header.sku}")];
    let named = |values: &[&[u8]]| {
        let mut parts = parts("/items");
        for value in values {
            parts.headers.append("sku", hyper::header::HeaderValue::from_bytes(value).unwrap());
        }
        let (at, matched) = find(&routes, &parts).unwrap();
        let seen = Seen { body: Vec::new(), is_whole: true };
        let asked = asked(routes[at].lock.as_ref().unwrap(), &parts, matched, seen, &Limits::default());
        asked.map(|asked| asked.resource).map_err(|problem| problem.status_code())
    };
    assert_eq!(named(&["é".as_bytes()]), Ok("é".to_owned()));
    for values in [&[] as &[&[u8]], &[b""], &[b"A", b"B"], &[b"\xe9"], &[b"\xe8"]] {
        assert_eq!(named(values), Err(400), "{values:?}");
    }
}

#[test]
fn an_ambiguous_query_names_no_request() {
    let routes = [route("/items", "{query.sku}")];
    assert_eq!(named(&routes, "/items?sku=A&x=1").1, "A");
    assert_eq!(named(&routes, "/items?sku=A%3BB").1, "A;B");
    assert_eq!(named(&routes, "/items?sku=A&skus=B&x.sku=C&x[sku]=D").1, "A");
    for query in [
        "sku=A&x=1;sku=B",
        "sku=A;B",
        "sku=A&SKU=B",
        "sku=A&sku[]=B",
        "sku=A&%73ku=B",
        "SKU=A",
        "sku=A&[sku]=B",
        "sku=A&sku]=B",
        "sku=A&%5Bsku=B",
        "sku=A&sku%00x=B",
        "sku=A&+sku=B",
        "sku=A&%u0073ku=B",
        "sku=%u0041",
        "sku=%C1%81",
    ] {
        let parts = parts(&format!("/items?{query}"));
        let (at, matched) = find(&routes, &parts).unwrap();
        let seen = Seen { body: Vec::new(), is_whole: true };
        let asked = asked(routes[at].lock.as_ref().unwrap(), &parts, matched, seen, &Limits::default());
        assert_eq!(asked.map(|asked| asked.resource).unwrap_err().status_code(), 400, "{query}");
    }
}

#[test]
fn a_route_that_sees_more_than_was_read_cannot_name_a_request() {
    let body = |text: &str, is_whole| Seen { body: text.into(), is_whole };
    let limited = |seen: Seen, bytes| seen.limited_to(bytes).map(|seen| (seen.body, seen.is_whole));
    for (seen, bytes, expected) in [
        (body("abcd", false), 5, None),
        (body("abcd", false), 4, Some(("abcd", false))),
        (body("abcd", false), 3, Some(("abc", false))),
        (body("abcd", true), 9, Some(("abcd", true))),
        (body("abcd", true), 3, Some(("abc", false))),
        (body("", false), 1, None),
        (body("", false), 0, Some(("", false))),
        (body("", true), 0, Some(("", true))),
    ] {
        let expected = expected.map(|(text, is_whole)| (text.into(), is_whole));
        assert_eq!(limited(seen, bytes), expected, "{bytes}");
    }
}

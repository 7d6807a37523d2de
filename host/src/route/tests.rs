//! Requests in other words.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::*;
use crate::config::PathPattern;
use crate::lock::Mode;

fn route(path: &str, resource: &str) -> GuardRoute {
    GuardRoute {
        methods: Vec::new(),
        path: PathPattern::parse(path).unwrap(),
        headers: Vec::new(),
        upstreams: vec!["127.0.0.1:9".into()],
        lock: Some(GuardLock {
            policy: "default".into(),
            resource: Template::parse(resource).unwrap(),
            mode: Mode::Exclusive,
            ttl_ms: None,
            wait_ms: None,
            labels: Vec::new(),
            see_headers: Vec::new(),
            see_body_bytes: 0,
            fail_open: false,
            caller: Vec::new(),
            max_replay_bytes: 0,
        }),
        response_timeout: Duration::from_secs(1),
        idle_timeout: Duration::from_secs(1),
        health: None,
    }
}

fn parts(target: &str) -> Parts {
    let request = hyper::Request::builder().method("PUT").uri(target).body(());
    request.unwrap_or_else(|error| panic!("{target}: {error}")).into_parts().0
}

/// The place of the route that a request takes, and the name of its lock.
fn named(routes: &[GuardRoute], target: &str) -> (usize, String) {
    let parts = parts(target);
    let (at, captures) = find(routes, &parts).unwrap_or_else(|problem| panic!("{target}: {problem:?}"));
    let lock = routes[at].lock.as_ref().unwrap();
    let asked = asked(lock, &parts, captures, Seen { body: Vec::new(), is_whole: true }, &Limits::default());
    (at, asked.unwrap_or_else(|problem| panic!("{target}: {problem:?}")).resource)
}

/// One of the ways to send a text; with bytes that must be encoded, and others that need not.
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

/// Whoever sends the same request in other words has the same lock.
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
            // The first separator may not be an encoded one alone.
            let target = if target.starts_with('/') { target } else { format!("/{target}") };
            assert_eq!(named(&routes, &target), (at, name), "{seed}: {target}");
        }
    }
}

#[test]
fn no_spelling_of_a_step_upwards_has_a_route() {
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

#[test]
fn dots_are_found_however_they_are_spelt() {
    for path in [
        "/a/../b",
        "/a/./b",
        "/..",
        "/a/%2e%2E/b",
        "/a/.%2e",
        "/a%2f..%2fb",
        "/a/..;x/b",
        "/a\\..\\b",
        "/a/%2e%5c",
    ] {
        assert!(has_dots(path), "{path}");
    }
    for path in ["/a.b/c", "/...", "/a/%20", "/.well-known/x", "/a..b"] {
        assert!(!has_dots(path), "{path}");
    }
}

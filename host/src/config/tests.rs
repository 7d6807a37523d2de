use std::path::Path;

use super::*;

fn parse(text: &str) -> Result<Config, Vec<String>> {
    parse_with(text, &[])
}

fn parse_with(text: &str, env: &[(&str, &str)]) -> Result<Config, Vec<String>> {
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Config::parse(Path::new("config.toml"), text, &env)
        .map_err(|faults| faults.iter().map(Fault::to_string).collect())
}

/// The only fault of a text.
fn fault(text: &str) -> String {
    let mut faults = parse(text).expect_err(text);
    assert_eq!(faults.len(), 1, "{faults:#?}");
    faults.remove(0)
}

const FILE: &str = include_str!("../../../config.toml");

#[test]
fn the_configuration_file_shows_every_default() {
    let config = parse(FILE).unwrap();
    assert_eq!(format!("{config:#?}"), format!("{:#?}", Config::default()));
    assert_eq!(format!("{:#?}", parse("").unwrap()), format!("{config:#?}"));
}

/// Every key that is read is in config.toml: the test derives its name from its variable.
#[test]
fn the_configuration_file_shows_every_key() {
    let env = Env::new();
    let document = Document::new(Path::new("config.toml"), "", &env);
    let table = DeTable::parse("").unwrap();
    Config::read(&document.top(table.get_ref()));
    let keys = document.known_keys();
    assert!(keys.len() > 45, "{keys:?}");
    let table: toml::Table = FILE.parse().unwrap();
    for key in keys {
        let mut parts = key.split('.');
        let first = table.get(parts.next().unwrap());
        let value = parts.fold(first, |value, part| value.and_then(|value| value.get(part)));
        assert!(value.is_some(), "{key} is not in config.toml");
    }
}

#[test]
fn all_faults_are_reported_with_their_lines() {
    let faults = parse("[store]\nlanes = 0\n\n[api]\nlisten = \"here\"\n[limit]\nx = 1\n").unwrap_err();
    assert_eq!(
        faults,
        [
            "config.toml:2: store.lanes: is 0; must be a whole number from 1 to 64",
            "config.toml:5: api.listen: `here` is not an address; must be like 127.0.0.1:7070, [::1]:7070 or unix:/run/locks.sock",
            "config.toml:6: unknown key `limit`; did you mean `limits`?",
        ]
    );
}

#[test]
fn wrong_types_are_named() {
    for (text, expected) in [
        (
            "[store]\nlanes = \"4\"",
            "config.toml:2: store.lanes: is text; must be a whole number from 1 to 64",
        ),
        ("[store]\nlanes = 1.5", "config.toml:2: store.lanes: is a number with a fraction; must be"),
        ("[store]\nlanes = -1", "config.toml:2: store.lanes: is -1; must be"),
        (
            "[store]\nlanes = 99999999999999999999999",
            "config.toml:2: store.lanes: is 99999999999999999999999;",
        ),
        (
            "[store]\nrequire_durable = 1",
            "config.toml:2: store.require_durable: is a whole number; must be true",
        ),
        ("[store]\nurl = true", "config.toml:2: store.url: is a boolean; must be text"),
        ("store = 1", "config.toml:1: store: is a whole number; must be a table"),
        ("[routes]\nx = 1", "config.toml:1: routes: is a table; must be tables, each under [[routes]]"),
        ("policies = []", "config.toml:1: policies: is a list; must be a table"),
        ("[log]\nformat = \"xml\"", "config.toml:2: log.format: is `xml`; must be \"text\" or \"json\""),
    ] {
        let fault = fault(text);
        assert!(fault.starts_with(expected), "{fault}");
    }
}

#[test]
fn bounds_are_checked_against_each_other() {
    let text = "[limits]\nmin_ttl_ms = 5000\nmax_ttl_ms = 1000";
    assert_eq!(
        fault(text),
        "config.toml:2: limits.min_ttl_ms: is 5000, over limits.max_ttl_ms, which is 1000"
    );
    let text = "[api]\nlisten = \"127.0.0.1:7071\"";
    assert!(fault(text).contains("admin.listen: is 127.0.0.1:7071, which is api.listen, too"));
    parse("[api]\nlisten = \"127.0.0.1:0\"\n[admin]\nlisten = \"127.0.0.1:0\"").unwrap();
}

#[test]
fn unix_sockets_are_of_this_machine_and_have_no_tls() {
    let socket = |section: &str, more: &str| format!("[{section}]\nlisten = \"unix:{section}.sock\"\n{more}");
    let config =
        parse(&format!("{}{}", socket("api", ""), socket("admin", "socket_mode = \"0600\"\n"))).unwrap();
    let unix = |path: &str, mode| ListenAddress::Unix { path: path.into(), mode };
    assert_eq!(config.listeners.api.listen, unix("api.sock", 0o660));
    assert_eq!(config.listeners.admin.listen, unix("admin.sock", 0o600));
    let tls = "tls = { cert = \"Cargo.toml\", key = \"Cargo.toml\" }\n";
    let text = fault(&socket("api", tls));
    assert!(text.contains("config.toml:3: api.tls: has no use here"), "{text}");
    for mode in ["0400", "1777", "rw", ""] {
        let text = fault(&socket("api", &format!("socket_mode = \"{mode}\"\n")));
        assert!(text.contains(&format!("api.socket_mode: is `{mode}`; must be like \"0660\"")), "{text}");
    }
    let same = format!("{}[admin]\nlisten = \"unix:api.sock\"\n", socket("api", ""));
    assert!(fault(&same).contains("admin.listen: is unix:api.sock, which is api.listen, too"));
    let text = fault("[fleet]\nlisten = \"unix:fleet.sock\"\n");
    assert!(text.contains("fleet.listen: `unix:fleet.sock` is not an address"), "{text}");
}

#[test]
fn urls_are_checked_and_not_repeated() {
    for bad in
        ["postgres://u:secret@h/db", "mysql://u:secret@h:3306", "mysql://u:secret@h:99999/db", "nonsense"]
    {
        let fault = fault(&format!("[store]\nurl = \"{bad}\""));
        assert!(fault.starts_with("config.toml:2: store.url: "), "{fault}");
        assert!(!fault.contains("secret"), "{fault}");
    }
    let config = parse("[store]\nurl = \"mysql://u:p@h:3306/db?socket=/tmp/s\"").unwrap();
    assert!(matches!(config.store.server, ServerChoice::Urls(urls) if urls[0].contains("socket")));
}

#[test]
fn several_servers_are_a_list_or_separated_by_commas() {
    let (one, two) = ("mysql://u:p,q@a:1/d", "mysql://u:p@b/d?socket=/x,y");
    let env = format!("{one}, {two}");
    for config in [
        parse(&format!("[store]\nurl = [\"{one}\", \"{two}\"]")).unwrap(),
        parse_with("", &[("LOCKKEEPER_STORE_URL", &env)]).unwrap(),
    ] {
        let ServerChoice::Urls(urls) = config.store.server else { panic!("urls") };
        assert_eq!(urls, [one, two]);
    }
    for (list, expected) in [
        ("[]", "names 0 servers; must name 1 to 16"),
        ("[\"mysql://u:secret@a/d\", \"managed\"]", "server 2: \"managed\" cannot be one of several servers"),
        ("[\"mysql://u:secret@a/d\", \"mysql://u:secret@a\"]", "server 2: names no database"),
        ("[\"mysql://u:secret@a/d\", \"mysql://u:secret@a/d\"]", "server 2 is in the list twice"),
        ("[\"mysql://u:secret@a/d\", 3]", "holds a whole number; must be text, or a list of texts"),
    ] {
        let fault = fault(&format!("[store]\nurl = {list}"));
        assert!(fault.starts_with(&format!("config.toml:2: store.url: {expected}")), "{fault}");
        assert!(!fault.contains("secret"), "{fault}");
    }
}

#[test]
fn policies_and_routes_must_exist() {
    assert_eq!(
        fault("[policies.a]\npath = \"nowhere.wasm\""),
        "config.toml:2: policies.a.path: there is no file nowhere.wasm"
    );
    assert_eq!(
        fault("[policies.a]\npath = \"builtin:defualt\""),
        "config.toml:2: policies.a.path: `defualt` is not built in; there are default, fair-groups, backoff; \
         did you mean `default`?"
    );
    assert_eq!(fault("\n[policies.a]"), "config.toml:2: policies.a.path: is missing");
    assert!(fault("[policies.\"A b\"]\npath = \"builtin:default\"").contains("a name must have"));
    assert_eq!(
        fault("[[routes]]\nresource = \"a\"\npolicy = \"b\""),
        "config.toml:3: routes[0].policy: no policy is named `b`; there are default"
    );
    assert_eq!(fault("[[routes]]\npolicy = \"default\""), "config.toml:1: routes[0].resource: is missing");
    assert!(fault("[[routes]]\nresource = \"\"\npolicy = \"default\"").contains("must have 1 to 512 bytes"));
}

#[test]
fn duplicate_names_are_faults() {
    let twice = "[policies.a]\npath = \"builtin:default\"\n[policies.a]\npath = \"builtin:backoff\"";
    assert!(parse(twice).unwrap_err()[0].starts_with("config.toml:3: "), "{:?}", parse(twice));
    assert!(parse("[store]\nlanes = 1\nlanes = 2").unwrap_err()[0].starts_with("config.toml:3: "));
}

#[test]
fn syntax_errors_are_reported_with_their_line() {
    let faults = parse("[store]\nlanes = \n[api]\nlisten = \"x\"\n").unwrap_err();
    assert!(faults.iter().any(|fault| fault.starts_with("config.toml:2: ")), "{faults:?}");
    assert!(faults.iter().any(|fault| fault.starts_with("config.toml:4: api.listen: ")), "{faults:?}");
}

#[test]
fn settings_become_json() {
    let text = "[policies.default]\npath = \"builtin:default\"\n[policies.default.settings]\n\
                ttl_ms = 10_000\nratio = 1.5\nnested = { on = true, names = [\"a\"] }\nday = 2026-01-02\n";
    let config = parse(text).unwrap();
    let expected = serde_json::json!({
        "ttl_ms": 10_000, "ratio": 1.5, "nested": {"on": true, "names": ["a"]}, "day": "2026-01-02"
    });
    assert_eq!(serde_json::Value::Object(config.policies[0].settings.clone()), expected);
}

#[test]
fn a_default_policy_is_added_and_policies_are_sorted() {
    let config =
        parse("[policies.zeta]\npath = \"builtin:backoff\"\n[policies.alpha]\npath = \"builtin:default\"");
    let names: Vec<String> = config.unwrap().policies.into_iter().map(|policy| policy.name).collect();
    assert_eq!(names, ["alpha", "default", "zeta"]);
}

#[test]
fn environment_variables_override_the_file() {
    let env = [
        ("LOCKKEEPER_STORE_LANES", "9"),
        ("LOCKKEEPER_STORE_MANAGED_DATA_DIR", "data"),
        ("LOCKKEEPER_STORE_MANAGED_SERVER", "mariadb"),
        ("LOCKKEEPER_API_LISTEN", "[::1]:1"),
        ("LOCKKEEPER_STORE_REQUIRE_DURABLE", "true"),
        ("LOCKKEEPER_POLICIES_FAIR_GROUPS_PATH", "builtin:fair-groups"),
        ("LOCKKEEPER_SERVER", "http://x"),
    ];
    let config =
        parse_with("[store]\nlanes = 2\n[policies.fair-groups]\npath = \"builtin:backoff\"", &env).unwrap();
    assert_eq!(config.store.lanes, 9);
    assert!(config.store.require_durable);
    assert_eq!(config.listeners.api.listen.to_string(), "[::1]:1");
    assert_eq!(config.policies[1].source, PolicySource::Builtin("fair-groups".into()));
    let ServerChoice::Managed(managed) = config.store.server else { panic!("managed") };
    assert_eq!((managed.binary, managed.data_dir), (ServerBinary::Mariadb, "data".into()));
    assert_eq!(config.warnings, Vec::<String>::new());
}

#[test]
fn faults_of_the_environment_name_the_variable() {
    let faults =
        parse_with("", &[("LOCKKEEPER_STORE_LANES", "many"), ("LOCKKEEPER_API_LISTEN", "")]).unwrap_err();
    assert_eq!(
        faults,
        [
            "LOCKKEEPER_API_LISTEN: api.listen: `` is not an address; must be like 127.0.0.1:7070, [::1]:7070 or unix:/run/locks.sock",
            "LOCKKEEPER_STORE_LANES: store.lanes: is `many`; must be a whole number from 1 to 64",
        ]
    );
    let config = parse_with("", &[("LOCKKEEPER_STORE_LANE", "1")]).unwrap();
    assert_eq!(
        config.warnings,
        [
            "the environment variable LOCKKEEPER_STORE_LANE is not known; did you mean `LOCKKEEPER_STORE_LANES`?"
        ]
    );
}

#[test]
fn a_route_that_bypasses_a_lock_causes_a_warning() {
    let config = |last: &str| {
        let text = format!(
            "[[guard]]\nlisten = \"127.0.0.1:7080\"\n\
             [[guard.routes]]\nmatch = {{ path = \"/orders/{{id}}\" }}\nupstream = \"http://a:1\"\npolicy = \"default\"\n\
             [[guard.routes]]\nmatch = {{ path = \"/{{*rest}}\" }}\n{last}"
        );
        parse_with(&text, &[]).unwrap().warnings
    };
    let warnings = config("upstream = [\"http://b:1\", \"http://a:1\"]");
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    for part in ["guard[0].routes[1]", "/{*rest}", "http://a:1", "policy = \"none\""] {
        assert!(warnings[0].contains(part), "{warnings:?}");
    }
    for last in ["upstream = \"http://a:1\"\npolicy = \"none\"", "upstream = \"http://b:1\""] {
        assert_eq!(config(last), Vec::<String>::new(), "{last}");
    }
}

#[test]
fn a_file_that_cannot_be_read_is_a_fault() {
    let faults = Config::load(Some(Path::new("/nowhere/config.toml")), &Env::new()).unwrap_err();
    assert!(faults[0].to_string().starts_with("/nowhere/config.toml: cannot be read: "), "{}", faults[0]);
}

#[test]
fn paths_are_relative_to_the_file() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("p.wasm"), b"x").unwrap();
    let file = folder.path().join("config.toml");
    std::fs::write(&file, "[policies.default]\npath = \"p.wasm\"").unwrap();
    let config = Config::load(Some(&file), &Env::new()).unwrap();
    assert_eq!(config.policies[0].source, PolicySource::File(folder.path().join("p.wasm")));
}

const GUARD: &str = "[[guard]]\nlisten = \"127.0.0.1:7080\"\n[[guard.routes]]\n";

#[test]
fn guarded_routes_are_read() {
    let text = format!(
        "{GUARD}match = {{ method = [\"PUT\", \"POST\"], path = \"/orders/{{id}}\", headers = {{ X-A = \"*\", x-b = \"1\" }} }}\n\
         upstream = [\"http://a\", \"http://[::1]:9000/\"]\npolicy = \"default\"\nresource = \"orders/{{id}}\"\n\
         mode = {{ permits = 2 }}\nwait_ms = 5\nlabels = {{ t = \"{{header.x-t}}\" }}\nfail = \"open\"\n\
         see = {{ headers = \"X-A\", body_bytes = 10 }}\n[[guard.routes]]\nmatch = {{ path = \"/\" }}\nupstream = \"http://a:1\"\n"
    );
    let guards = parse(&text).unwrap().guards;
    let [guard] = &guards[..] else { panic!("one") };
    let [first, second] = &guard.routes[..] else { panic!("two") };
    assert_eq!((&*first.methods.join(","), &*first.upstreams.join(",")), ("PUT,POST", "a:80,[::1]:9000"));
    assert_eq!(first.headers, [("x-a".to_owned(), None), ("x-b".to_owned(), Some("1".to_owned()))]);
    let lock = first.lock.as_ref().unwrap();
    assert_eq!(
        (lock.mode, lock.wait_ms, lock.ttl_ms),
        (crate::lock::Mode::Permits { count: 2, limit: 0 }, Some(5), None)
    );
    assert!(lock.fail_open && lock.see_body_bytes == 10 && lock.see_headers == ["x-a"]);
    assert!(second.lock.is_none() && second.methods.is_empty());
}

/// The text has everything that decides the name of a request, and nothing else.
#[test]
fn the_naming_text_covers_exactly_the_settings_that_name_requests() {
    let listener = |port: u16, more: &str, routes: &[(&str, &str)]| {
        let route = |(path, more): &(&str, &str)| {
            format!(
                "[[guard.routes]]\nmatch = {{ path = \"{path}\" }}\nupstream = \"http://a\"\npolicy = \"default\"\n{more}\n"
            )
        };
        let routes: String = routes.iter().map(route).collect();
        format!("[[guard]]\nlisten = \"127.0.0.1:{port}\"\n{more}\n{routes}")
    };
    let of = |text: &str| naming(&parse(text).unwrap().guards);
    let one = |more: &str, route: &str| of(&listener(7080, more, &[("/a", route)]));
    let plain = "resource = \"{path}\"";
    assert_eq!(one("", plain), one("trust_forwarded = true\nkeep_headers = [\"x_a\"]", plain));
    assert_eq!(one("", plain), one("", &format!("{plain}\nwait_ms = 5\nresponse_timeout_ms = 77")));
    let forwarded = "resource = \"{header.x-forwarded-host}\"";
    assert_ne!(one("", forwarded), one("trust_forwarded = true", forwarded));
    let networks = |texts: &str| one(&format!("trust_forwarded = {texts}"), forwarded);
    assert_ne!(networks("[\"10.0.0.0/8\"]"), networks("true"));
    assert_ne!(networks("[\"10.0.0.0/8\"]"), networks("[\"10.0.0.0/9\"]"));
    assert_eq!(networks("[\"10.0.0.0/8\", \"::1\"]"), networks("[\"::1/128\", \"10.1.2.3/8\"]"));
    let seen = "see = { headers = [\"x_a\"] }";
    assert_ne!(one("", seen), one("keep_headers = [\"x_a\"]", seen));
    assert_eq!(one("", seen), one("keep_headers = [\"x_b\"]", seen));
    let two = |first: &[&str], second: &[&str]| {
        let routes =
            |paths: &[&str]| listener(7080, "", &paths.iter().map(|path| (*path, "")).collect::<Vec<_>>());
        of(&(routes(first) + &routes(second).replace("7080", "7081")))
    };
    assert_ne!(two(&["/a", "/b"], &["/c"]), two(&["/a"], &["/b", "/c"]), "a route has moved");
}

#[test]
fn faults_of_guarded_routes_are_named() {
    let route = |more: &str| {
        format!("{GUARD}match = {{ path = \"/orders/{{id}}\" }}\nupstream = \"http://a\"\n{more}\n")
    };
    let locked = |more: &str| route(&format!("policy = \"default\"\n{more}"));
    for (text, expected) in [
        ("[[guard]]\nlisten = \"127.0.0.1:7080\"\n".to_owned(), "has no [[guard.routes]]"),
        (format!("{GUARD}upstream = \"http://a\"\n"), "guard[0].routes[0].match.path: is missing"),
        (format!("{GUARD}match = {{ path = \"/\" }}\n"), "guard[0].routes[0].upstream: is missing"),
        (route("").replace("/orders", "orders"), "must begin with `/`"),
        (route("").replace("http://a", "https://a"), "only http:// can be behind the proxy"),
        (route("").replace("http://a", "http://a/x"), "an upstream has no path"),
        (locked("").replace("policy", "polcy"), "did you mean `policy`?"),
        (
            route("").replace("/orders/{id}", "/{*all}")
                + "[[guard.routes]]\nmatch = { path = \"/\" }\nupstream = \"http://a\"\n",
            "guard[0].routes[1]: is never reached",
        ),
        (route("wait_ms = 5"), "wait_ms: is for routes with a `policy`"),
        (route("policy = \"defualt\""), "no policy is named `defualt`; there are default; did you mean"),
        (locked("resource = \"{sku}\""), "resource: `{sku}` is not in the path of the route"),
        (locked("resource = \"{json.id}\""), "needs see.body_bytes"),
        (locked("labels = { t = \"{what.x}\" }"), "labels: t: `{what.x}` is not known"),
        (locked("mode = \"upsert\""), "mode: is `upsert`; must be"),
        (
            locked("see = { body_bytes = 10000 }"),
            "see.body_bytes: is 10000; must be a whole number from 0 to 8192",
        ),
        (locked("fail = \"ajar\""), "fail: is `ajar`; must be \"closed\" or \"open\""),
        (locked("wiat_ms = 5"), "unknown key `guard[0].routes[0].wiat_ms`; did you mean"),
        (route("").replace(":7080", ":7070"), "which another listener has"),
        (route("health = \"x\""), "health: is `x`; must be a path"),
    ] {
        let fault = fault(&text);
        assert!(fault.contains(expected), "{text}\n{fault}");
    }
}

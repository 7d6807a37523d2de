use super::*;

fn field(prefix: &str, path: &str) -> Option<String> {
    json_field(prefix.as_bytes(), path)
}

fn is(prefix: &str, path: &str, expected: &str) {
    assert_eq!(field(prefix, path).as_deref(), Some(expected), "{path} in {prefix}");
}

fn is_none(prefix: &str, path: &str) {
    assert_eq!(field(prefix, path), None, "{path} in {prefix}");
}

#[test]
fn fields_are_found_by_their_paths() {
    let body = r#" {"id": "a/\u00e4\"b", "n": -150, "yes": true, "no": false, "nothing": null, "": "empty",
        "items": [{"sku": "A-7"}, [1, [2, "deep"]], {"0": "a name"}], "of": {"the": {"day": "ä"}}} "#;
    for (path, expected) in [
        ("id", "a/ä\"b"),
        ("n", "-150"),
        ("yes", "true"),
        ("no", "false"),
        ("", "empty"),
        ("items.0.sku", "A-7"),
        ("items.1.0", "1"),
        ("items.1.1.1", "deep"),
        ("items.2.0", "a name"),
        ("of.the.day", "ä"),
    ] {
        is(body, path, expected);
    }
    for path in [
        "absent",
        "nothing",
        "items",
        "of",
        "of.the",
        "items.3",
        "items.00",
        "items.+0",
        "items.-1",
        "items.sku",
        "id.0",
        "n.0",
        "yes.x",
        "nothing.x",
        "of.",
        ".of",
        "items.0.sku.0",
        "ID",
    ] {
        is_none(body, path);
    }
    is(r#"["a", "b"]"#, "1", "b");
    is_none("42", "");
}

#[test]
fn a_name_elsewhere_in_the_text_is_not_taken_for_the_field() {
    let body = r#"{"a": {"id": "deeper"}, "b": "\"id\": \"in a text\"", "c": ["id", {"id": 1}], "id": "it"}"#;
    is(body, "id", "it");
    is_none(&body[..body.len() - r#""id": "it"}"#.len()], "id");
    is(r#"{"\u0069d": "escaped"}"#, "id", "escaped");
}

/// For a cut at any place, the answer is that of the whole text or none. For a cut after the field, it is never none.
#[test]
fn a_truncated_body_gives_a_field_only_if_the_field_is_complete() {
    let body = r#"{"x": [1, -2.5e-3, true, null, "ä\u00e4\\"], "id": "ä1e5", "n": 120, "ok": true, "t": {"l": [7, 8]},
        "rest": [0.5, 1E+2, false, null, {"id": "\ud83d\ude00", "a": []}, ""], "end": "é\n"} "#;
    for (path, expected, last) in [
        ("id", "ä1e5", r#""ä1e5""#),
        ("n", "120", "120,"),
        ("ok", "true", "true"),
        ("t.l.0", "7", "7,"),
        ("t.l.1", "8", "8]"),
    ] {
        let from = body.find(&format!("\"{}\":", path.split('.').next().unwrap())).unwrap();
        let end = from + body[from..].find(last).unwrap() + last.len();
        for cut in 0..=body.len() {
            let expected = (cut >= end).then(|| expected.to_owned());
            assert_eq!(json_field(&body.as_bytes()[..cut], path), expected, "{path} in {cut} bytes");
        }
    }
}

#[test]
fn a_duplicate_name_gives_no_field() {
    for body in [
        r#"{"id": 1, "id": 2}"#,
        r#"{"id": 1, "id": 1}"#,
        r#"{"id": null, "id": 2}"#,
        r#"{"id": 1, "x": [], "\u0069\u0064": 2, "cut"#,
        r#"{"id": 1, "id": "cut"#,
        r#"{"id": 1, "id""#,
    ] {
        is_none(body, "id");
    }
    // Readers that ignore case take the long s and the Kelvin sign for s and k.
    for (body, path) in [
        (r#"{"id": 1, "ID": 2}"#, "id"),
        (r#"{"Id": 1, "id": 2}"#, "id"),
        (r#"{"ID": 2}"#, "id"),
        ("{\"sku\": 1, \"\u{17f}ku\": 2}", "sku"),
        ("{\"sku\": 1, \"s\\u212au\": 2}", "sku"),
        (r#"{"a": {"id": 1}, "A": {}}"#, "a.id"),
    ] {
        is_none(body, path);
    }
    is_none(r#"{"a": {"id": 1}, "a": {}}"#, "a.id");
    is_none(r#"{"a": {}, "a": {"id": 1}}"#, "a.id");
    is_none(r#"{"a": [{"id": 1, "id": 1}]}"#, "a.0.id");
    is(r#"{"id": 1, "b": {"x": 1, "x": 2}, "b": 3}"#, "id", "1");
    // The second name is after the cut.
    is(r#"{"id": 1, "i"#, "id", "1");
}

#[test]
fn a_body_that_is_not_json_has_no_fields() {
    for body in [
        "",
        "id=1",
        r#"{"id": 1, x"#,
        r#"{"id": 1,, "#,
        r#"{"id": 1} {"id": 2}"#,
        r#"{"id": 1}2"#,
        r#"{"id": 1}]"#,
        r#"{"id": 1, /* note */ "a""#,
        r#"{'id': 1}"#,
        r#"{"id": 01}"#,
        r#"{"id": NaN}"#,
        r#"{"id": tru3}"#,
        r#"{"id": "\ud800"}"#,
        "{\"id\": \"a\nb\"}",
        "\u{feff}{\"id\": 1}",
    ] {
        is_none(body, "id");
    }
    assert_eq!(json_field(b"{\"id\": 1, \"a\": \"\xff\"}", "id"), None);
    assert_eq!(json_field(b"{\"id\": 1}\xc3", "id"), None);
    assert_eq!(json_field(b"{\"id\": 1, \"a\": \"\xc3", "id").as_deref(), Some("1"));
}

#[test]
fn depth_is_bounded_on_the_path_of_the_field_and_nowhere_else() {
    let nested = |levels: usize| "[".repeat(levels) + "1" + &"]".repeat(levels);
    let path = |levels: usize| vec!["0"; levels].join(".");
    is(&nested(127), &path(127), "1");
    is_none(&nested(200), &path(200));
    is_none(&"[".repeat(100_000), &path(100_000));
    let beside = format!(r#"{{"x": {}, "id": 7, "y": {}"#, nested(100_000), "[{\"a\":".repeat(100_000));
    is(&beside, "id", "7");
    is_none(&format!(r#"{{"id": {}}}"#, nested(100_000)), "id");
}

#[test]
fn a_number_with_several_spellings_gives_no_field() {
    for number in ["1.0", "1e0", "1E2", "-0", "0.5"] {
        is_none(&format!(r#"{{"id": {number}, "x": 1}}"#), "id");
    }
    for number in ["0", "7", "-7", "123456789012345678901234567890"] {
        is(&format!(r#"{{"id": {number}, "x": 1}}"#), "id", number);
    }
}

//! The answers to bad input: over HTTP and in config.toml.

use serde_json::{Value, json};

use crate::harness::{Proxy, Response, database, fresh};

mod browsers;
mod configuration;
mod wire;

async fn is_invalid(answer: &Response, field: &str, says: &str, sent: &str) {
    assert_eq!((answer.status, answer.slug()), (400, "invalid"), "{sent}: {}", answer.text);
    assert_eq!(answer.headers["content-type"], "application/problem+json");
    assert_eq!(answer.json["field"], field, "{sent}: {}", answer.text);
    let detail = answer.json["detail"].as_str().unwrap_or_default();
    assert!(detail.contains(says), "{sent}: `{detail}` does not say `{says}`");
}

/// Invalid members of an acquire's body: each with the field at fault, and the bound in the answer.
fn members() -> Vec<(Value, &'static str, &'static str)> {
    let long = |bytes: usize| "x".repeat(bytes);
    vec![
        (json!({}), "resource", "is required"),
        (json!({"resource": null}), "resource", "is required"),
        (json!({"resource": ""}), "resource", "1 to 512 bytes"),
        (json!({"resource": long(513)}), "resource", "1 to 512 bytes"),
        (json!({"resource": 42}), "resource", "must be text"),
        (json!({"resource": ["r"]}), "resource", "must be text"),
        (json!({"resource": "r", "ttl_ms": 0}), "ttl_ms", "100 to 3600000"),
        (json!({"resource": "r", "ttl_ms": -1}), "ttl_ms", "100 to 3600000"),
        (json!({"resource": "r", "ttl_ms": 99}), "ttl_ms", "100 to 3600000"),
        (json!({"resource": "r", "ttl_ms": 3_600_001}), "ttl_ms", "100 to 3600000"),
        (json!({"resource": "r", "ttl_ms": 1.5}), "ttl_ms", "whole number"),
        (json!({"resource": "r", "ttl_ms": "1000"}), "ttl_ms", "100 to 3600000"),
        (json!({"resource": "r", "ttl_ms": 1e30}), "ttl_ms", "100 to 3600000"),
        (json!({"resource": "r", "ttl_ms": u64::MAX}), "ttl_ms", "100 to 3600000"),
        (json!({"resource": "r", "wait_ms": 3_600_001}), "wait_ms", "0 to 3600000"),
        (json!({"resource": "r", "wait_ms": true}), "wait_ms", "0 to 3600000"),
        (json!({"resource": "r", "mode": "upsert"}), "mode", "exclusive"),
        (json!({"resource": "r", "mode": {"permits": 0}}), "mode.permits", "1 to 1024"),
        (json!({"resource": "r", "mode": {"permits": 1025}}), "mode.permits", "1 to 1024"),
        (json!({"resource": "r", "owner": ""}), "owner", "1 to 256 bytes"),
        (json!({"resource": "r", "owner": long(257)}), "owner", "1 to 256 bytes"),
        (json!({"resource": "r", "request_id": ""}), "request_id", "1 to 128 bytes"),
        (json!({"resource": "r", "request_id": long(129)}), "request_id", "1 to 128 bytes"),
        (json!({"resource": "r", "request_id": 7}), "request_id", "must be text"),
        (json!({"resource": "r", "labels": {"a": long(257)}}), "labels.a", "256 bytes"),
        (json!({"resource": "r", "labels": "a"}), "labels", "object"),
        (json!({"resource": "r", "ttl": 1_000}), "ttl", "unknown field `ttl`"),
    ]
}

on_both! {
    /// The answer names the fault in a body and its bound, and nothing is locked.
    async fn invalid_bodies_are_refused_with_the_name_of_the_field(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let client = proxy.client();
        for call in ["/v1/acquire", "/v1/hold"] {
            for (body, field, says) in members() {
                is_invalid(&client.post(call, &body).await, field, says, &body.to_string()).await;
            }
        }
        for body in ["", "{", "nonsense", "[]", "\"r\"", "{\"resource\": \"r\"} x", "{\"resource\": \"\u{1}\"}"] {
            is_invalid(&client.send("POST", "/v1/acquire", body).await, "body", "JSON", body).await;
        }
        let invalid_utf8 = client.send("POST", "/v1/acquire", &b"{\"resource\": \"\xff\"}"[..]).await;
        is_invalid(&invalid_utf8, "body", "JSON", "invalid UTF-8").await;
        let deep = format!("{{\"resource\": {}", "[".repeat(60_000));
        is_invalid(&client.send("POST", "/v1/acquire", deep).await, "body", "JSON", "deep nesting").await;
        let twice = client.send("POST", "/v1/acquire", r#"{"resource": "r", "resource": "s"}"#).await;
        is_invalid(&twice, "resource", "twice", "a member twice").await;
        assert_eq!(client.get("/v1/locks").await.json["locks"], json!([]), "something was locked");
    }

    /// Row 1 for calls that take a lease id.
    async fn invalid_renewals_and_releases_are_refused(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let (client, resource) = (proxy.client(), fresh("checked"));
        let lease = client.lease(&resource, 60_000).await;
        let id = &lease["lease_id"];
        let bodies = [
            ("/v1/renew", json!({}), "lease_id", "is required"),
            ("/v1/renew", json!({"lease_id": 1}), "lease_id", "must be text"),
            ("/v1/renew", json!({"lease_id": id, "ttl_ms": 0}), "ttl_ms", "100 to 3600000"),
            ("/v1/renew", json!({"lease_id": id, "ttl_ms": 3_600_001}), "ttl_ms", "100 to 3600000"),
            ("/v1/renew", json!({"lease_id": id, "token": 1}), "token", "unknown field"),
            ("/v1/release", json!({"lease_id": ""}), "lease_id", "1 to 32768 bytes"),
            ("/v1/release", json!({"lease_id": "x".repeat(32_769)}), "lease_id", "1 to 32768 bytes"),
            ("/v1/release", json!({"lease_id": id, "ttl_ms": 1_000}), "ttl_ms", "unknown field"),
        ];
        for (call, body, field, says) in bodies {
            is_invalid(&client.post(call, &body).await, field, says, &body.to_string()).await;
        }
        assert_eq!(client.release(&lease).await.status, 200, "the lease is as it was");
    }

    /// Paths and methods that do not exist.
    async fn unknown_paths_and_methods_get_problems(kind: Kind) {
        let proxy = Proxy::start(&database(kind).await).await;
        let client = proxy.client();
        let calls = [
            ("GET", "/v1/acquire", 405),
            ("POST", "/v1/locks", 405),
            ("DELETE", "/v1/locks/x", 405),
            ("GET", "/", 404),
            ("GET", "/v2/locks", 404),
            ("GET", "/v1/locks/%ff", 400),
            ("GET", "/v1/watch?prefix=%zz", 400),
        ];
        for (method, path, status) in calls {
            let answer = client.send(method, path, "").await;
            assert_eq!(answer.status, status, "{method} {path}: {}", answer.text);
            assert_eq!(answer.headers["content-type"], "application/problem+json");
        }
    }
}

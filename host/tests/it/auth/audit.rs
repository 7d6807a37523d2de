//! The audit log.

use super::*;

fn lines(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

on_both! {
    async fn refusals_and_actions_are_recorded_without_secrets(kind: Kind) {
        let dir = folder();
        let file = dir.path().join("audit.log");
        let secured = Secured::start(kind, &format!("[audit]\nfile = \"{}\"\n", file.display())).await;
        let lease = secured.billing().lease("orders/1", 60_000).await;
        assert_eq!(lines(&file), Vec::<Value>::new(), "a grant is no refusal");
        let nobody = secured.proxy.client().get("/v1/locks").await;
        is_forbidden(&secured.billing().acquire(json!({"resource": "invoices/1"})).await);
        is_forbidden(&secured.shipping().renew(&lease).await);
        let operator = secured.proxy.admin().with_token(&secured.tokens.operator.token);
        assert_eq!(operator.send("DELETE", "/v1/locks/orders/1", "").await.status, 200);
        let written = lines(&file);
        let shown: Vec<String> = written
            .iter()
            .map(|line| {
                let of = |member: &str| line[member].as_str().unwrap_or("-").to_owned();
                format!("{} {} {} {}", of("principal"), of("request"), of("on"), of("verdict"))
            })
            .collect();
        assert_eq!(
            shown,
            [
                "- GET /v1/locks - 401 unauthenticated",
                "billing POST /v1/acquire invoices/1 403 forbidden",
                "shipping POST /v1/renew - 403 forbidden",
                "operator DELETE /v1/locks/orders/1 orders/1 begins",
                "operator DELETE /v1/locks/orders/1 orders/1 200",
            ]
        );
        assert_eq!(written[0]["request_id"], nobody.headers["x-request-id"].to_str().unwrap());
        assert_eq!(written[3]["credential"], secured.tokens.operator.id);
        let text = std::fs::read_to_string(&file).unwrap();
        for secret in [&secured.tokens.operator.token, &secured.tokens.billing.token, lease["lease_id"].as_str().unwrap()] {
            assert!(!text.contains(secret), "{text}");
        }
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    }

    async fn an_action_that_cannot_be_recorded_does_not_happen(kind: Kind) {
        let secured = Secured::start(kind, "[audit]\nfile = \"/dev/full\"\n").await;
        let lease = secured.billing().lease("orders/1", 60_000).await;
        let operator = secured.proxy.admin().with_token(&secured.tokens.operator.token);
        let answer = operator.send("DELETE", "/v1/locks/orders/1", "").await;
        assert_eq!((answer.status, answer.slug()), (503, "audit_unavailable"), "{}", answer.text);
        assert_eq!(secured.billing().renew(&lease).await.status, 200);
        is_forbidden(&secured.billing().acquire(json!({"resource": "invoices/1"})).await);
    }
}

//! The audit log.

use super::*;

/// The file of refusals that belongs to an audit log.
fn refusals(file: &Path) -> PathBuf {
    PathBuf::from(format!("{}.refusals", file.display()))
}

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
        let unknown = new_token();
        for token in [&unknown.token, "nonsense", &format!("lk_{}", unknown.token.to_uppercase())] {
            assert_eq!(secured.proxy.client().with_token(token).get("/v1/locks").await.status, 401);
        }
        assert_eq!(secured.client(&secured.tokens.ended).get("/v1/locks").await.status, 401);
        is_forbidden(&secured.billing().acquire(json!({"resource": "invoices/1"})).await);
        is_forbidden(&secured.shipping().renew(&lease).await);
        let operator = secured.proxy.admin().with_token(&secured.tokens.operator.token);
        assert_eq!(operator.send("DELETE", "/v1/locks/orders/1", "").await.status, 200);
        let shown = |file: &Path| -> Vec<String> {
            let of = |line: &Value, member: &str| line[member].as_str().unwrap_or("-").to_owned();
            let show = |line: &Value| {
                let parts = ["principal", "refused_credential", "request", "on", "verdict"];
                parts.map(|member| of(line, member)).join(" ")
            };
            lines(file).iter().map(show).collect()
        };
        let (refusals, ended) = (refusals(&file), &secured.tokens.ended.id);
        assert_eq!(
            shown(&refusals),
            [
                "- - GET /v1/locks - 401 unauthenticated",
                &format!("- {} GET /v1/locks - 401 unauthenticated", unknown.id),
                "- - GET /v1/locks - 401 unauthenticated",
                "- - GET /v1/locks - 401 unauthenticated",
                &format!("- {ended} GET /v1/locks - 401 unauthenticated"),
                "billing - POST /v1/acquire invoices/1 403 forbidden",
                "shipping - POST /v1/renew - 403 forbidden",
            ]
        );
        assert_eq!(
            shown(&file),
            [
                "operator - DELETE /v1/locks/orders/1 orders/1 begins",
                "operator - DELETE /v1/locks/orders/1 orders/1 200",
            ]
        );
        assert_eq!(lines(&refusals)[0]["request_id"], nobody.headers["x-request-id"].to_str().unwrap());
        assert_eq!(lines(&file)[0]["credential"], secured.tokens.operator.id);
        for line in lines(&file).iter().chain(&lines(&refusals)) {
            let time = line["time"].as_str().unwrap();
            let form: String = time.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
            assert_eq!(form, "0000-00-00T00:00:00.000000Z", "{time}");
        }
        let text = std::fs::read_to_string(&file).unwrap() + &std::fs::read_to_string(&refusals).unwrap();
        let secret_of = |token: &NewToken| token.token.rsplit_once(&token.id).unwrap().1.to_owned();
        let tokens = [&secured.tokens.operator, &secured.tokens.billing, &secured.tokens.ended, &unknown];
        for secret in tokens.map(secret_of).iter().chain([&lease["lease_id"].as_str().unwrap().to_owned()]) {
            assert!(!text.contains(secret.as_str()) && !text.contains(&secret.to_uppercase()), "{text}");
        }
        for file in [&file, &refusals] {
            assert_eq!(std::fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
        }
    }

    async fn strangers_cannot_displace_the_actions_of_operators(kind: Kind) {
        let dir = folder();
        let file = dir.path().join("audit.log");
        let audit = format!("[audit]\nfile = \"{}\"\nmax_bytes = 4096\nkeep = 1\n", file.display());
        let secured = Secured::start(kind, &audit).await;
        let operator = secured.proxy.admin().with_token(&secured.tokens.operator.token);
        assert_eq!(operator.send("DELETE", "/v1/locks/orders/1", "").await.status, 200);
        let stranger = secured.proxy.client();
        for _ in 0..100 {
            assert_eq!(stranger.get("/v1/locks").await.status, 401);
        }
        assert!(dir.path().join("audit.log.refusals.1").exists(), "the refusals have filled a file");
        let verdicts: Vec<Value> = lines(&file).iter().map(|line| line["verdict"].clone()).collect();
        assert_eq!(verdicts, ["begins", "200"]);
    }

    /// As logrotate does it, which sends no signal.
    async fn a_file_that_was_moved_is_opened_again(kind: Kind) {
        let dir = folder();
        let file = dir.path().join("audit.log");
        let secured = Secured::start(kind, &format!("[audit]\nfile = \"{}\"\n", file.display())).await;
        let operator = secured.proxy.admin().with_token(&secured.tokens.operator.token);
        let force = async |key: &str| operator.send("DELETE", &format!("/v1/locks/{key}"), "").await.status;
        assert_eq!(force("orders/1").await, 200);
        let moved = dir.path().join("audit.log-20270101");
        std::fs::rename(&file, &moved).unwrap();
        assert_eq!(force("orders/2").await, 200);
        let keys = |file: &Path| lines(file).iter().map(|line| line["on"].clone()).collect::<Vec<_>>();
        assert_eq!(keys(&moved), ["orders/1", "orders/1"]);
        assert_eq!(keys(&file), ["orders/2", "orders/2"]);
    }

    async fn an_action_that_cannot_be_recorded_does_not_happen(kind: Kind) {
        let dir = folder();
        let file = dir.path().join("audit.log");
        std::os::unix::fs::symlink("/dev/full", &file).unwrap();
        let secured = Secured::start(kind, &format!("[audit]\nfile = \"{}\"\n", file.display())).await;
        let ready = async || secured.proxy.admin().get("/ready").await;
        assert_eq!(ready().await.json["warnings"], json!([]));
        let lease = secured.billing().lease("orders/1", 60_000).await;
        let operator = secured.proxy.admin().with_token(&secured.tokens.operator.token);
        let answer = operator.send("DELETE", "/v1/locks/orders/1", "").await;
        assert_eq!((answer.status, answer.slug()), (503, "audit_unavailable"), "{}", answer.text);
        assert_eq!(secured.billing().renew(&lease).await.status, 200);
        is_forbidden(&secured.billing().acquire(json!({"resource": "invoices/1"})).await);
        let warned = ready().await;
        assert!(warned.status == 200 && warned.text.contains("the audit log cannot be written"), "{}", warned.text);
        assert_eq!(trouble(&secured, "audit_log").await, 1.0);
        std::fs::remove_file(&file).unwrap();
        assert_eq!(operator.send("DELETE", "/v1/locks/orders/1", "").await.status, 200);
        assert_eq!((ready().await.json["warnings"].clone(), trouble(&secured, "audit_log").await), (json!([]), 0.0));
    }
}

//! Promise 2, as applications see it: the tokens of a resource increase, whatever its keys are called.

use super::*;

/// The default policy, with stripes of other names as keys.
fn renamed(number: u8) -> Vec<u8> {
    let (old, new) = (b"stripe-", format!("strip{number}-").into_bytes());
    let mut component = default_policy().to_vec();
    let places: Vec<usize> =
        (0..component.len() - old.len()).filter(|at| component[*at..].starts_with(old)).collect();
    assert!(!places.is_empty());
    for at in places {
        component[at..at + new.len()].copy_from_slice(&new);
    }
    component
}

fn settings(primitive: &str) -> String {
    format!("[policies.default.settings]\nprimitive = \"{primitive}\"\nstripes = 1000")
}

/// Acquires and releases: the token of the resource must be higher than the last one.
async fn rises(client: &Client, last: &mut u64, at: &str) {
    let answer = client.acquire(json!({"resource": "orders/42", "wait_ms": 20_000})).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let lease = answer.json;
    let tokens: Vec<u64> = match &lease["tokens"] {
        Value::Array(tokens) => tokens.iter().filter_map(Value::as_u64).collect(),
        _ => lease["token"].as_u64().into_iter().collect(),
    };
    let token = *tokens.iter().max().expect("a token");
    assert!(token > *last, "{at}: {token} came after {last}: {lease}");
    *last = token;
    released(client, &lease).await;
}

async fn tokens_rise(kind: Kind, primitive: &str) {
    tokens_rise_with(kind, primitive, "").await;
}

/// `stores` are sections of config.toml.
async fn tokens_rise_with(kind: Kind, primitive: &str, stores: &str) {
    let more = settings(primitive) + stores;
    let deployment = Deployment::with(kind, default_policy(), &more).await;
    let (client, admin) = (deployment.proxy.client(), deployment.proxy.admin());
    let mut last = 0;
    for _ in 0..5 {
        rises(&client, &mut last, "at the start").await;
    }
    if primitive == "lease" {
        assert_eq!(last, 5, "tokens of a new store begin at 1");
    }
    for round in 0..2 {
        deployment.push(&renamed(round)).await;
        rises(&client, &mut last, "after a push").await;
        rises(&client, &mut last, "after a push").await;
        let back = admin.send("POST", "/v1/policies/default/rollback", "").await;
        assert_eq!(back.status, 200, "{}", back.text);
        rises(&client, &mut last, "after a rollback").await;
    }
    let Deployment { proxy, url, dir } = deployment;
    drop(proxy);
    let proxy = start(&url, dir.path(), &more).await;
    let before = last;
    rises(&proxy.client(), &mut last, "after a restart").await;
    if primitive == "lease" {
        assert_eq!(last, before + 1, "nothing has changed");
    }
    drop(proxy);
    deploy(dir.path(), &renamed(2));
    let proxy = start(&url, dir.path(), &more).await;
    rises(&proxy.client(), &mut last, "after a restart with another policy").await;
    drop(proxy);
    // The policy that a resource goes to is not part of any policy.
    std::fs::write(dir.path().join("shop.wasm"), default_policy()).unwrap();
    let file = dir.path().join("shop.wasm");
    let routed = format!(
        "{more}\n[policies.shop]\npath = \"{}\"\nsettings = {{ primitive = \"{primitive}\" }}\n\
         [[routes]]\nresource = \"orders/*\"\npolicy = \"shop\"",
        file.display()
    );
    let proxy = start(&url, dir.path(), &routed).await;
    rises(&proxy.client(), &mut last, "after a restart with another route").await;
}

on_both! {
    async fn tokens_of_a_resource_rise_when_its_keys_are_renamed(kind: Kind) {
        tokens_rise(kind, "lease").await;
    }

    async fn tokens_of_a_named_lock_rise_when_its_keys_are_renamed(kind: Kind) {
        tokens_rise(kind, "advisory").await;
    }

    async fn tokens_of_a_row_rise_when_its_keys_are_renamed(kind: Kind) {
        tokens_rise(kind, "row").await;
    }
}

async fn read(client: &Client) -> u64 {
    let read = client.post("/v1/versions/read", &json!({"resource": "stock"})).await;
    assert_eq!(read.status, 200, "{}", read.text);
    read.number("version")
}

async fn commit(client: &Client, version: u64) -> Response {
    client.post("/v1/versions/commit", &json!({"resource": "stock", "version": version, "value": 1})).await
}

on_both! {
    /// A commit to a version that was read before its key was renamed is a conflict, whatever the versions of the
    /// keys are. Versions increase.
    async fn a_version_read_before_a_rename_conflicts(kind: Kind) {
        let deployment = Deployment::with(kind, default_policy(), &settings("version")).await;
        let (client, admin) = (deployment.proxy.client(), deployment.proxy.admin());
        let mut seen = vec![read(&client).await];
        for change in 0..4 {
            let made = commit(&client, *seen.last().unwrap()).await;
            assert_eq!(made.status, 200, "{}", made.text);
            seen.extend([made.number("version"), read(&client).await]);
            match change % 2 {
                0 => drop(deployment.push(&renamed(change)).await),
                _ => {
                    let back = admin.send("POST", "/v1/policies/default/rollback", "").await;
                    assert_eq!(back.status, 200, "{}", back.text);
                }
            }
            for version in &seen {
                let late = commit(&client, *version).await;
                assert_eq!((late.status, late.slug()), (409, "conflict"), "{version} of {seen:?}: {}", late.text);
            }
            seen.push(read(&client).await);
        }
        assert!(seen.is_sorted(), "{seen:?}");
    }

    /// The servers of a quorum count their own tokens.
    async fn tokens_of_a_quorum_rise_when_its_keys_are_renamed(kind: Kind) {
        let mut stores = String::new();
        for name in ["a", "b", "c"] {
            stores += &format!("\n[stores.{name}]\nurl = \"{}\"", database(kind).await);
        }
        tokens_rise_with(kind, "quorum", &stores).await;
    }
}

//! The built-in policies in the proxy: fair shares between groups, and polling with limits.

use super::*;

const FAIR: &str = "[policies.fair]\npath = \"builtin:fair-groups\"\n\
    [policies.fair.settings]\nweights = { heavy = 3 }\n\
    [[routes]]\nresource = \"fair/*\"\npolicy = \"fair\"\n";

/// Waiters of a group, which queue in any order. Each reports its name when it is granted, and releases its grant at
/// once.
fn crowd(
    client: &Client,
    resource: &str,
    group: &str,
    count: usize,
    grants: &tokio::sync::mpsc::UnboundedSender<String>,
) {
    for n in 0..count {
        let (client, grants) = (client.clone(), grants.clone());
        let body = json!({
            "resource": resource, "owner": format!("{group}/{n}"), "labels": {"group": group},
            "wait_ms": 60_000, "ttl_ms": 30_000,
        });
        tokio::spawn(async move {
            let lease = granted(waiting(&client, body)).await;
            grants.send(lease["owner"].as_str().unwrap().to_owned()).unwrap();
            released(&client, &lease).await;
        });
    }
}

async fn until_queued(client: &Client, resource: &str, count: usize) -> Vec<String> {
    eventually("all of them wait", async || queue(client, resource).await.len() == count).await;
    queue(client, resource).await
}

/// The order of the grants after the release of the lease that everybody waits for.
async fn grants_after(
    client: &Client,
    lease: &Value,
    count: usize,
    mut grants: tokio::sync::mpsc::UnboundedReceiver<String>,
) -> Vec<String> {
    released(client, lease).await;
    let mut order = Vec::new();
    while order.len() < count {
        let next = tokio::time::timeout(Duration::from_secs(60), grants.recv()).await;
        order.push(next.expect("everybody is granted").expect("everybody tells"));
    }
    order
}

fn of_group<'a>(order: &'a [String], group: &str) -> Vec<&'a String> {
    order.iter().filter(|owner| owner.starts_with(group)).collect()
}

on_both! {
    /// A group with 100 waiters does not starve a group with a single waiter that came last. Within the group,
    /// arrival decides.
    async fn a_crowd_does_not_starve_a_single_waiter(kind: Kind) {
        let deployment = Deployment::with(kind, default_policy(), FAIR).await;
        let client = deployment.proxy.client();
        let (tell, grants) = tokio::sync::mpsc::unbounded_channel();
        let first = client.lease("fair/1", 60_000).await;
        crowd(&client, "fair/1", "crowd", 100, &tell);
        let arrived = until_queued(&client, "fair/1", 100).await;
        crowd(&client, "fair/1", "single", 1, &tell);
        until_queued(&client, "fair/1", 101).await;
        let order = grants_after(&client, &first, 101, grants).await;
        let place = order.iter().position(|owner| owner == "single/0").unwrap();
        assert!(place <= 1, "the single waiter was number {place}: {:?}", &order[..=place]);
        assert_eq!(of_group(&order, "crowd"), arrived.iter().collect::<Vec<_>>());
        assert_eq!(deployment.proxy.metric("lockkeeper_policy_faults_total", &[]).await, 0.0);
    }

    /// A group of weight 3 gets about three times as many grants as a group of weight 1.
    async fn a_group_of_weight_three_gets_three_times_the_grants(kind: Kind) {
        let deployment = Deployment::with(kind, default_policy(), FAIR).await;
        let client = deployment.proxy.client();
        let (tell, grants) = tokio::sync::mpsc::unbounded_channel();
        let first = client.lease("fair/1", 60_000).await;
        for group in ["light", "heavy"] {
            crowd(&client, "fair/1", group, 40, &tell);
        }
        until_queued(&client, "fair/1", 80).await;
        let order = grants_after(&client, &first, 80, grants).await;
        let heavy = of_group(&order[..40], "heavy").len();
        assert!((27..=33).contains(&heavy), "{heavy} of the first 40 grants: {order:?}");
    }

    /// The back-off policy polls as its settings say, gives up after its attempts with a message, and limits the
    /// longest wait.
    async fn polling_ends_as_the_settings_say(kind: Kind) {
        let poll = "[policies.poll]\npath = \"builtin:backoff\"\n\
            [policies.poll.settings]\nattempts = 4\nsleep = \"fixed\"\nmin_ms = 60\nmax_ms = 60\n\
            [policies.patient]\npath = \"builtin:backoff\"\n\
            [policies.patient.settings]\nwait_ms = 500\nsleep = \"exponential\"\n\
            [[routes]]\nresource = \"poll/*\"\npolicy = \"poll\"\n\
            [[routes]]\nresource = \"patient/*\"\npolicy = \"patient\"\n";
        let deployment = Deployment::with(kind, default_policy(), poll).await;
        let client = deployment.proxy.client();
        client.lease("poll/1", 60_000).await;
        let began = Instant::now();
        let refused = client.acquire(json!({"resource": "poll/1", "wait_ms": 60_000})).await;
        let took = began.elapsed();
        assert_eq!((refused.status, refused.slug()), (409, "contended"), "{}", refused.text);
        assert_eq!(refused.json["reason"], "still held after 4 attempts");
        // There are three sleeps between four attempts.
        assert!((180..10_000).contains(&took.as_millis()), "{took:?}");
        let decisions = shown(&client, "poll/1").await["decisions"].to_string();
        assert!(decisions.contains("ask again after 60 ms"), "{decisions}");
        assert!(decisions.contains("give up: still held after 4 attempts"), "{decisions}");

        client.lease("patient/1", 60_000).await;
        let began = Instant::now();
        let refused = client.acquire(json!({"resource": "patient/1", "wait_ms": 60_000})).await;
        let took = began.elapsed();
        assert_eq!((refused.status, refused.slug()), (409, "contended"), "{}", refused.text);
        assert!((500..10_000).contains(&took.as_millis()), "{took:?}");
        // A release on this proxy also wakes waiters that poll.
        let lease = client.lease("patient/2", 60_000).await;
        let waiter = line_up(&client, "patient/2", "w", 1).await.remove(0);
        released(&client, &lease).await;
        granted(waiter).await;
    }
}

//! Listing and reading.

use super::*;
use crate::lock::record::HttpView;

/// Keys that a careless comparison merges, truncates or treats as a pattern, in byte order.
const TRICKY: [&str; 10] = ["%", "JOB", "_", "a%b", "a_b", "axb", "job", "job ", "j\u{f3}b", "\u{1F512}"];

pub async fn all(store: &dyn Store) {
    keys_are_compared_as_bytes(store).await;
    pages_follow_each_other(store).await;
    only_held_keys_are_listed(store).await;
    every_field_of_a_claim_is_stored(store).await;
}

pub async fn keys_are_compared_as_bytes(store: &dyn Store) {
    let names = Names::new("bytes");
    let mut keys: Vec<String> = TRICKY.iter().map(|name| names.key(name)).collect();
    let long = |last: &str| {
        let start = names.key("z");
        format!("{start}{}{last}", "z".repeat(Key::MAX_BYTES - start.len() - 1))
    };
    keys.extend([long("a"), long("b")]);
    keys.sort();
    for key in &keys {
        granted(store, &claim(&[key], "me")).await;
    }
    assert_eq!(listed(store, &names.key(""), None, 100).await.0, keys);
    for (prefix, count) in
        [("%", 1), ("a%", 1), ("a_", 1), ("a", 3), ("job", 2), ("j", 3), ("J", 1), ("z", 2)]
    {
        let found = listed(store, &names.key(prefix), None, 100).await.0;
        assert_eq!(found.len(), count, "{prefix} gives {found:?}");
    }
}

pub async fn pages_follow_each_other(store: &dyn Store) {
    let names = Names::new("pages");
    let keys: Vec<String> = (0..25).map(|n| names.key(&format!("{n:02}"))).collect();
    for key in &keys {
        granted(store, &claim(&[key], "me")).await;
    }
    let mut seen = Vec::new();
    let mut after = None;
    loop {
        let (page, more) = listed(store, &names.key(""), after, 10).await;
        assert!(page.len() == 10 || !more);
        after = page.last().and_then(|key| Key::new(key));
        seen.extend(page);
        if !more {
            break;
        }
    }
    assert_eq!(seen, keys);
    let (page, more) = listed(store, &names.key(""), None, 25).await;
    assert_eq!((page.len(), more), (25, false));
}

pub async fn only_held_keys_are_listed(store: &dyn Store) {
    let names = Names::new("held");
    let [kept, gone, expired, delayed] = ["kept", "gone", "expired", "delayed"].map(|name| names.key(name));
    granted(store, &claim(&[&kept], "me")).await;
    let released = claim(&[&gone], "me");
    let grant = granted(store, &released).await;
    release(store, &lease(&released, &grant)).await;
    granted(store, &Claim { ttl_ms: 100, ..claim(&[&expired], "me") }).await;
    granted(store, &Claim { ttl_ms: 100, delay_ms: 10_000, ..claim(&[&delayed], "me") }).await;
    pass_ms(150 + UNNOTICED_US / 1_000).await;
    assert_eq!(listed(store, &names.key(""), None, 10).await.0, [delayed, kept]);
    let key = |name: &str| Key::new(name).expect("it is a key");
    let stored = store.read(key(&gone)).await.expect("it reads").expect("it is remembered");
    assert!(stored.record.holders.is_empty() && stored.record.token == grant.tokens[0]);
    assert!(store.read(key(&names.key("never"))).await.expect("it reads").is_none());
}

pub async fn every_field_of_a_claim_is_stored(store: &dyn Store) {
    let names = Names::new("kept");
    let text = "it's \\ \"quoted\"\n\t\0 \u{1F512}; DROP TABLE x; --";
    let claim = Claim {
        request: Some(text.into()),
        fingerprint: u64::MAX,
        mode: Mode::Permits { count: 2, limit: 3 },
        tag: Tag {
            delegated_to: None,
            resource: text.into(),
            policy: text.into(),
            labels: vec![(text.into(), text.into()), ("a".into(), "".into())],
            asked_mode: Some(Mode::Shared),
            principal: Some(text.into()),
            http: Some(Arc::new(HttpView { path: text.into(), body: text.into(), ..HttpView::default() })),
        },
        ..claim(&[&names.key("k")], text)
    };
    let grant = granted(store, &claim).await;
    let record = store.read(claim.keys[0].clone()).await.expect("it reads").expect("it is there").record;
    let [holder] = &record.holders[..] else { panic!("one holder: {record:?}") };
    assert_eq!((&holder.owner, holder.mode, &holder.tag), (&claim.owner, claim.mode, &claim.tag));
    assert_eq!((holder.nonce, holder.token), (grant.nonce, grant.tokens[0]));
    assert_eq!(holder.levels[0].request, claim.request);
    assert_eq!(holder.levels[0].fingerprint, u64::MAX);
}

async fn listed(store: &dyn Store, prefix: &str, after: Option<Key>, limit: usize) -> (Vec<String>, bool) {
    let page = store.list(prefix.to_owned(), after, limit).await.expect("it lists");
    (page.items.iter().map(|stored| stored.key.as_str().to_owned()).collect(), page.more)
}

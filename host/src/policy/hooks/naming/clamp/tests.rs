use super::*;
use crate::lock::Space;

fn sound() -> wit::LockPlan {
    wit::LockPlan {
        keys: vec!["b".into(), "a".into(), "b".into()],
        primitive: types::Primitive::Lease,
        mode: types::Mode::Exclusive,
        ttl: 1_000,
        wait: 0,
        rank: 0,
        group: String::new(),
        weight: 1,
        reentrant: false,
        max_waiters: 1,
        lock_at_least: 0,
        lock_delay: 0,
        max_hold: 1_000,
        labels: Vec::new(),
    }
}

fn refused(change: impl FnOnce(&mut wit::LockPlan)) -> String {
    let mut from = sound();
    change(&mut from);
    plan(from, &Limits::default()).unwrap_err()
}

#[test]
fn keys_are_sorted_and_deduplicated() {
    let keys = plan(sound(), &Limits::default()).unwrap().keys;
    assert_eq!(keys.iter().map(Key::as_str).collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn numeric_values_of_a_plan_are_clamped_to_the_limits() {
    let limits = Limits::default();
    let most = wit::LockPlan {
        ttl: u32::MAX,
        wait: u32::MAX,
        weight: 0,
        max_waiters: u32::MAX,
        lock_at_least: u32::MAX,
        lock_delay: u32::MAX,
        max_hold: u32::MAX,
        ..sound()
    };
    let plan_of = |from| plan(from, &limits).unwrap();
    let most = plan_of(most);
    assert_eq!(most.ttl_ms, limits.max_ttl_ms);
    assert_eq!(most.wait_ms, limits.max_wait_ms);
    assert_eq!(most.max_waiters, limits.max_waiters);
    assert_eq!(
        (most.lock_at_least_ms, most.lock_delay_ms),
        (limits.max_lock_delay_ms, limits.max_lock_delay_ms)
    );
    assert_eq!(most.max_hold_ms, limits.max_hold_ms);
    assert_eq!(most.weight, 1);
    let least = plan_of(wit::LockPlan { ttl: 0, max_hold: 0, ..sound() });
    assert_eq!((least.ttl_ms, least.max_hold_ms), (limits.min_ttl_ms, limits.min_ttl_ms));
}

#[test]
fn a_once_plan_keeps_its_outcome_and_is_not_reentrant() {
    let limits = Limits::default();
    let once = |lock_at_least| {
        let (keys, primitive) = (vec!["a".into()], types::Primitive::Once);
        let from = wit::LockPlan { keys, primitive, lock_at_least, reentrant: true, ..sound() };
        plan(from, &limits).unwrap()
    };
    assert_eq!((once(5_000).keep_ms, once(5_000).lock_at_least_ms), (NonZero::new(5_000), 0));
    assert_eq!(
        (once(0).keep_ms, once(u32::MAX).keep_ms),
        (NonZero::new(86_400_000), NonZero::new(limits.max_keep_ms))
    );
    assert!(!once(0).reentrant);
    assert_eq!(plan(sound(), &limits).unwrap().keep_ms, None);
}

#[test]
fn an_invalid_key_mode_group_or_label_is_refused_and_not_altered() {
    assert_eq!(refused(|plan| plan.keys.clear()), "there is no key");
    assert_eq!(refused(|plan| plan.keys.push(String::new())), "a key is empty");
    assert!(refused(|plan| plan.keys.push("x".repeat(1025))).contains("1025 bytes"));
    assert!(refused(|plan| plan.keys = (0..17).map(|n| n.to_string()).collect()).contains("more than 16"));
    assert!(refused(|plan| plan.group = "x".repeat(257)).contains("group"));
    let shared = types::Mode::Shared;
    let advisory = |plan: &mut wit::LockPlan| {
        (plan.primitive, plan.mode) = (types::Primitive::Advisory, shared);
    };
    assert!(refused(advisory).contains("`advisory` is exclusive"));
    for primitive in [types::Primitive::Once, types::Primitive::Version] {
        assert!(refused(|plan| plan.primitive = primitive).contains("2 keys"));
        let shared = |plan: &mut wit::LockPlan| {
            plan.keys.truncate(1);
            (plan.primitive, plan.mode) = (primitive, types::Mode::Shared);
        };
        assert!(refused(shared).contains("is exclusive"));
    }
    let permits = |count, limit| types::Mode::Permits(types::Permits { count, limit });
    for (count, limit) in [(0, 1), (2, 1), (1, 0), (1, 1025)] {
        assert!(refused(|plan| plan.mode = permits(count, limit)).contains("permits"), "{count} of {limit}");
    }
    let label = types::Label { name: "n".into(), value: "x".repeat(257) };
    assert!(refused(|plan| plan.labels.push(label)).contains("label"));
}

#[test]
fn a_second_primitive_must_fit_the_plan_as_the_first_primitive_does() {
    let second = |name: &str| types::Label { name: "lockkeeper.second-primitive".into(), value: name.into() };
    let with = |name: &str| wit::LockPlan {
        primitive: types::Primitive::Advisory,
        labels: vec![second(name)],
        ..sound()
    };
    let plan = plan(with("lease"), &Limits::default()).unwrap();
    assert_eq!((plan.primitive, plan.second), (Primitive::Advisory, Some(Primitive::Lease)));
    assert!(plan.labels.is_empty() && plan.keys.iter().all(|key| key.space() == Space::Advisory));
    let plan = plan.with_primitive(Primitive::Lease);
    assert!(plan.keys.iter().all(|key| key.space() == Space::Table));
    for (name, why) in [("once", "guards one"), ("mutex", "not a primitive")] {
        assert!(refused(|plan| *plan = with(name)).contains(why), "{name}");
    }
    let unknown = types::Label { name: "lockkeeper.other".into(), value: "x".into() };
    assert!(refused(|plan| plan.labels.push(unknown)).contains("means nothing"));
    let once = |plan: &mut wit::LockPlan| {
        *plan = with("once");
        plan.keys.truncate(1);
    };
    assert!(refused(once).contains("cannot stand in"));
}

#[test]
fn a_lost_lease_is_handled_as_the_label_of_the_sdk_says() {
    use lockkeeper_sdk::OnLoss as Said;
    let with = |value: &str| {
        let label = types::Label { name: "lockkeeper.on-loss".into(), value: value.into() };
        wit::LockPlan { labels: vec![label], ..sound() }
    };
    let limits = Limits::default();
    for (said, meant) in
        [(Said::Finish, OnLoss::Finish), (Said::Mark, OnLoss::Mark), (Said::Cut, OnLoss::Cut)]
    {
        let label = lockkeeper_sdk::Plan::exclusive("a").on_loss(said).labels.remove(0);
        assert_eq!(label.name, "lockkeeper.on-loss");
        let plan = plan(with(&label.value), &limits).unwrap();
        assert_eq!((plan.on_loss, plan.labels.len()), (meant, 0));
    }
    assert_eq!(plan(sound(), &limits).unwrap().on_loss, OnLoss::Finish);
    assert!(refused(|plan| *plan = with("stop")).contains("means nothing"));
}

use std::collections::VecDeque;

use lockkeeper_sdk::Mode;
use lockkeeper_sdk::fairness::GroupShare;

use super::*;

fn waiter(group: &str, weight: u32, waited: u32) -> Waiter {
    Waiter {
        rank: 0,
        group: group.into(),
        weight,
        owner: String::new(),
        mode: Mode::Exclusive,
        waited,
        labels: Vec::new(),
    }
}

fn queue(waiters: Vec<Waiter>, grants: &[(&str, u32)]) -> Queue {
    let share =
        |&(group, recent_grants): &(&str, u32)| GroupShare { group: group.into(), waiting: 0, recent_grants };
    Queue { key: "a".into(), waiters, groups: grants.iter().map(share).collect(), seed: 0 }
}

/// Grants `rounds` times to groups whose sizes never shrink, with the last 64 grants in view.
fn shares(crowds: &[(&str, u32, usize)], rounds: usize) -> BTreeMap<String, usize> {
    let mut recent: VecDeque<String> = VecDeque::new();
    let mut grants = BTreeMap::new();
    for _ in 0..rounds {
        let waiters =
            crowds.iter().flat_map(|(group, weight, n)| vec![waiter(group, *weight, 1); *n]).collect();
        let counts: Vec<(&str, u32)> = crowds
            .iter()
            .map(|(group, ..)| (*group, recent.iter().filter(|g| g == group).count() as u32))
            .collect();
        let queue = queue(waiters, &counts);
        let group = queue.waiters[FairGroups::choose(&Settings::default(), &queue) as usize].group.clone();
        *grants.entry(group.clone()).or_default() += 1;
        recent.push_back(group);
        if recent.len() > 64 {
            recent.pop_front();
        }
    }
    grants
}

#[test]
fn a_single_waiter_goes_before_a_crowd_that_was_just_served() {
    let mut waiters = vec![waiter("crowd", 1, 9_000); 50];
    waiters.push(waiter("single", 1, 1));
    let queue = queue(waiters, &[("crowd", 1), ("single", 0)]);
    assert_eq!(FairGroups::choose(&Settings::default(), &queue), 50);
}

#[test]
fn shares_follow_the_weights_and_not_the_number_of_waiters() {
    let shares = shares(&[("a", 3, 50), ("b", 1, 1)], 4_000);
    assert!((2_900..=3_100).contains(&shares["a"]), "{shares:?}");
    assert!((900..=1_100).contains(&shares["b"]), "{shares:?}");
}

#[test]
fn rank_and_arrival_decide_within_a_group() {
    let first = waiter("a", 1, 10);
    let urgent = Waiter { rank: -1, ..waiter("a", 1, 1) };
    let pick = |waiters| FairGroups::choose(&Settings::default(), &queue(waiters, &[]));
    assert_eq!(pick(vec![first.clone(), waiter("a", 1, 9)]), 0);
    assert_eq!(pick(vec![first, urgent]), 1);
}

#[test]
fn the_label_names_the_group_and_its_weight() {
    let settings: Settings = Settings {
        label: "tenant".into(),
        required: true,
        weights: BTreeMap::from([("acme".into(), 5)]),
        ..Settings::default()
    };
    let plan = FairGroups::plan(&settings, &Request::new("a").with_label("tenant", "acme")).unwrap();
    assert_eq!((plan.group.as_str(), plan.weight), ("acme", 5));
    let other = FairGroups::plan(&settings, &Request::new("a").with_label("tenant", "b")).unwrap();
    assert_eq!(other.weight, 1);
    assert!(FairGroups::plan(&settings, &Request::new("a")).unwrap_err().reason.contains("`tenant`"));
}

#[test]
fn settings_have_bounds() {
    let zero = Settings { weights: BTreeMap::from([("acme".into(), 0)]), ..Settings::default() };
    assert_eq!(FairGroups::check(&zero).unwrap_err(), "`weights.acme` must be between 1 and 1000, and is 0");
    FairGroups::check(&Settings::default()).unwrap();
}

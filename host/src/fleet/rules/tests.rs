use std::collections::BTreeMap;

use super::*;
use crate::lock::ServerTime;
use crate::store::registry::{Member, RulesRecord};

const ME: u64 = 1;
const GRACE: Duration = Duration::from_secs(60);
const NOW: u64 = 100_000_000_000;

fn rules(number: u64, digest: &str) -> RulesVersion {
    RulesVersion { number, digest: digest.to_owned() }
}

/// Another member that may grant; `None` for one that does not say what it goes by.
fn member(id: u64, rules: Option<&RulesVersion>) -> Member {
    Member {
        id,
        address: String::new(),
        host: String::new(),
        routes: String::new(),
        beat: ServerTime(NOW),
        until: ServerTime(NOW),
        acks: Some(BTreeMap::new()),
        rules: rules.map(RulesVersion::mark),
    }
}

/// What the proxy sees: what is recorded for so many seconds, and what the others go by.
fn view(recorded: Option<(&RulesVersion, u64)>, others: &[&RulesVersion]) -> View {
    let record = |(rules, for_s): (&RulesVersion, u64)| RulesRecord {
        rules: rules.clone(),
        since: ServerTime(NOW - for_s * 1_000_000),
    };
    let others = others.iter().enumerate().map(|(n, rules)| member(2 + n as u64, Some(rules)));
    View {
        now: ServerTime(NOW),
        members: std::iter::once(member(ME, Some(&rules(9, "not looked at")))).chain(others).collect(),
        rules: recorded.map(record),
        ..View::default()
    }
}

#[test]
fn a_higher_version_is_recorded_and_a_lower_one_is_behind() {
    let (old, new) = (rules(1, "old"), rules(2, "new"));
    let seen = |recorded, own, others: &[&RulesVersion]| standing(&view(recorded, others), ME, own, 0);
    assert_eq!(seen(None, &old, &[&new]), Standing::Newer, "nothing is recorded");
    assert_eq!(seen(Some((&old, 1)), &old, &[&new]), Standing::Same);
    assert_eq!(seen(Some((&old, 1)), &new, &[&old]), Standing::Newer);
    assert_eq!(seen(Some((&new, 1)), &old, &[&new]), Standing::Behind);
    assert_eq!(
        seen(Some((&new, 1)), &old, &[&old]),
        Standing::Behind,
        "the version says which is the newer one"
    );
    assert_eq!(seen(Some((&new, 1)), &old, &[]), Standing::Newer, "its operator chose so");
}

#[test]
fn of_two_contents_with_one_version_the_recorded_one_counts_until_no_proxy_has_it() {
    let (one, other) = (rules(0, "one"), rules(0, "other"));
    let seen = |others: &[&RulesVersion]| standing(&view(Some((&one, 1)), others), ME, &other, 0);
    assert_eq!(seen(&[&one]), Standing::Conflict);
    assert_eq!(seen(&[&other, &one]), Standing::Conflict);
    assert_eq!(seen(&[&other, &other]), Standing::Newer, "all have got it");
    assert_eq!(seen(&[]), Standing::Newer, "it is alone");
    let off = rules(0, auth::OFF);
    assert_eq!(standing(&view(Some((&off, 1)), &[&off]), ME, &one, 0), Standing::Conflict);
    assert_eq!(standing(&view(Some((&one, 1)), &[&one]), ME, &off, 0), Standing::Conflict);

    let mut joins = view(Some((&one, 1)), &[&other]);
    joins.members.push(Member { acks: None, rules: None, ..member(7, Some(&one)) });
    joins.members.push(member(8, None));
    assert_eq!(standing(&joins, ME, &other, 0), Standing::Newer, "neither says that it goes by other rules");
}

/// Whether nothing is granted after a view.
fn ends(own: &mut OwnRules, view: &View, mine: &RulesVersion, grace: Duration) -> bool {
    own.see(view, ME, mine.clone(), grace);
    own.trouble().is_some_and(|(_, grants_nothing)| grants_nothing)
}

#[test]
fn a_proxy_that_is_behind_grants_until_the_grace_after_the_record_is_over() {
    let (old, new) = (rules(1, "old"), rules(2, "new"));
    let mut own = OwnRules::default();
    assert!(!ends(&mut own, &view(Some((&old, 500)), &[&old]), &old, GRACE));
    assert!(own.trouble().is_none());
    assert!(!ends(&mut own, &view(Some((&new, 59)), &[&new]), &old, GRACE));
    assert!(
        own.trouble().is_some_and(|(what, _)| what.contains("in 1 s, it will grant")),
        "{:?}",
        own.trouble()
    );
    assert!(ends(&mut own, &view(Some((&new, 61)), &[&new]), &old, GRACE));
    let newer = rules(3, "newer");
    assert!(ends(&mut own, &view(Some((&newer, 0)), &[&newer]), &old, GRACE), "no other grace begins");
    assert!(!ends(&mut own, &view(Some((&newer, 1)), &[&newer]), &newer, GRACE), "its file was deployed");
    assert!(own.trouble().is_none());

    assert!(
        ends(&mut OwnRules::default(), &view(Some((&new, 61)), &[&new]), &old, GRACE),
        "it starts with an old file"
    );
    assert!(ends(&mut OwnRules::default(), &view(Some((&new, 0)), &[&new]), &old, Duration::ZERO));
}

/// A lost record, as after a fail-over, or the end of all other proxies must not bring withdrawn rights back.
#[test]
fn a_proxy_that_was_overtaken_stays_behind_until_its_file_changes() {
    let (old, new) = (rules(1, "old"), rules(2, "new"));
    for after in [view(None, &[]), view(Some((&old, 500)), &[&old]), view(Some((&new, 61)), &[])] {
        let mut own = OwnRules::default();
        assert!(ends(&mut own, &view(Some((&new, 61)), &[&new]), &old, GRACE));
        assert!(ends(&mut own, &after, &old, GRACE), "{after:?}");
        assert!(!own.are_newer());
        let deployed = rules(2, "new");
        assert!(!ends(&mut own, &after, &deployed, GRACE), "{after:?}");
    }
}

#[test]
fn a_proxy_in_conflict_grants_until_the_grace_after_it_read_its_file_is_over() {
    let (one, other) = (rules(0, "one"), rules(0, "other"));
    let long_ago = view(Some((&one, 5_000)), &[&one]);
    let mut own = OwnRules::default();
    assert!(!ends(&mut own, &long_ago, &other, GRACE));
    assert!(own.differ() && own.trouble().is_some());
    assert!(ends(&mut own, &long_ago, &other, Duration::ZERO));
    assert!(ends(&mut own, &long_ago, &other, GRACE), "the end stays");
    assert!(!ends(&mut own, &long_ago, &rules(0, "third"), GRACE), "another file, and another grace");
    assert!(!ends(&mut own, &long_ago, &one, GRACE) && own.trouble().is_none());
}

#[test]
fn the_advice_says_what_to_do() {
    let advice = |own: (u64, &str), recorded: (u64, &str)| {
        advice(&rules(own.0, own.1), &rules(recorded.0, recorded.1))
    };
    let behind = advice((1, "a"), (4, "b"));
    assert!(behind.contains("give this proxy their file") && behind.contains("`version = 5`"), "{behind}");
    let conflict = advice((0, "a"), (0, "b"));
    assert!(conflict.contains("with other content") && conflict.contains("`version = 1`"), "{conflict}");
    let off = advice((0, "a"), (0, auth::OFF));
    assert!(off.contains("have no [auth] file: give all of them the same"), "{off}");
    let on = advice((0, auth::OFF), (2, "b"));
    assert!(on.starts_with("this proxy has no [auth] file, and"), "{on}");
}

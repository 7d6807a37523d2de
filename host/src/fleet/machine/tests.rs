use super::*;

fn version(digest: &str) -> PolicyVersion {
    PolicyVersion { digest: digest.to_owned(), settings: "{}".to_owned() }
}

fn member(id: u64, seq: Option<u64>) -> Member {
    let acks = seq.map(|seq| BTreeMap::from([("p".to_owned(), seq)]));
    let (beat, until) = (ServerTime(1_000), ServerTime(16_000));
    Member {
        id,
        address: String::new(),
        host: String::new(),
        routes: "r".to_owned(),
        beat,
        until,
        acks,
        rules: None,
    }
}

fn record(seq: u64, live: &str, candidate: Option<&str>) -> PolicyRecord {
    let candidate = candidate.map(version);
    let (name, live) = ("p".to_owned(), version(live));
    PolicyRecord {
        name,
        seq,
        live,
        candidate,
        canary: None,
        previous: None,
        since: ServerTime(0),
        note: None,
    }
}

fn view(members: Vec<Member>, record: PolicyRecord) -> View {
    View { now: ServerTime(2_000), members, records: vec![record], ..View::default() }
}

fn acks(seq: u64) -> BTreeMap<String, u64> {
    BTreeMap::from([("p".to_owned(), seq)])
}

const NOBODY: BTreeSet<u64> = BTreeSet::new();

#[test]
fn a_candidate_goes_live_only_after_every_granting_member_has_acknowledged() {
    let settle = FleetAction::Settle { name: "p".to_owned(), seq: 4 };
    let both = || record(4, "x", Some("y"));
    let behind = view(vec![member(1, Some(4)), member(2, Some(3))], both());
    assert_eq!(steps(&behind, 1, &acks(4), &NOBODY), []);
    assert_eq!(waited_for(&behind, "p", 4), [2]);
    let all = view(vec![member(1, Some(4)), member(2, Some(4)), member(3, None)], both());
    assert_eq!(steps(&all, 1, &acks(4), &NOBODY), [settle]);
    assert_eq!(
        steps(&all, 2, &acks(3), &NOBODY),
        [FleetAction::ApplyRecord(Box::new(both()))],
        "its own comes first"
    );
}

#[test]
fn a_clock_set_forward_makes_no_member_count_as_gone() {
    let mut seen = view(vec![member(1, Some(1)), member(2, Some(1))], record(1, "x", None));
    seen.now = ServerTime(20_000);
    assert!(!is_silent(&seen, &seen.members[1], 15_000));
    assert!(is_silent(&seen, &seen.members[1], 15_001), "it was not heard of for as long as its beat lasts");
    seen.now = ServerTime(16_000);
    assert!(!is_silent(&seen, &seen.members[1], 60_000), "it may write still");
}

#[test]
fn a_gone_member_is_evicted_and_waited_for_until_its_eviction() {
    let evict = |id| FleetAction::Evict { id, beat: ServerTime(1_000) };
    let seen = view(vec![member(1, Some(4)), member(2, Some(3)), member(3, None)], record(4, "x", None));
    assert_eq!(steps(&seen, 1, &acks(4), &NOBODY), []);
    let gone = BTreeSet::from([1, 2, 3]);
    assert_eq!(steps(&seen, 1, &acks(4), &gone), [evict(2), evict(3)], "never itself");
    // The member may still be there, and is waited for until its row is gone.
    let seen = view(seen.members, record(5, "x", Some("y")));
    assert_eq!(steps(&seen, 1, &acks(5), &gone), [evict(2), evict(3)]);
}

#[test]
fn the_first_proxy_founds_the_fleet_and_later_proxies_follow() {
    let (same, other) =
        (BTreeMap::from([("p".to_owned(), version("x"))]), BTreeMap::from([("p".to_owned(), version("z"))]));
    let first_beats = BTreeMap::from([(2, ServerTime(1_000))]);
    let joins = |view: &View, own: Option<&BTreeMap<String, PolicyVersion>>| {
        joining(
            view,
            &Newcomer { id: 1, routes: "r", naming: &BTreeMap::new(), own, first_beats: &first_beats },
        )
    };
    let alone = view(vec![member(1, None), member(2, None)], record(3, "x", None));
    assert_eq!(joins(&alone, Some(&other)), Joining::Initialize, "the other one joins as well");
    assert_eq!(joins(&alone, None), Joining::Follow, "it has granted by the recorded ones before");

    let mut two = view(vec![member(1, None), member(2, Some(3))], record(3, "x", None));
    assert_eq!(joins(&two, Some(&same)), Joining::Follow);
    assert!(matches!(joins(&two, Some(&other)), Joining::Wait(why) if why.contains("0000000000000002")));
    two.members[1].beat = ServerTime(1_500);
    assert_eq!(joins(&two, Some(&other)), Joining::Follow, "the other one lives");

    two.members[1].routes = "s".to_owned();
    assert!(matches!(joins(&two, Some(&same)), Joining::Wait(why) if why.contains("routes")));
}

/// Proxies that name the same request differently, or that follow other rules, do not grant side by side.
#[test]
fn a_proxy_with_other_names_or_of_another_version_waits_until_it_is_alone() {
    let guarded = |digest: &str| BTreeMap::from([("[[guard]] shop".to_owned(), version(digest))]);
    let own = BTreeMap::from([("p".to_owned(), version("x"))]);
    let joins = |view: &View, routes: &str, naming: &str, fresh: bool| {
        let (naming, first_beats) = (guarded(naming), BTreeMap::new());
        let own = fresh.then_some(&own);
        joining(view, &Newcomer { id: 1, routes, naming: &naming, own, first_beats: &first_beats })
    };
    let mut two = view(vec![member(1, None), member(2, Some(3))], record(3, "x", None));
    assert_eq!(joins(&two, "r", "n", true), Joining::Follow, "no names are recorded");
    two.records.push(PolicyRecord { name: "[[guard]] shop".to_owned(), ..record(1, "n", None) });
    assert_eq!(joins(&two, "r", "n", true), Joining::Follow);
    for fresh in [true, false] {
        let told = joins(&two, "r", "m", fresh);
        assert!(matches!(&told, Joining::Wait(why) if why.contains("[[guard]] shop")), "{told:?}");
    }
    two.members[1].acks = None;
    assert_eq!(
        (joins(&two, "r", "m", true), joins(&two, "r", "m", false)),
        (Joining::Initialize, Joining::Rename)
    );

    two.members[1].acks = Some(acks(3));
    two.members[1].routes = "r".to_owned();
    let told = joins(&two, &fingerprint("r"), "n", true);
    assert!(matches!(&told, Joining::Wait(why) if why.contains("an earlier version")), "{told:?}");
    two.members[1].routes = fingerprint("r");
    assert_eq!(joins(&two, &fingerprint("r"), "n", true), Joining::Follow);
}

#[test]
fn a_proxy_may_rename_requests_alone_or_to_the_recorded_names() {
    let naming = |digest: &str| BTreeMap::from([("[[guard]] shop".to_owned(), version(digest))]);
    let mut seen = view(vec![member(1, Some(3)), member(2, None)], record(3, "x", None));
    seen.records.push(PolicyRecord { name: "[[guard]] shop".to_owned(), ..record(1, "n", None) });
    let asked = |view: &View, member, own: &str, wanted: &str| {
        renaming(view, member, &naming(own), &naming(wanted)).map_err(drop)
    };
    assert_eq!(asked(&seen, Some(1), "n", "m"), Ok(Renaming::Alone), "the other one joins");
    assert_eq!(asked(&seen, None, "m", "n"), Ok(Renaming::Recorded), "it was counted as gone");
    assert_eq!(asked(&seen, None, "n", "m"), Err(()), "first it joins");
    let own = BTreeMap::from([("[[guard]] other".to_owned(), version("n"))]);
    assert!(renaming(&seen, None, &own, &naming("n")).is_err(), "the record may be of a time before");
    seen.members[1].acks = Some(acks(3));
    assert_eq!(
        (asked(&seen, Some(1), "n", "m"), asked(&seen, None, "m", "n")),
        (Err(()), Ok(Renaming::Recorded))
    );

    assert_eq!(
        (named_otherwise(&seen, &naming("n")), named_otherwise(&seen, &BTreeMap::new())),
        (None, None)
    );
    assert!(named_otherwise(&seen, &naming("m")).is_some() && named_otherwise(&seen, &own).is_some());
    seen.records.push(PolicyRecord { name: "[[guard]] other".to_owned(), ..record(1, "n", None) });
    let why =
        named_otherwise(&seen, &naming("n")).expect("requests may have had the names of the other record");
    assert!(why.contains("[[guard]] other"), "{why}");
}

#[test]
fn a_push_is_live_only_when_all_members_have_followed() {
    let candidate = version("y");
    let told = |view: &View| fate(view, "p", 4, &candidate);
    let members = |one, other| vec![member(1, Some(one)), member(2, Some(other))];
    let waits_for = |ids: &[u64]| Fate::Pending { waits_for: ids.to_vec() };
    assert_eq!(told(&view(members(4, 3), record(4, "x", Some("y")))), waits_for(&[2]));
    assert_eq!(told(&view(members(5, 4), record(5, "y", None))), waits_for(&[2]));
    assert_eq!(told(&view(members(5, 5), record(5, "y", None))), Fate::Live);
    assert_eq!(told(&view(members(5, 5), record(6, "y", Some("z")))), Fate::Live);
    assert_eq!(told(&view(members(5, 5), record(7, "z", None))), Fate::Unknown);
    let mut called_off = record(5, "x", None);
    called_off.note = Some("refused".to_owned());
    assert_eq!(told(&view(members(5, 5), called_off)), Fate::CalledOff("refused".to_owned()));
}

/// The effect of pushing a version depends only on the record.
#[test]
fn a_push_of_the_live_version_calls_a_change_off() {
    let pushed = |record: &PolicyRecord, digest: &str| beginning(record, &version(digest));
    let settled = record(3, "x", None);
    assert_eq!(pushed(&settled, "y"), Beginning::Propose { seq: 3 });
    assert_eq!(pushed(&settled, "x"), Beginning::Join { seq: 2 }, "it may not be live on all members yet");
    let both = record(4, "x", Some("y"));
    assert_eq!(pushed(&both, "y"), Beginning::Join { seq: 4 });
    assert_eq!(pushed(&both, "z"), Beginning::Busy);
    assert_eq!(pushed(&both, "x"), Beginning::CallOff { seq: 4 });

    let mut seen = view(vec![member(1, Some(4)), member(2, Some(4))], both);
    called_off(&mut seen, "p", 4, "x was pushed again");
    assert_eq!(fate(&seen, "p", 4, &version("y")), Fate::CalledOff("x was pushed again".to_owned()));
    assert_eq!(fate(&seen, "p", 4, &version("x")), Fate::Pending { waits_for: vec![1, 2] });
    seen.members = vec![member(1, Some(5)), member(2, Some(5))];
    assert_eq!(fate(&seen, "p", 4, &version("x")), Fate::Live);
    called_off(&mut seen, "p", 4, "late");
    assert_eq!(seen.records[0].seq, 5, "a record that has changed stays as it is");
}

#[test]
fn heartbeats_speed_up_for_a_limited_time_during_a_change() {
    let later = |us, record: PolicyRecord, members| {
        let since = record.since.0;
        let mut seen = view(members, record);
        seen.now = ServerTime(since + us);
        hurries(&seen)
    };
    let all = || vec![member(1, Some(4)), member(2, Some(4))];
    assert!(!later(0, record(4, "x", None), all()), "nothing is under way");
    assert!(later(0, record(4, "x", Some("y")), all()));
    assert!(later(0, record(5, "x", None), all()), "it is not acknowledged");
    assert!(later(HURRY_US - 1, record(5, "x", None), all()));
    assert!(!later(HURRY_US, record(4, "x", Some("y")), all()));
    assert!(!later(HURRY_US, record(5, "x", None), all()));
}

#[test]
fn a_store_that_lost_a_record_is_noticed() {
    let seen = view(vec![member(1, Some(4))], record(4, "x", None));
    assert!(!has_forgotten(&seen, None));
    assert!(!has_forgotten(&seen, Some(&acks(4))));
    assert!(has_forgotten(&seen, Some(&acks(5))));
    assert!(has_forgotten(&View::default(), Some(&acks(4))));
}

/// This proxy sees its own actions before it reads the store again.
#[test]
fn a_proxy_sees_its_own_steps_before_it_reads_the_store_again() {
    let mut seen = view(vec![member(1, Some(3))], record(3, "x", None));
    proposed(&mut seen, "p", 3, version("y"), None);
    assert_eq!((seen.records[0].seq, &seen.records[0].candidate), (4, &Some(version("y"))));
    acknowledged(&mut seen, 1, &acks(4));
    assert_eq!(steps(&seen, 1, &acks(4), &NOBODY), [FleetAction::Settle { name: "p".to_owned(), seq: 4 }]);
    settled(&mut seen, "p", 4);
    assert_eq!((seen.records[0].seq, &seen.records[0].live), (5, &version("y")));
    assert_eq!(seen.records[0].previous, Some(version("x")));
    assert_eq!(fate(&seen, "p", 4, &version("y")), Fate::Pending { waits_for: vec![1] });
    // This view was read before the last step was recorded.
    let late = view(vec![member(1, Some(4))], record(4, "x", Some("y")));
    assert!(
        !steps(&late, 1, &acks(5), &NOBODY).iter().any(|step| matches!(step, FleetAction::ApplyRecord(_)))
    );
}

/// Members lag, pause and are evicted, and changes are called off. Whatever the order, no two members that may grant
/// ever use generations without a common one.
#[test]
fn members_that_may_grant_always_share_a_generation() {
    for seed in 1..=20_000 {
        simulate(seed);
    }
}

/// The generations whose keys a member takes, and whether the member knows that it was evicted.
#[derive(Clone)]
struct Proxy {
    id: u64,
    acks: BTreeMap<String, u64>,
    names: BTreeSet<String>,
    paused: bool,
}

struct World {
    random: u64,
    view: View,
    proxies: Vec<Proxy>,
    next: u64,
}

fn simulate(seed: u64) {
    let members = (1..=3).map(|id| member(id, Some(1))).collect();
    let proxy = |id| Proxy { id, acks: acks(1), names: BTreeSet::from(["g0".to_owned()]), paused: false };
    let proxies = (1..=3).map(proxy).collect();
    let view = view(members, record(1, "g0", None));
    let mut world = World { random: seed, view, proxies, next: 4 };
    for _ in 0..60 {
        world.step();
        let granting: Vec<&Proxy> =
            world.proxies.iter().filter(|proxy| world.view.member(proxy.id).is_some()).collect();
        for (n, one) in granting.iter().enumerate() {
            for other in &granting[n + 1..] {
                assert!(
                    !one.names.is_disjoint(&other.names),
                    "seed {seed}: {:?} {:?}",
                    one.names,
                    other.names
                );
            }
        }
    }
}

impl World {
    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    fn step(&mut self) {
        let at = self.random(self.proxies.len() as u64) as usize;
        let record = self.view.records[0].clone();
        match self.random(12) {
            0 if record.candidate.is_none() => {
                let candidate = version(&format!("g{}", self.random(4)));
                self.view.records[0] =
                    PolicyRecord { seq: record.seq + 1, candidate: Some(candidate), ..record };
            }
            1 if record.candidate.is_some() => {
                self.view.records[0] = PolicyRecord { seq: record.seq + 1, candidate: None, ..record };
            }
            2 => self.proxies[at].paused = !self.proxies[at].paused,
            3 if self.proxies[at].paused => {
                let id = self.proxies[at].id;
                self.view.members.retain(|member| member.id != id);
            }
            4 => self.join(at),
            _ => self.act(at),
        }
    }

    /// A proxy without a row joins with the record as it is.
    fn join(&mut self, at: usize) {
        if self.view.member(self.proxies[at].id).is_some() {
            return;
        }
        let record = &self.view.records[0];
        let (id, seq) = (self.next, record.seq);
        self.next += 1;
        self.proxies[at] = Proxy { id, acks: acks(seq), names: names(record), paused: false };
        self.view.members.push(member(id, Some(seq)));
    }

    fn act(&mut self, at: usize) {
        let proxy = self.proxies[at].clone();
        if proxy.paused || self.view.member(proxy.id).is_none() {
            return;
        }
        for step in steps(&self.view, proxy.id, &proxy.acks, &NOBODY) {
            match step {
                FleetAction::ApplyRecord(record) => {
                    let proxy = &mut self.proxies[at];
                    proxy.names = names(&record);
                    proxy.acks = acks(record.seq);
                    let known = self.view.members.iter_mut().find(|member| member.id == proxy.id);
                    known.expect("it has a row").acks = Some(proxy.acks.clone());
                }
                FleetAction::Settle { seq, .. } => {
                    let record = self.view.records[0].clone();
                    assert_eq!(record.seq, seq);
                    let live = record.candidate.clone().expect("there is one");
                    self.view.records[0] = PolicyRecord { seq: seq + 1, live, candidate: None, ..record };
                }
                FleetAction::Evict { .. } => unreachable!("time stands still here"),
            }
        }
    }
}

fn names(record: &PolicyRecord) -> BTreeSet<String> {
    [Some(&record.live), record.candidate.as_ref()].into_iter().flatten().map(|v| v.digest.clone()).collect()
}

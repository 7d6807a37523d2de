//! Notes for watchers, and operations that no waiter needs.

use super::readers::waiter;
use super::*;
use crate::lock::maps::HashSet;
use crate::lock::record::{Cause, Denial, Grant, HeldBy, Release};
use crate::lock::table::limits::LOOK_MS;
use crate::lock::{LeaseRef, Token};

/// A table, and the answers of its store.
struct Scene {
    table: Table,
    now: Instant,
    submitted: Vec<(SubmissionId, Vec<Op>)>,
    notes: Vec<Note>,
    finished: Vec<(WaiterId, Verdict)>,
}

impl Scene {
    fn new() -> Scene {
        Scene {
            table: Table::new(),
            now: Instant(1_000_000),
            submitted: Vec::new(),
            notes: Vec::new(),
            finished: Vec::new(),
        }
    }

    fn perform(&mut self) {
        while let Some(action) = self.table.poll_action() {
            match action {
                Action::Submit { ticket, ops } => self.submitted.push((ticket, ops)),
                Action::Note(note) => self.notes.push(note),
                Action::Finish { waiter, verdict } => self.finished.push((waiter, verdict)),
                _ => {}
            }
        }
    }

    fn handle(&mut self, event: Event) {
        self.table.handle_event(event, self.now);
        self.perform();
    }

    fn pass_ms(&mut self, ms: u32) {
        self.now = self.now.plus_ms(ms);
        self.table.handle_timeout(self.now);
        self.perform();
    }

    /// Answers the oldest open batch.
    fn answer(&mut self, outcome: Outcome) {
        self.answer_group(vec![outcome]);
    }

    fn answer_group(&mut self, outcomes: Vec<Outcome>) {
        let (ticket, _) = self.submitted.remove(0);
        let now = ServerTime(self.now.0 + SERVER_AHEAD_US);
        let answered = Answered { outcomes, asked_at: self.now, now };
        self.handle(Event::Completed { ticket, result: Ok(answered) });
    }

    fn fail_all(&mut self, sent: bool) {
        for (ticket, _) in std::mem::take(&mut self.submitted) {
            let result = Err(Unheard { why: "gone".into(), sent });
            self.handle(Event::Completed { ticket, result });
        }
    }

    /// A lease of five seconds.
    fn granted(&mut self) -> u64 {
        self.granted_to(1);
        assert!(matches!(self.notes.pop(), Some(Note::Granted { .. })));
        1
    }

    fn granted_to(&mut self, nonce: u64) {
        self.handle(Event::Enqueue(Box::new(waiter(nonce, Mode::Exclusive, 0))));
        self.answer(grant(nonce));
    }
}

/// The store denies the first key.
fn held() -> Outcome {
    let (key, cause) = (key(0), Cause::Held);
    Outcome::Held(Denial { key, cause, holder: None, free_in_us: 1_000_000, next_waiter: None, joined: None })
}

fn grant(nonce: u64) -> Outcome {
    let (tokens, left_us) = (vec![Token(6 + nonce)], 5_000_000);
    Outcome::Granted(Grant { nonce, chosen: None, tokens, left_us, levels: 1, repeated: false })
}

#[test]
fn a_lease_is_not_reported_expired_while_another_proxy_renews_it() {
    let mut scene = Scene::new();
    scene.granted();
    for _ in 0..3 {
        scene.pass_ms(5_000 + LOOK_MS);
        scene.pass_ms(LOOK_MS);
        assert!(matches!(scene.submitted[0].1[..], [Op::Raise { .. }]), "{:?}", scene.submitted);
        scene.answer(Outcome::Renewed { left_us: 5_000_000 });
        assert!(scene.notes.is_empty(), "{:?}", scene.notes);
        assert_eq!(scene.table.held(), 1);
    }
    scene.pass_ms(5_000);
    scene.pass_ms(LOOK_MS);
    scene.answer(Outcome::Lost);
    assert!(matches!(scene.notes[..], [Note::Expired { held_ms: 15_000.., .. }]), "{:?}", scene.notes);
    assert_eq!(scene.table.held(), 0);
}

#[test]
fn a_lease_is_reported_expired_before_the_next_lease_is_granted() {
    let mut scene = Scene::new();
    scene.granted();
    scene.pass_ms(5_000);
    assert!(scene.notes.is_empty(), "the store has not been asked");
    scene.granted_to(2);
    let [Note::Expired { token: Token(7), .. }, Note::Granted { token: Token(8), .. }] = scene.notes[..]
    else {
        panic!("{:?}", scene.notes);
    };
    assert_eq!(scene.table.held(), 1);
    scene.pass_ms(LOOK_MS);
    assert!(scene.submitted.is_empty(), "the store is not asked about the first one: {:?}", scene.submitted);
}

#[test]
fn an_expiry_that_the_store_does_not_confirm_is_not_reported() {
    let mut scene = Scene::new();
    scene.granted();
    scene.pass_ms(5_000);
    for _ in 0..40 {
        scene.pass_ms(1_000);
        scene.fail_all(true);
    }
    assert!(scene.notes.is_empty() && scene.submitted.is_empty());
    assert_eq!((scene.table.held(), scene.table.poll_timeout()), (0, None), "it is forgotten");
}

#[test]
fn a_lease_that_its_holder_finds_lost_is_reported_lost_once() {
    let mut scene = Scene::new();
    let nonce = scene.granted();
    scene.handle(Event::Lost { nonce });
    assert!(matches!(scene.notes[..], [Note::Lost { .. }]), "{:?}", scene.notes);
    assert!(!scene.table.knows(nonce));
    scene.handle(Event::Lost { nonce });
    assert_eq!(scene.notes.len(), 1, "once");
}

/// A renewal after the release finds the lease gone.
#[test]
fn a_lease_under_release_is_not_reported_lost() {
    let mut scene = Scene::new();
    let nonce = scene.granted();
    let lease = LeaseRef { keys: [key(0)].into(), nonce, token: Some(Token(7)), principal: None };
    let release = Release { lease, attempt: 9, outcome: None };
    scene.handle(Event::Release { id: ReleaseId(1), release });
    scene.handle(Event::Lost { nonce });
    scene.answer(Outcome::Released { levels_left: 0 });
    assert!(matches!(scene.notes[..], [Note::Released { .. }]), "{:?}", scene.notes);
}

#[test]
fn a_claim_that_was_not_sent_is_not_undone() {
    for (sent, undone) in [(true, 1), (false, 0)] {
        let mut scene = Scene::new();
        scene.handle(Event::Enqueue(Box::new(waiter(1, Mode::Exclusive, 0))));
        scene.fail_all(sent);
        scene.pass_ms(1);
        assert_eq!(scene.submitted.len(), undone, "{:?}", scene.submitted);
    }
}

/// A scene with `claims` claims of ten minutes, each for a key of its own, that were sent to the store.
fn with_claims(claims: u64) -> Scene {
    let mut scene = Scene::new();
    for id in 0..claims {
        let mut waiter = waiter(id + 1, Mode::Exclusive, 0);
        waiter.claim.keys = [Key::new(&format!("key-{id}")).unwrap()].into();
        waiter.claim.ttl_ms = 600_000;
        scene.handle(Event::Enqueue(Box::new(waiter)));
    }
    assert_eq!(scene.submitted.len() as u64, claims);
    scene
}

/// A claim that is not undone ends with its lease.
#[test]
fn the_number_of_claims_to_undo_is_bounded() {
    let mut scene = with_claims(70_000);
    scene.fail_all(true);
    scene.pass_ms(1);
    let mut undone = 0;
    while !scene.submitted.is_empty() {
        scene.answer(Outcome::Abandoned);
        scene.pass_ms(0);
        undone += 1;
    }
    assert_eq!(undone, 65_536);
    assert!(!scene.table.busy());
}

#[test]
fn claims_are_undone_a_few_at_a_time_after_an_outage() {
    let claims = 1_000;
    let mut scene = with_claims(claims);
    scene.fail_all(true);
    let mut asked = 0;
    // The store does not answer for another minute.
    for _ in 0..600 {
        scene.pass_ms(100);
        assert!(scene.submitted.len() <= 64, "{} at a time", scene.submitted.len());
        asked += scene.submitted.len();
        scene.fail_all(true);
    }
    assert!((64..64 * 60).contains(&asked), "{asked} tries");
    let mut undone = HashSet::default();
    for _ in 0..200 {
        scene.pass_ms(100);
        while let Some((_, ops)) = scene.submitted.first() {
            // And a look for other proxies that wait for the key.
            let [Op::Abandon { attempt, .. }, Op::GlobalQueue { .. }] = ops[..] else { panic!("{ops:?}") };
            undone.insert(attempt);
            scene.answer(Outcome::Abandoned);
            scene.pass_ms(0);
        }
    }
    assert_eq!(undone.len() as u64, claims);
    assert!(!scene.table.busy());
}

/// The waiter stands behind a claim whose client has gone, and the store does not answer: the waiter does not
/// wait for the store's time-out again.
#[test]
fn a_waiter_with_no_wait_fails_with_the_claim_before_it_when_the_store_is_gone() {
    let mut scene = Scene::new();
    scene.handle(Event::Enqueue(Box::new(waiter(1, Mode::Exclusive, 0))));
    scene.handle(Event::Cancel(WaiterId(1)));
    scene.handle(Event::Enqueue(Box::new(waiter(2, Mode::Exclusive, 0))));
    assert!(scene.finished.is_empty(), "the claim before may leave room");
    scene.pass_ms(5_000);
    scene.fail_all(true);
    let told = scene.finished.iter().find(|(waiter, _)| *waiter == WaiterId(2));
    assert!(matches!(told, Some((_, Verdict::Unavailable { .. }))), "{:?}", scene.finished);
}

/// Otherwise its lease would remain although nobody uses it.
#[test]
fn no_claim_is_sent_for_a_waiter_that_was_answered_with_a_failure() {
    let mut scene = Scene::new();
    scene.handle(Event::Enqueue(Box::new(waiter(1, Mode::Exclusive, 0))));
    scene.handle(Event::Cancel(WaiterId(1)));
    scene.handle(Event::Enqueue(Box::new(waiter(2, Mode::Exclusive, 0))));
    scene.handle(Event::Wake(key(0)));
    scene.fail_all(true);
    assert!(
        matches!(scene.finished[..], [(WaiterId(2), Verdict::Unavailable { .. })]),
        "{:?}",
        scene.finished
    );
    scene.pass_ms(1_000);
    let asked = scene.submitted.iter().flat_map(|(_, ops)| ops).any(|op| matches!(op, Op::Acquire(_)));
    assert!(!asked, "{:?}", scene.submitted);
}

/// The policy is replaced while the store is slow. Otherwise the waiter would wait for the store's time-out
/// again, behind the waiter of its new key, and then once more for itself.
#[test]
fn a_waiter_denied_after_its_deadline_is_refused_at_once_despite_its_new_keys() {
    let mut scene = Scene::new();
    scene.handle(Event::Enqueue(Box::new(waiter(1, Mode::Exclusive, 0))));
    let other = waiter(2, Mode::Exclusive, 60_000);
    let other = Waiter { claim: Claim { keys: [key(1)].into(), ..other.claim.clone() }, ..other };
    scene.handle(Event::Enqueue(Box::new(other)));
    scene.handle(Event::Cancel(WaiterId(2)));
    let claim = Claim { keys: [key(0), key(1)].into(), ..waiter(1, Mode::Exclusive, 0).claim };
    scene.handle(Event::Replan { waiter: WaiterId(1), claim: Box::new(claim) });
    scene.pass_ms(4_000);
    scene.answer(held());
    assert!(matches!(scene.finished[..], [(WaiterId(1), Verdict::Contended { .. })]), "{:?}", scene.finished);
}

/// The store is slow to answer the claim before, and would be slow again to undo the grant of that claim.
#[test]
fn a_waiter_past_its_deadline_does_not_wait_for_a_second_batch() {
    let mut scene = Scene::new();
    scene.handle(Event::Enqueue(Box::new(waiter(1, Mode::Exclusive, 0))));
    scene.handle(Event::Cancel(WaiterId(1)));
    scene.handle(Event::Enqueue(Box::new(waiter(2, Mode::Exclusive, 0))));
    scene.pass_ms(4_000);
    scene.answer(grant(1));
    assert!(
        matches!(scene.finished[..], [(WaiterId(2), Verdict::Unavailable { .. })]),
        "{:?}",
        scene.finished
    );
}

/// If a claim is refused, a quorum undoes what some of its members have granted, and that may arrive later than
/// the next claim. A claim with an unknown outcome may have been granted, and is found again by its attempt.
#[test]
fn a_denied_claim_is_repeated_as_another_attempt() {
    let mut scene = Scene::new();
    let asked = |scene: &Scene| match scene.submitted[0].1[..] {
        [Op::Acquire(ref claim)] => claim.attempt,
        ref ops => panic!("{ops:?}"),
    };
    scene.handle(Event::Enqueue(Box::new(waiter(1, Mode::Exclusive, 60_000))));
    let first = asked(&scene);
    scene.fail_all(true);
    scene.pass_ms(1_000);
    assert_eq!(asked(&scene), first);
    scene.answer(held());
    scene.handle(Event::Wake(key(0)));
    assert_ne!(asked(&scene), first);
}

/// The first grant shows that an earlier lease is over, so that its key may be asked for.
#[test]
fn no_second_claim_is_sent_for_a_waiter_granted_together_with_another() {
    let mut scene = Scene::new();
    scene.granted();
    scene.pass_ms(5_000);
    for id in [2, 3] {
        scene.handle(Event::Enqueue(Box::new(waiter(id, Mode::Shared, 60_000))));
    }
    scene.fail_all(false);
    scene.pass_ms(1_000);
    let both =
        scene.submitted.iter().position(|(_, ops)| ops.len() == 2).expect("they are asked for together");
    scene.submitted.swap(0, both);
    scene.submitted.truncate(1);
    scene.answer_group(vec![grant(2), grant(3)]);
    assert_eq!(scene.finished.len(), 3);
    assert!(scene.submitted.is_empty(), "{:?}", scene.submitted);
}

/// With a global queue it would join behind a waiter that has not joined yet.
#[test]
fn a_repeated_request_looks_for_its_lease_before_it_is_refused_as_contended() {
    let mut scene = Scene::new();
    let in_global_queue = |id, request: Option<&str>, wait_ms| {
        let mut waiter = waiter(id, Mode::Exclusive, wait_ms);
        waiter.claim.request = request.map(Into::into);
        waiter.claim.global =
            Some(GlobalTicket { number: id, rank: 0, joined: None, returns: request.is_some() });
        Event::Enqueue(Box::new(waiter))
    };
    scene.handle(in_global_queue(1, Some("mine"), 0));
    scene.answer(grant(1));
    scene.handle(in_global_queue(2, None, 60_000));
    let denial = Denial {
        key: key(0),
        cause: Cause::Held,
        holder: None,
        free_in_us: 5_000_000,
        next_waiter: None,
        joined: None,
    };
    scene.answer(Outcome::Held(denial));
    scene.handle(in_global_queue(3, None, 60_000));
    scene.handle(in_global_queue(4, Some("mine"), 0));
    scene.pass_ms(0);
    assert!(
        matches!(scene.submitted[..], [(_, ref ops)] if matches!(ops[..], [Op::Rejoin(_)])),
        "{:?}",
        scene.submitted
    );
    scene.answer(Outcome::Absent);
    let told: Vec<u64> = scene.finished.iter().map(|(id, _)| id.0).collect();
    assert_eq!(told, [1, 4]);
    assert!(matches!(scene.finished[1].1, Verdict::Contended { .. }), "{:?}", scene.finished);
}

/// An earlier call of the request was answered with an error, and was granted after this call looked for its
/// lease.
#[test]
fn a_request_is_not_refused_for_a_lease_of_its_own() {
    for is_there in [true, false] {
        let mut scene = Scene::new();
        scene.handle(Event::Enqueue(Box::new(waiter(1, Mode::Exclusive, 60_000))));
        let mut again = waiter(2, Mode::Exclusive, 3_000);
        again.claim.request = Some("mine".into());
        scene.handle(Event::Enqueue(Box::new(again)));
        scene.submitted.swap(0, 1);
        scene.answer(Outcome::Absent);
        let (since, until) = (ServerTime(scene.now.0), ServerTime(scene.now.0).plus_ms(9_000));
        let (mode, token) = (Mode::Exclusive, Token(1));
        let holder = HeldBy { owner: "me".into(), request: Some("mine".into()), mode, token, since, until };
        let (holder, free_in_us) = (Some(holder), 9_000_000);
        scene.answer(Outcome::Held(Denial {
            key: key(0),
            cause: Cause::Held,
            holder,
            free_in_us,
            next_waiter: None,
            joined: None,
        }));
        scene.pass_ms(3_000);
        let is_look = |(_, ops): &(SubmissionId, Vec<Op>)| matches!(ops[..], [Op::Rejoin(_)]);
        let look = scene.submitted.iter().position(is_look).expect("it looks for its lease again");
        scene.submitted.swap(0, look);
        scene.answer(if is_there { grant(2) } else { Outcome::Absent });
        match &scene.finished[..] {
            [(WaiterId(2), Verdict::Granted { .. })] if is_there => {}
            [(WaiterId(2), Verdict::Contended { holder: None, .. })] if !is_there => {}
            told => panic!("{told:?}"),
        }
    }
}

/// The table learns of the lease while the policy decides.
#[test]
fn a_policy_that_gives_up_does_not_hide_a_lease_of_the_request() {
    let mut scene = Scene::new();
    let denial = |owner: &str, request: Option<&str>| {
        let (since, until) = (ServerTime(0), ServerTime(20_000_000));
        let (request, mode, token) = (request.map(Into::into), Mode::Exclusive, Token(1));
        let holder = Some(HeldBy { owner: owner.into(), request, mode, token, since, until });
        Outcome::Held(Denial {
            key: key(0),
            cause: Cause::Held,
            holder,
            free_in_us: 9_000_000,
            next_waiter: None,
            joined: None,
        })
    };
    let mut again = Waiter { asks_backoff: true, ..waiter(1, Mode::Exclusive, 60_000) };
    again.claim.request = Some("mine".into());
    scene.handle(Event::Enqueue(Box::new(again)));
    scene.answer(denial("another", None));
    let mut in_global_queue = waiter(2, Mode::Exclusive, 60_000);
    in_global_queue.claim.global = Some(GlobalTicket { number: 2, rank: 0, joined: None, returns: false });
    scene.handle(Event::Enqueue(Box::new(in_global_queue)));
    scene.answer(denial("me", Some("mine")));
    let gives_up = |scene: &mut Scene| {
        let decision = Next::GiveUp { reason: "enough".into() };
        scene.handle(Event::Backoff { waiter: WaiterId(1), key: key(0), decision });
    };
    gives_up(&mut scene);
    assert!(scene.finished.is_empty(), "{:?}", scene.finished);
    scene.answer(Outcome::Absent);
    gives_up(&mut scene);
    assert!(
        matches!(
            scene.finished[..],
            [(WaiterId(1), Verdict::Contended { holder: Some(HeldBy { request: None, .. }), .. })]
        ),
        "{:?}",
        scene.finished
    );
}

/// Three calls of one request. The second call on this proxy has looked for the lease of the call on another
/// proxy when that call is granted again.
#[test]
fn a_request_is_not_refused_for_its_own_lease_granted_after_its_lookup() {
    for is_there in [true, false] {
        let mut scene = Scene::new();
        let mine = |id, wait_ms| {
            let mut waiter = waiter(id, Mode::Shared, wait_ms);
            waiter.claim.request = Some("mine".into());
            Event::Enqueue(Box::new(waiter))
        };
        let elsewhere = |scene: &Scene, token| {
            let (since, until) = (ServerTime(scene.now.0), ServerTime(scene.now.0).plus_ms(9_000));
            let (owner, request) = ("me".into(), Some("mine".into()));
            let holder = HeldBy { owner, request, mode: Mode::Exclusive, token: Token(token), since, until };
            let (holder, free_in_us) = (Some(holder), 9_000_000);
            Outcome::Held(Denial {
                key: key(0),
                cause: Cause::Held,
                holder,
                free_in_us,
                next_waiter: None,
                joined: None,
            })
        };
        let look = |scene: &mut Scene| {
            let is_look = |(_, ops): &(SubmissionId, Vec<Op>)| matches!(ops[..], [Op::Rejoin(_)]);
            let look = scene.submitted.iter().position(is_look).expect("it looks for its lease");
            scene.submitted.swap(0, look);
        };
        scene.handle(mine(1, 60_000));
        scene.handle(mine(2, 10));
        look(&mut scene);
        scene.answer(Outcome::Absent);
        let held = elsewhere(&scene, 1);
        scene.answer(held);
        scene.pass_ms(10);
        scene.handle(Event::Wake(key(0)));
        look(&mut scene);
        scene.answer(Outcome::Absent);
        scene.answer(grant(1));
        let held = elsewhere(&scene, 9);
        scene.answer(held);
        look(&mut scene);
        scene.answer(if is_there { grant(2) } else { Outcome::Absent });
        match &scene.finished[..] {
            [_, (WaiterId(2), Verdict::Granted { .. })] if is_there => {}
            [_, (WaiterId(2), Verdict::Contended { .. })] if !is_there => {}
            told => panic!("{told:?}"),
        }
    }
}

//! Batches whose answer was lost are retried after other changes.

use super::*;

/// A store that runs batches and may lose their answers.
struct Lane {
    world: World,
    batches: u64,
}

impl Lane {
    fn new() -> Lane {
        Lane { world: World::new(), batches: 0 }
    }

    fn batch_id(&mut self, writer: u64) -> BatchId {
        self.batches += 1;
        BatchId { writer, at: ServerTime(self.world.env.now.0 + self.batches) }
    }

    /// Runs a batch of another connection, or a batch that is answered.
    fn run(&mut self, writer: u64, groups: &[Vec<Op>], tried: &mut [Option<Tried>]) -> Vec<Vec<Outcome>> {
        let batch_id = self.batch_id(writer);
        let (records, env) = (&mut self.world.records, &self.world.env);
        let outcomes = run(records, groups, tried, env, batch_id);
        // The next batch reads the stored records.
        let stored: Vec<_> =
            records.changed().map(|(key, record, _)| (key.clone(), record.clone())).collect();
        stored.into_iter().for_each(|(key, record)| records.insert(key, Some(record)));
        outcomes
    }

    /// Runs a batch whose answer is lost, whether it was applied or not.
    fn lose(&mut self, writer: u64, groups: &[Vec<Op>], applied: bool) -> Vec<Option<Tried>> {
        let before = self.world.records.clone();
        let outcomes = self.run(writer, groups, &mut []);
        if !applied {
            self.world.records = before;
        }
        let batch_id = BatchId { writer, at: ServerTime(self.world.env.now.0 + self.batches) };
        outcomes.into_iter().map(|outcomes| Some(Tried { batch_id, outcomes })).collect()
    }

    fn granted(&mut self, claim: &Claim) -> LeaseRef {
        match &self.run(7, &[vec![Op::Acquire(claim.clone())]], &mut [])[0][..] {
            [Outcome::Granted(grant)] => LeaseRef {
                keys: claim.keys.clone(),
                nonce: grant.nonce,
                token: Some(grant.tokens[0]),
                principal: None,
            },
            other => panic!("{other:?}"),
        }
    }

    fn levels(&self) -> usize {
        let record = self.world.records.get(&keys(&["a"])[0]).unwrap();
        record.holders.first().map_or(0, |holder| holder.levels.len())
    }

    fn version(&self) -> Token {
        self.world.records.get(&keys(&["a"])[0]).unwrap().token
    }
}

fn release(lease: &LeaseRef, attempt: u64) -> Vec<Op> {
    vec![Op::Release(Release { lease: lease.clone(), attempt, outcome: None })]
}

fn commit(version: Token, attempt: u64) -> Vec<Op> {
    let (key, value, request) = (keys(&["a"])[0].clone(), None, None);
    vec![Op::Commit(Commit { key, version, value, attempt, request, fingerprint: 0 })]
}

#[test]
fn levels_are_released_once_however_often_the_batch_runs() {
    for applied in [true, false] {
        let mut lane = Lane::new();
        let enter = |attempt| Claim { reentrant: true, ..claim(&["a"], "x", attempt) };
        let lease = lane.granted(&enter(1));
        (2..=9).for_each(|attempt| drop(lane.granted(&enter(attempt))));
        let batch: Vec<_> = (21..=25).map(|attempt| release(&lease, attempt)).collect();
        let mut tried = lane.lose(1, &batch, applied);
        lane.granted(&enter(10));
        let outcomes = lane.run(2, &batch, &mut tried);
        assert_eq!(lane.levels(), 5, "ten entered, five left");
        assert!(outcomes.iter().all(|group| matches!(group[..], [Outcome::Released { levels_left: 1.. }])));
    }
}

#[test]
fn every_release_in_a_replayed_batch_is_answered_as_released() {
    for applied in [true, false] {
        let mut lane = Lane::new();
        let permit = Mode::Permits { count: 1, limit: 20 };
        let leases: Vec<_> =
            (1..=10).map(|n| lane.granted(&Claim { mode: permit, ..claim(&["a"], "p", n) })).collect();
        let batch: Vec<_> = leases.iter().map(|lease| release(lease, 100 + lease.nonce)).collect();
        let mut tried = lane.lose(1, &batch, applied);
        let other = lane.granted(&Claim { mode: permit, ..claim(&["a"], "p", 11) });
        lane.run(3, &[release(&other, 111)], &mut []);
        let outcomes = lane.run(2, &batch, &mut tried);
        assert!(outcomes.iter().all(|group| *group == [RELEASED]), "{outcomes:?}");
        assert_eq!(lane.levels(), 0);
    }
}

#[test]
fn a_commit_whose_answer_was_lost_is_confirmed_despite_later_commits() {
    let mut lane = Lane::new();
    lane.run(3, &[commit(Token(0), 1)], &mut []);
    let read = lane.version();
    let mut made = lane.lose(1, &[commit(read, 2)], true);
    for attempt in 3..50 {
        let read = lane.version();
        lane.run(3, &[commit(read, attempt)], &mut []);
    }
    let outcomes = lane.run(2, &[commit(read, 2)], &mut made);
    assert_eq!(outcomes, [[Outcome::Committed { version: read.next() }]]);

    let read = lane.version();
    let mut lost = lane.lose(1, &[commit(read, 60)], false);
    lane.run(3, &[commit(read, 61)], &mut []);
    let outcomes = lane.run(2, &[commit(read, 60)], &mut lost);
    assert!(matches!(outcomes[0][..], [Outcome::Conflict(_)]), "it was not made: {outcomes:?}");
}

/// After a step of the clock a batch id may appear too old, even when no lease is in doubt any more.
#[test]
fn a_batch_id_is_kept_while_its_age_is_uncertain() {
    for (steady, told) in [(false, "it was made"), (true, "it is forgotten")] {
        let mut lane = Lane::new();
        lane.run(3, &[commit(Token(0), 1)], &mut []);
        let read = lane.version();
        let mut made = lane.lose(1, &[commit(read, 2)], true);
        lane.world.env.now = lane.world.env.now.plus_ms(3_600_000);
        lane.world.env.steady = steady;
        let next = lane.version();
        lane.run(3, &[commit(next, 3)], &mut []);
        let outcomes = lane.run(2, &[commit(read, 2)], &mut made);
        assert_eq!(
            outcomes == [[Outcome::Committed { version: read.next() }]],
            !steady,
            "{told}: {outcomes:?}"
        );
    }
}

/// Otherwise a holder that came later would be removed, which nobody asked for.
#[test]
fn a_replayed_force_removes_no_later_holder() {
    let mut lane = Lane::new();
    lane.granted(&claim(&["a"], "x", 1));
    let force = vec![Op::Force { key: keys(&["a"])[0].clone() }];
    let mut tried = lane.lose(1, std::slice::from_ref(&force), true);
    let next = lane.granted(&claim(&["a"], "y", 2));
    let outcomes = lane.run(2, &[force], &mut tried);
    assert_eq!(outcomes, [[Outcome::Forced { holders: 1 }]]);
    assert_eq!(lane.run(2, &[release(&next, 9)], &mut []), [[RELEASED]]);
}

/// This includes a second lost try, which found the first one applied.
#[test]
fn a_batch_can_be_lost_and_replayed_repeatedly() {
    let mut lane = Lane::new();
    let lease = lane.granted(&claim(&["a"], "x", 1));
    let batch = [release(&lease, 9)];
    let mut tried = lane.lose(1, &batch, true);
    for writer in 2..6 {
        lane.granted(&claim(&["a"], "y", 10 + writer));
        let lease = LeaseRef { nonce: 10 + writer, token: None, ..lease.clone() };
        lane.run(7, &[release(&lease, 20 + writer)], &mut []);
        assert_eq!(lane.run(writer, &batch, &mut tried), [[RELEASED]]);
        assert!(tried[0].is_some(), "the next try goes by it");
    }
}

/// The rows of an earlier version have no batch ids.
#[test]
fn a_replay_without_a_batch_id_in_the_row_has_an_unknown_outcome() {
    let mut lane = Lane::new();
    let lease = lane.granted(&claim(&["a"], "x", 1));
    let batch = [release(&lease, 9)];
    let mut tried = lane.lose(1, &batch, true);
    let unmarked = |lane: &mut Lane| {
        let key = keys(&["a"])[0].clone();
        let record = lane.world.records.get(&key).unwrap().clone();
        lane.world.records.insert(key, Some(Record { batch_ids: Vec::new(), ended: Vec::new(), ..record }));
    };
    unmarked(&mut lane);
    assert_eq!(lane.run(2, &batch, &mut tried), [[Outcome::Unknown]]);
    // Nor does a row with so many writers that some batch ids are gone.
    let lease = lane.granted(&claim(&["a"], "x", 2));
    let batch = [release(&lease, 19)];
    let mut tried = lane.lose(1, &batch, false);
    for writer in 10..10 + MAX_BATCH_IDS as u64 {
        lane.run(writer, &[vec![Op::Renew { lease: lease.clone(), ttl_ms: None }]], &mut []);
    }
    assert_eq!(lane.run(2, &batch, &mut tried), [[Outcome::Unknown]]);
    assert_eq!(lane.levels(), 1);
}

#[test]
fn batch_ids_are_few_and_expire() {
    let mut lane = Lane::new();
    let batch_ids = |lane: &Lane| lane.world.records.get(&keys(&["a"])[0]).unwrap().batch_ids.len();
    for n in 0..100 {
        let lease = lane.granted(&claim(&["a"], "x", 1 + n));
        lane.run(1, &[release(&lease, 200 + n)], &mut []);
    }
    assert_eq!(batch_ids(&lane), 2, "one for each connection");
    let lease = lane.granted(&Claim { ttl_ms: 600 * SECOND, ..claim(&["a"], "x", 300) });
    lane.world.pass_ms(300 * SECOND);
    lane.run(3, &[release(&lease, 301)], &mut []);
    assert_eq!(batch_ids(&lane), 1, "nobody repeats what is so old");
}

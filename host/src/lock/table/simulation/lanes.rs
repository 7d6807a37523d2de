//! The store of the simulation: batches, and batches that are retried because their answer was lost.

use super::*;
use crate::lock::record::{Commit, GlobalQueueChange};

impl Sim {
    fn server_now(&self) -> ServerTime {
        ServerTime(self.now.0 + SERVER_AHEAD_US)
    }

    /// Runs one group without a lane.
    pub fn on_store(&mut self, ops: Vec<Op>) -> Vec<Outcome> {
        self.serial += 1;
        let batch_id = BatchId { writer: PROXIES as u64, at: ServerTime(self.serial) };
        self.decide(&[ops], &mut [], batch_id, true).remove(0)
    }

    /// One transaction, which is rolled back unless it `commits`.
    fn decide(
        &mut self,
        groups: &[Vec<Op>],
        tried: &mut [Option<Tried>],
        batch_id: BatchId,
        commits: bool,
    ) -> Vec<Vec<Outcome>> {
        let env = Env::certain(self.server_now());
        let mut records = Records::default();
        for key in groups.iter().flatten().flat_map(Op::keys) {
            records.insert(key.clone(), self.store.get(key).cloned());
        }
        let outcomes = record::run(&mut records, groups, tried, &env, batch_id);
        if !commits {
            return outcomes;
        }
        for (key, record, _) in records.changed() {
            let last = self.last_token.entry(key.clone()).or_default();
            assert!(record.token >= *last, "the token of {key} went back");
            *last = record.token;
            let new = |holder: &Holder| holder.keep_ms.is_some() && holder.since == env.now;
            let done = record.kept.as_ref().is_some_and(|kept| kept.until > env.now);
            assert!(
                !done || !record.holders.iter().any(new),
                "{key} was done, and is done again: {record:?}"
            );
            let before = self.store.insert(key.clone(), record.clone());
            if before.is_none_or(|before| before.holders != record.holders) {
                let ends =
                    record.holders.iter().map(Holder::free_at).fold(record.not_before, ServerTime::max);
                let free_from = Instant(ends.0.saturating_sub(SERVER_AHEAD_US)).max(self.now);
                self.free_from.insert(key.clone(), free_from);
            }
        }
        for (op, outcome) in groups.iter().flatten().zip(outcomes.iter().flatten()) {
            match (op, outcome) {
                (Op::Release(Release { attempt, .. }), Outcome::Released { .. })
                | (Op::Commit(Commit { attempt, .. }), Outcome::Committed { .. }) => {
                    self.carried_out.insert(*attempt);
                }
                _ => {}
            }
        }
        outcomes
    }

    pub(super) fn apply(&mut self, proxy: usize, sent: Sent, lost: bool) {
        if !lost {
            return self.answer(proxy, vec![sent]);
        }
        if self.random.chance(50) {
            // The connection breaks, and everything that waits for it fails with it.
            let mut batch = vec![sent];
            let same = |due: &Due| matches!(due, Due::Apply { proxy: other, .. } if *other == proxy);
            for (_, due) in self.due.extract_if(.., |_, due| same(due)) {
                if let Due::Apply { sent, .. } = due {
                    batch.push(sent);
                }
            }
            return self.lose(proxy, batch);
        }
        if self.random.chance(50) {
            self.transact(proxy, &mut [&sent], &mut [None], true);
        }
        self.fail(proxy, sent.ticket);
    }

    /// Loses the answer to a batch: the batch is retried on another connection, possibly after other changes.
    fn lose(&mut self, proxy: usize, mut batch: Vec<Sent>) {
        let commits = self.random.chance(60);
        let mut tried: Vec<_> = batch.iter_mut().map(|sent| sent.tried.take()).collect();
        let outcomes = self.transact(proxy, &mut batch.iter().collect::<Vec<_>>(), &mut tried, commits);
        let batch_id = self.batch_ids[proxy];
        for ((sent, tried), outcomes) in batch.iter_mut().zip(tried).zip(outcomes) {
            sent.tried = tried.or(Some(Tried { batch_id, outcomes }));
        }
        self.serial += 1;
        self.batch_ids[proxy] = BatchId { writer: self.serial, at: ServerTime(0) };
        let at = self.now.plus_us(self.random.below(20_000));
        self.last_apply[proxy] = self.last_apply[proxy].max(at);
        self.schedule(at, Due::Again { proxy, batch });
    }

    pub(super) fn again(&mut self, proxy: usize, batch: Vec<Sent>) {
        let (late, batch) = batch.into_iter().partition(|_| self.random.chance(5));
        let late: Vec<Sent> = late;
        late.into_iter().for_each(|sent| self.fail(proxy, sent.ticket));
        // A lane gives up early enough for its callers' deadlines.
        let in_time = batch.iter().all(|sent| self.now.ms_since(sent.asked_at) < 50);
        match in_time && self.random.chance(20) {
            true => self.lose(proxy, batch),
            false => self.answer(proxy, batch),
        }
    }

    fn answer(&mut self, proxy: usize, mut batch: Vec<Sent>) {
        let mut tried: Vec<_> = batch.iter_mut().map(|sent| sent.tried.take()).collect();
        let outcomes = self.transact(proxy, &mut batch.iter().collect::<Vec<_>>(), &mut tried, true);
        let back = self.now.plus_us(self.random.below(3_000));
        if let ([sent], [outcomes]) = (&batch[..], &outcomes[..]) {
            let freed = self.freed_for_others(proxy, &sent.ops, outcomes);
            self.freed.insert((proxy, sent.ticket), freed);
        }
        for (sent, outcomes) in batch.into_iter().zip(outcomes) {
            if let Some(attempt) = self.open_commits.remove(&sent.ticket) {
                let told_no = matches!(outcomes[..], [Outcome::Conflict(_)]);
                assert!(!told_no || !self.carried_out.contains(&attempt), "{attempt} was committed");
                continue;
            }
            let now = self.server_now();
            let result = Ok(Answered { outcomes, asked_at: sent.asked_at, now });
            let event = Event::Completed { ticket: sent.ticket, result };
            self.schedule(back, Due::Tell { proxy, event });
        }
    }

    /// The keys that these releases have freed and that another proxy waits for.
    fn freed_for_others(&mut self, proxy: usize, ops: &[Op], outcomes: &[Outcome]) -> Vec<Key> {
        let is_over = |outcome: &Outcome| matches!(outcome, Outcome::Released { levels_left: 0 });
        let over = ops.iter().zip(outcomes).filter(|(_, outcome)| is_over(outcome));
        let keys: Vec<Key> = over.flat_map(|(op, _)| op.keys().to_vec()).collect();
        let look = |key: &Key| Op::GlobalQueue { key: key.clone(), change: GlobalQueueChange::Look };
        let looks: Vec<Op> = keys.iter().map(look).collect();
        let next = self.on_store(looks);
        let waits = |outcome: &Outcome| match outcome {
            Outcome::GlobalQueue { next_waiter: Some(next) } => {
                next.ticket.is_none() && *next.proxy != *proxy.to_string()
            }
            _ => false,
        };
        keys.into_iter().zip(next).filter(|(_, next)| waits(next)).map(|(key, _)| key).collect()
    }

    fn transact(
        &mut self,
        proxy: usize,
        batch: &mut [&Sent],
        tried: &mut [Option<Tried>],
        commits: bool,
    ) -> Vec<Vec<Outcome>> {
        let batch_id = &mut self.batch_ids[proxy];
        batch_id.at = ServerTime(self.now.0 + SERVER_AHEAD_US).max(batch_id.at.plus_us(1));
        let batch_id = *batch_id;
        let groups: Vec<Vec<Op>> = batch.iter().map(|sent| sent.ops.clone()).collect();
        self.decide(&groups, tried, batch_id, commits)
    }

    fn fail(&mut self, proxy: usize, ticket: SubmissionId) {
        if self.open_commits.remove(&ticket).is_none() {
            let back = self.now.plus_us(self.random.below(3_000));
            let event = Event::Completed { ticket, result: Err(Unheard { why: "gone".into(), sent: true }) };
            self.schedule(back, Due::Tell { proxy, event });
        }
    }

    /// Commits on top of the current version; other clients may be faster.
    pub fn commit(&mut self, proxy: usize) {
        let key = key(KEYS as u64);
        let version = self.last_token.get(&key).copied().unwrap_or_default();
        self.serial += 1;
        let attempt = self.serial;
        let ticket = SubmissionId(u64::MAX - attempt);
        self.open_commits.insert(ticket, attempt);
        let commit = Commit { key, version, value: None, attempt, request: None, fingerprint: 0 };
        self.submit(proxy, ticket, vec![Op::Commit(commit)]);
    }
}

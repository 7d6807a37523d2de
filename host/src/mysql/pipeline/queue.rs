//! The jobs that wait for a lane, and the batches that are made of them.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;

use crate::clock;
use crate::lock::Instant;
use crate::lock::record::{BatchId, Op, Tried};
use crate::store::{Done, Reply, StoreError};

/// Bounds of a batch, besides the number of operations, so that statements stay of moderate size.
const BATCH_KEYS: usize = 4096;
const BATCH_KEY_BYTES: usize = 512 * 1024;

/// The error for a group that reaches its deadline.
pub const LATE: &str = "the MySQL server did not answer in time";

/// A group of operations and its responder.
pub struct Job {
    pub ops: Vec<Op>,
    pub responder: Responder,
    tried: Option<Tried>,
}

/// Answers a group exactly once. If it is dropped without an answer, it answers with an error.
pub struct Responder {
    pub deadline: Instant,
    /// Whether a part of the group may have been applied.
    pub sent: bool,
    done: Option<Done>,
    ops: usize,
    queued: Arc<AtomicUsize>,
}

/// The decisions for a batch. They are noted before the batch is sent, so that they are known if the answer
/// is lost.
pub struct Decided {
    pub batch_id: BatchId,
    pub replies: Vec<Reply>,
}

/// One attempt at the groups of a batch.
pub struct Attempt<'a> {
    pub groups: &'a [Vec<Op>],
    /// For each group, the last try that may have been applied without an answer.
    pub tried: &'a mut [Option<Tried>],
    /// Nothing is applied later.
    pub deadline: Instant,
    /// Set before the decisions are sent. If the connection breaks afterwards, nobody knows whether they were
    /// applied.
    pub decided: Option<Decided>,
}

/// The bound on queued operations, over all lanes.
#[derive(Clone)]
pub struct Places {
    queued: Arc<AtomicUsize>,
    max: usize,
}

/// Groups that run in one transaction, with their responders.
#[derive(Default)]
pub struct Batch {
    pub groups: Vec<Vec<Op>>,
    /// For each group, the last try that may have been applied without an answer.
    pub tried: Vec<Option<Tried>>,
    pub responders: Vec<Responder>,
}

/// The jobs of one lane, in order of arrival.
pub struct Queue {
    incoming: UnboundedReceiver<Job>,
    waiting: VecDeque<Job>,
    max_ops: usize,
    closed: bool,
}

impl Places {
    /// At most `max` operations wait.
    pub fn new(max: usize) -> Places {
        Places { queued: Arc::default(), max }
    }

    /// Queues a group. `None` if the bound is reached or the deadline has passed; `done` has then been
    /// called. The deadline is checked here because a lane reads its queue only when its transaction ends,
    /// which may be seconds later.
    pub fn admit(&self, ops: Vec<Op>, deadline: Instant, done: Done) -> Option<Job> {
        let queued = self.queued.fetch_add(ops.len(), Ordering::Relaxed);
        let mut responder = Responder {
            deadline,
            sent: false,
            done: Some(done),
            ops: ops.len(),
            queued: self.queued.clone(),
        };
        if queued + ops.len() > self.max {
            responder.answer(Err(StoreError::Overloaded { queued }));
            return None;
        }
        responder.expire(clock::now(), LATE);
        responder.is_open().then(|| Job { ops, responder, tried: None })
    }
}

impl Responder {
    /// Answers the group.
    pub fn answer(mut self, result: Result<Reply, StoreError>) {
        self.tell(result);
    }

    /// Whether the group is not answered yet.
    pub fn is_open(&self) -> bool {
        self.done.is_some()
    }

    /// The time left until the deadline.
    pub fn left(&self) -> Duration {
        Duration::from_micros(self.deadline.us_since(clock::now()))
    }

    /// Answers with an error if the deadline has passed.
    pub fn expire(&mut self, now: Instant, why: &str) {
        if self.deadline <= now {
            self.give_up(why);
        }
    }

    /// Answers with an error. The error tells whether the group may have been sent.
    pub fn give_up(&mut self, why: &str) {
        let why = why.to_owned();
        self.tell(Err(if self.sent { StoreError::Unavailable { why } } else { StoreError::Unsent { why } }));
    }

    fn tell(&mut self, result: Result<Reply, StoreError>) {
        if let Some(done) = self.done.take() {
            self.queued.fetch_sub(self.ops, Ordering::Relaxed);
            done(result);
        }
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        self.tell(Err(StoreError::Unavailable { why: "the store was closed".to_owned() }));
    }
}

impl Batch {
    /// The first deadline of the open groups; `None` if all are answered.
    pub fn deadline(&self) -> Option<Instant> {
        first_deadline(&self.responders)
    }

    /// The number of operations.
    pub fn ops(&self) -> usize {
        self.groups.iter().map(Vec::len).sum()
    }

    /// Drops the groups that are answered.
    fn retain_open(&mut self) {
        let open: Vec<bool> = self.responders.iter().map(Responder::is_open).collect();
        let (mut groups, mut tried) = (open.iter(), open.iter());
        self.groups.retain(|_| groups.next().is_some_and(|open| *open));
        self.tried.retain(|_| tried.next().is_some_and(|open| *open));
        self.responders.retain(Responder::is_open);
    }

    /// Notes that the batch was sent and no answer came. A group that was tried before keeps the earlier try.
    pub fn note_try(&mut self, decided: Decided) {
        for (tried, reply) in self.tried.iter_mut().zip(decided.replies) {
            tried.get_or_insert(Tried { batch_id: decided.batch_id, outcomes: reply.outcomes });
        }
    }

    /// Adds a job.
    pub fn push(&mut self, job: Job) {
        self.groups.push(job.ops);
        self.tried.push(job.tried);
        self.responders.push(job.responder);
    }

    /// Answers every group.
    pub fn answer(self, replies: Vec<Reply>) {
        for (responder, reply) in self.responders.into_iter().zip(replies) {
            responder.answer(Ok(reply));
        }
    }

    /// Answers every group with an error.
    pub fn fail(self, why: &str) {
        for responder in self.responders {
            responder.answer(Err(StoreError::Unavailable { why: why.to_owned() }));
        }
    }

    /// Adds the groups of `other`.
    pub fn append(&mut self, mut other: Batch) {
        self.groups.append(&mut other.groups);
        self.tried.append(&mut other.tried);
        self.responders.append(&mut other.responders);
    }

    fn jobs(self) -> impl DoubleEndedIterator<Item = Job> {
        let parts = self.groups.into_iter().zip(self.tried).zip(self.responders);
        parts.map(|((ops, tried), responder)| Job { ops, tried, responder })
    }

    /// Splits the batch into one batch for each group, in order.
    pub fn split(self) -> impl Iterator<Item = Batch> {
        self.jobs().map(|job| {
            let mut single = Batch::default();
            single.push(job);
            single
        })
    }
}

/// The first deadline of the responders that are still open.
pub fn first_deadline(responders: &[Responder]) -> Option<Instant> {
    responders.iter().filter(|responder| responder.is_open()).map(|responder| responder.deadline).min()
}

/// Answers the responders whose deadline has passed.
pub fn expire(responders: &mut [Responder], why: &str) {
    let now = clock::now();
    for responder in responders {
        responder.expire(now, why);
    }
}

impl Queue {
    /// The jobs that come through `incoming`; a batch has at most `max_ops` operations, or one group.
    pub fn new(incoming: UnboundedReceiver<Job>, max_ops: usize) -> Queue {
        Queue { incoming, waiting: VecDeque::new(), max_ops, closed: false }
    }

    /// Waits for a job. False if there is none and none will come.
    pub async fn wait(&mut self) -> bool {
        if self.waiting.is_empty() {
            match self.incoming.recv().await {
                Some(job) => self.waiting.push_back(job),
                None => return false,
            }
        }
        true
    }

    /// Whether a job is queued now.
    pub fn has_work(&mut self) -> bool {
        self.collect();
        !self.waiting.is_empty()
    }

    /// The next batch: as many groups as fit in one transaction. It splits no group and keeps their order. Groups
    /// whose deadline has passed are answered instead.
    pub fn batch(&mut self) -> Batch {
        let mut batch = Batch::default();
        let (mut ops, mut keys, mut bytes) = (0, 0, 0);
        while let Some(job) = self.waiting.pop_front().or_else(|| self.incoming.try_recv().ok()) {
            ops += job.ops.len();
            for op in &job.ops {
                keys += op.keys().len();
                bytes += op.keys().iter().map(|key| key.as_str().len()).sum::<usize>();
            }
            let fits = ops <= self.max_ops && keys <= BATCH_KEYS && bytes <= BATCH_KEY_BYTES;
            if !fits && !batch.groups.is_empty() {
                self.waiting.push_front(job);
                break;
            }
            batch.push(job);
        }
        expire(&mut batch.responders, LATE);
        batch.retain_open();
        batch
    }

    /// Waits for work of the lane until `until`, or until the first deadline of its callers. Answers the callers
    /// and the queued jobs whose deadline has passed. `None` if the work goes on.
    pub async fn work_until<T>(
        &mut self,
        work: impl Future<Output = T> + Unpin,
        responders: &mut [Responder],
        until: Instant,
    ) -> Option<T> {
        let next = first_deadline(responders).map_or(until, |deadline| deadline.min(until));
        tokio::select! {
            biased;
            done = work => return Some(done),
            () = clock::sleep_until(next) => {}
        }
        expire(responders, LATE);
        self.expire_now(LATE);
        None
    }

    /// Puts the open groups back to the front of the queue.
    pub fn put_back(&mut self, mut batch: Batch) {
        batch.retain_open();
        for job in batch.jobs().rev() {
            self.waiting.push_front(job);
        }
    }

    /// Collects new jobs and answers expired ones, as long as it is polled.
    pub async fn expire(&mut self, why: &str) -> Infallible {
        loop {
            self.expire_now(why);
            let next = self.waiting.iter().map(|job| job.responder.deadline).min();
            let next = next.unwrap_or(clock::now().plus_ms(60_000));
            tokio::select! {
                biased;
                job = self.incoming.recv(), if !self.closed => match job {
                    Some(job) => self.waiting.push_back(job),
                    None => self.closed = true,
                },
                () = clock::sleep_until(next) => {}
            }
        }
    }

    /// Collects new jobs and answers those whose deadline has passed.
    pub fn expire_now(&mut self, why: &str) {
        self.collect();
        let now = clock::now();
        for job in &mut self.waiting {
            job.responder.expire(now, why);
        }
        self.waiting.retain(|job| job.responder.is_open());
    }

    /// Fails the jobs that would write under key names that may be out of date, that is, claims and commits.
    pub fn give_up_claims(&mut self, why: &str) {
        self.collect();
        let is_claim = |op: &Op| {
            matches!(op, Op::Acquire(_) | Op::Commit(_) | Op::Delegate(_) | Op::Extend(_) | Op::Restore(_))
        };
        let claims = |job: &Job| job.ops.iter().any(is_claim);
        for mut job in std::mem::take(&mut self.waiting) {
            if claims(&job) {
                job.responder.give_up(why);
            } else {
                self.waiting.push_back(job);
            }
        }
    }

    /// Accepts no more jobs, and answers the waiting ones with an error.
    pub fn refuse(&mut self, why: &str) {
        self.incoming.close();
        self.collect();
        for mut job in self.waiting.drain(..) {
            job.responder.give_up(why);
        }
    }

    /// Accepts no more jobs. The waiting ones still run. Returns whether there are none.
    pub fn close(&mut self) -> bool {
        self.incoming.close();
        !self.has_work()
    }

    fn collect(&mut self) {
        while let Ok(job) = self.incoming.try_recv() {
            self.waiting.push_back(job);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_whose_deadline_has_passed_is_answered_at_once() {
        let (places, (tell, told)) = (Places::new(1), std::sync::mpsc::channel());
        let done = move |result: Result<Reply, StoreError>| drop(tell.send(result.map(drop)));
        assert!(places.admit(Vec::new(), clock::now(), Box::new(done)).is_none());
        assert!(matches!(told.try_recv(), Ok(Err(StoreError::Unsent { .. }))));
        let later = clock::now().plus_ms(60_000);
        assert!(places.admit(Vec::new(), later, Box::new(|_| {})).is_some());
    }
}

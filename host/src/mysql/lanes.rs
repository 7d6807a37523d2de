//! A lane: one connection, one task. While its batch is under way the next one collects.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use super::batch::{self, Decided};
use super::fast;
use super::link::{Fault, IDLE_S, Link};
use super::queue::{Batch, LATE, Queue, Ticket, first_deadline};
use super::store::Shared;
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::Instant;
use crate::lock::record::{Op, Tried};
use crate::random;
use crate::store::Reply;
use crate::store::registry::NO_MEMBER;

/// The longest that one transaction may take before its connection is given up.
pub const EXCHANGE_LIMIT: Duration = Duration::from_secs(3);

/// While this proxy is no member, claims are given up this often.
const GATE_POLL: Duration = Duration::from_millis(50);

/// Runs what comes through `queue` until the store is closed.
pub async fn run(shared: Arc<Shared>, mut queue: Queue, seat: usize) {
    while let Some(mut link) = open(&shared, &mut queue, Some(seat)).await {
        match serve(&shared, &mut link, &mut queue).await {
            Ok(()) => {
                link.close().await;
                break;
            }
            Err(fault) => {
                shared.metrics.store_error(fault.slug());
                tracing::warn!(lane = seat, "lost the connection to the MySQL server: {fault}");
            }
        }
    }
    queue.refuse("the store was closed");
}

/// Waiting times between attempts: doubled each time, up to a second, and spread.
pub struct Backoff(Duration);

impl Backoff {
    pub fn new() -> Backoff {
        Backoff(Duration::from_millis(10))
    }

    pub fn next(&mut self) -> Duration {
        let now = self.0;
        self.0 = (now * 2).min(Duration::from_secs(1));
        now.mul_f64(random::within(0.5..1.0))
    }
}

/// Opens a connection, however long it takes; `None` once the store is closed. Work that waits
/// expires meanwhile. A connection without a seat does not count for the store's health.
pub async fn open(shared: &Shared, queue: &mut Queue, seat: Option<usize>) -> Option<Link> {
    let mut backoff = Backoff::new();
    let mut why = LATE.to_owned();
    loop {
        let opened = tokio::select! {
            biased;
            opened = Link::open(shared) => opened,
            () = shared.stop.cancelled() => return None,
            never = queue.expire(&why) => match never {},
        };
        let fault = match opened {
            Ok(link) => {
                if let Some(seat) = seat {
                    shared.health.up(seat, &link.server.name, &link.server.warnings);
                }
                return Some(link);
            }
            Err(fault) => fault,
        };
        shared.metrics.store_error(fault.slug());
        tracing::debug!(lane = seat, "cannot use the MySQL server: {fault}");
        why = fault.to_string();
        if let Some(seat) = seat {
            shared.health.down(seat, why.clone());
        }
        tokio::select! {
            biased;
            () = tokio::time::sleep(backoff.next()) => {}
            () = shared.stop.cancelled() => return None,
            never = queue.expire(&why) => match never {},
        }
    }
}

/// `Ok` once the store is closed and everything is answered.
async fn serve(shared: &Shared, link: &mut Link, queue: &mut Queue) -> Result<(), Fault> {
    loop {
        if shared.stop.is_cancelled() {
            queue.close();
            if !queue.has_work() {
                return Ok(());
            }
        }
        tokio::select! {
            biased;
            open = queue.wait() => {
                if !open {
                    return Ok(());
                }
                may_write(shared, queue).await;
                run_batch(shared, link, queue).await?;
            }
            () = shared.stop.cancelled() => {}
            () = tokio::time::sleep(Duration::from_secs(IDLE_S)) => {
                let refreshed = tokio::time::timeout(EXCHANGE_LIMIT, link.refresh(shared)).await;
                refreshed.unwrap_or_else(|_| Err(Fault::timeout("an idle connection")))?;
            }
        }
    }
}

/// Waits until this proxy is a member of its fleet: what it would write before that is refused.
async fn may_write(shared: &Shared, queue: &mut Queue) {
    while !shared.membership.may_write() {
        if shared.membership.is_lost() {
            reached(Branch::BatchGivenUp);
            queue.give_up_claims(NO_MEMBER);
        }
        tokio::select! {
            biased;
            () = shared.membership.opened() => {}
            () = shared.stop.cancelled() => return,
            () = tokio::time::sleep(GATE_POLL) => {}
            never = queue.expire(NO_MEMBER) => match never {},
        }
    }
}

/// Runs one batch. What is not answered then goes back to the queue, before everything else.
async fn run_batch(shared: &Shared, link: &mut Link, queue: &mut Queue) -> Result<(), Fault> {
    let mut batch = queue.batch();
    expire(&mut batch.tickets, LATE);
    batch.retain_open();
    let Some(deadline) = batch.deadline() else { return Ok(()) };
    let fault = match exchange(shared, link, queue, &mut batch, deadline).await {
        Ok(replies) => {
            batch.answer(replies);
            return Ok(());
        }
        Err(fault) => fault,
    };
    let alone = batch.groups.len() == 1;
    match fault {
        Fault::Broken { .. } => {
            reached(Branch::BatchBroken);
            queue.put_back(batch);
            return Err(fault);
        }
        Fault::Rejected { why } if alone => reject(shared, batch, &why),
        Fault::Conflict { .. } if alone => {
            shared.metrics.store_error(fault.slug());
            tokio::time::sleep(Backoff::new().next()).await;
            queue.put_back(batch);
        }
        _ => {
            shared.metrics.store_error(fault.slug());
            reached(Branch::BatchApart);
            run_apart(shared, link, queue, batch).await?;
        }
    }
    Ok(())
}

/// After a fault of a whole batch: one group's trouble is not to be that of all. Whatever has
/// trouble by itself goes back to the queue, and so does what came after it for the same key.
async fn run_apart(shared: &Shared, link: &mut Link, queue: &mut Queue, batch: Batch) -> Result<(), Fault> {
    let mut later = Batch::default();
    let mut broken = None;
    for mut single in batch.split() {
        expire(&mut single.tickets, LATE);
        let Some(deadline) = single.deadline() else { continue };
        let first = &single.groups[0][0].keys()[0];
        let blocked = later.groups.iter().any(|group| group[0].keys()[0] == *first);
        if broken.is_some() || blocked {
            later.append(single);
            continue;
        }
        match exchange(shared, link, queue, &mut single, deadline).await {
            Ok(replies) => single.answer(replies),
            Err(Fault::Rejected { why }) => reject(shared, single, &why),
            Err(Fault::Conflict { .. }) => later.append(single),
            Err(fault @ Fault::Broken { .. }) => {
                broken = Some(fault);
                later.append(single);
            }
        }
    }
    queue.put_back(later);
    broken.map_or(Ok(()), Err)
}

/// One attempt at the batch. Groups that reach their deadline meanwhile are answered then.
async fn exchange(
    shared: &Shared,
    link: &mut Link,
    queue: &mut Queue,
    batch: &mut Batch,
    deadline: Instant,
) -> Result<Vec<Reply>, Fault> {
    let began = clock::now();
    let ops = batch.ops();
    let mut decided = None;
    let sent: Vec<bool> =
        batch.tickets.iter_mut().map(|ticket| std::mem::replace(&mut ticket.sent, true)).collect();
    let result = {
        let groups = (&batch.groups[..], &mut batch.tried[..]);
        let mut work = pin!(execute(shared, link, groups, deadline, &mut decided));
        watched(work.as_mut(), &mut batch.tickets, queue).await
    };
    match (result, decided) {
        (Ok(()), decided) => {
            let took = Duration::from_micros(clock::now().us_since(began));
            shared.metrics.batch(ops, took);
            Ok(decided.map_or_else(Vec::new, |decided| decided.replies))
        }
        (Err(fault @ Fault::Broken { .. }), Some(decided)) => {
            batch.note_try(decided);
            Err(fault)
        }
        (Err(fault), _) => {
            // Nothing of it was applied.
            batch.tickets.iter_mut().zip(sent).for_each(|(ticket, sent)| ticket.sent = sent);
            Err(fault)
        }
    }
}

async fn execute(
    shared: &Shared,
    link: &mut Link,
    (groups, tried): (&[Vec<Op>], &mut [Option<Tried>]),
    deadline: Instant,
    decided: &mut Option<Decided>,
) -> Result<(), Fault> {
    // What became of an earlier try is told by rows that are read, not by remembered ones.
    let is_first = tried.iter().all(Option::is_none);
    if is_first && fast::try_run(shared, link, groups, deadline, decided).await? {
        return Ok(());
    }
    batch::run(shared, link, (groups, tried), deadline, decided).await
}

/// Waits for the work, but no longer than anybody waits for it, nor than [`EXCHANGE_LIMIT`].
pub async fn watched<T>(
    mut work: impl Future<Output = Result<T, Fault>> + Unpin,
    tickets: &mut [Ticket],
    queue: &mut Queue,
) -> Result<T, Fault> {
    let limit = clock::now().plus_us(EXCHANGE_LIMIT.as_micros() as u64);
    loop {
        let Some(deadline) = first_deadline(tickets) else { return Err(Fault::timeout("a transaction")) };
        tokio::select! {
            biased;
            done = &mut work => return done,
            () = clock::sleep_until(deadline.min(limit)) => {}
        }
        expire(tickets, LATE);
        queue.expire_now(LATE);
        if limit <= clock::now() {
            return Err(Fault::timeout("a transaction"));
        }
    }
}

fn reject(shared: &Shared, batch: Batch, why: &str) {
    shared.metrics.store_error("rejected");
    tracing::error!("an operation cannot be carried out on the MySQL server: {why}");
    batch.fail(why);
}

pub fn expire(tickets: &mut [Ticket], why: &str) {
    let now = clock::now();
    for ticket in tickets {
        ticket.expire(now, why);
    }
}

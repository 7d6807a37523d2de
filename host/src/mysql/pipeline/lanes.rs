//! A lane: one connection and one task. The next batch collects while a batch is in progress.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use super::backoff::Backoff;
use super::batch;
use super::optimistic;
use super::queue::{Attempt, Batch, LATE, Queue, Responder, expire, first_deadline};
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::Instant;
use crate::mysql::context::Context;
use crate::mysql::session::fault::Fault;
use crate::mysql::session::link::{EXCHANGE_LIMIT, IDLE_S, Link};
use crate::store::Reply;
use crate::store::registry::NO_MEMBER;

/// How often waiting claims are failed while this proxy is not a member.
const GATE_POLL: Duration = Duration::from_millis(50);

/// Runs the operations in `queue` until the store is closed.
pub async fn run(context: Arc<Context>, mut queue: Queue, lane_index: usize) {
    while let Some(mut link) = open(&context, &mut queue, Some(lane_index)).await {
        match serve(&context, &mut link, &mut queue).await {
            Ok(()) => {
                link.close().await;
                break;
            }
            Err(fault) => {
                context.metrics.store.error(fault.slug());
                tracing::warn!(lane = lane_index, "lost the connection to the MySQL server: {fault}");
            }
        }
    }
    queue.refuse("the store was closed");
}

/// Opens a connection, however long it takes; `None` once the store is closed. Waiting operations expire
/// meanwhile. A connection without a lane index does not count for the store's health.
pub async fn open(context: &Context, queue: &mut Queue, lane_index: Option<usize>) -> Option<Link> {
    let mut backoff = Backoff::new();
    let mut why = LATE.to_owned();
    loop {
        let opened = tokio::select! {
            biased;
            opened = Link::open(context) => opened,
            () = context.stop.cancelled() => return None,
            never = queue.expire(&why) => match never {},
        };
        let fault = match opened {
            Ok(link) => {
                if let Some(lane_index) = lane_index {
                    context.health.up(lane_index, &link.server.name, &link.server.warnings);
                }
                return Some(link);
            }
            Err(fault) => fault,
        };
        context.metrics.store.error(fault.slug());
        tracing::debug!(lane = lane_index, "cannot use the MySQL server: {fault}");
        why = fault.to_string();
        if let Some(lane_index) = lane_index {
            context.health.down(lane_index, why.clone());
        }
        tokio::select! {
            biased;
            () = tokio::time::sleep(backoff.next()) => {}
            () = context.stop.cancelled() => return None,
            never = queue.expire(&why) => match never {},
        }
    }
}

/// `Ok` once the store is closed and every operation is answered.
async fn serve(context: &Context, link: &mut Link, queue: &mut Queue) -> Result<(), Fault> {
    loop {
        if context.stop.is_cancelled() && queue.close() {
            return Ok(());
        }
        tokio::select! {
            biased;
            open = queue.wait() => {
                if !open {
                    return Ok(());
                }
                may_write(context, queue).await;
                run_batch(context, link, queue).await?;
            }
            () = context.stop.cancelled() => {}
            () = tokio::time::sleep(Duration::from_secs(IDLE_S)) => {
                let refreshed = tokio::time::timeout(EXCHANGE_LIMIT, link.refresh(context)).await;
                refreshed.unwrap_or_else(|_| Err(Fault::timeout("an idle connection")))?;
            }
        }
    }
}

/// Waits until this proxy is a member of its fleet, because earlier writes would be refused.
async fn may_write(context: &Context, queue: &mut Queue) {
    while !context.membership.may_write() {
        if context.membership.is_lost() {
            reached(Branch::BatchGivenUp);
            queue.give_up_claims(NO_MEMBER);
        }
        tokio::select! {
            biased;
            () = context.membership.opened() => {}
            () = context.stop.cancelled() => return,
            () = tokio::time::sleep(GATE_POLL) => {}
            never = queue.expire(NO_MEMBER) => match never {},
        }
    }
}

/// Runs one batch. Operations that get no answer go back to the front of the queue.
async fn run_batch(context: &Context, link: &mut Link, queue: &mut Queue) -> Result<(), Fault> {
    let mut batch = queue.batch();
    let Some(deadline) = batch.deadline() else { return Ok(()) };
    let fault = match exchange(context, link, queue, &mut batch, deadline).await {
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
        Fault::Rejected { why } if alone => reject(context, batch, &why),
        Fault::Conflict { .. } if alone => {
            context.metrics.store.error(fault.slug());
            tokio::time::sleep(Backoff::new().next()).await;
            queue.put_back(batch);
        }
        _ => {
            context.metrics.store.error(fault.slug());
            reached(Branch::BatchApart);
            run_apart(context, link, queue, batch).await?;
        }
    }
    Ok(())
}

/// Runs each group alone after a fault of the whole batch, so that a bad group does not fail the others. A
/// group that has a fault of its own goes back to the queue, and so do later groups with the same first key.
async fn run_apart(context: &Context, link: &mut Link, queue: &mut Queue, batch: Batch) -> Result<(), Fault> {
    let mut later = Batch::default();
    let mut broken = None;
    for mut single in batch.split() {
        expire(&mut single.responders, LATE);
        let Some(deadline) = single.deadline() else { continue };
        let first = &single.groups[0][0].keys()[0];
        let blocked = later.groups.iter().any(|group| group[0].keys()[0] == *first);
        if broken.is_some() || blocked {
            later.append(single);
            continue;
        }
        match exchange(context, link, queue, &mut single, deadline).await {
            Ok(replies) => single.answer(replies),
            Err(Fault::Rejected { why }) => reject(context, single, &why),
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

/// Makes one attempt at the batch. Groups that reach their deadline meanwhile are answered at that moment.
async fn exchange(
    context: &Context,
    link: &mut Link,
    queue: &mut Queue,
    batch: &mut Batch,
    deadline: Instant,
) -> Result<Vec<Reply>, Fault> {
    let began = clock::now();
    let ops = batch.ops();
    let mut attempt = Attempt { groups: &batch.groups, tried: &mut batch.tried, deadline, decided: None };
    let sent: Vec<bool> =
        batch.responders.iter_mut().map(|responder| std::mem::replace(&mut responder.sent, true)).collect();
    let result = {
        let mut work = pin!(execute(context, link, &mut attempt));
        watched(work.as_mut(), &mut batch.responders, queue).await
    };
    match (result, attempt.decided) {
        (Ok(()), decided) => {
            let took = Duration::from_micros(clock::now().us_since(began));
            context.metrics.store.batch(ops, took);
            Ok(decided.map_or_else(Vec::new, |decided| decided.replies))
        }
        (Err(fault @ Fault::Broken { .. }), Some(decided)) => {
            batch.note_try(decided);
            Err(fault)
        }
        (Err(fault), _) => {
            // Nothing was applied.
            batch.responders.iter_mut().zip(sent).for_each(|(responder, sent)| responder.sent = sent);
            Err(fault)
        }
    }
}

async fn execute(context: &Context, link: &mut Link, attempt: &mut Attempt<'_>) -> Result<(), Fault> {
    // Only rows that are read tell what became of an earlier try; remembered rows do not.
    let is_first = attempt.tried.iter().all(Option::is_none);
    if is_first && optimistic::try_run(context, link, attempt).await? {
        return Ok(());
    }
    batch::run(context, link, attempt).await
}

/// Waits for the work until the last deadline of its callers, and no longer than [`EXCHANGE_LIMIT`].
async fn watched<T>(
    mut work: impl Future<Output = Result<T, Fault>> + Unpin,
    responders: &mut [Responder],
    queue: &mut Queue,
) -> Result<T, Fault> {
    let limit = clock::now().plus_us(EXCHANGE_LIMIT.as_micros() as u64);
    while first_deadline(responders).is_some() {
        if let Some(done) = queue.work_until(&mut work, responders, limit).await {
            return done;
        }
        if limit <= clock::now() {
            break;
        }
    }
    Err(Fault::timeout("a transaction"))
}

fn reject(context: &Context, batch: Batch, why: &str) {
    context.metrics.store.error("rejected");
    tracing::error!("an operation cannot be carried out on the MySQL server: {why}");
    batch.fail(why);
}

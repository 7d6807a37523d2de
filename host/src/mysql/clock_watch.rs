//! What a starting proxy must know about the server's clock: how far it may have been set forward.
//!
//! [`clock_steps`](super::clock_steps) detects a step by earlier readings of the same process. A starting
//! process has no earlier readings, and if the clock was set forward while no proxy watched, all leases look
//! ended. So the row in `lockkeeper_clock` records until when the clock was watched (`seen_us`). Each proxy
//! that finds the clock as expected updates `seen_us` every second. A later step is at most as long as the
//! time that the clock shows to have passed since `seen_us`. A starting proxy records that time as a possible
//! step, and a proxy that detects a step records the step.
//!
//! So time that no proxy has watched does not count towards the end of a lease: while no proxy runs, the time
//! of leases does not advance.

use std::sync::Arc;
use std::time::Duration;

use super::clock_steps::{ClockStep, ClockSteps};
use super::context::Context;
use super::pipeline::backoff::Backoff;
use super::session::fault::Fault;
use super::session::link::{EXCHANGE_LIMIT, Link};
use crate::clock;

/// The time between two readings.
const ROUND: Duration = Duration::from_secs(1);
/// Watches the clock until the store is closed.
pub async fn run(context: Arc<Context>) {
    let mut backoff = Backoff::new();
    let mut watch = Watch::default();
    loop {
        tokio::select! {
            biased;
            () = context.stop.cancelled() => return,
            Err(fault) = watch.keep(&context) => tracing::debug!("cannot watch the server's clock: {fault}"),
        }
        tokio::select! {
            biased;
            () = context.stop.cancelled() => return,
            () = tokio::time::sleep(backoff.next()) => {}
        }
    }
}

/// Keeps the record of the clock. It uses readings of its own, because a step that a lane has noticed is not
/// recorded yet.
#[derive(Default)]
struct Watch {
    steps: ClockSteps,
    /// The server generation of the last reading.
    generation: u64,
    /// How far the clock was set forward, in microseconds, as far as that is not recorded yet.
    unrecorded_us: u64,
    has_claimed: bool,
}

impl Watch {
    /// Reads the clock again and again, until a reading fails.
    async fn keep(&mut self, context: &Context) -> Result<(), Fault> {
        let mut link = Link::open(context).await?;
        let generation = link.cache_scope().generation;
        if self.generation != generation {
            self.steps.change_server();
            (self.generation, self.has_claimed) = (generation, false);
        }
        loop {
            let looked = tokio::time::timeout(EXCHANGE_LIMIT, self.look(context, &mut link)).await;
            looked.unwrap_or_else(|_| Err(Fault::timeout("the server's clock")))?;
            tokio::time::sleep(ROUND).await;
        }
    }

    async fn look(&mut self, context: &Context, link: &mut Link) -> Result<(), Fault> {
        link.refresh(context).await?;
        if !context.clock_steps().is_watched() {
            link.begin(context).await?;
        }
        let seen = link.sample;
        let noticed = self.steps.observe(seen.now, seen.before, seen.after);
        if let ClockStep::Forward { at_most_us, .. } = noticed {
            self.unrecorded_us += at_most_us;
        }
        let set_back = context.clock_steps().recorded(clock::now());
        link.record_clock(self.unrecorded_us, set_back, context.longest_us()).await?;
        self.unrecorded_us = 0;
        if !self.has_claimed && context.membership.may_write() {
            link.claim_version().await?;
            self.has_claimed = true;
        }
        Ok(())
    }
}

//! What a proxy that starts must know of the server's clock: how far it may have been set forward.
//!
//! [`steps`](super::steps) notices a step by what this process has seen before. A process that starts has seen
//! nothing, and a clock that was set forward while no proxy looked makes all leases look ended. So the row in
//! `lockkeeper_clock` says up to which time the clock was watched (`seen_us`): each proxy that finds the clock where it
//! has to be says so every second. Since then the clock was set forward by no more than the time that it shows to have
//! passed. A proxy that starts records that time as a possible step, and a proxy that notices a step records the step.
//!
//! So time that no proxy has watched does not count for the end of a lease: while no proxy runs, leases stand still.

use std::sync::Arc;
use std::time::Duration;

use mysql_async::Row;

use super::clock_steps::{ClockStep, ClockSteps, MARGIN_US, SetBack, UNSEEN_US};
use super::lanes::{Backoff, EXCHANGE_LIMIT};
use super::link::{self, Fault, Link};
use super::schema;
use super::sql::{CLOCK, META, NOW_US};
use super::store::Context;
use super::wire::Wire;
use crate::clock;
use crate::lock::ServerTime;

/// Between two looks.
const ROUND: Duration = Duration::from_secs(1);
/// What is asked for at the beginning is no older than this when it is used, in microseconds.
const LONGEST_BEGIN_US: u64 = 5_000_000;
/// What another proxy has said this long ago need not be said again, in microseconds.
const RECENT_US: u64 = 500_000;
/// No wait after a change of the server is longer than the longest lease and this, in microseconds.
const LONGEST_MARGIN_US: u64 = 10_000_000;

/// The first look of a process at the server's clock, and the first look after the process was away: takes over what other
/// proxies have noticed, and records that the clock may have been set forward since the last of them looked.
pub async fn begin(wire: &mut Wire, context: &Context) -> Result<(), Fault> {
    let (ahead, by_us) = (format!("{NOW_US}>seen_us"), format!("{NOW_US}-seen_us"));
    // So that it concerns leases from before this look alone. Else leases that are granted after a start would last longer.
    let since = format!("GREATEST(stepped_us,{NOW_US}-{UNSEEN_US})");
    let sql = format!(
        "UPDATE {CLOCK} SET {},seen_us=GREATEST(seen_us,{NOW_US}) WHERE id=1;\
         SELECT {NOW_US},by_us,stepped_us,grants_us,seen_us FROM {CLOCK} WHERE id=1",
        step(&ahead, &by_us, &since, context.longest_us())
    );
    let before = clock::now();
    let row = link::exchange(wire, sql).await?.pop().and_then(|mut rows| rows.pop());
    let after = clock::now();
    if after.us_since(before) > LONGEST_BEGIN_US {
        return Err(Fault::timeout("the server's clock"));
    }
    let [now, by_us, stepped_us, grants_us, seen_us] = read(row)?;
    let (now, mut steps) = (ServerTime(now), context.clock_steps());
    steps.inherit(by_us, ServerTime(stepped_us), now, before);
    steps.note_wait(ServerTime(grants_us), now, before);
    steps.observe(now, before, after);
    steps.note_seen(ServerTime(seen_us), now, before, after);
    steps.begin();
    Ok(())
}

/// Assignments that record a possible step by `by_us`, where `ahead` holds. `since`: what the clock said when it was noticed.
/// Several proxies may record the same step, and then it counts several times: no lease is in doubt for longer than it was
/// set for. A step that is longer ago than the longest lease and [`UNSEEN_US`] is over. A wait that was not over when the clock
/// was last watched is put off.
fn step(ahead: &str, by_us: &str, since: &str, longest_us: u64) -> String {
    let grants_from = format!("GREATEST(grants_us,(SELECT grants_from FROM {META} WHERE id=1))");
    let latest = format!("{NOW_US}+{}", longest_us + LONGEST_MARGIN_US);
    let counts_us = UNSEEN_US + longest_us + MARGIN_US;
    // They are made from left to right.
    format!(
        "grants_us=IF({ahead} AND {grants_from}>seen_us,LEAST({grants_from}+{by_us},{latest}),grants_us),\
         by_us=IF({ahead},IF(stepped_us+{counts_us}>seen_us,by_us,0)+{by_us},by_us),\
         stepped_us=IF({ahead},{since},stepped_us)"
    )
}

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

/// What is recorded of the clock rests on looks of its own: a step that a lane has noticed is not recorded yet.
#[derive(Default)]
struct Watch {
    steps: ClockSteps,
    /// The choice of the server that was looked at last.
    generation: u64,
    /// How far the clock was set forward, in microseconds, where that is still to be recorded.
    unrecorded_us: u64,
    has_claimed: bool,
}

impl Watch {
    /// Looks again and again, until that fails.
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
        link.exchange(said(seen.now, self.unrecorded_us, set_back, context.longest_us())).await?;
        self.unrecorded_us = 0;
        if !self.has_claimed && context.membership.may_write() {
            link.exchange(schema::claim_version()).await?;
            self.has_claimed = true;
        }
        Ok(())
    }
}

/// Says that the clock was watched up to `seen`, and that it was set forward meanwhile, where it was. A clock that was set
/// back is for a while recorded as if it was not, as what is granted is: see [`ClockSteps::set_back_us`].
fn said(seen: ServerTime, by_us: u64, set_back: SetBack, longest_us: u64) -> String {
    let (set_back_us, may_lower) = match set_back {
        SetBack::By(us) => (us, true),
        SetBack::Unknown => (0, false),
    };
    let seen_us = seen.0 + set_back_us;
    if by_us > 0 {
        let step = step("TRUE", &by_us.to_string(), NOW_US, longest_us);
        return format!("UPDATE {CLOCK} SET {step},seen_us={seen_us} WHERE id=1");
    }
    // By the clock of now: a look that arrives late is behind what others have seen since, and must not take back the
    // step that they have recorded.
    let is_back = match may_lower {
        true => format!("seen_us>{NOW_US}+{}", set_back_us + RECENT_US),
        false => "0>1".to_owned(),
    };
    format!(
        "UPDATE {CLOCK} SET stepped_us=IF({is_back},LEAST(stepped_us,{seen_us}),stepped_us),seen_us={seen_us} \
         WHERE id=1 AND (seen_us+{RECENT_US}<{seen_us} OR {is_back})"
    )
}

fn read(row: Option<Row>) -> Result<[u64; 5], Fault> {
    let read = row.and_then(|row| mysql_async::from_row_opt::<(u64, u64, u64, u64, u64)>(row).ok());
    read.map(<[u64; 5]>::from).ok_or_else(|| {
        let why = format!("the row in {CLOCK} is missing: were its tables dropped?");
        Fault::Broken { why, slug: "schema" }
    })
}

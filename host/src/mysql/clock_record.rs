//! The table in which the proxies record the server's clock.

use mysql_async::Row;

use super::clock_steps::{MARGIN_US, SetBack, UNSEEN_US};
use super::context::Context;
use super::session::fault::{self, Fault};
use super::session::wire::Wire;
use super::sql::{CLOCK, META, NOW_US};
use crate::clock;
use crate::lock::ServerTime;

/// [`begin`] uses an answer only if it is no older than this, in microseconds.
const LONGEST_BEGIN_US: u64 = 5_000_000;
/// A proxy does not repeat what another proxy has recorded less than this long ago, in microseconds.
const RECENT_US: u64 = 500_000;
/// A wait after a change of the server lasts at most the longest lease plus this, in microseconds.
const LONGEST_MARGIN_US: u64 = 10_000_000;

/// The first reading of a process, and the first after it was away. Takes over the records of other proxies,
/// and records that the clock may have been set forward since the last of them read it.
pub async fn begin(wire: &mut Wire, context: &Context) -> Result<(), Fault> {
    let (ahead, by_us) = (format!("{NOW_US}>seen_us"), format!("{NOW_US}-seen_us"));
    // So that only leases from before this reading are in doubt. Otherwise leases that are granted after a
    // start would last longer.
    let since = format!("GREATEST(stepped_us,{NOW_US}-{UNSEEN_US})");
    let sql = format!(
        "UPDATE {CLOCK} SET {},seen_us=GREATEST(seen_us,{NOW_US}) WHERE id=1;\
         SELECT {NOW_US},by_us,stepped_us,grants_us,seen_us FROM {CLOCK} WHERE id=1",
        step(&ahead, &by_us, &since, context.longest_us())
    );
    let before = clock::now();
    let row = fault::exchange(wire, sql).await?.pop().and_then(|mut rows| rows.pop());
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

/// Assignments that record a possible step of `by_us` if `ahead` holds. `since` is the time that the clock
/// showed when the step was noticed. A step that several proxies record counts several times; even so no
/// lease is in doubt for longer than its duration. A step that is longer ago than the longest lease plus
/// [`UNSEEN_US`] does not count any more. A wait that was not over when the clock was last watched is
/// extended by the step.
fn step(ahead: &str, by_us: &str, since: &str, longest_us: u64) -> String {
    let grants_from = format!("GREATEST(grants_us,(SELECT grants_from FROM {META} WHERE id=1))");
    let latest = format!("{NOW_US}+{}", longest_us + LONGEST_MARGIN_US);
    let counts_us = UNSEEN_US + longest_us + MARGIN_US;
    // Assignments run from left to right.
    format!(
        "grants_us=IF({ahead} AND {grants_from}>seen_us,LEAST({grants_from}+{by_us},{latest}),grants_us),\
         by_us=IF({ahead},IF(stepped_us+{counts_us}>seen_us,by_us,0)+{by_us},by_us),\
         stepped_us=IF({ahead},{since},stepped_us)"
    )
}

/// The statement that records that the clock was watched up to `seen`, and was set forward by `by_us`
/// meanwhile. A clock that was set back is recorded for a while as if it was not, just as leases are granted:
/// see [`ClockSteps::set_back_us`](super::clock_steps::ClockSteps::set_back_us).
pub fn watched(seen: ServerTime, by_us: u64, set_back: SetBack, longest_us: u64) -> String {
    let (set_back_us, may_lower) = match set_back {
        SetBack::By(us) => (us, true),
        SetBack::Unknown => (0, false),
    };
    let seen_us = seen.0 + set_back_us;
    if by_us > 0 {
        let step = step("TRUE", &by_us.to_string(), NOW_US, longest_us);
        return format!("UPDATE {CLOCK} SET {step},seen_us={seen_us} WHERE id=1");
    }
    // Compares with the server's current clock, because a statement that arrives late is behind what other
    // proxies have seen since, and must not undo the step that they have recorded.
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

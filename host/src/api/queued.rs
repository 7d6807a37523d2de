//! A waiter as `GET /v1/locks/{name}` shows it: its position, why it waits, about how long, and its plan.

use serde::Serialize;

use crate::clock;
use crate::fronts::mode::Shown;
use crate::lock::record::{Cause, HeldBy};
use crate::lock::table::{Order, Reason, Rule, Why};
use crate::service::{Estimate, NoEstimate, PlanEntry, QueueEntry, Spread};

#[derive(Serialize)]
pub struct Queued {
    position: u32,
    owner: String,
    mode: Shown,
    rank: i32,
    group: String,
    waited_ms: u32,
    wait_left_ms: u32,
    /// What decides which waiter is next.
    rule: &'static str,
    /// The position among the waiters of all proxies; absent without a global queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    global_position: Option<u32>,
    why: Waits,
    estimate: Expected,
    plan: Planned,
}

/// Why the waiter waits.
#[derive(Serialize)]
struct Waits {
    reason: &'static str,
    /// In words.
    text: String,
    /// The key that is not free. Absent, as all that follows, if the client may not read it.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    /// The lease that blocks the key the longest.
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<Blocker>,
    /// The waiter that goes first.
    #[serde(skip_serializing_if = "Option::is_none")]
    behind: Option<Ahead>,
    /// The permits that are taken, and how many there are.
    #[serde(skip_serializing_if = "Option::is_none")]
    permits: Option<Permits>,
    /// When the key may be free, unless it is given up earlier.
    #[serde(skip_serializing_if = "Option::is_none")]
    free_in_ms: Option<u32>,
    /// The proxy that has the key, or whose turn it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    proxy: Option<String>,
}

#[derive(Serialize)]
struct Blocker {
    owner: String,
    mode: Shown,
    token: u64,
    since: String,
    until: String,
}

#[derive(Serialize)]
struct Ahead {
    owner: String,
    mode: Shown,
    by: &'static str,
}

#[derive(Serialize)]
struct Permits {
    taken: u32,
    limit: u32,
}

/// How long the waiter still waits.
#[derive(Serialize)]
#[serde(untagged)]
enum Expected {
    Within(Times),
    None {
        /// Why there is no estimate.
        none: &'static str,
        #[serde(skip_serializing_if = "Option::is_none")]
        holds: Option<u32>,
    },
}

/// Times, rounded to two digits, because they are guesses.
#[derive(Serialize)]
pub struct Times {
    low_ms: u32,
    median_ms: u32,
    high_ms: u32,
    holds: u32,
}

#[derive(Serialize)]
struct Planned {
    policy: String,
    keys: Vec<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    any: bool,
    ttl_ms: u32,
    wait_ms: u32,
    /// What the policy reads of the request; absent if the policy does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    reads: Option<Vec<Read>>,
}

#[derive(Serialize)]
struct Read {
    part: String,
    /// Absent if the client may not see it.
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
}

impl From<QueueEntry> for Queued {
    fn from(entry: QueueEntry) -> Queued {
        Queued {
            position: entry.position,
            owner: entry.owner,
            mode: Shown(entry.mode),
            rank: entry.rank,
            group: entry.group,
            waited_ms: entry.waited_ms,
            wait_left_ms: entry.wait_left_ms,
            rule: match entry.rule {
                Rule::RankThenArrival => "rank_then_arrival",
                Rule::Fairness => "fairness",
                Rule::GlobalQueue => "global_queue",
            },
            global_position: entry.global_position,
            why: Waits::of(entry.why, entry.text),
            estimate: Expected::from(entry.estimate),
            plan: Planned::from(entry.plan),
        }
    }
}

impl Waits {
    fn of(why: Option<Why>, text: String) -> Waits {
        let mut shown = Waits {
            reason: "other_key",
            text,
            key: None,
            holder: None,
            behind: None,
            permits: None,
            free_in_ms: None,
            proxy: None,
        };
        let Some(Why { key, reason }) = why else { return shown };
        shown.key = Some(key.to_string());
        shown.reason = slug(&reason);
        match reason {
            Reason::Behind { owner, mode, by, .. } => {
                let by = match by {
                    Order::Rank => "rank",
                    Order::Arrival => "arrival",
                    Order::GlobalQueue => "global_queue",
                };
                shown.behind = Some(Ahead { owner: owner.into(), mode: Shown(mode), by });
            }
            Reason::Blocked { cause, holder, free_in_ms, next_waiter } => {
                shown.holder = holder.map(Blocker::from);
                shown.free_in_ms = Some(free_in_ms).filter(|_| free_in_ms > 0);
                shown.proxy = next_waiter.map(|next| next.proxy.to_string());
                if let Cause::Permits { used, limit } = cause {
                    shown.permits = Some(Permits { taken: used, limit });
                }
            }
            Reason::Asked
            | Reason::Free
            | Reason::Choosing
            | Reason::Fairness { .. }
            | Reason::Unanswered { .. } => {}
        }
        shown
    }
}

fn slug(reason: &Reason) -> &'static str {
    match reason {
        Reason::Asked => "asked",
        Reason::Free => "free",
        Reason::Choosing => "choosing",
        Reason::Fairness { .. } => "fairness",
        Reason::Behind { .. } => "behind",
        Reason::Unanswered { .. } => "unanswered",
        Reason::Blocked { cause, .. } => match cause {
            Cause::Held => "held",
            Cause::Permits { .. } => "permits",
            Cause::Delay => "delay",
            Cause::ClockInDoubt => "clock_in_doubt",
            Cause::FailOver => "fail_over",
            Cause::GlobalQueue => "global_queue",
            Cause::Turn => "turn",
            Cause::Delegated => "delegated",
            Cause::OtherSession => "other_session",
            Cause::Divided => "divided",
        },
    }
}

impl From<HeldBy> for Blocker {
    fn from(held: HeldBy) -> Blocker {
        Blocker {
            owner: held.owner.into(),
            mode: Shown(held.mode),
            token: held.token.0,
            since: clock::rfc3339(held.since.0),
            until: clock::rfc3339(held.until.0),
        }
    }
}

impl From<Estimate> for Expected {
    fn from(estimate: Estimate) -> Expected {
        let why = match estimate {
            Estimate::Within(spread) => return Expected::Within(spread.into()),
            Estimate::None(why) => why,
        };
        let (none, holds) = match why {
            NoEstimate::TooFewHolds { holds } => ("too_few_holds", Some(holds)),
            NoEstimate::HeldLonger { holds } => ("held_longer", Some(holds)),
            NoEstimate::Permits => ("permits", None),
            NoEstimate::SeveralKeys => ("several_keys", None),
            NoEstimate::Fairness => ("fairness", None),
            NoEstimate::NotHeld => ("not_held", None),
        };
        Expected::None { none, holds }
    }
}

impl From<Spread> for Times {
    fn from(spread: Spread) -> Times {
        let Spread { low_ms, median_ms, high_ms, holds } = spread;
        Times { low_ms: rounded(low_ms), median_ms: rounded(median_ms), high_ms: rounded(high_ms), holds }
    }
}

/// The time with two digits that count.
fn rounded(ms: u32) -> u32 {
    let unit = 10u32.pow(ms.checked_ilog10().unwrap_or(0).saturating_sub(1));
    (ms / unit * unit).saturating_add(if ms % unit * 2 >= unit && unit > 1 { unit } else { 0 })
}

impl From<PlanEntry> for Planned {
    fn from(plan: PlanEntry) -> Planned {
        let read = |(part, value)| Read { part, value };
        Planned {
            policy: plan.policy.to_string(),
            keys: plan.keys.iter().map(ToString::to_string).collect(),
            any: plan.any,
            ttl_ms: plan.ttl_ms,
            wait_ms: plan.wait_ms,
            reads: plan.reads.map(|reads| reads.into_iter().map(read).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_have_two_digits() {
        let cases = [(0, 0), (9, 9), (12, 12), (123, 120), (125, 130), (999, 1_000), (12_345, 12_000)];
        assert_eq!(cases.map(|(ms, _)| rounded(ms)), cases.map(|(_, shown)| shown));
        assert_eq!(rounded(u32::MAX), 4_300_000_000u64.min(u64::from(u32::MAX)) as u32);
    }
}

//! The requests of a recording, and how long each lease was held.

use std::collections::HashMap;
use std::sync::Arc;

use super::store::StoreModel;
use crate::lock::record::HttpView;
use crate::policy::PlanRequest;
use crate::recording::{Ask, Http, Pairs, Recording};

/// When requests arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arrivals {
    /// When they were recorded, whatever became of the requests before them.
    #[default]
    Open,
    /// Each owner sends its next request as long after the end of the one before as it did. After the last one it begins
    /// again, until the recording ends: a client that waits less asks more often.
    Closed,
}

/// The requests, in the order in which they arrived.
#[derive(Debug)]
pub struct Load {
    /// The requests.
    pub requests: Vec<Arrival>,
    /// The time from the first request to the last one, in microseconds.
    pub span_us: u64,
    /// How long the store takes.
    pub(super) store: StoreModel,
    /// The lengths of all recorded holds, for requests whose hold is not known.
    holds: Holds,
}

/// One request.
#[derive(Debug)]
pub struct Arrival {
    /// When it arrives, in microseconds since the first request.
    pub at_us: u64,
    /// What the policy sees.
    pub request: PlanRequest,
    /// The client leaves if it has no answer after this time, in microseconds.
    pub leaves_us: Option<u64>,
    /// How long the lease was held, if that is known.
    pub hold: Option<Hold>,
    /// The request that the same owner sends next, and how long after the end of this one, if arrivals are closed.
    pub next: Option<(usize, u64)>,
    /// Whether it is the first of its owner. Otherwise the one before it says when it arrives, if arrivals are closed.
    pub is_first: bool,
    /// The recorded outcome.
    pub outcome: String,
    /// The recorded wait, in microseconds.
    pub waited_us: u64,
    /// The recorded group of the plan.
    pub group: String,
}

/// How long a lease is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// How long the holder uses the lease, in microseconds.
    pub us: u64,
    /// Whether the holder releases it then. Otherwise it ends by itself.
    pub is_released: bool,
    /// Whether the holder renews it meanwhile.
    pub renews: bool,
}

#[derive(Debug, Default)]
struct Holds {
    by_resource: HashMap<String, Vec<Hold>>,
    all: Vec<Hold>,
}

impl Load {
    /// The requests of a recording. `store_us`: how long the store takes, if not as recorded.
    pub fn of(recording: &Recording, arrivals: Arrivals, store_us: Option<u64>) -> Load {
        let began_us = recording.asks.first().map_or(0, |ask| ask.at_us);
        let mut holds = Holds::default();
        let mut requests: Vec<Arrival> = recording
            .asks
            .iter()
            .map(|ask| {
                let hold = hold(recording, ask);
                if let Some(hold) = hold {
                    holds.by_resource.entry(ask.resource.to_string()).or_default().push(hold);
                    holds.all.push(hold);
                }
                Arrival {
                    at_us: ask.at_us - began_us,
                    request: request(ask),
                    leaves_us: (ask.outcome == "left").then_some(ask.waited_us),
                    hold,
                    next: None,
                    is_first: true,
                    outcome: ask.outcome.to_string(),
                    waited_us: ask.waited_us,
                    group: ask.plan.as_ref().map(|plan| plan.group.to_string()).unwrap_or_default(),
                }
            })
            .collect();
        if arrivals == Arrivals::Closed {
            chain(&mut requests);
        }
        let recorded = || StoreModel::recorded(&recording.store, began_us);
        let span_us = requests.last().map_or(0, |last| last.at_us);
        Load { requests, span_us, store: store_us.map_or_else(recorded, StoreModel::constant), holds }
    }

    /// How long a lease is held, and whether that is a guess: the hold of another lease of the resource, or of any.
    pub fn hold(&self, n: usize) -> (Hold, bool) {
        let Arrival { hold, request, .. } = &self.requests[n];
        let guess = || {
            let of = self.holds.by_resource.get(&request.resource).unwrap_or(&self.holds.all);
            // Any of them, and the same in each run.
            let at = (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
            of.get(at as usize % of.len().max(1)).copied().unwrap_or(Hold {
                us: 0,
                is_released: true,
                renews: false,
            })
        };
        hold.map_or_else(|| (guess(), true), |hold| (hold, false))
    }
}

fn hold(recording: &Recording, ask: &Ask<'_>) -> Option<Hold> {
    let end = recording.ends.get(ask.lease.as_ref()?)?;
    let ttl_us = ask.plan.as_ref().map_or(0, |plan| u64::from(plan.ttl_ms) * 1_000);
    let us = end.at_us.saturating_sub(ask.at_us + ask.waited_us);
    // A lease that is not renewed ends a little late, because the store's answers are late.
    let renews = us > ttl_us + ttl_us / 8;
    Some(match &*end.how {
        "released" => Hold { us, is_released: true, renews },
        // The last renewal was as long before the end as a lease lasts.
        _ => Hold { us: us.saturating_sub(ttl_us), is_released: false, renews },
    })
}

fn request(ask: &Ask<'_>) -> PlanRequest {
    PlanRequest {
        resource: ask.resource.to_string(),
        owner: ask.owner.to_string(),
        mode: ask.mode,
        ttl_ms: ask.ttl_ms,
        wait_ms: ask.wait_ms,
        labels: pairs(&ask.labels),
        http: ask.http.as_ref().map(|http| Arc::new(view(http))),
        seed: ask.seed,
    }
}

fn view(http: &Http<'_>) -> HttpView {
    HttpView {
        method: http.method.to_string(),
        path: http.path.to_string(),
        captures: pairs(&http.captures),
        query: pairs(&http.query),
        headers: pairs(&http.headers),
        body: Vec::new(),
    }
}

fn pairs(pairs: &Pairs<'_>) -> Vec<(String, String)> {
    pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

/// Lets each owner send its requests one after the other. Requests that an owner sent before the end of its last one stay
/// where they are.
fn chain(requests: &mut [Arrival]) {
    let mut last: HashMap<String, usize> = HashMap::new();
    for n in 0..requests.len() {
        let before = last.insert(requests[n].request.owner.clone(), n);
        let Some(before) = before else { continue };
        let held_us = requests[before].hold.map_or(0, |hold| hold.us);
        let ended_us = requests[before].at_us + requests[before].waited_us + held_us;
        if let Some(pause_us) = requests[n].at_us.checked_sub(ended_us) {
            requests[before].next = Some((n, pause_us));
            requests[n].is_first = false;
        }
    }
    // An owner that has sent all its requests begins again.
    for first in 0..requests.len() {
        let Some((second, pause_us)) = requests[first].next.filter(|_| requests[first].is_first) else {
            continue;
        };
        let mut end = second;
        while let Some((next, _)) = requests[end].next {
            end = next;
        }
        requests[end].next = Some((first, pause_us));
    }
}

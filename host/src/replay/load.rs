//! The requests of a run, and how long each lease is held. They come from a recording or from a scenario.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::draw::drawn;
use super::store::StoreModel;
use crate::lock::Call;
use crate::lock::record::HttpView;
use crate::policy::PlanRequest;
use crate::recording::{Ask, End, Http, LeaseName, Pairs, Recording};

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
    /// How many requests are sent at most.
    pub(super) most: usize,
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
    /// No next request is sent after this time, in microseconds since the first request.
    pub until_us: u64,
    /// Whether it arrives when it was recorded. Otherwise the one before it says when, if arrivals are closed.
    pub is_first: bool,
    /// What the client called.
    pub call: Call,
    /// When the request was over as it was recorded: refused, or its lease at its end, in microseconds since the first request.
    ended_us: u64,
    /// The recorded outcome.
    pub outcome: String,
    /// The recorded wait, in microseconds.
    pub waited_us: u64,
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

/// How many times as many requests are sent as were recorded, at most.
const REPEATS: usize = 20;

#[derive(Debug, Default)]
struct Holds {
    by_resource: HashMap<String, Vec<Hold>>,
    all: Vec<Hold>,
}

impl Arrival {
    /// A request that nobody has recorded.
    pub fn made(at_us: u64, request: PlanRequest, hold: Hold) -> Arrival {
        Arrival {
            at_us,
            request,
            leaves_us: None,
            hold: Some(hold),
            next: None,
            until_us: u64::MAX,
            is_first: true,
            call: Call::Acquire,
            ended_us: 0,
            outcome: String::new(),
            waited_us: 0,
        }
    }

    /// A request that is planned and not sent.
    pub fn planned(request: PlanRequest) -> Arrival {
        let hold = Hold { us: 0, is_released: true, renews: false };
        Arrival { is_first: false, ..Arrival::made(0, request, hold) }
    }
}

impl Load {
    /// The requests of a recording. `store_us`: how long the store takes, if not as recorded.
    pub fn of(recording: &Recording, arrivals: Arrivals, store_us: Option<u64>) -> Load {
        let began_us = recording.asks.first().map_or(0, |ask| ask.at_us);
        let mut holds = Holds::default();
        // When the first level of each lease was granted.
        let mut granted = HashMap::new();
        let mut requests: Vec<Arrival> = recording
            .asks
            .iter()
            .map(|ask| {
                let (hold, held_us) = hold(recording, ask, &mut granted).unzip();
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
                    until_us: 0,
                    is_first: true,
                    call: Call::named(&ask.call).unwrap_or(Call::Acquire),
                    ended_us: ask.at_us - began_us + ask.waited_us + held_us.unwrap_or_default(),
                    outcome: ask.outcome.to_string(),
                    waited_us: ask.waited_us,
                }
            })
            .collect();
        if arrivals == Arrivals::Closed {
            chain(&mut requests);
        }
        let recorded = || StoreModel::recorded(&recording.store, began_us);
        let span_us = requests.last().map_or(0, |last| last.at_us);
        requests.iter_mut().for_each(|request| request.until_us = span_us);
        let most = requests.len() * REPEATS;
        Load { requests, most, store: store_us.map_or_else(recorded, StoreModel::constant), holds }
    }

    /// Requests that nobody has recorded, in the order in which they arrive. At most `most` are sent in all. The store takes
    /// `store_us` for each answer.
    pub fn made(requests: Vec<Arrival>, most: usize, store_us: u64) -> Load {
        Load { requests, most, store: StoreModel::constant(store_us), holds: Holds::default() }
    }

    /// How long a lease is held, and whether that is a guess: the hold of another lease of the resource, or of any.
    pub fn hold(&self, n: usize) -> (Hold, bool) {
        let Arrival { hold, request, .. } = &self.requests[n];
        let guess = || {
            let of = self.holds.by_resource.get(&request.resource).unwrap_or(&self.holds.all);
            drawn(of, n as u64).copied().unwrap_or(Hold { us: 0, is_released: true, renews: false })
        };
        hold.map_or_else(|| (guess(), true), |hold| (hold, false))
    }
}

/// How long a lease was used, and how long it lasted, in microseconds. All levels of a lease end with it. `granted`: when the
/// first level of each lease was granted.
fn hold<'a>(
    recording: &'a Recording,
    ask: &'a Ask<'_>,
    granted: &mut HashMap<&'a LeaseName<'a>, u64>,
) -> Option<(Hold, u64)> {
    let name = ask.lease.as_ref()?;
    let End { held_us, how, .. } = recording.ends.get(name)?;
    let granted_us = ask.at_us + ask.waited_us;
    let first_us = *granted.entry(name).or_insert(granted_us);
    let held_us = held_us.saturating_sub(granted_us.saturating_sub(first_us));
    let ttl_us = ask.plan.as_ref().map_or(0, |plan| u64::from(plan.ttl_ms) * 1_000);
    // A lease that is not renewed ends a little late, because the store's answers are late.
    let renews = held_us > ttl_us + ttl_us / 8;
    let hold = match &**how {
        // The last renewal was as long before the end as a lease lasts.
        "expired" => {
            let us = held_us.saturating_sub(ttl_us);
            Hold { us, is_released: false, renews: us > 0 }
        }
        // Released, or taken away.
        _ => Hold { us: held_us, is_released: true, renews },
    };
    Some((hold, held_us))
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

/// Lets each owner send its requests one after the other, in as many lanes as it sent requests at the same time.
fn chain(requests: &mut [Arrival]) {
    // Of each owner: when the last request of a lane is over, that request, and the first one of the lane.
    let mut lanes: HashMap<String, BTreeSet<(u64, usize, usize)>> = HashMap::new();
    for n in 0..requests.len() {
        let (at_us, over_us) = (requests[n].at_us, requests[n].ended_us);
        let lanes = lanes.entry(requests[n].request.owner.clone()).or_default();
        let free = lanes.first().copied().filter(|(ended_us, ..)| *ended_us <= at_us);
        match free {
            Some(lane @ (ended_us, last, first)) => {
                lanes.remove(&lane);
                requests[last].next = Some((n, at_us - ended_us));
                requests[n].is_first = false;
                lanes.insert((over_us, n, first));
            }
            None => {
                lanes.insert((over_us, n, n));
            }
        }
    }
    // A lane that has sent all its requests begins again.
    for (_, last, first) in lanes.into_values().flatten().filter(|(_, last, first)| first != last) {
        let pause_us = requests[first].next.map_or(0, |(_, pause_us)| pause_us);
        requests[last].next = Some((first, pause_us));
    }
}

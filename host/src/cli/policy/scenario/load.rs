//! Turns a scenario into the requests of a run.

use std::sync::Arc;

use super::super::trial;
use super::file::{Ask, File, PlanCase, Requests};
use crate::lock::{Call, Mode};
use crate::policy::PlanRequest;
use crate::replay::{Arrival, Hold, Load};

/// The most requests that a scenario sends.
pub const MOST: usize = 1_000_000;

/// The requests of a scenario.
pub struct Script {
    pub load: Load,
    /// Of each request of the load: the place of its kind in the file, and its client.
    pub of: Vec<(usize, u32)>,
}

/// The requests of the file.
///
/// # Errors
/// In words: what is wrong with which requests.
pub fn script(file: &File) -> Result<Script, String> {
    let mut arrivals: Vec<(Arrival, (usize, u32))> = Vec::new();
    for (kind, requests) in file.requests.iter().enumerate() {
        let wrong = |why: String| format!("requests `{}`: {why}", requests.name);
        if file.requests[..kind].iter().any(|before| before.name == requests.name) {
            return Err(wrong("the name is given twice".to_owned()));
        }
        if !(1..=MOST).contains(&(requests.clients as usize)) {
            return Err(wrong(format!("`clients` must be 1 to {MOST}")));
        }
        for client in 0..requests.clients {
            let sent = lane(requests, client).map_err(wrong)?;
            if arrivals.len() + sent.len() > MOST {
                return Err(wrong(format!("a scenario has at most {MOST} requests")));
            }
            let begin = arrivals.len();
            arrivals.extend(sent.into_iter().map(|arrival| (arrival, (kind, client))));
            if requests.every.is_none() {
                chain(&mut arrivals[begin..], begin, requests);
            }
        }
    }
    let sorted = sorted(arrivals);
    let (requests, of) = sorted.into_iter().unzip();
    Ok(Script { load: Load::made(requests, MOST + 1, file.store.us), of })
}

/// The requests of a client, which arrive when they are due if nothing holds them up.
fn lane(requests: &Requests, client: u32) -> Result<Vec<Arrival>, String> {
    let Requests { at, every, repeat, until, pause, .. } = requests;
    let texts = [&requests.ask.resource, &requests.ask.owner, &requests.ask.request, &requests.ask.body];
    let labels = requests.ask.labels.values().chain(requests.ask.headers.values());
    let has_number = texts.into_iter().flatten().chain(labels).any(|text| text.contains("{n}"));
    if until.is_some_and(|until| until < *at) {
        return Err("`until` must not be before `at`".to_owned());
    }
    if every.is_some() && pause.is_some() {
        return Err("`every` and `pause` exclude each other".to_owned());
    }
    let count = match (repeat, until, every) {
        (Some(_), Some(_), _) => return Err("`repeat` and `until` exclude each other".to_owned()),
        (Some(0), None, _) => return Err("`repeat` must be at least 1".to_owned()),
        (None, None, Some(_)) => return Err("`every` needs `repeat` or `until`".to_owned()),
        (None, None, None) => 1,
        (Some(repeat), None, _) => u64::from(*repeat),
        (None, Some(_), None) if has_number => {
            return Err(
                "`{n}` needs `repeat` or `every`: a client sends one request again and again".to_owned()
            );
        }
        (None, Some(_), None) => 1,
        (None, Some(_), Some(every)) if every.us == 0 => return Err("`every` must not be 0".to_owned()),
        (None, Some(until), Some(every)) => (until.us - at.us) / every.us + 1,
    };
    let count = u32::try_from(count).ok().filter(|count| *count as usize <= MOST);
    let count = count.ok_or_else(|| format!("a scenario has at most {MOST} requests"))?;
    (0..count)
        .map(|n| {
            let owner = format!("{}-{client}", requests.name);
            let request = request(&requests.ask, &owner, client, n)?;
            let hold = Hold { us: requests.hold.us, is_released: requests.release, renews: requests.renew };
            let at_us = at.us + every.map_or(0, |every| every.us * u64::from(n));
            let call = if request.http.is_some() { Call::Guard } else { Call::Acquire };
            let mut arrival = Arrival::made(at_us, request, hold);
            (arrival.leaves_us, arrival.call) = (requests.leave.map(|leave| leave.us), call);
            Ok(arrival)
        })
        .collect()
}

/// Lets a client send its requests one after the other. `begin`: the place of the first one among all.
fn chain(lane: &mut [(Arrival, (usize, u32))], begin: usize, requests: &Requests) {
    let pause_us = requests.pause.map_or(0, |pause| pause.us);
    let last = lane.len() - 1;
    for (n, (arrival, _)) in lane.iter_mut().enumerate() {
        arrival.is_first = n == 0;
        arrival.next = (n < last).then_some((begin + n + 1, pause_us));
        if let Some(until) = requests.until {
            (arrival.next, arrival.until_us) = (Some((begin, pause_us)), until.us);
        }
    }
}

/// The arrivals in the order of time. Each goes on to the same next one as before.
fn sorted(arrivals: Vec<(Arrival, (usize, u32))>) -> Vec<(Arrival, (usize, u32))> {
    let mut sorted: Vec<_> = arrivals.into_iter().enumerate().collect();
    sorted.sort_by_key(|(_, (arrival, _))| arrival.at_us);
    let mut place = vec![0; sorted.len()];
    sorted.iter().enumerate().for_each(|(at, (n, _))| place[*n] = at);
    let moved = |(_, (mut arrival, of)): (usize, (Arrival, (usize, u32)))| {
        arrival.next = arrival.next.map(|(next, pause_us)| (place[next], pause_us));
        (arrival, of)
    };
    sorted.into_iter().map(moved).collect()
}

/// The request of a plan that is checked.
///
/// # Errors
/// In words: what is wrong with it.
pub fn planned(case: &PlanCase) -> Result<PlanRequest, String> {
    request(&case.ask, "somebody", 0, 0).map_err(|why| format!("plan: {why}"))
}

/// The request `n` of a client.
fn request(ask: &Ask, owner: &str, client: u32, n: u32) -> Result<PlanRequest, String> {
    let filled = |text: &str| text.replace("{client}", &client.to_string()).replace("{n}", &n.to_string());
    let pairs = |pairs: &std::collections::BTreeMap<String, String>| {
        pairs.iter().map(|(name, value)| (name.clone(), filled(value))).collect::<Vec<_>>()
    };
    let http = match &ask.request {
        Some(line) => {
            let headers = pairs(&ask.headers).into_iter().map(|(name, value)| format!("{name}: {value}"));
            let headers: Vec<String> = headers.collect();
            Some(trial::seen(
                &filled(line),
                ask.path.as_deref(),
                &headers,
                filled(ask.body.as_deref().unwrap_or("")),
            )?)
        }
        None if ask.path.is_some() || !ask.headers.is_empty() || ask.body.is_some() => {
            return Err(
                "`path`, `headers` and `body` need a `request`, such as \"GET /orders/42\"".to_owned()
            );
        }
        None => None,
    };
    let path = http.as_ref().map(|http| http.path.clone());
    let resource = ask.resource.as_deref().map(filled).or(path);
    Ok(PlanRequest {
        resource: resource.ok_or("`ask` needs a `resource` or a `request`")?,
        owner: ask.owner.as_deref().map_or_else(|| owner.to_owned(), filled),
        mode: ask.mode.map_or(Mode::Exclusive, |mode| mode.0.into()),
        ttl_ms: ask.ttl.map(|time| time.ms()),
        wait_ms: ask.wait.map(|time| time.ms()),
        labels: pairs(&ask.labels),
        http: http.map(Arc::new),
        // The same in each run.
        seed: client.wrapping_mul(0x9e37_79b9).wrapping_add(n),
    })
}

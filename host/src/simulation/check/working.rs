//! Checks whether the application works on two guarded requests for one resource at the same time.

use std::sync::Arc;

use super::{Checks, Violation};
use crate::clock;
use crate::lock::{Instant, Token};
use crate::vital::process::Process;

/// The longest time after a pause until a proxy aborts work whose lease is over.
const SETTLES_WITHIN_MS: u32 = 500;

/// The longest time from the last check of its lease to the arrival of a request, if nothing aborts the request.
const PASSED_ON_WITHIN_MS: u32 = 20;

/// A guarded request that the application works on.
pub struct Work {
    /// The client's name, which is different for each request.
    pub owner: String,
    pub token: Token,
    pub process: Arc<Process>,
    /// The proxy's `life` when the client asked it, and when the request arrived.
    pub life: (u64, u64),
}

impl Work {
    /// Whether the proxy was killed since the client asked it, or was paused until a moment ago. Such a proxy cannot
    /// abort the work in time, and may pass on a request whose lease is over. The fencing token protects against such
    /// a request.
    fn may_be_late(&self) -> bool {
        self.life.0 != self.life.1
            || self.process.is_dead()
            || self.process.was_paused_within(SETTLES_WITHIN_MS)
    }
}

impl Checks {
    /// The application begins to work on a request.
    pub fn begins_work(&mut self, resource: &str, work: Work) -> Result<(), Violation> {
        let under_way = self.work.entry(resource.to_owned()).or_default();
        let mut checked = Ok(());
        let passed_on = under_way.highest_at.plus_ms(PASSED_ON_WITHIN_MS);
        let is_on_its_way = self.lets_finish && clock::now() <= passed_on;
        if !work.may_be_late() {
            self.works += 1;
            let (owner, token) = (&work.owner, work.token.0);
            if let Some(other) =
                under_way.works.iter().find(|other| !other.may_be_late() && !self.lets_finish)
            {
                checked = Err(Violation(format!(
                    "two requests at once: the application works on {resource} for {owner} with token {token}, and for {} \
                     with token {}",
                    other.owner, other.token.0
                )));
            } else if work.token <= under_way.highest && !is_on_its_way {
                checked = Err(Violation(format!(
                    "tokens do not rise: a request of {owner} for {resource} has token {token}, after one with {}",
                    under_way.highest.0
                )));
            }
        }
        if work.token > under_way.highest {
            (under_way.highest, under_way.highest_at) = (work.token, clock::now());
        }
        under_way.works.push(work);
        checked
    }

    /// The work is done or was aborted, by a proxy that lost the lease or by the application itself.
    pub fn ends_work(&mut self, resource: &str, owner: &str, is_done: bool) -> Result<(), Violation> {
        if let Some(under_way) = self.work.get_mut(resource) {
            under_way.works.retain(|work| work.owner != owner);
        }
        match is_done || !self.is_plain {
            true => Ok(()),
            false => Err(Violation(format!(
                "broken off: the work on {resource} for {owner}, and no lease is lost"
            ))),
        }
    }
}

/// The requests for a resource.
#[derive(Default)]
pub struct UnderWay {
    works: Vec<Work>,
    /// The highest token of all requests so far.
    highest: Token,
    /// When it arrived.
    highest_at: Instant,
}

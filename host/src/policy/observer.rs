//! Tells an observer what a generation is asked and what it answers.

use super::{
    Backoff, Contention, Expiring, Fault, Generation, Plan, PlanError, PlanRequest, QueueView,
    RefusalResponse, Renewal, ResponseContention,
};

/// Follows the calls of a generation. Its methods run on the path of requests, so they must not wait.
pub trait Observer: Send + Sync {
    /// Whether it wants to know of calls for this key, or for this resource if there is no key.
    fn wants(&self, name: &str) -> bool;

    /// Gets a call.
    fn tell(&self, call: Observed);
}

/// A call of a generation: what it was asked, and its answer. The answer is `None` if the call failed.
#[derive(Debug)]
pub enum Observed {
    /// A plan for a request.
    Plan {
        /// The request.
        request: PlanRequest,
        /// The plan, the refusal, or the fault.
        answer: Result<Plan, PlanError>,
    },
    /// The choice of the next waiter.
    Choose {
        /// The queue.
        queue: QueueView,
        /// The index of the waiter.
        answer: Option<usize>,
    },
    /// What a waiter does next.
    Backoff {
        /// The waiter's situation.
        contention: Contention,
        /// The decision.
        answer: Option<Backoff>,
    },
    /// Whether a lease is extended.
    Renewal {
        /// The lease.
        expiring: Expiring,
        /// The decision.
        answer: Option<Renewal>,
    },
    /// The answer to a guarded request that cannot get its lock.
    Response {
        /// The request.
        request: PlanRequest,
        /// Why it waits.
        contention: ResponseContention,
        /// The answer.
        answer: Option<RefusalResponse>,
    },
}

impl Generation {
    /// Tells `observer` of the calls from now on; with `None`, nothing is told any more.
    pub fn observe(&self, observer: Option<Box<dyn Observer>>) {
        self.observer.store(observer.map(std::sync::Arc::new));
    }

    /// Tells the observer of a plan for a client's request.
    pub(super) fn observed_plan(&self, request: &PlanRequest, answer: &Result<Plan, PlanError>) {
        let name = answer.as_ref().map_or(request.resource.as_str(), |plan| plan.keys[0].as_str());
        self.tell(name, || Observed::Plan { request: request.clone(), answer: answer.clone() });
    }

    /// Tells the observer of the call of another hook, unless the generation lacks the hook.
    pub(super) fn observed<R: Clone>(
        &self,
        key: &str,
        answer: Option<&Result<R, Fault>>,
        call: impl FnOnce(Option<R>) -> Observed,
    ) {
        if let Some(answer) = answer {
            self.tell(key, || call(answer.as_ref().ok().cloned()));
        }
    }

    fn tell(&self, name: &str, call: impl FnOnce() -> Observed) {
        if let Some(observer) = &*self.observer.load()
            && observer.wants(name)
        {
            observer.tell(call());
        }
    }
}

//! What a policy answers to each request of a recording.

use std::collections::HashMap;
use std::sync::Arc;

use super::load::Load;
use crate::policy::{Fault, Generation, Plan, PlanError};
use crate::recording::Ask;

/// The answers of a policy.
#[derive(Debug)]
pub struct Plans {
    /// One for each request, in their order.
    pub all: Vec<Planned>,
    /// How many calls failed, by the kind of the fault.
    pub faults: HashMap<&'static str, u64>,
    /// The first fault, in words.
    pub fault: Option<String>,
}

/// The answer to one request.
#[derive(Clone, Debug, PartialEq)]
pub enum Planned {
    /// The plan.
    Plan(Arc<Plan>),
    /// The policy refuses the request, for this reason.
    Refused(Arc<str>),
    /// The call failed.
    Fault,
}

impl Planned {
    /// The answer of a policy. `failed` gets its fault.
    pub fn of(answer: Result<Plan, PlanError>, failed: impl FnOnce(&Fault)) -> Planned {
        match answer {
            Ok(plan) => Planned::Plan(Arc::new(plan)),
            Err(PlanError::Refused { reason }) => Planned::Refused(reason.into()),
            Err(PlanError::Fault(fault)) => {
                failed(&fault);
                Planned::Fault
            }
        }
    }

    /// The plan, if there is one.
    pub fn plan(&self) -> Option<&Arc<Plan>> {
        match self {
            Planned::Plan(plan) => Some(plan),
            Planned::Refused(_) | Planned::Fault => None,
        }
    }
}

impl Plans {
    /// How many of the requests were recorded with another plan. The names of keys may be masked, so only their number is
    /// compared.
    pub fn unlike(&self, asks: &[Ask<'_>]) -> usize {
        let is_unlike = |(ask, planned): &(&Ask<'_>, &Planned)| match (&ask.plan, planned.plan()) {
            (None, None) => false,
            (Some(was), Some(is)) => {
                was.keys.len() != is.keys.len()
                    || *was.primitive != *is.primitive.as_str()
                    || was.mode != is.mode
                    || was.ttl_ms != is.ttl_ms
            }
            _ => true,
        };
        asks.iter().zip(&self.all).filter(is_unlike).count()
    }

    /// Asks the policy.
    pub fn of(generation: &Generation, load: &Load) -> Plans {
        let mut plans =
            Plans { all: Vec::with_capacity(load.requests.len()), faults: HashMap::new(), fault: None };
        // Many requests have equal plans, which are kept once.
        let mut last: HashMap<&str, Planned> = HashMap::new();
        for arrival in &load.requests {
            let planned = Planned::of(generation.plan(&arrival.request), |fault| {
                *plans.faults.entry(fault.kind.as_str()).or_default() += 1;
                plans.fault.get_or_insert_with(|| format!("{}: {fault}", arrival.request.resource));
            });
            let known = last.entry(&arrival.request.resource).or_insert_with(|| planned.clone());
            if *known != planned {
                *known = planned;
            }
            plans.all.push(known.clone());
        }
        plans
    }
}

//! `reads.plan-reads`: lists what `plan` reads of a request.

use std::borrow::Cow;

use super::naming::PlanRequest;
use super::{Definition, Hook};
use crate::lock::Mode;
use crate::policy::bindings::reads::Part;
use crate::policy::module::Module;
use crate::policy::{Fault, Generation, Rejection};

pub(super) const HOOK: Definition = Definition {
    hook: Hook::Reads,
    name: "reads",
    interface: "reads",
    function: "plan-reads",
    // It was called before the trial, and the trial of `plan` checks its answer.
    try_out: |_| Ok(Vec::new()),
};

/// The parts of a request that `plan` gets. Without the hook, these are all parts.
#[derive(Clone, Debug)]
pub(crate) struct Reads(Option<Vec<Part>>);

/// A part of a request that `plan` reads, for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadPart {
    /// The name of the resource.
    Name(String),
    /// The owner that the client named.
    Owner(String),
    /// The mode that the client asked for.
    Mode(Mode),
    /// The name and the value of a label.
    Label(String, String),
    /// The name of a part whose value is not shown.
    Unshown(String),
}

impl ReadPart {
    /// The name of the part, as the policy lists it.
    pub fn name(&self) -> String {
        match self {
            ReadPart::Name(_) => named(&Part::Name),
            ReadPart::Owner(_) => named(&Part::Owner),
            ReadPart::Mode(_) => named(&Part::Mode),
            ReadPart::Label(name, _) => named(&Part::Label(name.clone())),
            ReadPart::Unshown(name) => name.clone(),
        }
    }
}

impl Generation {
    /// The parts of the request that `plan` reads; `None` if the policy does not list them.
    pub fn parts_read(&self, request: &PlanRequest) -> Option<Vec<ReadPart>> {
        self.reads.of_request(request)
    }
}

impl Reads {
    /// Asks the policy.
    pub(crate) fn of(module: &Module, settings: &[u8]) -> Result<Reads, Rejection> {
        if !module.has(Hook::Reads) {
            return Ok(Reads(None));
        }
        let parts = ask(module, settings).map_err(Rejection::Reads)?;
        let again = ask(module, settings).map_err(Rejection::Reads)?;
        if format!("{parts:?}") != format!("{again:?}") {
            return Err(Rejection::Nondeterministic { trial: "what `plan` reads" });
        }
        Ok(Reads(Some(parts)))
    }

    /// The names of the listed parts; none if the policy lists nothing.
    pub(crate) fn names(&self) -> Vec<String> {
        self.0.iter().flatten().map(named).collect()
    }

    /// Whether requests with the same parts have the same plan, and some requests have the same parts.
    pub(crate) fn repeat(&self) -> bool {
        self.0.is_some() && !self.has(|part| matches!(part, Part::Seed))
    }

    /// The request with these parts only.
    pub(crate) fn only<'a>(&self, request: &'a PlanRequest) -> Cow<'a, PlanRequest> {
        if self.0.is_none() {
            return Cow::Borrowed(request);
        }
        let text = |is_read, text: &String| if is_read { text.clone() } else { String::new() };
        let labels = request.labels.iter().filter(|(name, _)| self.has_label(name));
        Cow::Owned(PlanRequest {
            resource: text(self.has(|part| matches!(part, Part::Name)), &request.resource),
            owner: text(self.has(|part| matches!(part, Part::Owner)), &request.owner),
            mode: if self.has(|part| matches!(part, Part::Mode)) { request.mode } else { Mode::Exclusive },
            ttl_ms: request.ttl_ms.filter(|_| self.has(|part| matches!(part, Part::Ttl))),
            wait_ms: request.wait_ms.filter(|_| self.has(|part| matches!(part, Part::Wait))),
            labels: labels.cloned().collect(),
            http: request.http.clone().filter(|_| self.has(|part| matches!(part, Part::Http))),
            seed: if self.has(|part| matches!(part, Part::Seed)) { request.seed } else { 0 },
        })
    }

    /// The listed parts of the request with their values; `None` if the policy lists nothing.
    fn of_request(&self, request: &PlanRequest) -> Option<Vec<ReadPart>> {
        let label = |(name, value): &(String, String)| ReadPart::Label(name.clone(), value.clone());
        let parts = self.0.as_ref()?.iter().flat_map(|part| match part {
            Part::Name => vec![ReadPart::Name(request.resource.clone())],
            Part::Owner => vec![ReadPart::Owner(request.owner.clone())],
            Part::Mode => vec![ReadPart::Mode(request.mode)],
            Part::Label(name) => request.labels.iter().filter(|(own, _)| own == name).map(label).collect(),
            Part::Labels => request.labels.iter().map(label).collect(),
            Part::Ttl | Part::Wait | Part::Http | Part::Seed => vec![ReadPart::Unshown(named(part))],
        });
        Some(parts.collect())
    }

    /// A part of the request that is not listed, and that `answer` depends on. An answer of `None` is a fault, which says
    /// nothing of the parts.
    pub(super) fn unlisted<A: PartialEq>(
        &self,
        request: &PlanRequest,
        answer: impl Fn(&PlanRequest) -> Option<A>,
    ) -> Option<String> {
        let listed = self.0.as_ref()?;
        let without = answer(&self.only(request));
        let differs = |with: Option<A>| with.is_some() && with != without;
        if !differs(answer(request)) {
            return None;
        }
        let labels = request.labels.iter().map(|(name, _)| Part::Label(name.clone()));
        let parts = [Part::Name, Part::Owner, Part::Mode, Part::Ttl, Part::Wait, Part::Http, Part::Seed];
        let mut parts = parts.into_iter().chain(labels);
        let part = parts.find(|part| {
            let more = Reads(Some(listed.iter().cloned().chain([part.clone()]).collect()));
            differs(answer(&more.only(request)))
        });
        Some(part.as_ref().map_or("several parts, which count only together".to_owned(), named))
    }

    fn has(&self, is_part: impl Fn(&Part) -> bool) -> bool {
        self.0.as_ref().is_none_or(|parts| parts.iter().any(is_part))
    }

    fn has_label(&self, name: &str) -> bool {
        self.has(|part| match part {
            Part::Labels => true,
            Part::Label(listed) => listed == name,
            _ => false,
        })
    }
}

fn ask(module: &Module, settings: &[u8]) -> Result<Vec<Part>, Fault> {
    module.ask(Hook::Reads, (settings,))
}

fn named(part: &Part) -> String {
    match part {
        Part::Name => "name".to_owned(),
        Part::Owner => "owner".to_owned(),
        Part::Mode => "mode".to_owned(),
        Part::Ttl => "ttl".to_owned(),
        Part::Wait => "wait".to_owned(),
        Part::Label(name) => format!("label({name})"),
        Part::Labels => "labels".to_owned(),
        Part::Http => "http".to_owned(),
        Part::Seed => "seed".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::naming::trial_requests;
    use super::*;

    fn reads(parts: &[Part]) -> Reads {
        Reads(Some(parts.to_vec()))
    }

    #[test]
    fn parts_that_are_not_listed_are_left_out() {
        for (_, request) in trial_requests() {
            let all = [
                Part::Name,
                Part::Owner,
                Part::Mode,
                Part::Ttl,
                Part::Wait,
                Part::Labels,
                Part::Http,
                Part::Seed,
            ];
            assert_eq!(*reads(&all).only(&request), request);
            assert_eq!(*Reads(None).only(&request), request);
            let none = reads(&[]).only(&request).into_owned();
            assert_eq!(none, PlanRequest::plain("", ""));
            let tenant = reads(&[Part::Name, Part::Label("tenant".to_owned())]).only(&request).into_owned();
            assert_eq!(tenant.resource, request.resource);
            assert!(tenant.labels.iter().all(|(name, _)| name == "tenant"));
            assert_eq!(tenant.labels.is_empty(), request.labels.is_empty());
        }
    }

    #[test]
    fn a_part_that_matters_and_is_not_listed_is_named() {
        let [_, (_, labelled), ..] = trial_requests();
        let key = |request: &PlanRequest| Some(format!("{}/{:?}", request.resource, request.labels));
        let unlisted = |parts: &[Part]| reads(parts).unlisted(&labelled, key);
        assert_eq!(unlisted(&[Part::Labels]).as_deref(), Some("name"));
        let tenant = Part::Label("tenant".to_owned());
        assert_eq!(unlisted(&[Part::Name, tenant]).as_deref(), Some("label(group)"));
        assert_eq!(unlisted(&[Part::Name, Part::Labels]), None);
        assert_eq!(Reads(None).unlisted(&labelled, key), None);
        // The plan needs the name, and fails without it.
        let first =
            |request: &PlanRequest| request.resource.split_once('/').map(|(first, _)| first.to_owned());
        assert_eq!(reads(&[Part::Owner]).unlisted(&labelled, first).as_deref(), Some("name"));
        let both = |request: &PlanRequest| Some(!request.resource.is_empty() && request.ttl_ms.is_some());
        let several = reads(&[Part::Owner]).unlisted(&labelled, both);
        assert!(several.is_some_and(|several| several.contains("together")));
    }

    #[test]
    fn plans_that_depend_on_random_bits_do_not_repeat() {
        assert!(reads(&[Part::Name]).repeat());
        assert!(!reads(&[Part::Name, Part::Seed]).repeat());
        assert!(!Reads(None).repeat());
    }
}

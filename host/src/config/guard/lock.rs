//! The keys of `[[guard.routes]]` that say what a request locks.

use super::pattern::{Part, PathPattern, Template};
use crate::config::limits::Limits;
use crate::config::policies::{self, NO_LOCK, PolicyConfig};
use crate::config::reader::Section;
use crate::config::values::header_names;
use crate::lock::Mode;

/// The upper bound of `see_body_bytes`: how much of a body a policy may see.
pub const MAX_SEEN_BYTES: usize = 8_192;

/// The lock of a route's requests.
#[derive(Clone, Debug)]
pub struct GuardLock {
    /// The name of the policy that decides about the lock.
    pub policy: String,
    /// The template for the name of the resource to lock.
    pub resource: Template,
    /// The requested mode.
    pub mode: Mode,
    /// The requested length of the lease. `None`: the policy decides.
    pub ttl_ms: Option<u32>,
    /// The requested longest wait. `None`: the policy decides.
    pub wait_ms: Option<u32>,
    /// The labels of the lock request: their names, and the templates for their values.
    pub labels: Vec<(String, Template)>,
    /// Headers that the policy may see, in lower case.
    pub see_headers: Vec<String>,
    /// How many bytes of the body the policy may see.
    pub see_body_bytes: usize,
    /// Whether requests are passed on without their lock while the store is unavailable.
    pub fail_open: bool,
    /// Headers, in lower case, that identify the sender of a request. A kept answer is only given to the same sender.
    pub caller: Vec<String>,
    /// The size limit of an answer that is kept for a `once`, with its headers.
    pub max_replay_bytes: usize,
}

/// The keys that only a route with a policy may have.
const WITH_POLICY: [&str; 9] =
    ["resource", "mode", "ttl_ms", "wait_ms", "labels", "see", "fail", "caller", "max_replay_bytes"];

impl GuardLock {
    /// An exclusive lock of this name by the policy `default`, which leaves the rest to the policy.
    #[cfg(any(test, feature = "simulation", feature = "fuzzing"))]
    pub(crate) fn named(resource: &str) -> GuardLock {
        GuardLock {
            policy: "default".to_owned(),
            resource: Template::parse(resource).unwrap_or_else(|why| panic!("{resource}: {why}")),
            mode: Mode::Exclusive,
            ttl_ms: None,
            wait_ms: None,
            labels: Vec::new(),
            see_headers: Vec::new(),
            see_body_bytes: 0,
            fail_open: false,
            caller: Vec::new(),
            max_replay_bytes: 0,
        }
    }

    /// Reads the lock of a route. `path` is the path of the route. Without a lock, keys that need one are faults.
    pub(super) fn read(
        section: &Section<'_>,
        path: Option<&PathPattern>,
        policies: &[PolicyConfig],
        limits: &Limits,
    ) -> Option<GuardLock> {
        WITH_POLICY.iter().for_each(|key| section.know(key));
        let none = section.parsed("policy", !section.holds("policy"), |text, _| Ok(text == NO_LOCK));
        if none {
            for key in WITH_POLICY.into_iter().filter(|key| section.holds(key)) {
                section.complain(key, "is for routes with a `policy`; without one there is no lock");
            }
            return None;
        }
        let policy = section.required("policy", |text, _| policies::named(policies, text));
        let see = section.section("see");
        let see_headers = see.texts("headers", header_names).unwrap_or_default();
        let see_body_bytes = see.integer("body_bytes", 0..=MAX_SEEN_BYTES as u64, 0);
        see.finish();
        let check = |template: &Template| check(template, path, see_body_bytes);
        let template = |text: &str| Template::parse(text).and_then(|parsed| check(&parsed).map(|()| parsed));
        let resource = section.parsed("resource", Template::parse("{path}").ok()?, |text, _| template(text));
        let labels = section.pairs("labels").into_iter().filter_map(|(name, text)| match template(&text) {
            Ok(_) if name.starts_with(':') || name.len() > limits.max_label_bytes => {
                section.complain("labels", format!("`{name}` cannot be the name of a label"));
                None
            }
            Ok(template) => Some((name, template)),
            Err(what) => {
                section.complain("labels", format!("{name}: {what}"));
                None
            }
        });
        Some(GuardLock {
            resource,
            labels: labels.collect(),
            mode: mode(section, limits),
            ttl_ms: section.optional("ttl_ms", limits.min_ttl_ms.into()..=limits.max_ttl_ms.into()),
            wait_ms: section.optional("wait_ms", 0..=limits.max_wait_ms.into()),
            see_headers,
            see_body_bytes,
            fail_open: section.parsed("fail", false, |text, _| match text {
                "closed" => Ok(false),
                "open" => Ok(true),
                other => Err(format!("is `{other}`; must be \"closed\" or \"open\"")),
            }),
            caller: section
                .texts("caller", header_names)
                .unwrap_or_else(|| ["authorization", "cookie"].map(str::to_owned).to_vec()),
            max_replay_bytes: section.integer(
                "max_replay_bytes",
                0..=limits.max_value_bytes as u64,
                limits.max_value_bytes,
            ),
            policy: policy?,
        })
    }

    /// Whether the lock's name or a label contains something from the body.
    pub fn names_body(&self) -> bool {
        let labels = self.labels.iter().map(|(_, template)| template);
        labels.chain([&self.resource]).any(Template::reads_body)
    }
}

fn mode(section: &Section<'_>, limits: &Limits) -> Mode {
    if section.is_table("mode") {
        let mode = section.section("mode");
        let count = mode.integer("permits", 1..=u64::from(limits.max_permits), 1);
        mode.finish();
        return Mode::Permits { count, limit: 0 };
    }
    section.parsed("mode", Mode::Exclusive, |text, _| match text {
        "exclusive" => Ok(Mode::Exclusive),
        "shared" => Ok(Mode::Shared),
        other => Err(format!("is `{other}`; must be \"exclusive\", \"shared\" or {{ permits = 1 }}")),
    })
}

/// Checks that a template can be filled from the requests of its route.
fn check(template: &Template, path: Option<&PathPattern>, body_bytes: usize) -> Result<(), String> {
    for part in template.parts() {
        match part {
            Part::Capture(name) if path.is_some_and(|path| !path.names().any(|known| known == name)) => {
                return Err(format!("`{part}` is not in the path of the route"));
            }
            Part::Json(_) if body_bytes == 0 => {
                return Err(format!("`{part}` needs see.body_bytes: how much of the body is read for it"));
            }
            _ => {}
        }
    }
    Ok(())
}

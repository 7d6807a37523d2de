//! `[[routes]]`: which policy decides about which resource.

use super::limits::Limits;
use super::policies::{self, PolicyConfig};
use super::reader::Section;
use super::wildcard::Wildcard;

/// Assigns resources to a policy by name.
#[derive(Clone, Debug)]
pub struct Route {
    /// The pattern for the names of resources.
    pub resource: Wildcard,
    /// The name of the policy that decides about these resources.
    pub policy: String,
}

/// Reads `[[routes]]`, in the order of the file.
pub(super) fn read(top: &Section<'_>, policies: &[PolicyConfig], limits: &Limits) -> Vec<Route> {
    let read = |section: Section<'_>| {
        let resource = section.required("resource", |text, _| match text.len() {
            length if (1..=limits.max_resource_bytes).contains(&length) => Ok(Wildcard::new(text)),
            length => Err(format!("has {length} bytes; must have 1 to {} bytes", limits.max_resource_bytes)),
        });
        let policy = section.required("policy", |text, _| policies::named(policies, text));
        section.finish();
        Some(Route { resource: resource?, policy: policy? })
    };
    top.list("routes").into_iter().filter_map(read).collect()
}

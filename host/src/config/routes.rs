//! `[[routes]]`: which policy decides about which resource.

use super::limits::Limits;
use super::policies::{self, PolicyConfig};
use super::reader::Section;

/// Assigns resources to a policy by name. `*` matches any text, including `/`.
#[derive(Clone, Debug)]
pub struct Route {
    /// The pattern for the names of resources.
    pub resource: String,
    /// The name of the policy that decides about these resources.
    pub policy: String,
}

impl Route {
    /// Whether the route's pattern matches the whole name of the resource.
    pub fn matches(&self, resource: &str) -> bool {
        let mut parts = self.resource.split('*');
        let first = parts.next().unwrap_or_default();
        let Some(mut rest) = resource.strip_prefix(first) else { return false };
        let mut parts = parts.peekable();
        if parts.peek().is_none() {
            return rest.is_empty();
        }
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                return rest.ends_with(part);
            }
            let Some(at) = rest.find(part) else { return false };
            rest = &rest[at + part.len()..];
        }
        true
    }
}

/// Reads `[[routes]]`, in the order of the file.
pub(super) fn read(top: &Section<'_>, policies: &[PolicyConfig], limits: &Limits) -> Vec<Route> {
    let read = |section: Section<'_>| {
        let resource = section.required("resource", |text, _| match text.len() {
            length if (1..=limits.max_resource_bytes).contains(&length) => Ok(text.to_owned()),
            length => Err(format!("has {length} bytes; must have 1 to {} bytes", limits.max_resource_bytes)),
        });
        let policy = section.required("policy", |text, _| policies::named(policies, text));
        section.finish();
        Some(Route { resource: resource?, policy: policy? })
    };
    top.list("routes").into_iter().filter_map(read).collect()
}

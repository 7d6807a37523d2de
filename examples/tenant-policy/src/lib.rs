//! Tenants that cannot lock each other out: the key is the tenant and the resource.

use lockkeeper_sdk::{Plan, Policy, Refusal, Request};
use serde::{Deserialize, Serialize};

pub struct TenantPolicy;

/// The table `[policies.tenant.settings]` of config.toml.
#[derive(Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// The label that names the tenant.
    pub label: String,
    /// The only tenants that are served; all are, where it is empty.
    pub tenants: Vec<String>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { label: "tenant".into(), tenants: Vec::new() }
    }
}

impl Policy for TenantPolicy {
    type Settings = Settings;

    fn check(settings: &Settings) -> Result<(), String> {
        if settings.label.is_empty() { Err("`label` must not be empty".into()) } else { Ok(()) }
    }

    fn plan(settings: &Settings, request: &Request) -> Result<Plan, Refusal> {
        let tenant = request.label(&settings.label).filter(|tenant| !tenant.is_empty());
        let Some(tenant) = tenant else {
            return Err(Refusal::new(format!("the label `{}` is missing", settings.label)));
        };
        // A tenant with a slash could name a key of another tenant.
        let known = settings.tenants.is_empty() || settings.tenants.iter().any(|known| known == tenant);
        if !known || tenant.contains('/') {
            return Err(Refusal::new(format!("there is no tenant `{tenant}`")));
        }
        Plan::of(request).with_key(format!("{tenant}/{}", request.name)).with_permits(10)
    }
}

lockkeeper_sdk::export!(TenantPolicy);

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(request: &Request) -> Result<Plan, Refusal> {
        TenantPolicy::plan(&Settings::default(), request)
    }

    #[test]
    fn tenants_have_keys_of_their_own() {
        let of = |tenant| plan(&Request::new("orders/42").with_label("tenant", tenant)).unwrap().keys;
        assert_eq!(of("acme"), ["acme/orders/42"]);
        assert_ne!(of("acme"), of("globex"));
    }

    #[test]
    fn a_request_without_a_tenant_is_refused() {
        assert!(plan(&Request::new("orders/42")).unwrap_err().reason.contains("`tenant`"));
        assert!(plan(&Request::new("orders/42").with_label("tenant", "")).is_err());
    }

    #[test]
    fn a_tenant_cannot_pose_as_another() {
        assert!(plan(&Request::new("42").with_label("tenant", "acme/orders")).is_err());
        let settings = Settings { tenants: vec!["acme".into()], ..Settings::default() };
        let stranger = Request::new("a").with_label("tenant", "globex");
        assert!(TenantPolicy::plan(&settings, &stranger).is_err());
    }
}

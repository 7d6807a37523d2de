//! The default policy: the resource is the key, and waiters are served in order of arrival.
//!
//! README.md documents the settings. This policy only plans, so the proxy's defaults apply to order, back-off and
//! renewal.

use lockkeeper_sdk::reads::Part;
use lockkeeper_sdk::{Delegate, OnLoss, Plan, Policy, Primitive, Refusal, Request, within};
use serde::{Deserialize, Serialize};

/// The policy.
pub struct Default;

/// The mechanism that guards the keys, by its name in config.toml.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Guard {
    Lease,
    Row,
    Advisory,
    Version,
    Once,
    Quorum,
}

/// What happens to a guarded request whose lease is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lost {
    Finish,
    Mark,
    Cut,
}

/// When a proxy grants a key from its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Delegated {
    Never,
    Contended,
    Always,
}

/// The settings, which README.md documents.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    pub primitive: Guard,
    pub second_primitive: Option<Guard>,
    pub keep_ms: u32,
    pub stripes: u32,
    pub pool: u32,
    pub separator: String,
    pub ttl_ms: u32,
    pub wait_ms: u32,
    pub max_waiters: u32,
    pub permits: u32,
    pub reentrant: bool,
    pub rank_label: String,
    pub global_order: bool,
    pub lock_at_least_ms: u32,
    pub lock_delay_ms: u32,
    pub max_hold_ms: u32,
    pub on_loss: Lost,
    pub delegate: Delegated,
}

impl core::default::Default for Settings {
    fn default() -> Settings {
        Settings {
            primitive: Guard::Lease,
            second_primitive: None,
            keep_ms: 86_400_000,
            stripes: 0,
            pool: 0,
            separator: String::new(),
            ttl_ms: Plan::TTL,
            wait_ms: 0,
            max_waiters: Plan::MAX_WAITERS,
            permits: 10,
            reentrant: false,
            rank_label: String::new(),
            global_order: false,
            lock_at_least_ms: 0,
            lock_delay_ms: 0,
            max_hold_ms: Plan::MAX_HOLD,
            on_loss: Lost::Finish,
            delegate: Delegated::Never,
        }
    }
}

impl Policy for Default {
    type Settings = Settings;

    fn check(settings: &Settings) -> Result<(), String> {
        within("keep_ms", settings.keep_ms, 1_000..=2_592_000_000)?;
        within("stripes", settings.stripes, 0..=1_000_000)?;
        within("pool", settings.pool, 0..=1_024)?;
        if settings.pool > 0 && settings.stripes > 0 {
            return Err("`pool` and `stripes` do not go together".to_owned());
        }
        if settings.pool > 0 && !settings.separator.is_empty() {
            return Err("`pool` and `separator` do not go together".to_owned());
        }
        if settings.separator.len() > 16 {
            let length = settings.separator.len();
            return Err(format!("`separator` must have at most 16 bytes, and has {length}"));
        }
        within("ttl_ms", settings.ttl_ms, 100..=3_600_000)?;
        within("wait_ms", settings.wait_ms, 0..=3_600_000)?;
        within("max_waiters", settings.max_waiters, 0..=20_000)?;
        within("permits", settings.permits, 1..=1024)?;
        within("lock_at_least_ms", settings.lock_at_least_ms, 0..=600_000)?;
        within("lock_delay_ms", settings.lock_delay_ms, 0..=600_000)?;
        within("max_hold_ms", settings.max_hold_ms, 100..=86_400_000)
    }

    fn plan(settings: &Settings, request: &Request) -> Result<Plan, Refusal> {
        let primitive = Primitive::from(settings.primitive);
        let plan = Plan {
            primitive,
            ttl: request.ttl.unwrap_or(settings.ttl_ms),
            wait: request.wait.unwrap_or(settings.wait_ms),
            rank: rank(settings, request)?,
            reentrant: settings.reentrant,
            max_waiters: settings.max_waiters,
            lock_at_least: match primitive {
                Primitive::Once => settings.keep_ms,
                _ => settings.lock_at_least_ms,
            },
            lock_delay: settings.lock_delay_ms,
            max_hold: settings.max_hold_ms,
            ..Plan::of(request)
        };
        let plan = match settings.pool {
            0 => plan.with_keys(keys(settings, &request.name)?),
            pool => plan.with_keys((1..=pool).map(|n| format!("{}#{n}", request.name))).any_of_keys(),
        };
        let plan = match settings.second_primitive {
            Some(second) => plan.with_second_primitive(second.into()),
            None => plan,
        };
        let plan = if settings.global_order { plan.in_global_order() } else { plan };
        let plan = match settings.on_loss {
            Lost::Finish => plan,
            Lost::Mark => plan.on_loss(OnLoss::Mark),
            Lost::Cut => plan.on_loss(OnLoss::Cut),
        };
        let plan = match settings.delegate {
            Delegated::Never => plan,
            Delegated::Contended => plan.delegated(Delegate::Contended),
            Delegated::Always => plan.delegated(Delegate::Always),
        };
        plan.with_permits(settings.permits)
    }

    fn plan_reads(settings: &Settings) -> Vec<Part> {
        let mut parts = vec![Part::Name, Part::Mode, Part::Ttl, Part::Wait];
        if !settings.rank_label.is_empty() {
            parts.push(Part::Label(settings.rank_label.clone()));
        }
        parts
    }
}

lockkeeper_sdk::export!(Default, reads);

impl From<Guard> for Primitive {
    fn from(guard: Guard) -> Primitive {
        match guard {
            Guard::Lease => Primitive::Lease,
            Guard::Row => Primitive::Row,
            Guard::Advisory => Primitive::Advisory,
            Guard::Quorum => Primitive::Quorum,
            Guard::Version => Primitive::Version,
            Guard::Once => Primitive::Once,
        }
    }
}

/// The keys of a resource. The name of a resource may list several keys.
fn keys(settings: &Settings, resource: &str) -> Result<Vec<String>, Refusal> {
    let parts: Vec<&str> = match settings.separator.as_str() {
        "" => vec![resource],
        separator => resource.split(separator).collect(),
    };
    if parts.iter().any(|part| part.is_empty()) && parts.len() > 1 {
        let separator = &settings.separator;
        return Err(Refusal::new(format!("`{resource}` has nothing on one side of `{separator}`")));
    }
    let key = |part: &str| match settings.stripes {
        0 => part.to_owned(),
        stripes => stripe(part, stripes),
    };
    Ok(parts.into_iter().map(key).collect())
}

/// One key for all resources whose checksums have the same remainder.
fn stripe(resource: &str, stripes: u32) -> String {
    format!("stripe-{}-of-{stripes}", crc32fast::hash(resource.as_bytes()) % stripes)
}

fn rank(settings: &Settings, request: &Request) -> Result<i32, Refusal> {
    let label = settings.rank_label.as_str();
    match request.label(label) {
        Some(rank) if !label.is_empty() => {
            rank.parse().map_err(|_| Refusal::new(format!("the label `{label}` must be a whole number")))
        }
        _ => Ok(0),
    }
}

#[cfg(test)]
mod tests {
    use lockkeeper_sdk::{Mode, Permits};

    use super::*;

    fn plan(settings: &Settings, request: &Request) -> Result<Plan, Refusal> {
        Default::check(settings).unwrap();
        Default::plan(settings, request)
    }

    #[test]
    fn the_resource_is_the_key() {
        let plan = plan(&Settings::default(), &Request::new("orders/42")).unwrap();
        assert_eq!(plan, Plan::exclusive("orders/42"));
    }

    #[test]
    fn the_request_overrides_the_settings() {
        let settings = Settings { ttl_ms: 500, wait_ms: 600, ..Settings::default() };
        let silent = plan(&settings, &Request::new("a")).unwrap();
        assert_eq!((silent.ttl, silent.wait), (500, 600));
        let wishes = plan(&settings, &Request::new("a").with_ttl(700).with_wait(0)).unwrap();
        assert_eq!((wishes.ttl, wishes.wait), (700, 0));
    }

    #[test]
    fn permits_are_limited_by_the_settings() {
        let settings = Settings { permits: 3, ..Settings::default() };
        let ask = |count| Request::new("a").with_mode(Mode::Permits(Permits { count, limit: 0 }));
        assert_eq!(plan(&settings, &ask(3)).unwrap().mode, Mode::Permits(Permits { count: 3, limit: 3 }));
        assert!(plan(&settings, &ask(4)).unwrap_err().reason.contains('3'));
    }

    #[test]
    fn an_outcome_is_kept_as_long_as_the_settings_say() {
        let settings = Settings { primitive: Guard::Once, keep_ms: 5_000, ..Settings::default() };
        let plan = plan(&settings, &Request::new("a")).unwrap();
        assert_eq!((plan.primitive, plan.lock_at_least), (Primitive::Once, 5_000));
    }

    #[test]
    fn a_guarded_request_is_locked_by_its_resource() {
        let request = Request::http("POST /orders/42/pay").with_ttl(700);
        let silent = plan(&Settings::default(), &request).unwrap();
        assert_eq!(silent, Plan::exclusive("/orders/42/pay").with_ttl(700));
        for (setting, value) in [(Lost::Mark, "mark"), (Lost::Cut, "cut")] {
            let settings = Settings { on_loss: setting, ..Settings::default() };
            let label = plan(&settings, &request).unwrap().labels.remove(0);
            assert_eq!((label.name.as_str(), label.value.as_str()), ("lockkeeper.on-loss", value));
        }
    }

    #[test]
    fn resources_share_the_keys_of_their_stripes() {
        let settings = Settings { stripes: 100, ..Settings::default() };
        let key = |name: &str| plan(&settings, &Request::new(name)).unwrap().keys;
        // The check value of CRC-32: 0xCBF43926 for these digits.
        assert_eq!(key("123456789"), [format!("stripe-{}-of-100", 0xCBF4_3926_u32 % 100)]);
        let keys: std::collections::BTreeSet<_> = (0..10_000).map(|n| key(&format!("orders/{n}"))).collect();
        assert_eq!(keys.len(), 100);
        let central = Settings { stripes: 1, ..Settings::default() };
        assert_eq!(plan(&central, &Request::new("a")).unwrap().keys, ["stripe-0-of-1"]);
    }

    #[test]
    fn a_name_may_be_several_resources() {
        let settings = Settings { separator: "+".into(), ..Settings::default() };
        let keys =
            |settings: &Settings, name: &str| plan(settings, &Request::new(name)).map(|plan| plan.keys);
        assert_eq!(keys(&settings, "a+b").unwrap(), ["a", "b"]);
        assert_eq!(keys(&settings, "a").unwrap(), ["a"]);
        assert_eq!(keys(&Settings::default(), "a+b").unwrap(), ["a+b"]);
        for empty in ["a++b", "+a", "a+"] {
            assert!(keys(&settings, empty).unwrap_err().reason.contains(empty));
        }
        let striped = Settings { stripes: 1, ..settings };
        assert_eq!(keys(&striped, "a+b").unwrap(), ["stripe-0-of-1"; 2]);
        let pool = Settings { pool: 2, ..striped };
        assert!(Default::check(&Settings { stripes: 0, ..pool }).unwrap_err().contains("separator"));
    }

    #[test]
    fn the_rank_comes_from_its_label() {
        let settings = Settings { rank_label: "rank".into(), ..Settings::default() };
        let ranked = |rank| Request::new("a").with_label("rank", rank);
        assert_eq!(plan(&settings, &ranked("-3")).unwrap().rank, -3);
        assert_eq!(plan(&settings, &Request::new("a")).unwrap().rank, 0);
        assert!(plan(&settings, &ranked("urgent")).is_err());
        assert_eq!(plan(&Settings::default(), &ranked("urgent")).unwrap().rank, 0);
    }

    #[test]
    fn settings_have_bounds() {
        let error = Default::check(&Settings { ttl_ms: 5, ..Settings::default() }).unwrap_err();
        assert_eq!(error, "`ttl_ms` must be between 100 and 3600000, and is 5");
    }
}

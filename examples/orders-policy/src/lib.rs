//! Orders behind a guarded route: readers beside each other, one writer at a time, each payment once.

use lockkeeper_sdk::{Plan, Policy, Refusal, Request, response, within};
use serde::{Deserialize, Serialize};

pub struct OrdersPolicy;

/// The table `[policies.orders.settings]` of config.toml.
#[derive(Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// The header that names the tenant; its orders have keys of their own. Empty: there is one tenant.
    pub tenant_header: String,
    /// How long the answer to a payment is kept and given to those who send it again, in milliseconds.
    pub keep_ms: u32,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { tenant_header: "x-tenant".into(), keep_ms: 86_400_000 }
    }
}

impl Policy for OrdersPolicy {
    type Settings = Settings;

    fn check(settings: &Settings) -> Result<(), String> {
        within("keep_ms", settings.keep_ms, 1_000..=2_592_000_000)
    }

    fn plan(settings: &Settings, request: &Request) -> Result<Plan, Refusal> {
        let id = request.capture("id").ok_or_else(|| Refusal::new("the route's path has no {id}"))?;
        let order = format!("{}orders/{}", tenant(settings, request)?, segment(id));
        if !is_payment(request) {
            return Ok(Plan::of(request).with_key(order).shared_if_safe(request));
        }
        let key = request.header("idempotency-key").filter(|key| !key.is_empty());
        let key = key.ok_or_else(|| Refusal::new("a payment needs one header `Idempotency-Key`"))?;
        Ok(Plan::of(request).once_by(format!("{order}/pay/{}", segment(key))).with_keep(settings.keep_ms))
    }

    fn response(_: &Settings, request: &Request, contention: &response::Contention) -> response::Answer {
        let (status, detail) = match is_payment(request) {
            true => (409, "this payment is being made; send it again with the same Idempotency-Key"),
            false => (423, "somebody is changing this order; try again in a moment"),
        };
        response::Answer {
            status,
            retry_after: contention.retry_after.max(1_000),
            headers: Vec::new(),
            detail: detail.into(),
        }
    }
}

lockkeeper_sdk::export!(OrdersPolicy, response);

fn is_payment(request: &Request) -> bool {
    let path = request.http.as_ref().map_or("", |http| &http.path);
    request.method_is("POST") && path.trim_end_matches('/').ends_with("/pay")
}

/// `acme/`, or nothing where there is one tenant.
fn tenant(settings: &Settings, request: &Request) -> Result<String, Refusal> {
    let header = settings.tenant_header.as_str();
    if header.is_empty() {
        return Ok(String::new());
    }
    match request.header(header) {
        Some(tenant) if !tenant.is_empty() => Ok(format!("{}/", segment(tenant))),
        _ => Err(Refusal::new(format!("the request needs one header `{header}`"))),
    }
}

/// What clients choose must not lead into the key of another tenant or order.
fn segment(text: &str) -> String {
    text.replace('%', "%25").replace('/', "%2F")
}

#[cfg(test)]
mod tests {
    use lockkeeper_sdk::{Mode, Primitive};

    use super::*;

    fn plan(request: &Request) -> Result<Plan, Refusal> {
        OrdersPolicy::plan(&Settings::default(), request)
    }

    fn of_acme(line: &str) -> Request {
        Request::http(line).with_capture("id", "42").with_header("X-Tenant", "acme")
    }

    #[test]
    fn readers_share_an_order_and_a_writer_has_it_alone() {
        let (read, write) =
            (plan(&of_acme("GET /orders/42")).unwrap(), plan(&of_acme("PUT /orders/42")).unwrap());
        assert_eq!((read.mode, write.mode), (Mode::Shared, Mode::Exclusive));
        assert_eq!(
            (read.keys, write.keys),
            (vec!["acme/orders/42".to_owned()], vec!["acme/orders/42".to_owned()])
        );
    }

    #[test]
    fn a_payment_is_made_once() {
        let pay = of_acme("POST /orders/42/pay");
        assert!(plan(&pay).unwrap_err().reason.contains("Idempotency-Key"));
        let plan = plan(&pay.with_header("Idempotency-Key", "7f/3a")).unwrap();
        assert_eq!((plan.primitive, plan.lock_at_least), (Primitive::Once, 86_400_000));
        assert_eq!(plan.keys, ["acme/orders/42/pay/7f%2F3a"]);
    }

    #[test]
    fn tenants_have_orders_of_their_own() {
        let of =
            |tenant| Request::http("PUT /orders/42").with_capture("id", "42").with_header("x-tenant", tenant);
        assert_ne!(plan(&of("acme")).unwrap().keys, plan(&of("globex")).unwrap().keys);
        assert_eq!(plan(&of("acme/orders")).unwrap().keys, ["acme%2Forders/orders/42"]);
        assert!(plan(&of("")).is_err());
        assert!(plan(&of("acme").with_header("x-tenant", "globex")).is_err(), "which of the two is it?");
        let one = Settings { tenant_header: String::new(), ..Settings::default() };
        assert_eq!(OrdersPolicy::plan(&one, &of("acme")).unwrap().keys, ["orders/42"]);
    }

    #[test]
    fn a_contended_change_gets_423_and_a_contended_payment_gets_409() {
        let contention = response::Contention {
            key: "acme/orders/42".into(),
            holder: "another".into(),
            position: 1,
            waited: 0,
            retry_after: 0,
        };
        let answer = |line| OrdersPolicy::response(&Settings::default(), &of_acme(line), &contention);
        assert_eq!((answer("PUT /orders/42").status, answer("POST /orders/42/pay").status), (423, 409));
        assert_eq!(answer("PUT /orders/42").retry_after, 1_000);
    }
}

//! The SDK for lock policies of Lockkeeper.
//!
//! A policy is a type that implements [`Policy`]: pure functions that turn a request into a [`Plan`]. They may also
//! choose the next waiter, set back-off times, decide whether a lease is renewed, and answer refused HTTP requests. A
//! policy has no clock, no random numbers and no I/O; everything it may use is in the arguments. So a policy can be
//! tested like any other function.
//!
//! ```
//! use lockkeeper_sdk::{Plan, Policy, Refusal, Request};
//!
//! struct PerTenant;
//!
//! impl Policy for PerTenant {
//!     type Settings = ();
//!
//!     fn plan(_settings: &(), request: &Request) -> Result<Plan, Refusal> {
//!         let tenant = request.label("tenant").ok_or_else(|| Refusal::new("no tenant"))?;
//!         Ok(Plan::of(request).with_key(format!("{tenant}/{}", request.name)))
//!     }
//! }
//!
//! lockkeeper_sdk::export!(PerTenant);
//!
//! let request = Request::new("orders/42").with_label("tenant", "acme");
//! assert_eq!(PerTenant::plan(&(), &request).unwrap().keys, ["acme/orders/42"]);
//! ```
//!
//! # Guarded routes
//!
//! A guarded route holds a lock while it handles an HTTP request. [`Request::http`] has what the route shows of the
//! request: method, path, the values of the `{name}`s in the route's path, the query, and the headers and the
//! beginning of the body that the route lists. This policy admits one request at a time for each order:
//!
//! ```
//! # use lockkeeper_sdk::{Plan, Policy, Refusal, Request};
//! # struct OneAtATime;
//! # impl Policy for OneAtATime {
//! #     type Settings = ();
//! fn plan(_settings: &(), request: &Request) -> Result<Plan, Refusal> {
//!     let id = request.capture("id").ok_or_else(|| Refusal::new("the route has no {id}"))?;
//!     Ok(Plan::of(request).with_key(format!("orders/{id}")))
//! }
//! # }
//! let request = Request::http("PUT /orders/42").with_capture("id", "42");
//! assert_eq!(OneAtATime::plan(&(), &request).unwrap().keys, ["orders/42"]);
//! ```
//!
//! Readers run concurrently, and each payment is made once, however often it is sent:
//!
//! ```
//! # use lockkeeper_sdk::{Mode, Plan, Policy, Primitive, Refusal, Request};
//! # struct Payments;
//! # impl Policy for Payments {
//! #     type Settings = ();
//! fn plan(_settings: &(), request: &Request) -> Result<Plan, Refusal> {
//!     if !request.method_is("POST") {
//!         return Ok(Plan::of(request).shared_if_safe(request));
//!     }
//!     let key = request.header("idempotency-key");
//!     let key = key.ok_or_else(|| Refusal::new("send one `idempotency-key`"))?;
//!     Ok(Plan::of(request).once_by(format!("payments/{key}")).with_keep(86_400_000))
//! }
//! # }
//! let read = Payments::plan(&(), &Request::http("GET /payments/42")).unwrap();
//! assert_eq!(read.mode, Mode::Shared);
//! let pay = Request::http("POST /payments");
//! assert!(Payments::plan(&(), &pay).is_err());
//! let paid = Payments::plan(&(), &pay.with_header("Idempotency-Key", "7f3a")).unwrap();
//! assert_eq!((paid.primitive, paid.keys), (Primitive::Once, vec!["payments/7f3a".to_owned()]));
//! ```
//!
//! A key from a header and the body, and an action for requests whose lease is lost:
//!
//! ```
//! # use lockkeeper_sdk::{OnLoss, Plan, Policy, Refusal, Request};
//! # struct Stock;
//! # impl Policy for Stock {
//! #     type Settings = ();
//! fn plan(_settings: &(), request: &Request) -> Result<Plan, Refusal> {
//!     let tenant = request.header("x-tenant").ok_or_else(|| Refusal::new("no tenant"))?;
//!     let sku = request.json("items.0.sku").ok_or_else(|| Refusal::new("no `items.0.sku`"))?;
//!     // A slash in a tenant's name could make its key that of another tenant.
//!     let tenant = tenant.replace('/', "%2F");
//!     Ok(Plan::of(request).with_key(format!("{tenant}/stock/{sku}")).on_loss(OnLoss::Cut))
//! }
//! # }
//! let request = Request::http("POST /reservations")
//!     .with_header("X-Tenant", "acme")
//!     .with_body(r#"{"items": [{"sku": "A-7", "n": 2}], "note": "the route shows no mo"#);
//! assert_eq!(Stock::plan(&(), &request).unwrap().keys, ["acme/stock/A-7"]);
//! ```
//!
//! `lockkeeper policy try` shows the plan that a component makes for a request. `lockkeeper policy new NAME` creates
//! the crate of a policy, and `lockkeeper policy build` builds the component.
//!
//! All durations are `u32` milliseconds. The proxy clamps every value to its own limits.

#[cfg(all(target_arch = "wasm32", feature = "allocator"))]
mod allocator;
mod http;
mod json;
mod plan;
mod random;
mod request;

/// The bindings of the worlds in `wit/policy.wit`, one module a hook.
///
/// They are generated: `tests/bindings.rs` compares them with the WIT, and writes them anew. A macro that generates
/// them while a policy is compiled would bring sixty crates into each build of a policy.
///
/// The export macro of a world carries the section that describes the world. So a component exports only the hooks
/// whose macro its crate invokes. All modules share the types of `naming`.
#[doc(hidden)]
#[allow(
    clippy::all,
    clippy::pedantic,
    clippy::restriction,
    missing_docs,
    unused_qualifications,
    rustdoc::all
)]
pub mod bindings {
    pub mod backoff;
    pub mod fairness;
    pub mod naming;
    pub mod reads;
    pub mod renewal;
    pub mod response;
    pub mod settings;
}

/// A file each: the types of the hook, the default decision, and the export that calls [`Policy`].
mod hooks {
    pub mod backoff;
    pub mod fairness;
    pub mod naming;
    pub mod reads;
    pub mod renewal;
    pub mod response;
    pub mod settings;
}

pub use bindings::naming::lockkeeper::policy::types::{
    HttpRequest, Label, Mode, Permits, Primitive, Request,
};
pub use hooks::naming::{Plan, Refusal};
pub use hooks::settings::within;
pub use json::json_field;
pub use plan::{Delegate, OnLoss};
pub use random::Random;

use serde::{Serialize, de::DeserializeOwned};

/// `fairness`: chooses the next waiter.
pub mod fairness {
    pub use crate::hooks::fairness::{GroupShare, Queue, Waiter};
}

/// `backoff`: decides what the first waiter does while another request holds the key.
pub mod backoff {
    pub use crate::hooks::backoff::{Contention, Decision};
}

/// `renewal`: decides whether a lease that the proxy keeps alive is extended.
pub mod renewal {
    pub use crate::hooks::renewal::{Decision, Expiring};
}

/// `response`: makes the answer to a guarded request that does not get its lock.
pub mod response {
    pub use crate::hooks::response::{Answer, Contention};
}

/// `reads`: lists what [`Policy::plan`] reads.
pub mod reads {
    pub use crate::hooks::reads::Part;
}

/// The default decisions for hooks that a policy leaves out, for policies that want to change only some of them.
pub mod builtin {
    pub use crate::hooks::{backoff::contended, fairness::choose, renewal::renewal_due, response::response};
}

/// A lock policy. Only [`Policy::plan`] is required; the other functions have defaults. A hook
/// other than `plan` is called only if [`export!`] names it.
///
/// A panic is a fault: a fault in `plan` refuses the request, and a fault in another hook gives the default
/// decision.
pub trait Policy {
    /// The policy's table in config.toml. Mark the type `#[serde(default, deny_unknown_fields)]`, so that every
    /// setting has a default and a misspelt setting is refused by name. `()` takes no settings.
    ///
    /// Settings are also encoded in a compact form without field names. In this form, the serde attributes `flatten`,
    /// `untagged`, `tag` and `skip_serializing_if` do not work; a policy that uses one is refused at load.
    type Settings: Serialize + DeserializeOwned + Default;

    /// Checks the settings when the policy is loaded. An error refuses the load and is shown to the operator, so it
    /// should name the setting and its bounds, as [`within`] does.
    fn check(_settings: &Self::Settings) -> Result<(), String> {
        Ok(())
    }

    /// Turns a request into a plan, or refuses it.
    fn plan(settings: &Self::Settings, request: &Request) -> Result<Plan, Refusal>;

    /// Lists the parts of a request that [`Policy::plan`] reads with these settings. It counts only if [`export!`] names
    /// `reads`. Then the proxy gives `plan` only these parts, and answers most requests with the same parts from a cache. A
    /// part that is not in the list is empty, absent, `exclusive` or 0 in each request, so a key cannot depend on it.
    fn plan_reads(_settings: &Self::Settings) -> Vec<reads::Part> {
        reads::Part::all()
    }

    /// Chooses the next waiter: returns an index into `queue.waiters`, which is never empty. If that waiter is a reader, the
    /// proxy also grants the readers that come before the first other waiter in the queue, 64 at a time.
    fn choose(_settings: &Self::Settings, queue: &fairness::Queue) -> u32 {
        builtin::choose(queue)
    }

    /// Decides what the first waiter does while another request holds the key.
    fn contended(_settings: &Self::Settings, contention: &backoff::Contention) -> backoff::Decision {
        builtin::contended(contention)
    }

    /// Decides whether a lease that the proxy keeps alive is extended when it nears its end.
    fn renewal_due(_settings: &Self::Settings, expiring: &renewal::Expiring) -> renewal::Decision {
        builtin::renewal_due(expiring)
    }

    /// Makes the HTTP answer to a guarded request that does not get its lock.
    fn response(
        _settings: &Self::Settings,
        _request: &Request,
        contention: &response::Contention,
    ) -> response::Answer {
        builtin::response(contention)
    }
}

/// Makes the crate a policy. `export!(MyPolicy)` exports `plan` and the settings. Name further hooks after the type,
/// any of these: `export!(MyPolicy, fairness, backoff, renewal, response, reads)`.
///
/// Outside WebAssembly the macro expands to nothing, so tests run natively.
#[macro_export]
macro_rules! export {
    ($policy:ident $(, $hook:ident)* $(,)?) => {
        #[cfg(target_arch = "wasm32")]
        const _: () = {
            $crate::__export_hook!($policy naming);
            $crate::__export_hook!($policy settings);
            $($crate::__export_hook!($policy $hook);)*
        };
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __export_hook {
    ($policy:ident naming) => {
        $crate::bindings::naming::export!($policy with_types_in $crate::bindings::naming);
    };
    ($policy:ident settings) => {
        $crate::bindings::settings::export!($policy with_types_in $crate::bindings::settings);
    };
    ($policy:ident fairness) => {
        $crate::bindings::fairness::export!($policy with_types_in $crate::bindings::fairness);
    };
    ($policy:ident backoff) => {
        $crate::bindings::backoff::export!($policy with_types_in $crate::bindings::backoff);
    };
    ($policy:ident renewal) => {
        $crate::bindings::renewal::export!($policy with_types_in $crate::bindings::renewal);
    };
    ($policy:ident response) => {
        $crate::bindings::response::export!($policy with_types_in $crate::bindings::response);
    };
    ($policy:ident reads) => {
        $crate::bindings::reads::export!($policy with_types_in $crate::bindings::reads);
    };
    ($policy:ident $other:ident) => {
        compile_error!(concat!(
            "`", stringify!($other), "` is no hook; there are fairness, backoff, renewal, response and reads"
        ));
    };
}

//! The admin API for operators: health, metrics, policies, and the forced release of locks.
//!
//! | call | file |
//! | --- | --- |
//! | `GET /live`, `GET /ready`, `GET /metrics` | `health` |
//! | `GET /v1/policies`, `PUT /v1/policies/{name}`, `POST /v1/policies/{name}/rollback` | `policies` |
//! | `PUT /v1/policies/{name}/canary`, `POST /v1/policies/{name}/promote` and `/abort` | `policies` |
//! | `PUT`, `GET` and `DELETE /v1/policies/{name}/shadow` | `shadow` |
//! | `GET /v1/fleet` | `fleet` |
//! | `DELETE /v1/locks/{key}` | here |
//!
//! Without `[auth]`, the admin API must listen on an address that only operators can reach.

use std::sync::Arc;

use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::audit::Entry;
use crate::auth::{Identity, Rate};
use crate::config::{EngineLimits, Verb};
use crate::fleet::Fleet;
use crate::fronts::routes::{Methods, Needs, Route};
use crate::fronts::{Access, Admitted, Code, Refusal};
use crate::http::{self, Handler, Peer, Problem, Request, Response};
use crate::lock::Key;
use crate::net::Addresses;
use crate::service::{Principal, Service};
use crate::shadow::Shadows;
use crate::telemetry::Metrics;

mod fleet;
mod health;
mod policies;
mod shadow;

/// The calls of the admin API.
#[derive(Clone, Copy, Debug)]
pub enum Call {
    /// Whether the process lives.
    Live,
    /// `health::ready`.
    Ready,
    /// `health::metrics`.
    Metrics,
    /// `fleet::show`.
    Fleet,
    /// `policies::list`.
    Policies,
    /// `policies::push`.
    Push,
    /// `policies::roll_back`.
    RollBack,
    /// `policies::canary`.
    Canary,
    /// `policies::promote`.
    Promote,
    /// `policies::abort`.
    Abort,
    /// `shadow::begin`.
    Shadow,
    /// `shadow::report`.
    ShadowReport,
    /// `shadow::end`.
    EndShadow,
    /// The forced release of a key.
    Force,
}

/// The paths of the admin API.
pub const ROUTES: &[Route<Call>] = &[
    route(Methods::Get, "/live", Call::Live, &[]),
    route(Methods::Get, "/ready", Call::Ready, &[]),
    route(Methods::Get, "/metrics", Call::Metrics, &[Verb::Metrics]),
    route(Methods::Get, "/v1/fleet", Call::Fleet, &[Verb::FleetRead]),
    route(Methods::Get, "/v1/policies", Call::Policies, &[Verb::PolicyRead]),
    route(Methods::Get, "/v1/policies/", Call::Policies, &[Verb::PolicyRead]),
    route(Methods::Put, "/v1/policies/{name}", Call::Push, &[Verb::PolicyPush]),
    route(Methods::Post, "/v1/policies/{name}/rollback", Call::RollBack, &[Verb::PolicyRollback]),
    route(Methods::Put, "/v1/policies/{name}/canary", Call::Canary, &[Verb::PolicyPush]),
    route(Methods::Post, "/v1/policies/{name}/promote", Call::Promote, &[Verb::PolicyPush]),
    route(Methods::Post, "/v1/policies/{name}/abort", Call::Abort, &[Verb::PolicyRollback]),
    route(Methods::Put, "/v1/policies/{name}/shadow", Call::Shadow, &[Verb::PolicyPush]),
    route(Methods::Get, "/v1/policies/{name}/shadow", Call::ShadowReport, &[Verb::PolicyPush]),
    route(Methods::Delete, "/v1/policies/{name}/shadow", Call::EndShadow, &[Verb::PolicyPush]),
    route(Methods::Delete, "/v1/locks/{key...}", Call::Force, &[Verb::Force]),
];

const fn route(methods: Methods, path: &'static str, call: Call, verbs: &'static [Verb]) -> Route<Call> {
    let needs = if verbs.is_empty() { Needs::Nothing } else { Needs::OneOf(verbs) };
    Route { methods, path, call, needs, counts: true }
}

/// The handler of the admin listener.
#[derive(Clone)]
pub struct Admin {
    /// The interface to the locks.
    pub service: Service,
    /// This proxy's membership among the proxies of its store.
    pub fleet: Fleet,
    /// The components that are compared with live versions on this proxy.
    pub shadows: Shadows,
    /// The metrics that `/metrics` returns.
    pub metrics: Metrics,
    /// The limits of pushed components.
    pub engine: EngineLimits,
    /// Who may make which call, and limits on requests.
    pub access: Access,
    /// Cancelled at shutdown: the proxy is then still live, but no longer ready.
    pub stop: CancellationToken,
}

impl Admin {
    async fn answer(
        &self,
        routes: &[Route<Call>],
        request: Request,
        peer: &Peer,
    ) -> Result<Response, Problem> {
        let Admitted { call, name, principal, entry } =
            self.access.admit(Admin::FRONT, &request, peer, routes).await?;
        let counted = principal.identity().and_then(Identity::request);
        let mut response = self.serve(call, name, principal, entry, request).await?;
        response.body_mut().counts(counted);
        Ok(response)
    }

    async fn serve(
        &self,
        call: Call,
        name: String,
        principal: Principal,
        entry: Option<Entry>,
        request: Request,
    ) -> Result<Response, Problem> {
        match call {
            Call::Live => Ok(http::json(&json!({"status": "live"}))),
            Call::Ready => Ok(health::ready(self)),
            Call::Metrics => Ok(health::metrics(self, &request)),
            Call::Fleet => Ok(fleet::show(self)),
            Call::Policies => Ok(policies::list(self, &principal)),
            Call::Push => {
                let push = policies::push(self, &principal, &name, request);
                self.replace(Verb::PolicyPush, &name, &principal, entry, push).await
            }
            Call::RollBack => {
                let roll_back = policies::roll_back(self, &principal, &name);
                self.replace(Verb::PolicyRollback, &name, &principal, entry, roll_back).await
            }
            Call::Canary => {
                let canary = policies::canary(self, &principal, &name, request);
                self.replace(Verb::PolicyPush, &name, &principal, entry, canary).await
            }
            Call::Promote => {
                let promote = policies::promote(self, &principal, &name);
                self.replace(Verb::PolicyPush, &name, &principal, entry, promote).await
            }
            Call::Abort => {
                let abort = policies::abort(self, &principal, &name);
                self.act(Verb::PolicyRollback, &name, &principal, entry, abort).await
            }
            Call::Shadow => {
                let begin = shadow::begin(self, &principal, &name, request);
                self.replace(Verb::PolicyPush, &name, &principal, entry, begin).await
            }
            Call::ShadowReport if principal.may(Verb::PolicyPush, &name) => {
                shadow::report(self, &name, request.uri().query()).await
            }
            Call::ShadowReport => Err(self.forbidden(Verb::PolicyPush, &name, entry).await),
            Call::EndShadow => {
                let end = shadow::end(self, &name);
                self.act(Verb::PolicyPush, &name, &principal, entry, end).await
            }
            Call::Force => {
                let force = self.force_release(&name, &principal);
                self.act(Verb::Force, &name, &principal, entry, force).await
            }
        }
    }

    /// Counts the replacement of a policy, which compiles a component.
    async fn counts_push(&self, principal: &Principal, entry: &Option<Entry>) -> Result<(), Problem> {
        let sent = principal.identity().map_or(Ok(()), |client| client.send(Rate::Pushes));
        let Err(over) = sent.map_err(|over| Problem::from(Refusal::from(over))) else { return Ok(()) };
        self.access.refused(entry.clone(), &over).await;
        Err(over)
    }

    /// As [`Admin::act`], for an action that replaces a policy or may do so.
    async fn replace(
        &self,
        verb: Verb,
        policy: &str,
        principal: &Principal,
        entry: Option<Entry>,
        action: impl Future<Output = Result<Response, Problem>>,
    ) -> Result<Response, Problem> {
        self.counts_push(principal, &entry).await?;
        self.act(verb, policy, principal, entry, action).await
    }

    /// Performs an action of an operator on the key or policy `on`: checks the right to it, and records it.
    async fn act(
        &self,
        verb: Verb,
        on: &str,
        principal: &Principal,
        entry: Option<Entry>,
        action: impl Future<Output = Result<Response, Problem>>,
    ) -> Result<Response, Problem> {
        if !principal.may(verb, on) {
            return Err(self.forbidden(verb, on, entry).await);
        }
        let acting = self.access.begins(entry, verb, on).await?;
        let answer = action.await;
        acting.ended(&answer);
        answer
    }

    /// Refuses a call about the key or policy `on`, and records that.
    async fn forbidden(&self, verb: Verb, on: &str, entry: Option<Entry>) -> Problem {
        let detail = format!("you may not {} `{on}`", verb.as_str());
        let refusal = Refusal::new(Code::Forbidden, detail).with("verb", verb.as_str()).with("on", on);
        let problem = Problem::from(refusal);
        self.access.refused(entry, &problem).await;
        problem
    }

    /// Releases all holders of a key. A key without a holder is no error: the answer counts the holders.
    async fn force_release(&self, text: &str, principal: &Principal) -> Result<Response, Problem> {
        let key = Key::new(text).ok_or_else(|| {
            let bound = format!("1 to {} bytes", Key::MAX_BYTES);
            Problem::invalid("key", format!("must have {bound}")).with("bound", bound)
        })?;
        let holders = self.service.force_release(key).await?;
        let by = principal.name();
        tracing::warn!(key = text, holders, by = by.as_deref(), "an operator took a lock away");
        Ok(http::json(&json!({"key": text, "holders": holders})))
    }
}

/// The handler of a listener that has health and metrics alone, for programs without credentials.
pub struct Health {
    admin: Admin,
    /// The metrics that the clients of each address have not read.
    unread: Arc<Addresses>,
}

/// How many times the clients of an address may leave the metrics unread.
const MAX_UNREAD: usize = 16;

/// The paths of that listener.
const HEALTH: &[Route<Call>] = &[
    route(Methods::Get, "/live", Call::Live, &[]),
    route(Methods::Get, "/ready", Call::Ready, &[]),
    route(Methods::Get, "/metrics", Call::Metrics, &[]),
];

impl Health {
    /// The handler of the listener of health for this admin API.
    pub fn new(admin: Admin) -> Health {
        Health { admin, unread: Arc::new(Addresses::new(MAX_UNREAD)) }
    }

    async fn answer(&self, request: Request, peer: &Peer) -> Result<Response, Problem> {
        // The other answers are short. A probe must not fail for what other clients of its address leave unread.
        let is_long = request.uri().path() == "/metrics";
        let unread = is_long.then(|| self.unread.take(peer.address.origin()));
        if let Some(None) = unread {
            let detail = format!("the clients of this address have not read {MAX_UNREAD} answers");
            let refusal = Refusal::new(Code::TooManyRequests, detail).with("limit", "health.unread");
            let problem = Problem::from(refusal.with("bound", MAX_UNREAD));
            self.admin.access.refused(None, &problem).await;
            return Err(problem);
        }
        let mut response = self.admin.answer(HEALTH, request, peer).await?;
        if let Some(unread) = unread {
            response.body_mut().counts(Some(Arc::new(unread)));
        }
        Ok(response)
    }
}

impl Handler for Health {
    const FRONT: &'static str = "health";

    async fn handle(&self, request: Request, peer: &Arc<Peer>) -> Response {
        self.answer(request, peer).await.unwrap_or_else(Problem::into_response)
    }
}

impl Handler for Admin {
    const FRONT: &'static str = "admin";

    async fn handle(&self, request: Request, peer: &Arc<Peer>) -> Response {
        self.answer(ROUTES, request, peer).await.unwrap_or_else(Problem::into_response)
    }
}

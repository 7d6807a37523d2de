//! Calls that a proxy must answer in time.

use std::pin::pin;
use std::time::Duration;

use rand::Rng;

use super::{Client, SLACK_MS};
use crate::clock;
use crate::lock::{Mode, Space};
use crate::service::{AcquireError, Request};
use crate::simulation::check::Violation;
use crate::simulation::world::{Proxy, TIMEOUT_MS};

impl Client {
    /// Waits for the answer of a proxy, or leaves. `None` if there was no answer.
    pub(super) async fn call<T: Send + 'static>(
        &mut self,
        proxy: &Proxy,
        request: &Request,
        call: impl Future<Output = Result<T, AcquireError>> + Send + 'static,
    ) -> Option<Result<T, AcquireError>> {
        let (resource, wait_ms) = (&request.resource, request.wait_ms.unwrap_or(0));
        let longest = wait_ms + 2 * TIMEOUT_MS + SLACK_MS;
        self.note(&format!("asks proxy {} for {resource}, and waits {wait_ms} ms", proxy.index));
        let leaves = self.random.random_bool(0.1);
        let patience = if leaves { self.random.random_range(1..1_000) } else { longest };
        let pauses = (!proxy.process.is_paused()).then(|| proxy.process.pauses());
        let limit = Duration::from_millis(patience.into());
        self.shared.checks.lock().asks(&request.owner, (proxy.index, proxy.life));
        let waits = (request.mode == Mode::Exclusive && wait_ms > 0).then(|| {
            let until = clock::now().plus_ms(wait_ms);
            self.shared.checks.lock().waits(resource, &self.name, (proxy.index, proxy.life), until)
        });
        let asked_at = clock::now();
        let policy = resource.split_once('/').map_or("", |(policy, _)| policy);
        let version = || proxy.policies.active(policy).map(|active| active.version());
        let before = version();
        let mut call = pin!(proxy.process.run(call));
        let mut asked = tokio::time::timeout(limit, &mut call).await;
        if asked.is_err() && !leaves && version() != before {
            let more = Duration::from_millis(TIMEOUT_MS.into());
            asked = tokio::time::timeout(more, call).await;
        }
        if let Some(id) = waits {
            self.shared.check(|checks| checks.waits_no_more(resource, id));
        }
        let Ok(asked) = asked else {
            // A proxy that was paused may be late.
            if !leaves && pauses == Some(proxy.process.pauses()) {
                let why = format!("{} was not answered within {longest} ms on {resource}", self.name);
                self.shared.broken(Violation(why));
            }
            self.note(&format!("leaves while it waits for {resource}"));
            return None;
        };
        if let Some(Err(AcquireError::RulesDiffer { .. })) = &asked {
            self.shared.tally.count("a request is refused because of other rules");
        }
        if let Some(Err(error)) = &asked {
            self.note(&format!("is refused {resource}: {error}"));
        }
        if let Some(Err(AcquireError::Contended { key, holder, .. })) = &asked {
            let is_own = key.space() == Space::Table
                && holder.as_ref().is_some_and(|holder| *holder.owner == *request.owner);
            self.shared.check(|checks| checks.told_held(request, is_own, asked_at, clock::now()));
        }
        asked
    }
}

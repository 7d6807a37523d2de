//! The requests under way that have a lock or wait for one, so that routes are replaced without two holders.
//!
//! A request keeps the name that it was given when it arrived. New routes may name the same request differently, and
//! a later request would then not meet the lock of the first one. So when routes are replaced, the new ones name each
//! request under way once more: a request that still waits starts over, and the lease of a request that has its lock
//! keeps its new keys from others until it ends.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hyper::http::request::Parts;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::routes::Routes;
use crate::lock::Key;
use crate::route::Seen;
use crate::service::{Renamed, Request as Wanted, Service};

/// What the name of a request was made of, and the name.
pub struct Named {
    /// The place of its listener.
    pub listener: usize,
    pub parts: Parts,
    pub seen: Seen,
    pub wanted: Wanted,
}

/// What the new routes make of a request: `None` where they lock nothing for it.
///
/// The error says why they cannot name it.
pub type Rename<'a> = dyn Fn(&Named, &Routes) -> Result<Option<Wanted>, String> + 'a;

/// The requests of all listeners.
pub struct UnderWay {
    requests: Mutex<Requests>,
    paused: watch::Sender<bool>,
}

#[derive(Default)]
struct Requests {
    last: u64,
    by_id: HashMap<u64, (Named, State)>,
}

enum State {
    /// Cancelled where the request has to start over.
    Waits(CancellationToken),
    Holds {
        nonce: u64,
        keys: Arc<[Key]>,
    },
}

/// The place of a request. Dropping it says that the request is over.
pub struct Entry {
    id: u64,
    all: Arc<UnderWay>,
    outdated: CancellationToken,
}

impl UnderWay {
    pub fn new() -> UnderWay {
        UnderWay { requests: Mutex::default(), paused: watch::Sender::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a request that is about to ask for its lock. `None` where routes are being replaced, or `is_current` says
    /// that they were since it was named.
    pub fn enter(self: &Arc<UnderWay>, named: Named, is_current: impl FnOnce() -> bool) -> Option<Entry> {
        let mut all = self.lock();
        if *self.paused.borrow() || !is_current() {
            return None;
        }
        all.last += 1;
        let id = all.last;
        let outdated = CancellationToken::new();
        all.by_id.insert(id, (named, State::Waits(outdated.clone())));
        drop(all);
        Some(Entry { id, all: self.clone(), outdated })
    }

    /// Names every request under way once more, and keeps later ones waiting until [`UnderWay::resume`]: a request that
    /// waits starts over then. The leases that have other keys by the new routes.
    ///
    /// # Errors
    /// Where the new routes, or a policy, cannot name a request that has its lock. Nobody is kept waiting then; the
    /// request will have ended after a while.
    pub fn pause(
        &self,
        service: &Service,
        routes: &[Arc<Routes>],
        rename: &Rename<'_>,
    ) -> Result<Vec<Renamed>, String> {
        let all = self.lock();
        let (mut start_over, mut renamed) = (Vec::new(), Vec::new());
        for (named, state) in all.by_id.values() {
            let wanted = rename(named, &routes[named.listener]);
            if matches!(&wanted, Ok(wanted) if wanted.as_ref().is_none_or(|wanted| is_same(wanted, &named.wanted)))
            {
                continue;
            }
            match state {
                State::Waits(outdated) => start_over.push(outdated),
                State::Holds { nonce, keys } => {
                    let named_now = wanted?.and_then(|wanted| service.keys_of(&wanted)).ok_or_else(|| {
                        let resource = &named.wanted.resource;
                        format!("the policy names no keys for a request that is under way as {resource}")
                    })?;
                    renamed.push(Renamed { nonce: *nonce, held: keys.clone(), named: named_now });
                }
            }
        }
        self.paused.send_replace(true);
        start_over.into_iter().for_each(CancellationToken::cancel);
        Ok(renamed)
    }

    /// Lets requests go on.
    pub fn resume(&self) {
        let _all = self.lock();
        self.paused.send_replace(false);
    }

    /// Waits while routes are being replaced.
    pub async fn resumed(&self) {
        let _ = self.paused.subscribe().wait_for(|paused| !paused).await;
    }
}

impl Entry {
    /// Notes that the request has its lock. False where it must start over instead.
    pub fn holds(&self, nonce: u64, keys: Arc<[Key]>) -> bool {
        let mut all = self.all.lock();
        if self.outdated.is_cancelled() {
            return false;
        }
        if let Some((_, state)) = all.by_id.get_mut(&self.id) {
            *state = State::Holds { nonce, keys };
        }
        true
    }

    /// Cancelled when the request must start over.
    pub fn watch(&self) -> CancellationToken {
        self.outdated.clone()
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.all.lock().by_id.remove(&self.id);
    }
}

/// Whether two requests are planned alike.
fn is_same(one: &Wanted, other: &Wanted) -> bool {
    let plain = |wanted: &Wanted| {
        let via = wanted.via.as_ref().map(|via| (via.policy.clone(), via.http.clone()));
        (wanted.resource.clone(), wanted.mode, wanted.labels.clone(), via)
    };
    plain(one) == plain(other)
}

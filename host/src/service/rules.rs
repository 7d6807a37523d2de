//! Until when this proxy grants locks by its rules of who may do what.

use std::sync::Arc;

use super::errors::AcquireError;
use super::principal::Principal;
use crate::clock;
use crate::latest;
use crate::lock::Instant;

/// The rules of this proxy are not those of its store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulesEnd {
    /// From this moment on, no client gets a new lock.
    pub at: Instant,
    /// For clients.
    pub why: Arc<str>,
}

/// Whether this proxy may grant locks by its rules. They do not apply to guarded routes.
pub struct RulesGate {
    /// `None`: it may.
    end: latest::Sender<Option<RulesEnd>>,
}

impl RulesGate {
    /// A gate that lets every client pass, until [`RulesGate::set`].
    pub fn new() -> RulesGate {
        RulesGate { end: latest::Sender::new(None) }
    }

    /// Lets clients pass until the given moment; `None`: for good.
    pub fn set(&self, end: Option<RulesEnd>) {
        if *self.end.borrow() != end {
            self.end.send_replace(end);
        }
    }

    /// Checks that this proxy may grant the client a lock.
    pub fn check(&self, client: &Principal) -> Result<(), AcquireError> {
        match &*self.end.borrow() {
            Some(end) if client.routed().is_none() && end.at <= clock::now() => Err(end.error()),
            _ => Ok(()),
        }
    }

    /// Waits until this proxy may not grant the client a lock.
    pub async fn closed(&self, client: &Principal) -> AcquireError {
        if client.routed().is_some() {
            std::future::pending::<()>().await;
        }
        let mut ends = self.end.subscribe();
        loop {
            let end = ends.borrow_and_update().clone();
            let closed = async {
                match &end {
                    Some(end) => {
                        clock::sleep_until(end.at).await;
                        end.error()
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                changed = ends.changed() => if changed.is_err() { std::future::pending::<()>().await },
                error = closed => return error,
            }
        }
    }
}

impl RulesEnd {
    fn error(&self) -> AcquireError {
        AcquireError::RulesDiffer { why: self.why.clone() }
    }
}

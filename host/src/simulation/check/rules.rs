//! Whether locks were granted by the rules of who may do what that count.

use std::time::Duration;

use super::super::principals::GRACE;
use super::{Checks, Violation};
use crate::lock::Instant;

/// How long a proxy whose heartbeats are lost may grant without knowing the record, and how long the record may be older
/// than the run knows.
const UNHEARD: Duration = Duration::from_secs(11);

/// The versions of the rules that were recorded: when this was first seen of each one.
#[derive(Default)]
pub struct RecordedRules(Vec<(u64, Instant)>);

impl Checks {
    /// Takes note of the version that is recorded.
    pub fn rules_are(&mut self, version: u64, now: Instant) {
        let recorded = &mut self.recorded_rules.0;
        // A proxy that is alone may go back to an earlier file.
        recorded.retain(|(other, _)| *other <= version);
        if recorded.last().is_none_or(|(last, _)| *last < version) {
            recorded.push((version, now));
        }
    }

    /// Checks that a proxy whose rules have this version could grant a request that was sent at `asked_at`.
    pub fn rules_allow(&self, version: u64, asked_at: Instant) -> Result<(), Violation> {
        let patience = u64::try_from((GRACE + UNHEARD).as_micros()).unwrap_or(u64::MAX);
        let is_later =
            |(other, since): &&(u64, Instant)| *other > version && asked_at > since.plus_us(patience);
        match self.recorded_rules.0.iter().find(is_later) {
            Some((other, _)) => Err(Violation(format!(
                "outdated rules: a proxy with version {version} has granted a lock long after version {other} was recorded"
            ))),
            None => Ok(()),
        }
    }
}

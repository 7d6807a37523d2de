//! Changes of policies by operators.

use crate::fleet::{Fleet, Pushed};
use crate::policy::{CanaryGuard, CanaryTerms, Policies, Prepared};
use crate::simulation::faults::Settings;

/// What becomes of a change, or why there is none.
type Change = Result<String, String>;

fn prepared(policies: &Policies, policy: &str, settings: &Settings) -> Result<Prepared, String> {
    let component = policies.get(policy).ok_or("there is no such policy")?.component();
    policies.prepare(policy, &component, Some(settings.table())).map_err(|error| error.to_string())
}

/// Gives a policy other settings on all proxies.
pub fn replace(
    policies: &Policies,
    fleet: &Fleet,
    policy: &'static str,
    settings: &Settings,
) -> impl Future<Output = Change> + use<> {
    let (policies, fleet, settings) = (policies.clone(), fleet.clone(), settings.clone());
    async move {
        let prepared = prepared(&policies, policy, &settings)?;
        let changed = fleet.change(prepared).await.map_err(|error| error.to_string())?;
        Ok(format!("{changed:?}"))
    }
}

/// The terms of a canary that nothing ends by itself: the search judges it by the promises alone.
pub fn terms(percent: u8, every_ms: u32) -> CanaryTerms {
    let guard = CanaryGuard { faults: u64::MAX, refused: 100.0, ungranted: 100.0, p99: 1_000.0 };
    let steps = if percent < 60 && every_ms > 0 { vec![80.0] } else { Vec::new() };
    CanaryTerms { share: percent.into(), steps, every_ms: every_ms.into(), guard }
}

/// Lets other settings of a policy decide for a share of the keys.
pub fn canary(
    policies: &Policies,
    fleet: &Fleet,
    (policy, settings): (&'static str, &Settings),
    terms: CanaryTerms,
) -> impl Future<Output = Change> + use<> {
    let (policies, fleet, settings) = (policies.clone(), fleet.clone(), settings.clone());
    async move {
        let prepared = prepared(&policies, policy, &settings)?;
        if let Prepared::Unchanged(_) = prepared {
            return Err("these settings are live".to_owned());
        }
        fleet.try_out(policy, prepared, &terms).await.map_err(|error| error.to_string())?;
        Ok("a canary".to_owned())
    }
}

/// Makes the canary of a policy live.
pub fn promote(fleet: &Fleet, policy: &'static str) -> impl Future<Output = Change> + use<> {
    let fleet = fleet.clone();
    async move {
        match fleet.promote(policy).await.map_err(|error| format!("{error:?}"))? {
            Pushed::Live(_) => Ok("Live".to_owned()),
            other => Ok(format!("{other:?}")),
        }
    }
}

/// Restores the policy's previous settings, or ends its canary or its change. Every other time, the proxy does so by itself, as
/// for a version that exceeds its guard.
pub fn roll_back(fleet: &Fleet, policy: &'static str) -> impl Future<Output = Change> + use<> {
    let fleet = fleet.clone();
    async move {
        if let Some(record) = fleet.fresh_record(policy).await
            && record.is_settled()
            && (record.seq / 2).is_multiple_of(2)
            && fleet.relapse(&record, "the search has rolled it back").await
        {
            return Ok("by itself".to_owned());
        }
        let changed = fleet.roll_back(policy).await.map_err(|error| error.to_string())?;
        Ok(format!("{changed:?}"))
    }
}

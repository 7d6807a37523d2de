//! The effect of each operation on the records.

use super::decide::{abandon, acquire, commit, force, raise, rejoin, rejoin_any, release, renew, version};
use super::{Env, Op, Outcome, Records, delegation, global_queue};

/// Decides one operation and changes the records accordingly.
///
/// # Panics
/// If `records` lacks a key of the operation.
pub fn apply(records: &mut Records, op: &Op, env: &Env) -> Outcome {
    if let Some(elsewhere) = delegation::elsewhere(records, op, env) {
        return elsewhere;
    }
    match op {
        Op::Acquire(claim) => acquire(records, claim, env),
        Op::Rejoin(claim) if claim.any => rejoin_any(records, claim, env).unwrap_or(Outcome::Absent),
        Op::Rejoin(claim) => rejoin(records, claim, env).unwrap_or(Outcome::Absent),
        Op::Renew { lease, ttl_ms } => renew(records, lease, *ttl_ms, env),
        Op::Raise { lease, tokens } => raise(records, lease, tokens.as_deref(), env),
        Op::Release(asked) => release(records, asked, env),
        Op::Abandon { keys, attempt } => abandon(records, keys, *attempt, env),
        Op::Force { key } => force(records, key, env),
        Op::GlobalQueue { key, change } => global_queue::change(records, key, change, env),
        Op::Read { key } => Outcome::Version(version(records, key, env)),
        Op::Commit(asked) => commit(records, asked, env),
        Op::Delegate(asked) => delegation::delegate(records, asked, env),
        Op::Extend(asked) => delegation::extend(records, asked, env),
        Op::Restore(asked) => delegation::restore(records, asked, env),
    }
}

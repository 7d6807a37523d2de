//! What a record says to a claim, without changing it: for display.

use super::{Cause, Claim, Denial, Env, NextWaiter, Op, Outcome, Record, Records, apply, global_queue};
use crate::lock::Key;

/// Why the key would be denied to this claim now; `None` if it would be granted, or refused for another reason. This is
/// the answer of [`apply()`] on a copy of the record, so there is no second set of rules.
pub fn refusal(record: &Record, key: &Key, claim: &Claim, env: &Env) -> Option<Denial> {
    let mut records = Records::default();
    records.insert(key.clone(), Some(record.clone()));
    let claim = Claim { waits: false, ..claim.of(key) };
    match apply(&mut records, &Op::Acquire(claim), env) {
        Outcome::Held(denial) => Some(denial),
        Outcome::Elsewhere { key, proxy } => Some(Denial {
            key,
            cause: Cause::Delegated,
            holder: None,
            free_in_us: 0,
            next_waiter: Some(NextWaiter { proxy, ticket: None }),
            joined: None,
        }),
        _ => None,
    }
}

/// How many waiters are ahead of this one in the global queue of a key, on all proxies; `None` if it has no place.
pub fn place_in_global_queue(record: &Record, ticket: u64, env: &Env) -> Option<usize> {
    global_queue::place(record, ticket, env)
}

/// Whether a proxy other than `own` waits for the key.
pub fn others_wait(record: &Record, own: &str, env: &Env) -> bool {
    global_queue::is_wanted(record, own, env)
}

//! Rows of the lease table: read, decided on, and written, in a transaction ([`batch`](super::batch)) or without
//! one ([`optimistic`](super::optimistic)).

use mysql_async::Row;

use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::record::{self, Env, Holder, Record, Records};
use crate::lock::{Key, ServerTime, Token};
use crate::mysql::codec;
use crate::mysql::context::Context;
use crate::mysql::session::fault::Fault;
use crate::mysql::session::link::Link;
use crate::mysql::sql::RowWrite;

/// Reads the columns [`crate::mysql::sql::ROW`]: the key, its record, and the revision.
pub fn read_row(row: Row) -> Result<(Key, (Record, u64)), Fault> {
    let rejected = |why: String| Fault::Rejected { why };
    let (key, token, revision, state) = mysql_async::from_row_opt::<(Vec<u8>, u64, u64, Vec<u8>)>(row)
        .map_err(|error| rejected(format!("a row was not written by this program: {error}")))?;
    let text = String::from_utf8_lossy(&key);
    let key = Key::new(&text).ok_or_else(|| rejected(format!("{text:?} is not a key")))?;
    let record = codec::decode(token, &state).map_err(|error| rejected(format!("{text:?}: {error}")))?;
    Ok((key, (record, revision)))
}

/// The inputs for decisions at `now`, the server's time. `earliest` is the earliest time that the server's
/// clock can show.
pub fn environment<'a>(
    context: &Context,
    link: &Link,
    records: &Records,
    keys: impl IntoIterator<Item = &'a &'a Key>,
    (earliest, now): (ServerTime, ServerTime),
) -> Env {
    let sample = &link.sample;
    let own = clock::now();
    let (doubt, set_back_us, waits_until, steady) = {
        let steps = context.clock_steps();
        let steady = steps.is_steady(own, record::BATCH_ID_KEPT_US);
        (steps.doubt(own), steps.set_back_us(own), steps.waits_until(), steady)
    };
    let is_in_doubt = |holder: &Holder| holder.free_at() <= now && !doubt.has_ended(holder, earliest);
    let records = keys.into_iter().filter_map(|key| records.get(key));
    let takeover = doubt.by_us == 0 || !records.flat_map(|record| &record.holders).any(is_in_doubt);
    if !takeover {
        reached(Branch::ClockDoubt);
    }
    Env {
        now,
        floor: Token::floor_of_epoch(sample.epoch).max(Token(sample.floor)),
        renamed: Token(sample.renamed),
        others: Token(sample.counter),
        grants_from: sample.grants_from.max(now.plus_us(waits_until.us_since(own))),
        takeover,
        longest_us: context.longest_us(),
        set_back_us,
        steady,
    }
}

/// The row as it is to be written for `record`.
pub fn row_write(key: &Key, record: &Record, revision: u64, now: ServerTime) -> RowWrite {
    RowWrite {
        key: key.clone(),
        token: record.token.0,
        until: record.until().max(now),
        revision,
        state: codec::encode(record),
    }
}

/// First revisions are multiples of this, and no revision is one less than a multiple.
const FIRST_REVISIONS: u64 = 4096;

/// The next revision of a row. A new row's revision is taken from the time, so that a row that was deleted
/// and created again gets a different one. No row ever has the revision before a first one, so a writer that
/// takes a row for new cannot match an existing row.
pub fn next_revision(last: Option<&u64>, now: ServerTime) -> u64 {
    match last {
        None => now.0.next_multiple_of(FIRST_REVISIONS),
        Some(last) if (last + 2).is_multiple_of(FIRST_REVISIONS) => last + 2,
        Some(last) => last + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_revision_directly_precedes_a_first_revision() {
        let mut revision = next_revision(None, ServerTime(1_795_314_151_950_432));
        for _ in 0..3 * FIRST_REVISIONS {
            let next = next_revision(Some(&revision), ServerTime(0));
            assert!(next > revision, "{next} follows {revision}");
            revision = next;
            let time = ServerTime(revision);
            assert_ne!(next_revision(None, time), revision + 1);
        }
    }
}

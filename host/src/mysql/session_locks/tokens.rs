//! The fencing tokens of locks that depend on a session. They come from a counter of the server, so that an
//! acquire writes nothing.

use mysql_async::Row;

use crate::clock;
use crate::lock::maps::HashMap;
use crate::lock::record::Op;
use crate::lock::{Instant, Key, ServerTime, Token};
use crate::mysql::session::fault::Fault;
use crate::mysql::session::link::{self, Link};
use crate::mysql::session::preflight::Server;
use crate::mysql::sql::{self, COUNTER, LEASES, META, NOW_US};

/// The most tokens of one key that the operations may need.
pub fn tokens_for<'a>(ops: impl Iterator<Item = &'a Op>) -> u64 {
    let mut counts: HashMap<&Key, u64> = HashMap::default();
    for op in ops.filter(|op| matches!(op, Op::Acquire(_))) {
        for key in op.keys() {
            *counts.entry(key).or_default() += 1;
        }
    }
    counts.into_values().max().unwrap_or(0)
}

/// The number of tokens that one number of the server stands for: a group makes at most this many grants of a
/// key.
const PER_NUMBER: u64 = 64;
/// The most tokens that are reserved at a time. Leases in rows are granted above the block, and no token may
/// be far ahead of the clock. So a block ends at the current time, if that leaves [`LEAST_BLOCK`] tokens.
const BLOCK: u64 = PER_NUMBER * 1_000_000;
const LEAST_BLOCK: u64 = PER_NUMBER * 16;

/// Asks for a number that is higher than every number that the server gave before, to any session.
/// `UUID_SHORT` counts in memory, so nothing is written. Ask once the keys are guarded. Returns one row.
///
/// The database has the token of the number `run`, and the last token of the block. After a restart the
/// server's numbers are different, and outside of the block. The block is also of no use if the floor has
/// risen past it, for example because another server was in use meanwhile.
pub fn number<'a>(keys: impl Iterator<Item = &'a Key>) -> String {
    let rows = highest_of_rows(keys);
    format!(
        "SELECT UUID_SHORT() AS n,LAST_INSERT_ID() AS own,run,base,token,GREATEST({rows},floor) AS r,grants_from,{NOW_US} AS now,identity \
         FROM {COUNTER} JOIN {META} USING (id) WHERE id=1"
    )
}

/// Reserves the next block of tokens, above every token that may have been given out, and above every token
/// of these keys in the lease table. Also reserves `tokens` below the block for the caller.
fn reserve<'a>(epoch: u64, tokens: u64, keys: impl Iterator<Item = &'a Key>) -> String {
    let epoch = Token::floor_of_epoch(epoch).0;
    let rows = highest_of_rows(keys);
    // Assignments run from left to right, so the new token uses the new base. The floor rises too: proxies
    // grant leases above the block. They may have read it a second ago, and check that the floor is
    // unchanged.
    format!(
        "UPDATE {COUNTER} SET base=LAST_INSERT_ID(GREATEST(token,{epoch},(SELECT floor FROM {META} WHERE id=1),\
         {rows})+{tokens}+1),run=UUID_SHORT(),\
         token=IF(base+{LEAST_BLOCK}<{NOW_US},LEAST(base+{BLOCK},{NOW_US}),base+{LEAST_BLOCK}) WHERE id=1;{}",
        sql::raise_floor(0)
    )
}

fn highest_of_rows<'a>(keys: impl Iterator<Item = &'a Key>) -> String {
    let list = sql::hexed_list(keys.map(Key::as_str));
    match list.is_empty() {
        true => "0".to_owned(),
        false => {
            format!("(SELECT COALESCE(MAX(token),0) FROM {LEASES} FORCE INDEX (PRIMARY) WHERE k IN ({list}))")
        }
    }
}

/// The new tokens of a batch: the token that they are above, and when grants may begin, on our own clock.
pub type Counted = (Token, Instant);

/// Reads the answer to [`number`] for this many `tokens` of `keys`, and reserves tokens if it has to. `until` is
/// the end of this proxy's membership.
///
/// # Errors
/// [`Fault::Conflict`] if other proxies have used up the tokens meanwhile.
pub async fn counted<'a>(
    link: &mut Link,
    answer: Option<Vec<Row>>,
    tokens: u64,
    keys: impl Iterator<Item = &'a Key> + Clone,
    until: ServerTime,
) -> Result<Counted, Fault> {
    if let Some(counted) = read(&link.server, answer, tokens, until, false)? {
        return Ok(counted);
    }
    let sql = format!("{};{}", reserve(link.sample.epoch, tokens, keys.clone()), number(keys));
    let answer = link.exchange(sql).await?.pop();
    let counted = read(&link.server, answer, tokens, until, true)?;
    counted.ok_or_else(|| Fault::Conflict { why: "the tokens were used up meanwhile".to_owned() })
}

/// Reads the answer to [`number`]. `None` if tokens have to be reserved first. `is_reserved`: this session has
/// reserved them in the same request.
fn read(
    server: &Server,
    answer: Option<Vec<Row>>,
    tokens: u64,
    until: ServerTime,
    is_reserved: bool,
) -> Result<Option<Counted>, Fault> {
    let row = answer.and_then(|mut rows| rows.pop());
    type Columns = (u64, u64, u64, u64, u64, u64, u64, u64, Vec<u8>);
    let read = row.and_then(|row| mysql_async::from_row_opt::<Columns>(row).ok());
    let Some((number, own, run, base, last, above, from, now, used_on)) = read else {
        let why = format!("the row in {COUNTER} is missing: were its tables dropped?");
        return Err(Fault::Broken { why, slug: "schema" });
    };
    link::check_use(server, &used_on)?;
    link::check_member(ServerTime(now), until)?;
    // Not on the clock of the records, which may be that of an earlier server.
    let from = begins(from, now, clock::now());
    if tokens > PER_NUMBER {
        return Ok(is_reserved.then(|| (Token(own - tokens - 1), from)));
    }
    if just_started(number, now) {
        let why = "the server has just started; its numbers can be used from the next second on".to_owned();
        return Err(Fault::Conflict { why });
    }
    let token = number.checked_sub(run).and_then(|n| n.checked_mul(PER_NUMBER)?.checked_add(base));
    let fits = |token: &u64| *token + PER_NUMBER <= last && *token > above;
    Ok(token.filter(fits).map(|token| (Token(token - 1), from)))
}

/// Whether the server was started in this second of its clock or in the last one. `UUID_SHORT` counts from
/// the second of the start, so a server that restarts within the same second would give a number again.
fn just_started(number: u64, now_us: u64) -> bool {
    let started_s = (number >> 24) & u64::from(u32::MAX);
    (started_s..=started_s + 1).contains(&(now_us / 1_000_000))
}

/// When grants may begin, on our own clock. `from` and `now` are by the clock of the server that answered.
fn begins(from: u64, now: u64, own: Instant) -> Instant {
    own.plus_us(from.saturating_sub(now))
}

#[cfg(test)]
mod tests {
    use super::super::Time;
    use super::*;

    #[test]
    fn a_wait_keeps_its_length_on_a_server_with_another_clock() {
        let time = Time::default();
        time.calibrate(ServerTime(1_000_000_000), Instant(0));
        let own = Instant(5_000_000);
        let left = |from, now| time.at(begins(from, now, own)).us_since(time.at(own));
        assert_eq!(left(1_019_000_000, 1_005_000_000), 14_000_000, "the first one");
        assert_eq!(left(1_009_000_000, 995_000_000), 14_000_000, "one that is ten seconds behind it");
        assert_eq!(left(1_009_000_000, 1_015_000_000), 0, "it was over before");
    }

    #[test]
    fn a_token_number_is_used_only_after_the_second_of_the_server_start() {
        let number = |started_s: u64| (7 << 56) + (started_s << 24) + 3;
        let started = 1_795_314_151;
        for (now_us, just) in [(0, true), (999_999, true), (1_999_999, true), (2_000_000, false)] {
            assert_eq!(just_started(number(started), started * 1_000_000 + now_us), just, "{now_us}");
        }
        assert!(!just_started(number(started), (started - 60) * 1_000_000), "the clock was set back since");
    }
}

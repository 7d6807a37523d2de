//! Statements as text. Values are numbers, hexadecimal or quoted here: nothing else gets in.
//!
//! Text, not prepared statements, where several go in one packet: that exists for text only.

use std::fmt::Write as _;

use mysql_async::Value;

use super::schema::LATEST_FLOOR;
use crate::lock::{Key, ServerTime};

pub const LEASES: &str = "lockkeeper_lease";
pub const META: &str = "lockkeeper_meta";
pub const HEARTBEAT: &str = "lockkeeper_mark";
pub const COUNTER: &str = "lockkeeper_token";
pub const CLOCK: &str = "lockkeeper_clock";
pub const ROWS: &str = "lockkeeper_row";

/// The server's clock in microseconds since 1970. `UTC_TIMESTAMP` cannot be faked with `SET
/// timestamp` by anyone but this session, and does not follow its time zone.
pub const NOW_US: &str = "TIMESTAMPDIFF(MICROSECOND,'1970-01-01',UTC_TIMESTAMP(6))";

/// The same at the moment it is asked for, where [`NOW_US`] stands still while a statement runs.
/// `SYSDATE` follows the session's time zone, which every connection sets to UTC.
const EXACT_NOW_US: &str = "TIMESTAMPDIFF(MICROSECOND,'1970-01-01',SYSDATE(6))";

/// Second column: whether [`EXACT_NOW_US`] is what it says. A server can be told to have `SYSDATE` stand still, too.
pub const SYSDATE_MOVES: &str = "SELECT SLEEP(0.001),SYSDATE(6)>UTC_TIMESTAMP(6)";

/// One row as it is to be written.
pub struct RowWrite {
    pub key: Key,
    pub token: u64,
    pub until: ServerTime,
    /// Rises with every write of a row: what "still the same row" means.
    pub revision: u64,
    pub state: Vec<u8>,
}

/// What is read at the start of every transaction, and to calibrate the clock. One row: time,
/// epoch, floor, the floor of the last [`raise_above_all`], counter, grants_from, read_only, the server that the tables are
/// used on.
///
/// `read_only` is looked at here because a privileged account may write in spite of it.
pub fn sample() -> String {
    format!(
        "SELECT {NOW_US},epoch,floor,COALESCE((SELECT floor FROM {META} WHERE id=2),0),token,grants_from,\
         @@GLOBAL.read_only,identity FROM {META} \
         JOIN {COUNTER} USING (id) WHERE id=1"
    )
}

/// One row: the server that the tables are used on.
pub fn used_on() -> String {
    format!("SELECT identity FROM {META} WHERE id=1")
}

/// One row: the epoch. The statement locks the row, so it reads what this node has applied of the writes of other nodes.
pub fn epoch() -> String {
    format!("SELECT epoch FROM {META} WHERE id=1 LOCK IN SHARE MODE")
}

/// Raises the floor above what it was, and at least to `least` (a number, or an expression). So every rise begins
/// another [`CacheScope`](super::cache::CacheScope), and rows that were remembered before it are forgotten.
pub fn raise_floor(least: impl std::fmt::Display) -> String {
    format!("UPDATE {META} SET floor=GREATEST(floor+1,{least}) WHERE id=1")
}

/// Locks the rows of these keys, in the order of the keys, and then reads the clock.
///
/// The order matters twice: the time is that of a moment at which the rows are locked, and a row
/// that clean-up has deleted is missing only where its token is in the floor already.
pub fn lock_rows<'a>(keys: impl Iterator<Item = &'a Key>) -> String {
    // FORCE INDEX: on a small table the optimizer prefers a scan, which would wait for the locks
    // of rows that are not asked for.
    let mut sql =
        format!("BEGIN;SELECT k,token,revision,state FROM {LEASES} FORCE INDEX (PRIMARY) WHERE k IN (");
    for (n, key) in keys.enumerate() {
        if n > 0 {
            sql.push(',');
        }
        hex(&mut sql, key.as_str().as_bytes());
    }
    sql.push_str(") ORDER BY k FOR UPDATE;");
    sql.push_str(&sample());
    sql
}

/// Writes rows. `stored` rows are locked by this transaction, so they exist and none is inserted;
/// the others must not exist, or error 1062 says so.
pub fn write_rows(rows: &[RowWrite], stored: bool) -> Vec<u8> {
    let mut sql = values(rows);
    if stored {
        // VALUES() is the only form that both servers have.
        sql.extend_from_slice(
            b" ON DUPLICATE KEY UPDATE token=VALUES(token),until_us=VALUES(until_us),\
              revision=VALUES(revision),state=VALUES(state)",
        );
    }
    sql
}

fn values(rows: &[RowWrite]) -> Vec<u8> {
    let size = rows.iter().map(|row| row.state.len() + 2 * row.key.as_str().len() + 100).sum::<usize>();
    let mut sql = Vec::with_capacity(size + 300);
    sql.extend_from_slice(b"INSERT INTO ");
    sql.extend_from_slice(LEASES.as_bytes());
    sql.extend_from_slice(b" (k,token,until_us,revision,state) VALUES ");
    for (n, row) in rows.iter().enumerate() {
        if n > 0 {
            sql.push(b',');
        }
        let mut head = String::from("(");
        hex(&mut head, row.key.as_str().as_bytes());
        let _ = write!(head, ",{},{},{},", row.token, row.until.0, row.revision);
        sql.extend_from_slice(head.as_bytes());
        quote(&mut sql, &row.state);
        sql.push(b')');
    }
    sql
}

/// The end of a transaction, which does not come to its COMMIT where the server's clock is past
/// `deadline`, or where `floor` has moved since it was read.
///
/// It stands right before the COMMIT: a server that is paused anywhere before it applies nothing
/// late. The floor is compared where rows are inserted: if clean-up had deleted such a row after
/// the transaction looked for it, a token could be given out twice.
pub fn commit_before(deadline: ServerTime, floor: Option<u64>) -> String {
    let mut late = format!("{NOW_US}>{}", deadline.0);
    if let Some(floor) = floor {
        let _ = write!(late, " OR (SELECT floor FROM {META} WHERE id=1)<>{floor}");
    }
    stop_if(&late) + ";COMMIT"
}

/// Raises the floor above every token that was given out: keys of other names begin there, so that the tokens
/// of a resource rise whatever its keys are called.
///
/// The time will do, for a key has far less than one grant a microsecond since the floor was last set. Where
/// the clock says less than the floor, or hardly more, some tokens are left out: more than a key is given while
/// the clock catches up. They are few where the clock was not set back: tokens stay close to the clock (see `schema`).
///
/// The floor that was reached is kept in a row of its own, for [`Env::renamed`](crate::lock::record::Env::renamed).
pub fn raise_above_all() -> String {
    let last = format!("GREATEST(floor,(SELECT token FROM {COUNTER} WHERE id=1))");
    let raise = raise_floor(format_args!(
        "IF({last}+{CLOCK_US}<{NOW_US} AND {NOW_US}<{LATEST_FLOOR},{NOW_US},\
         {last}+IF({last}<{NOW_US}+{SET_BACK_US},{LEFT_OUT},{LEFT_OUT_OF_LONG}))"
    ));
    format!(
        "{raise};INSERT INTO {META} (id,version,identity,epoch,floor,grants_from) \
         SELECT 2,version,'',0,floor,0 FROM {META} WHERE id=1 ON DUPLICATE KEY UPDATE floor=VALUES(floor)"
    )
}

/// The clock is ahead of the floor by more than that, in microseconds, where it tells what was given out.
const CLOCK_US: u64 = 10_000;
/// Where the clock is behind the floor by more than that, in microseconds, it was set back.
const SET_BACK_US: u64 = 10_000_000;
/// Tokens that are left out where the clock does not tell what was given out: more than a key is given in the time by which
/// the clock is behind, and in an hour of a clock that was set back.
const LEFT_OUT: u64 = 1 << 18;
const LEFT_OUT_OF_LONG: u64 = 1 << 28;

/// Fails, and so keeps the statements behind it from being run, where the condition holds: with error
/// 1690, as no number is as large as the exponential. Both servers have it, and need less than half
/// the time that a subquery of two rows takes, which would do as well. Not as a DO: MariaDB forgives
/// that its errors.
fn stop_if(condition: &str) -> String {
    format!("SET @late={}", huge_if(condition))
}

/// One, or error 1690.
fn huge_if(condition: &str) -> String {
    format!("EXP(IF({condition},1000,0))")
}

/// Writes so many rows in one transaction that is one statement, if they are as they are remembered; all
/// or none of them.
///
/// A row that is stored must still have the revision before its new one, or error 1264 says so: its revision is
/// set to -1, which strict mode refuses. Any other row is inserted, and must be missing:
/// [`next_revision`](super::batch::next_revision) sees to it that no stored row has the revision before a
/// first one.
///
/// Error 1690 where the server's clock is not within the bounds, or where the floor is not the one that all these
/// rows were remembered under: a row that clean-up has deleted would be made again. The floor is locked, so it does
/// not rise while the statement runs. The clock is looked at before the first row and the last one, as rows' locks may be waited for; the last
/// one's for as long as [`LOCK_WAIT_S`](super::link::LOCK_WAIT_S) after it.
pub fn write_if_same(rows: usize) -> String {
    let floor = format!("(SELECT floor FROM {META} WHERE id=1 LOCK IN SHARE MODE)");
    let first = huge_if(&format!("{floor}<>? OR {EXACT_NOW_US} NOT BETWEEN ? AND ?"));
    let mut sql =
        format!("INSERT INTO {LEASES} (k,token,until_us,revision,state) VALUES (?,?*{first},?,?,?)");
    for _ in 2..rows {
        sql.push_str(",(?,?,?,?,?)");
    }
    if rows > 1 {
        let last = huge_if(&format!("{EXACT_NOW_US}>?"));
        let _ = write!(sql, ",(?,?*{last},?,?,?)");
    }
    sql.push_str(
        " ON DUPLICATE KEY UPDATE token=VALUES(token),until_us=VALUES(until_us),state=VALUES(state),\
         revision=IF(revision+1=VALUES(revision),VALUES(revision),-1)",
    );
    sql
}

/// What stands for the question marks of [`write_if_same`].
pub fn write_if_same_params(rows: Vec<RowWrite>, floor: u64, bounds: (ServerTime, ServerTime)) -> Vec<Value> {
    let (from, to) = bounds;
    let last = rows.len() - 1;
    let mut params = Vec::with_capacity(rows.len() * 5 + 4);
    for (n, RowWrite { key, token, until, revision, state }) in rows.into_iter().enumerate() {
        params.extend([key.as_str().as_bytes().into(), token.into()]);
        if n == 0 {
            params.extend([floor.into(), from.0.into(), to.0.into()]);
        } else if n == last {
            params.push(to.0.into());
        }
        params.extend([until.0.into(), revision.into(), state.into()]);
    }
    params
}

/// The statement as text: each value in the place of its question mark.
pub fn fill_in(sql: &str, params: &[Value]) -> Vec<u8> {
    let mut filled = Vec::with_capacity(sql.len());
    let mut parts = sql.split('?');
    filled.extend_from_slice(parts.next().unwrap_or_default().as_bytes());
    for (value, part) in params.iter().zip(parts) {
        match value {
            Value::Bytes(bytes) => quote(&mut filled, bytes),
            number => filled.extend_from_slice(number.as_sql(false).as_bytes()),
        }
        filled.extend_from_slice(part.as_bytes());
    }
    filled
}

/// Appends `x'…'`.
pub fn hex(sql: &mut String, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    sql.reserve(bytes.len() * 2 + 3);
    sql.push_str("x'");
    for byte in bytes {
        sql.push(char::from(DIGITS[usize::from(byte >> 4)]));
        sql.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    sql.push('\'');
}

/// Appends `_binary'…'`. Half the size of hexadecimal, and readable in the server's logs. The session
/// has backslash escapes on, and UTF-8 as its character set.
pub fn quote(sql: &mut Vec<u8>, text: &[u8]) {
    sql.extend_from_slice(b"_binary'");
    let mut rest = text;
    while let Some(at) = memchr::memchr3(b'\'', b'\\', 0, rest) {
        sql.extend_from_slice(&rest[..at]);
        sql.extend_from_slice(&[b'\\', if rest[at] == 0 { b'0' } else { rest[at] }]);
        rest = &rest[at + 1..];
    }
    sql.extend_from_slice(rest);
    sql.push(b'\'');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_leave_its_quotes() {
        let mut sql = Vec::new();
        quote(&mut sql, b"a'b\\c\0d\"");
        assert_eq!(sql, b"_binary'a\\'b\\\\c\\0d\"'");
    }

    #[test]
    fn keys_are_hexadecimal() {
        let key = Key::new("a'\u{e9}").expect("it is a key");
        assert!(lock_rows(std::iter::once(&key)).contains("(x'6127c3a9')"));
    }

    #[test]
    fn every_question_mark_has_a_value() {
        for rows in 1..5 {
            let row = |n: usize| RowWrite {
                key: Key::new(&format!("k?{n}")).expect("it is a key"),
                token: 7,
                until: ServerTime(9),
                revision: 11,
                state: b"'?".to_vec(),
            };
            let sql = write_if_same(rows);
            let params =
                write_if_same_params((0..rows).map(row).collect(), 3, (ServerTime(4), ServerTime(5)));
            assert_eq!(sql.matches('?').count(), params.len());
            let text = String::from_utf8(fill_in(&sql, &params)).expect("it is text");
            assert!(text.contains("VALUES (_binary'k?0',7*EXP(IF("), "{text}");
            assert!(text.contains("<>3 OR ") && text.contains(" NOT BETWEEN 4 AND 5,"), "{text}");
            assert_eq!(text.matches(",9,11,_binary'\\'?')").count(), rows, "{text}");
            assert_eq!(
                text.contains("7*EXP(IF(TIMESTAMPDIFF(MICROSECOND,'1970-01-01',SYSDATE(6))>5,"),
                rows > 1,
                "{text}"
            );
        }
    }
}

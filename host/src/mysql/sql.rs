//! Builds statements as text. Values are numbers, hexadecimal or quoted, so nothing else gets into a
//! statement.
//!
//! Packets of several statements are text because a prepared statement cannot hold several.

use std::fmt::Write as _;

use mysql_async::Value;

use crate::lock::{Key, ServerTime};

/// The schema version of this program. A higher version is refused, a lower one is migrated.
pub const VERSION: u32 = 3;

/// The table of leases: a row for each key.
pub const LEASES: &str = "lockkeeper_lease";
/// The table of the row that all proxies share: schema version, identity, epoch, floor.
pub const META: &str = "lockkeeper_meta";
/// The table of the in-use heartbeat.
pub const HEARTBEAT: &str = "lockkeeper_mark";
/// The table of the tokens of keys that have no row in [`LEASES`].
pub const COUNTER: &str = "lockkeeper_token";
/// The table of what proxies have recorded about the server's clock.
pub const CLOCK: &str = "lockkeeper_clock";
/// The table of the rows that guard keys by a row lock.
pub const ROWS: &str = "lockkeeper_row";

/// The columns of a row of [`LEASES`] that is decided on or shown.
pub const ROW: &str = "k,token,revision,state";

/// The server's clock in microseconds since 1970. Only this session's `SET timestamp` could change
/// `UTC_TIMESTAMP`, and the session's time zone does not.
pub const NOW_US: &str = "TIMESTAMPDIFF(MICROSECOND,'1970-01-01',UTC_TIMESTAMP(6))";

/// Like [`NOW_US`], but evaluated when it is reached; [`NOW_US`] does not change within a statement.
/// `SYSDATE` uses the session's time zone, which every connection sets to UTC.
const EXACT_NOW_US: &str = "TIMESTAMPDIFF(MICROSECOND,'1970-01-01',SYSDATE(6))";

/// Second column: whether `SYSDATE` moves within a statement. A server option can make it stand still.
pub const SYSDATE_MOVES: &str = "SELECT SLEEP(0.001),SYSDATE(6)>UTC_TIMESTAMP(6)";

/// Batches of up to this many rows use prepared statements, which cost a sixth less than text. The server
/// keeps one statement of each size for each connection, so there is a bound.
pub const PREPARED_ROWS: usize = 64;

/// How long a statement waits for a row lock, in seconds.
pub const LOCK_WAIT_S: u32 = 1;
/// The server ends a session that sends nothing for this long, in seconds. That also ends the transaction of
/// a proxy that was paused or cut off. Until then the rows of the transaction stay locked, so this is less
/// than a call of another proxy waits, unless `store.timeout_ms` is set lower.
pub const SESSION_TIMEOUT_S: u32 = 3;

/// A row to be written.
pub struct RowWrite {
    pub key: Key,
    pub token: u64,
    pub until: ServerTime,
    /// Rises with every write of a row. It identifies the content of the row.
    pub revision: u64,
    pub state: Vec<u8>,
}

/// Reads the clock and the shared row, at the start of every transaction and to calibrate the clock. One row:
/// time, epoch, floor, floor of the last [`raise_above_all`], counter, grants_from, read_only, and the server
/// that the tables are used on.
///
/// `read_only` is included because a privileged account may write in spite of it.
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

/// One row: the epoch. The statement locks the row, so it sees the writes of other nodes that this node has
/// applied.
pub fn epoch() -> String {
    format!("SELECT epoch FROM {META} WHERE id=1 LOCK IN SHARE MODE")
}

/// Raises the floor by at least one, and at least to `least` (a number or an expression). So every rise
/// begins a new [`CacheScope`](super::pipeline::cache::CacheScope), and rows that were remembered before it are
/// forgotten.
pub fn raise_floor(least: impl std::fmt::Display) -> String {
    format!("UPDATE {META} SET floor=GREATEST(floor+1,{least}) WHERE id=1")
}

/// Locks the rows of these keys, in the order of the keys, and then reads the clock.
///
/// The order has two purposes. The time is read while the rows are locked. And if clean-up has deleted a row,
/// its token is already in the floor when the row is found missing.
pub fn lock_rows<'a>(keys: impl Iterator<Item = &'a Key>) -> String {
    // FORCE INDEX: on a small table the optimizer prefers a scan, which would wait for the locks of other
    // rows.
    format!(
        "BEGIN;SELECT {ROW} FROM {LEASES} FORCE INDEX (PRIMARY) WHERE k IN ({}) \
         ORDER BY k FOR UPDATE;{}",
        hexed_list(keys.map(Key::as_str)),
        sample()
    )
}

/// Writes rows. If `stored`, this transaction has locked the rows, so they exist and none is inserted.
/// Otherwise they must not exist, or the statement fails with error 1062.
pub fn write_rows(rows: &[RowWrite], stored: bool) -> Vec<u8> {
    let mut sql = values(rows);
    if stored {
        // VALUES() is the only form that both servers support.
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

/// The end of a transaction. It stops before the COMMIT if the server's clock is past `deadline`, or if
/// `floor` has changed since it was read.
///
/// The check comes right before the COMMIT, so a server that was paused anywhere before it applies nothing
/// late. The floor is compared if rows are inserted: if clean-up had deleted such a row after the transaction
/// looked for it, a token could be given out twice.
pub fn commit_before(deadline: ServerTime, floor: Option<u64>) -> String {
    let mut late = format!("{NOW_US}>{}", deadline.0);
    if let Some(floor) = floor {
        let _ = write!(late, " OR (SELECT floor FROM {META} WHERE id=1)<>{floor}");
    }
    stop_if(&late) + ";COMMIT"
}

/// Raises the floor above every token that was given out. Renamed keys begin there, so the tokens of a
/// resource rise even if its key gets another name.
///
/// The time is high enough, because a key has far less than one grant a microsecond since the floor was last
/// set. If the clock is behind the floor, or hardly ahead of it, some tokens are skipped instead: more than a
/// key gets until the clock has caught up. They are few unless the clock was set back, because tokens stay
/// close to the clock (see [`election`](super::failover::election)).
///
/// The new floor is also kept in a row of its own, for [`Env::renamed`](crate::lock::record::Env::renamed).
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

/// A clock that is past this is not used for a floor: tokens end at 2^53.
pub const LATEST_FLOOR: u64 = 1 << 52;

/// If the clock is ahead of the floor by more than this, in microseconds, it is above all tokens that were
/// given out.
const CLOCK_US: u64 = 10_000;
/// If the clock is behind the floor by more than this, in microseconds, it was set back.
const SET_BACK_US: u64 = 10_000_000;
/// The number of tokens that are skipped if the clock cannot be used: more than a key gets in the time by
/// which the clock is behind; and, for a clock that was set back, in an hour.
const LEFT_OUT: u64 = 1 << 18;
const LEFT_OUT_OF_LONG: u64 = 1 << 28;

/// Fails with error 1690 if the condition holds, so that the later statements of the packet do not run: the
/// exponential is too large for a number. Both servers have it, and it takes less than half the time of a
/// subquery that returns two rows. DO cannot be used: MariaDB ignores errors in it.
fn stop_if(condition: &str) -> String {
    format!("SET @late={}", huge_if(condition))
}

/// One, or error 1690 if the condition holds.
fn huge_if(condition: &str) -> String {
    format!("EXP(IF({condition},1000,0))")
}

/// Writes this many rows, all or none, in one transaction of one statement, if they are as remembered.
///
/// A stored row must still have the revision before its new one. Otherwise its revision is set to -1, which
/// strict mode refuses with error 1264. Any other row is inserted, and must be missing:
/// [`next_revision`](super::pipeline::rows::next_revision) ensures that no stored row has the revision before a first
/// one.
///
/// The statement fails with error 1690 if the server's clock is not within the bounds, or if the floor is not
/// the one under which the rows were remembered; otherwise it could create a row again that clean-up has
/// deleted. The floor's row is locked, so the floor does not rise while the statement runs. The clock is read
/// before the first row and before the last one, because the statement may wait for row locks. After the last
/// reading it may wait for [`LOCK_WAIT_S`].
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

/// The parameters of [`write_if_same`].
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

/// The statement as text, with each value in place of its question mark.
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

/// `x'…'`.
pub fn hexed(bytes: &[u8]) -> String {
    let mut sql = String::new();
    hex(&mut sql, bytes);
    sql
}

/// `x'…',x'…'`: keys of rows.
pub fn hexed_list<K: AsRef<[u8]>>(keys: impl IntoIterator<Item = K>) -> String {
    let mut sql = String::new();
    for (n, key) in keys.into_iter().enumerate() {
        if n > 0 {
            sql.push(',');
        }
        hex(&mut sql, key.as_ref());
    }
    sql
}

/// Appends `_binary'…'`. This is half the size of hexadecimal, and readable in the server's logs. It needs a
/// session with backslash escapes on and the character set UTF-8.
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
    fn keys_are_written_in_hexadecimal() {
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

//! Statements as text. Values are numbers, hexadecimal or quoted here: nothing else gets in.
//!
//! Text, not prepared statements: a batch is several statements in one packet, and that exists for
//! text only.

use std::fmt::Write as _;

use mysql_async::Params;

use crate::lock::{Key, ServerTime};

pub const LEASES: &str = "lockkeeper_lease";
pub const META: &str = "lockkeeper_meta";
pub const MARK: &str = "lockkeeper_mark";
pub const COUNTER: &str = "lockkeeper_token";
pub const ROWS: &str = "lockkeeper_row";

/// The server's clock in microseconds since 1970. `UTC_TIMESTAMP` cannot be faked with `SET
/// timestamp` by anyone but this session, and does not follow its time zone.
pub const NOW_US: &str = "TIMESTAMPDIFF(MICROSECOND,'1970-01-01',UTC_TIMESTAMP(6))";

/// One row as it is to be written.
#[derive(Clone)]
pub struct RowWrite {
    pub key: Key,
    pub token: u64,
    pub until: ServerTime,
    /// Rises with every write of a row: what "still the same row" means.
    pub revision: u64,
    pub state: Vec<u8>,
}

/// What is read at the start of every transaction, and to calibrate the clock. One row: time,
/// epoch, floor, counter, grants_from, read_only.
///
/// `read_only` is looked at here because a privileged account may write in spite of it.
pub fn sample() -> String {
    format!(
        "SELECT {NOW_US},epoch,floor,token,grants_from,@@GLOBAL.read_only FROM {META} \
         JOIN {COUNTER} USING (id) WHERE id=1"
    )
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
/// late. The floor is compared where rows are inserted: had clean-up deleted such a row after
/// the transaction looked for it, a token could be given out twice.
pub fn commit_before(deadline: ServerTime, floor: Option<u64>) -> String {
    let mut late = format!("{NOW_US}>{}", deadline.0);
    if let Some(floor) = floor {
        let _ = write!(late, " OR (SELECT floor FROM {META} WHERE id=1)<>{floor}");
    }
    stop_if(&late) + ";COMMIT"
}

/// Fails, and so keeps the statements behind it from being run, where the condition holds: with error
/// 1690, as no number is as large as the exponential. Both servers have it, and need less than half
/// the time that a subquery of two rows takes, which would do as well. Not as a DO: MariaDB forgives
/// that its errors.
fn stop_if(condition: &str) -> String {
    format!("SET @late=EXP(IF({condition},1000,0))")
}

/// Writes one row if it still has a token and revision and the server's clock is within bounds;
/// affected rows is 1 or 0, whatever CLIENT_FOUND_ROWS says, as the revision always changes. The one
/// statement that is prepared: it comes alone.
pub fn write_if_same() -> String {
    format!(
        "UPDATE {LEASES} SET token=?,until_us=?,revision=?,state=? \
         WHERE k=? AND token=? AND revision=? AND {NOW_US} BETWEEN ? AND ?"
    )
}

/// What [`write_if_same`] is run with; the row's revision before was one less.
pub fn write_if_same_params(row: RowWrite, old_token: u64, bounds: (ServerTime, ServerTime)) -> Params {
    let RowWrite { key, token, until, revision, state } = row;
    let key = key.as_str().as_bytes();
    let (from, to) = bounds;
    (token, until.0, revision, state, key, old_token, revision - 1, from.0, to.0).into()
}

/// Writes rows that are all stored, each if it still has the revision before its new one; all or none
/// of them, and only while the server's clock is within bounds. Fails with error 1264 where a row
/// has changed (the revision is set to -1, which strict mode refuses), and as [`stop_if`] does where a
/// row is gone or the time is not within bounds.
///
/// `inserts` are rows that must be missing, or error 1062 says so; `floor` is compared for them as in
/// [`commit_before`].
pub fn write_all_if_same(
    updates: &[RowWrite],
    inserts: &[RowWrite],
    floor: u64,
    bounds: (ServerTime, ServerTime),
) -> Vec<u8> {
    let (from, to) = bounds;
    let mut sql = b"BEGIN;".to_vec();
    let mut stop = format!("{NOW_US} NOT BETWEEN {} AND {}", from.0, to.0);
    if !inserts.is_empty() {
        sql.extend_from_slice(&values(inserts));
        sql.push(b';');
        let _ = write!(stop, " OR (SELECT floor FROM {META} WHERE id=1)<>{floor}");
    }
    if !updates.is_empty() {
        sql.extend_from_slice(&values(updates));
        sql.extend_from_slice(
            b" ON DUPLICATE KEY UPDATE token=VALUES(token),until_us=VALUES(until_us),state=VALUES(state),\
              revision=IF(revision+1=VALUES(revision),VALUES(revision),-1);",
        );
        // Of the last statement: a row that is updated counts twice, one that is inserted once.
        let _ = write!(stop, " OR ROW_COUNT()<>{}", updates.len() * 2);
    }
    sql.extend_from_slice(stop_if(&stop).as_bytes());
    sql.extend_from_slice(b";COMMIT");
    sql
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
    for byte in text {
        match byte {
            b'\'' | b'\\' => sql.extend_from_slice(&[b'\\', *byte]),
            0 => sql.extend_from_slice(b"\\0"),
            _ => sql.push(*byte),
        }
    }
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
}

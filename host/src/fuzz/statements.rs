//! Values stay within their literals, as the lexer of MySQL and MariaDB reads a statement.
//!
//! The rules are those of the manual, "String Literals" and "Hexadecimal Literals", for a session without
//! `NO_BACKSLASH_ESCAPES` and `ANSI_QUOTES`: every session of the proxy sets its `sql_mode`
//! (`mysql/session/link.rs`). Hexadecimal literals are the same in every mode.

use arbitrary::{Result, Unstructured};
use mysql_async::Value;

use crate::lock::{Key, ServerTime};
use crate::mysql::sql::{RowWrite, fill_in, hexed, quote, write_if_same, write_if_same_params, write_rows};

/// A part of a statement.
#[derive(Debug, PartialEq)]
enum Piece {
    /// The bytes that a literal stands for.
    Literal(Vec<u8>),
    /// A byte outside literals.
    Code(u8),
}

pub fn hold(u: &mut Unstructured<'_>) -> Result<()> {
    let text: &[u8] = u.arbitrary()?;
    let mut quoted = Vec::new();
    quote(&mut quoted, text);
    let expected = b"_binary".iter().map(|byte| Piece::Code(*byte)).chain([Piece::Literal(text.to_vec())]);
    assert_eq!(lex(&quoted, false), Some(expected.collect()), "{}", String::from_utf8_lossy(&quoted));
    for no_backslash_escapes in [false, true] {
        let pieces = lex(hexed(text).as_bytes(), no_backslash_escapes);
        assert_eq!(pieces, Some(vec![Piece::Literal(text.to_vec())]));
    }
    let rows = (0..u.int_in_range(1..=3)?).map(|_| row(u)).collect::<Result<Vec<_>>>()?;
    let expected: Vec<Vec<u8>> =
        rows.iter().flat_map(|row| [row.key.as_str().as_bytes().to_vec(), row.state.clone()]).collect();
    let write = write_rows(&rows, u.arbitrary()?);
    assert_eq!(literals(&write), expected, "{}", String::from_utf8_lossy(&write));
    let sql = write_if_same(rows.len());
    let params = write_if_same_params(rows, 3, (ServerTime(4), ServerTime(5)));
    let (filled, bare) = (fill_in(&sql, &params), fill_in(&sql, &emptied(&params)));
    let found: Vec<Vec<u8>> = literals(&filled).into_iter().filter(|text| text != b"1970-01-01").collect();
    assert_eq!(found, expected, "{}", String::from_utf8_lossy(&filled));
    // The values change nothing of the statement around them.
    assert_eq!(code(&filled), code(&bare));
    Ok(())
}

fn row(u: &mut Unstructured<'_>) -> Result<RowWrite> {
    let key = Key::new(u.arbitrary()?).or_else(|| Key::new("k?")).expect("it is a key");
    let state = match u.ratio(1, 4)? {
        true => b"'),('?\\".to_vec(),
        false => u.arbitrary::<&[u8]>()?.to_vec(),
    };
    Ok(RowWrite {
        key,
        token: u.arbitrary()?,
        until: ServerTime(u.arbitrary()?),
        revision: u.arbitrary()?,
        state,
    })
}

fn emptied(params: &[Value]) -> Vec<Value> {
    let empty = |value: &Value| match value {
        Value::Bytes(_) => Value::Bytes(Vec::new()),
        other => other.clone(),
    };
    params.iter().map(empty).collect()
}

fn literals(sql: &[u8]) -> Vec<Vec<u8>> {
    let pieces = lex(sql, false).expect("every literal ends");
    let literal = |piece| match piece {
        Piece::Literal(text) => Some(text),
        Piece::Code(_) => None,
    };
    pieces.into_iter().filter_map(literal).collect()
}

fn code(sql: &[u8]) -> Vec<u8> {
    let pieces = lex(sql, false).expect("every literal ends");
    let code = |piece| match piece {
        Piece::Literal(_) => b'\'',
        Piece::Code(byte) => byte,
    };
    pieces.into_iter().map(code).collect()
}

/// `None` if a literal does not end.
fn lex(sql: &[u8], no_backslash_escapes: bool) -> Option<Vec<Piece>> {
    let (mut pieces, mut at) = (Vec::new(), 0);
    while at < sql.len() {
        match sql[at] {
            quote @ (b'\'' | b'"' | b'`') => {
                let (mut text, mut end) = (Vec::new(), at + 1);
                loop {
                    match (*sql.get(end)?, sql.get(end + 1)) {
                        (byte, Some(next)) if byte == quote && *next == quote => {
                            text.push(quote);
                            end += 2;
                        }
                        (byte, _) if byte == quote => break,
                        (b'\\', next) if quote != b'`' && !no_backslash_escapes => {
                            text.extend(unescaped(*next?));
                            end += 2;
                        }
                        (byte, _) => {
                            text.push(byte);
                            end += 1;
                        }
                    }
                }
                at = end + 1;
                let is_hex = matches!(pieces.last(), Some(Piece::Code(b'x' | b'X')));
                if is_hex {
                    pieces.pop();
                    text = unhexed(&text)?;
                }
                pieces.push(Piece::Literal(text));
            }
            code => {
                pieces.push(Piece::Code(code));
                at += 1;
            }
        }
    }
    Some(pieces)
}

/// What `\` and this byte stand for.
fn unescaped(byte: u8) -> impl Iterator<Item = u8> {
    let (keeps_backslash, byte) = match byte {
        b'0' => (false, 0),
        b'b' => (false, 8),
        b'n' => (false, b'\n'),
        b'r' => (false, b'\r'),
        b't' => (false, b'\t'),
        b'Z' => (false, 26),
        b'%' | b'_' => (true, byte),
        other => (false, other),
    };
    keeps_backslash.then_some(b'\\').into_iter().chain([byte])
}

fn unhexed(digits: &[u8]) -> Option<Vec<u8>> {
    let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    digits.len().is_multiple_of(2).then(|| digits.chunks(2).map(pair).collect()).flatten()
}

#[test]
fn values_stay_within_their_literals() {
    super::input::check(hold);
}

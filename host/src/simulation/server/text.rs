//! Parses the text of statements into values and words.

use super::Failure;
use super::value::Value;

/// A word of a statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// A name or keyword, as written.
    Name(String),
    /// `@name`.
    Variable(String),
    /// `@@GLOBAL.name`.
    System(String),
    /// The question mark with this index.
    Parameter(usize),
    Sign(&'static str),
}

/// Longer signs come first.
const SIGNS: [&str; 15] = ["<>", "<=", ">=", "(", ")", ",", ";", "=", "<", ">", "+", "-", "*", ".", "/"];

/// A text without its values.
pub struct Shape {
    /// The text with a question mark for each value.
    pub text: Vec<u8>,
    /// The values of all question marks, including those of the original text.
    pub values: Vec<Value>,
}

/// Takes the values out of the text of one or more statements, so that statements that differ only in values have the
/// same text.
///
/// # Errors
/// If a value is not in MySQL's syntax, or the number of question marks differs from that of `parameters`.
pub fn shape(sql: &[u8], parameters: &[Value]) -> Result<Shape, Failure> {
    let mut shape = Shape { text: Vec::with_capacity(sql.len()), values: Vec::new() };
    let mut parameters = parameters.iter();
    let mut rest = sql;
    while let Some(&byte) = rest.first() {
        let (value, len) = match byte {
            b'\'' => quoted(rest)?,
            b'_' if rest.starts_with(b"_binary'") => {
                let (value, len) = quoted(&rest[7..])?;
                (value, len + 7)
            }
            b'x' if rest.starts_with(b"x'") => hexadecimal(rest)?,
            b'0'..=b'9' => number(rest),
            b'?' => {
                let next = parameters.next().cloned();
                (next.ok_or_else(|| Failure::new(1210, "too few parameters"))?, 1)
            }
            _ => {
                let len = match byte {
                    b'`' => 2 + rest[1..].iter().take_while(|byte| **byte != b'`').count(),
                    _ => rest.iter().take_while(|byte| is_of_name(**byte)).count().max(1),
                };
                let len = len.min(rest.len());
                shape.text.extend_from_slice(&rest[..len]);
                rest = &rest[len..];
                continue;
            }
        };
        shape.text.push(b'?');
        shape.values.push(value);
        rest = &rest[len..];
    }
    if parameters.next().is_some() {
        return Err(Failure::new(1210, "too many parameters"));
    }
    Ok(shape)
}

/// Splits the text of a [`Shape`] into words.
///
/// # Errors
/// If the text has a sign that no statement has.
pub fn words(text: &[u8]) -> Result<Vec<Word>, Failure> {
    let mut words = Vec::new();
    let mut parameters = 0;
    let mut at = 0;
    while at < text.len() {
        let byte = text[at];
        let rest = &text[at..];
        if byte.is_ascii_whitespace() {
            at += 1;
        } else if byte == b'`' {
            let len = rest[1..].iter().take_while(|byte| **byte != b'`').count();
            words.push(Word::Name(String::from_utf8_lossy(&rest[1..1 + len]).into_owned()));
            at += len + 2;
        } else if is_of_name(byte) || byte == b'@' {
            let ats = rest.iter().take_while(|byte| **byte == b'@').count();
            let is_part = |byte: &u8| is_of_name(*byte) || (ats == 2 && *byte == b'.');
            let len = rest[ats..].iter().copied().take_while(|byte| is_part(byte)).count();
            let name = String::from_utf8_lossy(&rest[ats..ats + len]).into_owned();
            words.push(match ats {
                0 => Word::Name(name),
                1 => Word::Variable(name),
                _ => Word::System(name.to_ascii_lowercase()),
            });
            at += ats + len;
        } else if byte == b'?' {
            words.push(Word::Parameter(parameters));
            parameters += 1;
            at += 1;
        } else if let Some(sign) = SIGNS.into_iter().find(|sign| rest.starts_with(sign.as_bytes())) {
            words.push(Word::Sign(sign));
            at += sign.len();
        } else {
            return Err(Failure::syntax(&format!("the sign {:?}", char::from(byte))));
        }
    }
    Ok(words)
}

fn is_of_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'$'
}

/// The number at the beginning of the text, and its length. A number with a fraction is given in millionths.
fn number(text: &[u8]) -> (Value, usize) {
    let digits = |text: &[u8]| text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let read = |digits: &[u8]| {
        let digits = digits.iter().map(|digit| i128::from(digit - b'0'));
        digits.fold(0_i128, |value, digit| value.saturating_mul(10).saturating_add(digit))
    };
    let whole = digits(text);
    if text.get(whole) != Some(&b'.') {
        let value = read(&text[..whole]);
        return (Value::Number { value, unsigned: i64::try_from(value).is_err() }, whole);
    }
    let fraction = digits(&text[whole + 1..]);
    let mut millionths = [b'0'; 6];
    let kept = fraction.min(6);
    millionths[..kept].copy_from_slice(&text[whole + 1..whole + 1 + kept]);
    let value = read(&text[..whole]).saturating_mul(1_000_000).saturating_add(read(&millionths));
    (Value::signed(value), whole + 1 + fraction)
}

/// The text between quotes, and its length with the quotes.
fn quoted(text: &[u8]) -> Result<(Value, usize), Failure> {
    let mut found = Vec::new();
    let mut at = 1;
    loop {
        let plain = memchr::memchr2(b'\'', b'\\', &text[at..]).unwrap_or(text.len() - at);
        found.extend_from_slice(&text[at..at + plain]);
        at += plain;
        match (text.get(at), text.get(at + 1)) {
            (Some(b'\\'), Some(escaped)) => {
                found.push(if *escaped == b'0' { 0 } else { *escaped });
                at += 2;
            }
            (Some(b'\''), Some(b'\'')) => {
                found.push(b'\'');
                at += 2;
            }
            (Some(b'\''), _) => return Ok((Value::Text(found), at + 1)),
            _ => return Err(Failure::syntax("a text without an end")),
        }
    }
}

/// Parses `x'00ff'`. Returns the value, and its length with the quotes.
fn hexadecimal(text: &[u8]) -> Result<(Value, usize), Failure> {
    let len = text[2..].iter().take_while(|byte| **byte != b'\'').count();
    let value = |digit: u8| char::from(digit).to_digit(16).map(|digit| digit as u8);
    let byte = |pair: &[u8]| Some(value(pair[0])? << 4 | value(*pair.get(1)?)?);
    let bytes: Option<Vec<u8>> = text[2..2 + len].chunks(2).map(byte).collect();
    bytes
        .filter(|_| text.len() > 2 + len)
        .map(|bytes| (Value::Text(bytes), len + 3))
        .ok_or_else(|| Failure::syntax("a hexadecimal text"))
}

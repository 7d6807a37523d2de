//! The words of a statement.

use super::Failure;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// A name or keyword, as it was written.
    Name(String),
    /// `@name`.
    Variable(String),
    /// `@@GLOBAL.name`.
    System(String),
    Number(i128),
    /// A number with a fraction, in millionths.
    Millionths(i128),
    Text(Vec<u8>),
    /// `?`, with its position among them.
    Parameter(usize),
    Sign(&'static str),
}

/// Longer ones first.
const SIGNS: [&str; 15] = ["<>", "<=", ">=", "(", ")", ",", ";", "=", "<", ">", "+", "-", "*", ".", "/"];

/// Splits the text of one or more statements into words.
pub fn words(sql: &[u8]) -> Result<Vec<Word>, Failure> {
    let mut words = Vec::new();
    let mut parameters = 0;
    let mut at = 0;
    while at < sql.len() {
        let byte = sql[at];
        let rest = &sql[at..];
        let is_binary = rest.starts_with(b"_binary'");
        if byte.is_ascii_whitespace() {
            at += 1;
        } else if byte == b'\'' || is_binary {
            let (text, len) = quoted(&rest[if is_binary { 7 } else { 0 }..])?;
            words.push(Word::Text(text));
            at += len + if is_binary { 7 } else { 0 };
        } else if rest.starts_with(b"x'") {
            let len = rest[2..].iter().take_while(|byte| **byte != b'\'').count();
            words.push(Word::Text(hexadecimal(&rest[2..2 + len])?));
            at += len + 3;
        } else if byte == b'`' {
            let len = rest[1..].iter().take_while(|byte| **byte != b'`').count();
            words.push(Word::Name(String::from_utf8_lossy(&rest[1..1 + len]).into_owned()));
            at += len + 2;
        } else if byte.is_ascii_digit() {
            let (word, len) = number(rest);
            words.push(word);
            at += len;
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

fn number(text: &[u8]) -> (Word, usize) {
    let digits = |text: &[u8]| text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let whole = digits(text);
    let value = |text: &[u8]| String::from_utf8_lossy(text).parse::<i128>().unwrap_or(i128::MAX);
    if text.get(whole) != Some(&b'.') {
        return (Word::Number(value(&text[..whole])), whole);
    }
    let fraction = digits(&text[whole + 1..]);
    let millionths = format!("{:0<6}", String::from_utf8_lossy(&text[whole + 1..whole + 1 + fraction]));
    let millionths = value(&text[..whole]) * 1_000_000 + value(&millionths.as_bytes()[..6]);
    (Word::Millionths(millionths), whole + 1 + fraction)
}

/// The text between quotes, and the length with them.
fn quoted(text: &[u8]) -> Result<(Vec<u8>, usize), Failure> {
    let mut found = Vec::new();
    let mut at = 1;
    loop {
        match (text.get(at), text.get(at + 1)) {
            (Some(b'\\'), Some(escaped)) => {
                found.push(if *escaped == b'0' { 0 } else { *escaped });
                at += 2;
            }
            (Some(b'\''), Some(b'\'')) => {
                found.push(b'\'');
                at += 2;
            }
            (Some(b'\''), _) => return Ok((found, at + 1)),
            (Some(byte), _) => {
                found.push(*byte);
                at += 1;
            }
            (None, _) => return Err(Failure::syntax("a text without an end")),
        }
    }
}

fn hexadecimal(digits: &[u8]) -> Result<Vec<u8>, Failure> {
    let value = |digit: u8| char::from(digit).to_digit(16).map(|digit| digit as u8);
    let byte = |pair: &[u8]| Some(value(pair[0])? << 4 | value(*pair.get(1)?)?);
    digits.chunks(2).map(byte).collect::<Option<_>>().ok_or_else(|| Failure::syntax("a hexadecimal text"))
}

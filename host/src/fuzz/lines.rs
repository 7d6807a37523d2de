//! A stream has the same lines however its bytes arrive.

use arbitrary::{Result, Unstructured};

use super::input::{joined, parts};
use crate::cli::stream::Splitter;

const WORDS: [&str; 8] =
    ["data: {}", "\n", "\r\n", "\n\n", " ", "\u{e9}", ": beat", "{\"event\":\"granted\"}"];

pub fn hold(u: &mut Unstructured<'_>) -> Result<()> {
    let bytes = joined(u, &WORDS, 16)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let mut expected: Vec<&str> = text.split('\n').map(str::trim_end).collect();
    // The last line has not ended.
    expected.pop();
    let (mut splitter, mut found) = (Splitter::default(), Vec::new());
    for part in parts(u, &bytes)? {
        splitter.add(part);
        while let Some(line) = splitter.line().expect("the lines are short") {
            found.push(line);
        }
    }
    assert_eq!(found, expected);
    Ok(())
}

#[test]
fn a_stream_has_the_same_lines_however_its_bytes_arrive() {
    super::input::check(hold);
}

#[test]
fn a_line_without_an_end_is_not_kept_for_ever() {
    let mut splitter = Splitter::default();
    let refused = (0..100).any(|_| {
        splitter.add(&[b'a'; 1 << 16]);
        splitter.line().is_err()
    });
    assert!(refused);
}

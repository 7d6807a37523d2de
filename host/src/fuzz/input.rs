//! Inputs that are made of bytes.

use arbitrary::{Result, Unstructured};

/// A property: it panics if it does not hold for the input that is made of these bytes.
pub type Holds = fn(&mut Unstructured<'_>) -> Result<()>;

/// One of the texts.
pub fn one_of<'a>(u: &mut Unstructured<'_>, texts: &[&'a str]) -> Result<&'a str> {
    u.choose(texts).copied()
}

/// A few of the texts, and other bytes in between, joined.
pub fn joined(u: &mut Unstructured<'_>, words: &[&str], most: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for _ in 0..u.int_in_range(0..=most)? {
        match u.ratio(1, 8)? {
            true => bytes.extend_from_slice(u.arbitrary::<&[u8]>()?),
            false => bytes.extend_from_slice(one_of(u, words)?.as_bytes()),
        }
    }
    Ok(bytes)
}

/// The bytes in parts of any lengths.
pub fn parts<'a>(u: &mut Unstructured<'_>, bytes: &'a [u8]) -> Result<Vec<&'a [u8]>> {
    let (mut parts, mut rest) = (Vec::new(), bytes);
    while !rest.is_empty() {
        let (part, after) = rest.split_at(u.int_in_range(1..=rest.len().min(64))?);
        parts.push(part);
        rest = after;
    }
    Ok(parts)
}

/// Runs a future on this thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    thread_local! {
        static RUNTIME: tokio::runtime::Runtime =
            tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    }
    RUNTIME.with(|runtime| runtime.block_on(future))
}

/// Tries a property on random bytes for a moment, or for as many milliseconds as `ARBTEST_BUDGET_MS` says.
#[cfg(test)]
pub fn check(holds: Holds) {
    let search = arbtest::arbtest(holds).size_min(256).size_max(4_096);
    match std::env::var_os("ARBTEST_BUDGET_MS") {
        None => search.budget_ms(1_500),
        Some(_) => search,
    };
}

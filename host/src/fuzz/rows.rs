//! A record that is written to a row is read back as it was, and no row makes the proxy panic.

use std::num::NonZero;
use std::sync::Arc;

use arbitrary::{Result, Unstructured};

use super::input::joined;
use crate::lock::record::{
    BatchId, Committed, Ended, GlobalPlace, Holder, HttpView, Level, Origin, Record, StoredValue, Tag, Wanted,
};
use crate::lock::{Mode, ServerTime, Token};
use crate::mysql::codec::{decode, encode};

const WORDS: [&str; 30] = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "1",
    "0",
    "-1",
    "18446744073709551616",
    "\"x\"",
    "\"\\ud800\"",
    "null",
    "true",
    "\"holders\":",
    "\"not_before\":",
    "\"ended\":",
    "\"kept\":",
    "\"line\":",
    "\"marks\":",
    "\"wanted\":",
    "{\"nonce\":1,\"owner\":\"a\",\"token\":1,\"since\":1,\"until\":2,\"ttl_ms\":3",
    ",\"mode\":\"shared\"",
    ",\"mode\":{\"permits\":{\"count\":1,\"limit\":2}}",
    ",\"levels\":[]",
    ",\"labels\":[[\":method\",\"x\"]]",
    "{\"proxies\":[\"p\"],\"places\":[[1,0,2,3]]}",
    ",\"places\":[[1,9,2,3]]",
    "{\"value\":\"1\",\"since\":1,\"nonce\":2}",
    "\"\u{e9}\"",
];

pub fn hold(u: &mut Unstructured<'_>) -> Result<()> {
    if u.ratio(1, 3)? {
        let bytes = joined(u, &WORDS, 16)?;
        if let Ok(record) = decode(7, &bytes) {
            let again = decode(7, &encode(&record));
            assert_eq!(again.ok(), Some(record), "{}", String::from_utf8_lossy(&bytes));
        }
        return Ok(());
    }
    let record = record(u)?;
    let state = encode(&record);
    let read = decode(record.token.0, &state);
    assert_eq!(read.ok(), Some(record), "{}", String::from_utf8_lossy(&state));
    Ok(())
}

fn some<T>(u: &mut Unstructured<'_>, one: fn(&mut Unstructured<'_>) -> Result<T>) -> Result<Vec<T>> {
    (0..u.int_in_range(0..=3)?).map(|_| one(u)).collect()
}

fn text<T: for<'a> From<&'a str>>(u: &mut Unstructured<'_>) -> Result<T> {
    Ok(u.arbitrary::<&str>()?.into())
}

fn maybe_text<T: for<'a> From<&'a str>>(u: &mut Unstructured<'_>) -> Result<Option<T>> {
    Ok(if u.arbitrary()? { Some(text(u)?) } else { None })
}

fn time(u: &mut Unstructured<'_>) -> Result<ServerTime> {
    u.arbitrary().map(ServerTime)
}

fn record(u: &mut Unstructured<'_>) -> Result<Record> {
    Ok(Record {
        token: Token(u.arbitrary()?),
        holders: some(u, holder)?,
        not_before: time(u)?,
        ended: some(u, ended)?,
        kept: if u.arbitrary()? { Some(kept(u)?) } else { None },
        global_queue: some(u, place)?,
        batch_ids: some(u, |u| Ok(BatchId { writer: u.arbitrary()?, at: time(u)? }))?,
        wanted: some(u, |u| {
            Ok(Wanted { proxy: text(u)?, since: time(u)?, passed: u.arbitrary()?, until: time(u)? })
        })?,
    })
}

fn mode(u: &mut Unstructured<'_>) -> Result<Mode> {
    Ok(match u.int_in_range(0..=2)? {
        0 => Mode::Exclusive,
        1 => Mode::Shared,
        _ => Mode::Permits { count: u.arbitrary()?, limit: u.arbitrary()? },
    })
}

fn holder(u: &mut Unstructured<'_>) -> Result<Holder> {
    let mut levels = some(u, level)?;
    if levels.is_empty() {
        levels.push(level(u)?);
    }
    Ok(Holder {
        nonce: u.arbitrary()?,
        owner: text(u)?,
        mode: mode(u)?,
        token: Token(u.arbitrary()?),
        lowest_token: Token(u.arbitrary()?),
        keys: u.arbitrary()?,
        since: time(u)?,
        until: time(u)?,
        ttl_ms: u.arbitrary()?,
        at_least_until: time(u)?,
        delay_ms: u.arbitrary()?,
        keep_ms: NonZero::new(u.arbitrary()?),
        released_by: NonZero::new(u.arbitrary()?),
        levels,
        tag: tag(u)?,
    })
}

fn level(u: &mut Unstructured<'_>) -> Result<Level> {
    let attempts = some(u, |u| u.arbitrary())?;
    Ok(Level { attempts, request: maybe_text(u)?, fingerprint: u.arbitrary()? })
}

fn tag(u: &mut Unstructured<'_>) -> Result<Tag> {
    let asked_mode = match u.int_in_range(0..=3)? {
        0 => None,
        1 => Some(Mode::Exclusive),
        2 => Some(Mode::Shared),
        _ => Some(Mode::Permits { count: u.arbitrary()?, limit: 0 }),
    };
    // Names that begin with a colon are reserved.
    let label = |u: &mut Unstructured<'_>| Ok((format!("l{}", u.arbitrary::<&str>()?).into(), text(u)?));
    let labels = (0..u.int_in_range(0..=2)?).map(|_| label(u)).collect::<Result<_>>()?;
    let http = if u.arbitrary()? { Some(Arc::new(view(u)?)) } else { None };
    Ok(Tag {
        resource: text(u)?,
        policy: text(u)?,
        labels,
        asked_mode,
        http,
        principal: maybe_text(u)?,
        delegated_to: maybe_text(u)?,
    })
}

fn view(u: &mut Unstructured<'_>) -> Result<HttpView> {
    let pair = |u: &mut Unstructured<'_>| Ok((text(u)?, text(u)?));
    Ok(HttpView {
        method: text(u)?,
        path: text(u)?,
        captures: some(u, pair)?,
        query: some(u, pair)?,
        headers: some(u, pair)?,
        body: u.arbitrary::<&[u8]>()?.to_vec(),
    })
}

fn ended(u: &mut Unstructured<'_>) -> Result<Ended> {
    let committed = Committed { version: Token(u.arbitrary()?), fingerprint: u.arbitrary()? };
    Ok(Ended {
        nonce: u.arbitrary()?,
        released_by: NonZero::new(u.arbitrary()?),
        request: maybe_text(u)?,
        // Versions begin with 1.
        committed: Some(committed).filter(|committed| committed.version.0 > 0),
    })
}

fn kept(u: &mut Unstructured<'_>) -> Result<StoredValue> {
    Ok(StoredValue {
        value: text(u)?,
        since: time(u)?,
        until: time(u)?,
        nonce: u.arbitrary()?,
        origin: *u.choose(&[Origin::Api, Origin::Route])?,
    })
}

fn place(u: &mut Unstructured<'_>) -> Result<GlobalPlace> {
    Ok(GlobalPlace {
        ticket: u.arbitrary()?,
        proxy: text(u)?,
        rank: u.arbitrary()?,
        joined: Some(time(u)?).filter(|joined| joined.0 > 0),
        returns: u.arbitrary()?,
        until: time(u)?,
    })
}

#[test]
fn a_record_is_read_back_as_it_was_written() {
    super::input::check(hold);
}

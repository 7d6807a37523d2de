//! Records as compact JSON, one row for each key, readable in any SQL client.
//!
//! `lock` does not depend on serde, so its types are mirrored here. Times are in microseconds since 1970
//! (UTC, the server's clock). An absent field has its default.

use std::borrow::Cow;
use std::num::NonZero;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::lock::record::{
    BatchId, Committed, Ended, GlobalPlace, Holder, Level, Origin, Record, StoredValue, Wanted,
};
use crate::lock::{Mode, ServerTime, Token};

mod tag;

/// The text is not a record.
#[derive(Debug, thiserror::Error)]
#[error("a row's state is not a record: {0}")]
pub struct DecodeError(#[from] serde_json::Error);

/// Encodes the record without its token, which has a column of its own.
pub fn encode(record: &Record) -> Vec<u8> {
    let state = State {
        holders: record.holders.iter().map(HolderState::from).collect(),
        not_before: record.not_before.0,
        ended: record.ended.iter().map(EndedState::from).collect(),
        kept: record.kept.as_ref().map(KeptState::from),
        line: LineState::from(&record.global_queue[..]),
        marks: record.batch_ids.iter().map(|mark| (mark.writer, mark.at.0)).collect(),
        wanted: record.wanted.iter().map(WantedState::from).collect(),
    };
    serde_json::to_vec(&state).expect("strings and numbers always serialize")
}

/// Decodes a record.
pub fn decode(token: u64, state: &[u8]) -> Result<Record, DecodeError> {
    let state: State<'_> = serde_json::from_slice(state)?;
    Ok(Record {
        token: Token(token),
        holders: state.holders.into_iter().map(Holder::from).collect(),
        not_before: ServerTime(state.not_before),
        ended: state.ended.into_iter().map(Ended::from).collect(),
        kept: state.kept.map(StoredValue::from),
        global_queue: state.line.into(),
        batch_ids: state
            .marks
            .into_iter()
            .map(|(writer, at)| BatchId { writer, at: ServerTime(at) })
            .collect(),
        wanted: state.wanted.into_iter().map(Wanted::from).collect(),
    })
}

#[derive(Serialize, Deserialize)]
struct State<'a> {
    #[serde(default, borrow, skip_serializing_if = "Vec::is_empty")]
    holders: Vec<HolderState<'a>>,
    #[serde(default, skip_serializing_if = "is_zero")]
    not_before: u64,
    #[serde(default, borrow, skip_serializing_if = "Vec::is_empty")]
    ended: Vec<EndedState<'a>>,
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    kept: Option<KeptState<'a>>,
    #[serde(default, borrow, skip_serializing_if = "LineState::is_empty")]
    line: LineState<'a>,
    /// Writer and time of each batch id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    marks: Vec<(u64, u64)>,
    #[serde(default, borrow, skip_serializing_if = "Vec::is_empty")]
    wanted: Vec<WantedState<'a>>,
}

/// The global queue. Hundreds of waiters may belong to few proxies, so each proxy is named once.
#[derive(Default, Serialize, Deserialize)]
struct LineState<'a> {
    #[serde(borrow)]
    proxies: Vec<Cow<'a, str>>,
    /// Ticket, index into `proxies`, end, rank.
    places: Vec<(u64, usize, u64, i32)>,
    /// For each place: when its waiter joined (0: unknown), and whether its client may return to it. Apart from `places`,
    /// so that earlier versions can read `places`. Earlier versions drop this field.
    #[serde(default)]
    joined: Vec<(u64, bool)>,
}

#[derive(Serialize, Deserialize)]
struct WantedState<'a> {
    #[serde(borrow)]
    proxy: Cow<'a, str>,
    since: u64,
    passed: u32,
    until: u64,
}

#[derive(Serialize, Deserialize)]
struct HolderState<'a> {
    nonce: u64,
    #[serde(borrow)]
    owner: Cow<'a, str>,
    #[serde(default, skip_serializing_if = "ModeState::is_exclusive")]
    mode: ModeState,
    token: u64,
    /// Absent: same as `token`. Earlier versions drop this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lowest_token: Option<u64>,
    /// How many keys the lease holds.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    keys: u32,
    since: u64,
    until: u64,
    ttl_ms: u32,
    #[serde(default, skip_serializing_if = "is_zero")]
    at_least_until: u64,
    #[serde(default, skip_serializing_if = "is_zero_u32")]
    delay_ms: u32,
    #[serde(default, skip_serializing_if = "is_zero_u32")]
    keep_ms: u32,
    #[serde(default, skip_serializing_if = "is_zero")]
    released_by: u64,
    /// Absent: one level, of the claim that made the grant, without a request id.
    #[serde(default, borrow, skip_serializing_if = "Vec::is_empty")]
    levels: Vec<LevelState<'a>>,
    #[serde(default, borrow, skip_serializing_if = "str::is_empty")]
    resource: Cow<'a, str>,
    #[serde(default, borrow, skip_serializing_if = "str::is_empty")]
    policy: Cow<'a, str>,
    #[serde(default, borrow, skip_serializing_if = "Vec::is_empty")]
    labels: Vec<tag::Label<'a>>,
}

#[derive(Clone, Copy, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ModeState {
    #[default]
    Exclusive,
    Shared,
    Permits {
        count: u32,
        limit: u32,
    },
}

#[derive(Serialize, Deserialize)]
struct LevelState<'a> {
    attempts: Cow<'a, [u64]>,
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    request: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "is_zero")]
    fingerprint: u64,
}

#[derive(Serialize, Deserialize)]
struct EndedState<'a> {
    nonce: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    released_by: u64,
    #[serde(default, borrow, skip_serializing_if = "Option::is_none")]
    request: Option<Cow<'a, str>>,
    /// The version that a commit made; 0 if it was a grant.
    #[serde(default, skip_serializing_if = "is_zero")]
    version: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    fingerprint: u64,
}

#[derive(Serialize, Deserialize)]
struct KeptState<'a> {
    /// JSON, as text.
    #[serde(borrow)]
    value: Cow<'a, str>,
    since: u64,
    /// Absent: kept until it is replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    until: Option<u64>,
    nonce: u64,
    /// Absent: stored through the API, or by an earlier version, which did not record this.
    #[serde(default, skip_serializing_if = "is_false")]
    by_route: bool,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

fn one() -> u32 {
    1
}

fn is_one(number: &u32) -> bool {
    *number == 1
}

fn is_zero_u32(number: &u32) -> bool {
    *number == 0
}

impl ModeState {
    fn is_exclusive(&self) -> bool {
        matches!(self, ModeState::Exclusive)
    }
}

impl From<Mode> for ModeState {
    fn from(mode: Mode) -> ModeState {
        match mode {
            Mode::Exclusive => ModeState::Exclusive,
            Mode::Shared => ModeState::Shared,
            Mode::Permits { count, limit } => ModeState::Permits { count, limit },
        }
    }
}

impl From<ModeState> for Mode {
    fn from(mode: ModeState) -> Mode {
        match mode {
            ModeState::Exclusive => Mode::Exclusive,
            ModeState::Shared => Mode::Shared,
            ModeState::Permits { count, limit } => Mode::Permits { count, limit },
        }
    }
}

impl<'a> From<&'a Holder> for HolderState<'a> {
    fn from(holder: &'a Holder) -> HolderState<'a> {
        HolderState {
            nonce: holder.nonce,
            owner: Cow::Borrowed(&holder.owner),
            mode: holder.mode.into(),
            token: holder.token.0,
            lowest_token: (holder.lowest_token != holder.token).then_some(holder.lowest_token.0),
            keys: holder.keys,
            since: holder.since.0,
            until: holder.until.0,
            ttl_ms: holder.ttl_ms,
            at_least_until: holder.at_least_until.0,
            delay_ms: holder.delay_ms,
            keep_ms: holder.keep_ms.map_or(0, NonZero::get),
            released_by: holder.released_by.map_or(0, NonZero::get),
            levels: match &holder.levels[..] {
                [Level { attempts, request: None, fingerprint: 0 }] if *attempts == [holder.nonce] => {
                    Vec::new()
                }
                levels => levels.iter().map(LevelState::from).collect(),
            },
            resource: Cow::Borrowed(&holder.tag.resource),
            policy: Cow::Borrowed(&holder.tag.policy),
            labels: tag::labels(&holder.tag),
        }
    }
}

impl From<HolderState<'_>> for Holder {
    fn from(state: HolderState<'_>) -> Holder {
        Holder {
            nonce: state.nonce,
            owner: boxed(state.owner),
            mode: state.mode.into(),
            token: Token(state.token),
            lowest_token: Token(state.lowest_token.unwrap_or(state.token)),
            keys: state.keys,
            since: ServerTime(state.since),
            until: ServerTime(state.until),
            ttl_ms: state.ttl_ms,
            at_least_until: ServerTime(state.at_least_until),
            delay_ms: state.delay_ms,
            keep_ms: NonZero::new(state.keep_ms),
            released_by: NonZero::new(state.released_by),
            levels: if state.levels.is_empty() {
                vec![Level { attempts: vec![state.nonce], request: None, fingerprint: 0 }]
            } else {
                state.levels.into_iter().map(Level::from).collect()
            },
            tag: tag::tag((&*state.resource).into(), (&*state.policy).into(), state.labels),
        }
    }
}

impl<'a> From<&'a Level> for LevelState<'a> {
    fn from(level: &'a Level) -> LevelState<'a> {
        LevelState {
            attempts: Cow::Borrowed(&level.attempts),
            request: level.request.as_deref().map(Cow::Borrowed),
            fingerprint: level.fingerprint,
        }
    }
}

impl From<LevelState<'_>> for Level {
    fn from(state: LevelState<'_>) -> Level {
        Level {
            attempts: state.attempts.into_owned(),
            request: state.request.map(boxed),
            fingerprint: state.fingerprint,
        }
    }
}

impl<'a> From<&'a Ended> for EndedState<'a> {
    fn from(ended: &'a Ended) -> EndedState<'a> {
        EndedState {
            nonce: ended.nonce,
            released_by: ended.released_by.map_or(0, NonZero::get),
            request: ended.request.as_deref().map(Cow::Borrowed),
            version: ended.committed.map_or(0, |committed| committed.version.0),
            fingerprint: ended.committed.map_or(0, |committed| committed.fingerprint),
        }
    }
}

impl From<EndedState<'_>> for Ended {
    fn from(state: EndedState<'_>) -> Ended {
        let committed = Committed { version: Token(state.version), fingerprint: state.fingerprint };
        Ended {
            nonce: state.nonce,
            released_by: NonZero::new(state.released_by),
            request: state.request.map(boxed),
            committed: Some(committed).filter(|committed| committed.version.0 > 0),
        }
    }
}

impl<'a> From<&'a StoredValue> for KeptState<'a> {
    fn from(kept: &'a StoredValue) -> KeptState<'a> {
        KeptState {
            value: Cow::Borrowed(&kept.value),
            since: kept.since.0,
            until: Some(kept.until.0).filter(|until| *until < u64::MAX),
            nonce: kept.nonce,
            by_route: kept.origin == Origin::Route,
        }
    }
}

impl From<KeptState<'_>> for StoredValue {
    fn from(state: KeptState<'_>) -> StoredValue {
        StoredValue {
            value: boxed(state.value),
            since: ServerTime(state.since),
            until: ServerTime(state.until.unwrap_or(u64::MAX)),
            nonce: state.nonce,
            origin: if state.by_route { Origin::Route } else { Origin::Api },
        }
    }
}

impl LineState<'_> {
    fn is_empty(&self) -> bool {
        self.places.is_empty()
    }
}

impl<'a> From<&'a [GlobalPlace]> for LineState<'a> {
    fn from(line: &'a [GlobalPlace]) -> LineState<'a> {
        let mut state = LineState::default();
        for place in line {
            let known = state.proxies.iter().position(|proxy| **proxy == *place.proxy);
            let proxy = known.unwrap_or(state.proxies.len());
            if known.is_none() {
                state.proxies.push(Cow::Borrowed(&place.proxy));
            }
            state.places.push((place.ticket, proxy, place.until.0, place.rank));
            state.joined.push((place.joined.map_or(0, |joined| joined.0), place.returns));
        }
        state
    }
}

impl From<LineState<'_>> for Vec<GlobalPlace> {
    fn from(state: LineState<'_>) -> Vec<GlobalPlace> {
        let proxies: Vec<Arc<str>> = state.proxies.iter().map(|proxy| proxy.as_ref().into()).collect();
        let joined = state.joined.into_iter().chain(std::iter::repeat((0, false)));
        let place = |((ticket, n, until, rank), (joined, returns)): ((u64, usize, u64, i32), (u64, bool))| {
            GlobalPlace {
                ticket,
                proxy: proxies.get(n).cloned().unwrap_or_else(|| "".into()),
                rank,
                joined: Some(ServerTime(joined)).filter(|joined| joined.0 > 0),
                returns,
                until: ServerTime(until),
            }
        };
        state.places.into_iter().zip(joined).map(place).collect()
    }
}

impl<'a> From<&'a Wanted> for WantedState<'a> {
    fn from(mark: &'a Wanted) -> WantedState<'a> {
        WantedState {
            proxy: Cow::Borrowed(&mark.proxy),
            since: mark.since.0,
            passed: mark.passed,
            until: mark.until.0,
        }
    }
}

impl From<WantedState<'_>> for Wanted {
    fn from(state: WantedState<'_>) -> Wanted {
        Wanted {
            proxy: state.proxy.as_ref().into(),
            since: ServerTime(state.since),
            passed: state.passed,
            until: ServerTime(state.until),
        }
    }
}

fn boxed(text: Cow<'_, str>) -> Box<str> {
    text.into_owned().into_boxed_str()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::record::Tag;

    fn record() -> Record {
        let holder = |mode| Holder {
            nonce: u64::MAX,
            owner: "it's \\ \"me\"\n\0 ü".into(),
            mode,
            token: Token(7),
            lowest_token: Token(6),
            keys: 2,
            since: ServerTime(1),
            until: ServerTime(u64::MAX),
            ttl_ms: 10,
            at_least_until: ServerTime(3),
            delay_ms: 4,
            keep_ms: NonZero::new(9),
            released_by: NonZero::new(5),
            levels: vec![
                Level { attempts: vec![1, 3], request: Some("r\u{1F512}".into()), fingerprint: 9 },
                Level { attempts: vec![2], request: None, fingerprint: 0 },
            ],
            tag: Tag {
                resource: "orders/42".into(),
                policy: "default@sha256:00".into(),
                labels: vec![("tenant".into(), "a".into())],
                ..Tag::default()
            },
        };
        Record {
            token: Token(9),
            holders: vec![
                holder(Mode::Exclusive),
                holder(Mode::Shared),
                holder(Mode::Permits { count: 2, limit: 3 }),
            ],
            not_before: ServerTime(11),
            ended: vec![
                Ended { nonce: 1, released_by: None, request: None, committed: None },
                Ended {
                    nonce: 2,
                    released_by: NonZero::new(3),
                    request: Some("x".into()),
                    committed: Some(Committed { version: Token(5), fingerprint: 6 }),
                },
            ],
            kept: Some(StoredValue {
                value: "{\"a\":[1,\"\\\\\"]}".into(),
                since: ServerTime(1),
                until: ServerTime(u64::MAX),
                nonce: 4,
                origin: Origin::Route,
            }),
            global_queue: vec![place(1, "a", 0), place(2, "b", 0), place(3, "a", 7)],
            batch_ids: vec![
                BatchId { writer: u64::MAX, at: ServerTime(1) },
                BatchId { writer: 2, at: ServerTime(3) },
            ],
            wanted: vec![Wanted { proxy: "b".into(), since: ServerTime(1), passed: 2, until: ServerTime(3) }],
        }
    }

    fn place(ticket: u64, proxy: &str, rank: i32) -> GlobalPlace {
        let (joined, until) = (Some(ServerTime(ticket + 4)), ServerTime(ticket + 9));
        GlobalPlace { ticket, proxy: proxy.into(), rank, joined, returns: ticket == 2, until }
    }

    /// An earlier version wrote a global queue without times.
    #[test]
    fn places_written_by_an_earlier_version_are_read() {
        let line = r#"{"line":{"proxies":["a","b"],"places":[[7,1,9,0],[8,0,9,0]]}}"#;
        let places = decode(1, line.as_bytes()).expect("it was a record").global_queue;
        let read = |place: &GlobalPlace| (place.ticket, place.proxy.to_string(), place.joined, place.returns);
        assert_eq!(
            places.iter().map(read).collect::<Vec<_>>(),
            [(7, "b".to_owned(), None, false), (8, "a".to_owned(), None, false)]
        );
    }

    #[test]
    fn a_record_survives_encoding_and_decoding() {
        for record in [record(), Record::default()] {
            let state = encode(&record);
            assert_eq!(decode(record.token.0, &state).expect("it was just encoded"), record);
        }
    }

    #[test]
    fn an_idle_record_is_encoded_as_an_empty_object() {
        assert_eq!(encode(&Record::default()), b"{}");
    }
}

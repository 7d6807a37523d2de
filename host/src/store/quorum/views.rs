//! Merges what the members hold into one view.
//!
//! A member that does not answer may have any record. So a holder that too few answers contain still counts if
//! the silent members could complete its majority.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;

use super::Member;
use super::count::Count;
use crate::lock::record::{Doubt, Holder, Record};
use crate::lock::{Key, ServerTime};
use crate::store::{Health, Page, StoreError, StoreFuture, Stored};

/// The answers of a majority, and how many members have not answered.
struct Heard<T> {
    answers: Vec<T>,
    count: Count,
    unheard: usize,
}

/// A page of keys with a lease that has, or may have, a majority.
pub async fn list(
    members: &[Member],
    patience: Duration,
    prefix: &str,
    after: Option<&Key>,
    limit: usize,
) -> Result<Page, StoreError> {
    let ask = |member: &Member| member.store.list(prefix.to_owned(), after.cloned(), limit);
    let heard = hear(members, patience, ask).await?;
    // A member whose page ends here may have more keys after it.
    let ends = heard.answers.iter().filter(|page| page.more).filter_map(|page| page.items.last());
    let end = ends.map(|stored| stored.key.clone()).min();
    let more = end.is_some();
    let mut by_key: BTreeMap<Key, Vec<&Stored>> = BTreeMap::new();
    for stored in heard.answers.iter().flat_map(|page| &page.items) {
        if end.as_ref().is_none_or(|end| stored.key <= *end) {
            by_key.entry(stored.key.clone()).or_default().push(stored);
        }
    }
    let joined = by_key.into_values().filter_map(|copies| heard.joined(&copies));
    let mut items: Vec<Stored> = joined.filter(|stored| !stored.record.holders.is_empty()).collect();
    let more = more || items.len() > limit;
    items.truncate(limit);
    Ok(Page { items, more, ..Page::default() })
}

/// The record of one key with the holders that have, or may have, a majority.
pub async fn read(members: &[Member], patience: Duration, key: &Key) -> Result<Option<Stored>, StoreError> {
    let heard = hear(members, patience, |member| member.store.read(key.clone())).await?;
    let copies: Vec<&Stored> = heard.answers.iter().flatten().collect();
    Ok(heard.joined(&copies))
}

/// Asks every available member. Waits for slow members until a majority has answered, and at least for
/// `patience`.
async fn hear<T>(
    members: &[Member],
    patience: Duration,
    ask: impl Fn(&Member) -> StoreFuture<Result<T, StoreError>>,
) -> Result<Heard<T>, StoreError> {
    let count = Count { members: members.len() };
    let there = members.iter().filter(|member| matches!(member.store.health(), Health::Ready { .. }));
    let mut asked: FuturesUnordered<_> = there.map(ask).collect();
    let limit = tokio::time::sleep(patience);
    tokio::pin!(limit);
    let mut answers = Vec::new();
    loop {
        tokio::select! {
            biased;
            answer = asked.next() => match answer {
                Some(answer) => answers.extend(answer.ok()),
                None => break,
            },
            () = &mut limit, if count.is_majority(answers.len()) => break,
        }
    }
    let unheard = members.len() - answers.len();
    match count.is_majority(answers.len()) {
        true => Ok(Heard { answers, count, unheard }),
        false => Err(StoreError::Unavailable {
            why: format!("only {} of {} stores answer, which is no majority", answers.len(), members.len()),
        }),
    }
}

impl<T> Heard<T> {
    /// The key with the holders that have, or may have, a majority.
    fn joined(&self, copies: &[&Stored]) -> Option<Stored> {
        let has =
            |stored: &Stored, nonce: u64| stored.record.holders.iter().any(|holder| holder.nonce == nonce);
        let may_hold = |nonce: u64| {
            let copies = copies.iter().filter(|stored| has(stored, nonce)).count();
            self.count.is_majority(copies + self.unheard)
        };
        let latest = copies.iter().max_by_key(|stored| stored.record.token)?;
        let here = |stored: &&Stored| -> Vec<Holder> {
            stored.record.holders.iter().map(|holder| moved(holder, stored, latest.now)).collect()
        };
        let mut holders: Vec<_> = copies.iter().flat_map(here).collect();
        holders.retain(|holder| may_hold(holder.nonce));
        holders.sort_by_key(|holder| (holder.nonce, Reverse(holder.token), Reverse(holder.until)));
        holders.dedup_by_key(|holder| holder.nonce);
        let record = Record { holders, ..latest.record.clone() };
        Some(Stored { record, doubt: Doubt::default(), ..(*latest).clone() })
    }
}

/// Converts the holder's times to another server's clock. A holder whose end is in doubt is extended.
fn moved(holder: &Holder, stored: &Stored, to: ServerTime) -> Holder {
    let from = stored.now;
    let there = |at: ServerTime| match at >= from {
        true => to.plus_us(at.us_since(from)),
        false => ServerTime(to.0.saturating_sub(from.us_since(at))),
    };
    let in_doubt = holder.free_at() <= from && !stored.has_ended(holder);
    let until = if in_doubt { to.plus_us(1) } else { there(holder.until) };
    Holder { since: there(holder.since), until, ..holder.clone() }
}

//! What the members hold, as one.

use std::collections::BTreeMap;

use futures_util::future::join_all;

use super::Member;
use super::count::Count;
use crate::lock::Key;
use crate::lock::record::Record;
use crate::store::{Health, Page, StoreError, Stored};

/// Keys with a lease that a majority has.
pub async fn list(
    members: &[Member],
    prefix: &str,
    after: Option<&Key>,
    limit: usize,
) -> Result<Page, StoreError> {
    let pages = there(members).map(|member| member.store.list(prefix.to_owned(), after.cloned(), limit));
    let pages: Vec<Page> = enough(members, join_all(pages).await)?;
    // Beyond the end of a page that goes on, its member may have more.
    let ends = pages.iter().filter(|page| page.more).filter_map(|page| page.items.last());
    let end = ends.map(|stored| stored.key.clone()).min();
    let more = end.is_some();
    let mut by_key: BTreeMap<Key, Vec<Stored>> = BTreeMap::new();
    for stored in pages.into_iter().flat_map(|page| page.items) {
        if end.as_ref().is_none_or(|end| stored.key <= *end) {
            by_key.entry(stored.key.clone()).or_default().push(stored);
        }
    }
    let count = Count { members: members.len() };
    let joined = by_key.into_values().filter_map(|copies| joined(count, &copies));
    let mut items: Vec<Stored> = joined.filter(|stored| !stored.record.holders.is_empty()).collect();
    let more = more || items.len() > limit;
    items.truncate(limit);
    Ok(Page { items, more })
}

pub async fn read(members: &[Member], key: &Key) -> Result<Option<Stored>, StoreError> {
    let copies = there(members).map(|member| member.store.read(key.clone()));
    let copies: Vec<Option<Stored>> = enough(members, join_all(copies).await)?;
    let copies: Vec<Stored> = copies.into_iter().flatten().collect();
    Ok(joined(Count { members: members.len() }, &copies))
}

fn there(members: &[Member]) -> impl Iterator<Item = &Member> {
    members.iter().filter(|member| matches!(member.store.health(), Health::Ready { .. }))
}

/// The answers, where they are those of a majority.
fn enough<T>(members: &[Member], answers: Vec<Result<T, StoreError>>) -> Result<Vec<T>, StoreError> {
    let answers: Vec<T> = answers.into_iter().filter_map(Result::ok).collect();
    let count = Count { members: members.len() };
    match count.is_majority(answers.len()) {
        true => Ok(answers),
        false => Err(StoreError::Unavailable {
            why: format!("{} of {} stores answer, which is no majority", answers.len(), members.len()),
        }),
    }
}

/// The key with the holders that a majority has.
fn joined(count: Count, copies: &[Stored]) -> Option<Stored> {
    let has = |stored: &Stored, nonce: u64| stored.record.holders.iter().any(|holder| holder.nonce == nonce);
    let latest = copies.iter().max_by_key(|stored| stored.record.token)?;
    let holders = copies.iter().flat_map(|stored| &stored.record.holders);
    let mut holders: Vec<_> = holders
        .filter(|holder| count.is_majority(copies.iter().filter(|stored| has(stored, holder.nonce)).count()))
        .cloned()
        .collect();
    holders.sort_by_key(|holder| (holder.nonce, std::cmp::Reverse(holder.token)));
    holders.dedup_by_key(|holder| holder.nonce);
    Some(Stored { record: Record { holders, ..latest.record.clone() }, ..latest.clone() })
}

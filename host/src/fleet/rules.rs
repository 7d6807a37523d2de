//! Which rules of who may do what the proxies of a store go by.
//!
//! The store has a record of the rules: their version, which operators raise, and their digest. It never returns to a
//! lower version while a proxy with the higher one lives. So while a new file reaches one proxy after another, all of
//! them grant: those with the new version at once, the others until the grace is over. The decisions are pure.

use std::cmp::Ordering;
use std::time::Duration;

use super::{Fleet, Inner};
use crate::auth::{self, Auth};
use crate::clock;
use crate::coverage::{Branch, reached};
use crate::lock::Instant;
use crate::service::RulesEnd;
use crate::store::registry::{RulesVersion, View};

/// How the rules of a proxy relate to the recorded ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// They are the recorded ones.
    #[default]
    Same,
    /// They are to be recorded.
    Newer,
    /// Their version is lower.
    Behind,
    /// They have the recorded version, and another content.
    Conflict,
}

/// How the rules `own` of the member `me` relate to the recorded ones. `newest`: the highest number of recorded rules
/// that the proxy was behind, with these rules.
pub fn standing(view: &View, me: u64, own: &RulesVersion, newest: u64) -> Standing {
    if own.number < newest {
        // Even if the record was lost, or its proxies are gone: this proxy did not get the later file, so it must not
        // return to what that may have withdrawn.
        return Standing::Behind;
    }
    let Some(record) = &view.rules else { return Standing::Newer };
    if record.rules == *own {
        return Standing::Same;
    }
    // A member of an earlier version of the program does not say what it goes by.
    let mut others = view
        .members
        .iter()
        .filter(|other| other.id != me && other.acks.is_some())
        .filter_map(|other| other.rules);
    match own.number.cmp(&record.rules.number) {
        Ordering::Greater => Standing::Newer,
        // All of them got the same new file, and nobody raised its version.
        Ordering::Equal if others.all(|other| other == own.mark()) => Standing::Newer,
        Ordering::Equal => Standing::Conflict,
        // The operator of a proxy that is alone gave it an earlier file.
        Ordering::Less if others.next().is_none() => Standing::Newer,
        Ordering::Less => Standing::Behind,
    }
}

/// What the proxy knows of its rules.
#[derive(Default)]
pub struct OwnRules {
    own: RulesVersion,
    standing: Standing,
    /// The rules with the highest number that the proxy was behind.
    newest: Option<RulesVersion>,
    /// From when the proxy grants nothing, and the sentence that says what to do about it.
    end: Option<(Instant, String)>,
}

impl OwnRules {
    /// Takes account of a view. `own`: the rules of now.
    pub fn see(&mut self, view: &View, me: u64, own: RulesVersion, grace: Duration) {
        if self.own != own {
            *self = OwnRules { own, ..OwnRules::default() };
        }
        let newest = self.newest.as_ref().map_or(0, |newest| newest.number);
        self.standing = standing(view, me, &self.own, newest);
        let mut left_us = u64::try_from(grace.as_micros()).unwrap_or(u64::MAX);
        let record = view.rules.as_ref();
        let other = match self.standing {
            Standing::Same | Standing::Newer => None,
            Standing::Conflict => record.map(|record| record.rules.clone()),
            Standing::Behind => {
                if let Some(record) = record.filter(|record| record.rules.number > self.own.number) {
                    // Also for a proxy that starts with an earlier file long after the record was made.
                    left_us = left_us.saturating_sub(view.now.us_since(record.since));
                    if record.rules.number > newest {
                        self.newest = Some(record.rules.clone());
                    }
                }
                self.newest.clone()
            }
        };
        let at = clock::now().plus_us(left_us);
        let at = self.end.as_ref().map_or(at, |(earlier, _)| at.min(*earlier));
        self.end = other.map(|other| (at, advice(&self.own, &other)));
    }

    /// Whether these rules are to be recorded.
    pub fn are_newer(&self) -> bool {
        self.standing == Standing::Newer
    }

    /// Whether the rules are not those of the store.
    pub fn differ(&self) -> bool {
        matches!(self.standing, Standing::Behind | Standing::Conflict)
    }

    /// What is wrong, if anything, and whether it is so that nothing is granted by now.
    pub fn trouble(&self) -> Option<(String, bool)> {
        let (at, advice) = self.end.as_ref()?;
        let left_us = at.us_since(clock::now());
        let what = match left_us {
            0 => "it grants clients no new lock".to_owned(),
            _ => format!("in {} s, it will grant clients no new lock", left_us.div_ceil(1_000_000)),
        };
        Some((format!("{advice}; {what}"), left_us == 0))
    }
}

/// What an operator should do about different rules.
fn advice(own: &RulesVersion, recorded: &RulesVersion) -> String {
    let has = |rules: &RulesVersion| match rules.digest == auth::OFF {
        true => "no [auth] file".to_owned(),
        false => format!("an [auth] file with the version {}", rules.number),
    };
    let (own_file, others) = (has(own), has(recorded));
    let next = recorded.number + 1;
    if own.number < recorded.number {
        let back = match own.digest == auth::OFF {
            true => String::new(),
            false => format!("to go back to this one, set `version = {next}` in it and give it to all; or, "),
        };
        return format!(
            "this proxy has {own_file}, and the proxies of its store have {others}: give this proxy their file; or, \
             {back}if no other proxy runs, restart this one"
        );
    }
    let both = if own_file == others { ", with other content".to_owned() } else { String::new() };
    format!(
        "this proxy has {own_file}, and the proxies of its store have {others}{both}: give all of them the same; if this \
         proxy's is the newer one, set `version = {next}` in it"
    )
}

/// The rules that a proxy goes by.
pub fn of(auth: &Auth) -> RulesVersion {
    let (number, digest) = auth.version();
    RulesVersion { number, digest }
}

impl Fleet {
    /// Records the rules of this proxy, if they are newer than those of a view. Returns whether that changed the record.
    pub(super) async fn record_rules(&self, view: &View) -> bool {
        let own = {
            let rules = self.0.rules.lock();
            rules.are_newer().then(|| rules.own.clone())
        };
        let before = view.rules.as_ref().map(|record| record.rules.clone());
        let Some(own) = own.filter(|own| before.as_ref() != Some(own)) else { return false };
        let number = own.number;
        // Another proxy may be first; the next view tells.
        let recorded = self.0.registry.record_rules(before, own).await.unwrap_or(false);
        if recorded {
            reached(Branch::RulesRecorded);
            tracing::info!(
                version = number,
                "the rules of who may do what were recorded for all proxies of the store"
            );
        }
        recorded
    }
}

impl Inner {
    /// Grants, or ceases to, by the rules of a view.
    pub(super) fn see_rules(&self, view: &View, me: u64) {
        let mut rules = self.rules.lock();
        let before = rules.differ();
        rules.see(view, me, of(&self.auth), self.grace);
        let (differ, trouble) = (rules.differ(), rules.trouble());
        let end = rules.end.as_ref().map(|(at, _)| RulesEnd { at: *at, why: WHY.into() });
        drop(rules);
        self.service.end_rules(end);
        self.metrics.fleet.rules_differ(differ);
        match trouble {
            Some((what, _)) if !before => {
                reached(Branch::RulesDiffer);
                tracing::error!("the rules of who may do what are not those of the store: {what}");
            }
            None if before => tracing::info!("the rules of who may do what are those of the store again"),
            _ => {}
        }
    }
}

/// What a client is told. It does not learn of the rules.
const WHY: &str = "its rules of who may do what are not those of the other proxies of its store";

#[cfg(test)]
mod tests;

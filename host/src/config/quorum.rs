//! `[stores.NAME]` and `[quorum]`: the stores of the primitive `quorum`.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::reader::Section;
use super::store::{ServerChoice, check_url};
use super::values::{NAME_RULE, is_plain_name};

/// How many stores a quorum may have.
const SIZE: RangeInclusive<usize> = 3..=9;

/// The stores of the primitive `quorum`.
#[derive(Clone, Debug)]
pub struct QuorumConfig {
    /// The stores, sorted by name: none, or three to nine.
    pub members: Vec<MemberConfig>,
    /// How long an operation whose majority is undecided waits for the stores that have not answered.
    pub patience: Duration,
}

/// One store of a quorum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberConfig {
    /// The name of the store: NAME in the table `[stores.NAME]`.
    pub name: String,
    /// A URL as in [`ServerChoice::Urls`].
    pub url: String,
}

impl QuorumConfig {
    /// Reads `[stores.NAME]` and `[quorum]`. `main` is the server of `[store]`.
    pub(super) fn read(top: &Section<'_>, main: &ServerChoice) -> QuorumConfig {
        let members = members(top, main);
        let section = top.section("quorum");
        let patience = section.milliseconds("patience_ms", 10..=60_000, 500);
        section.finish();
        QuorumConfig { members, patience }
    }
}

/// Each store must be a different server: otherwise one failure takes several stores down.
fn members(top: &Section<'_>, main: &ServerChoice) -> Vec<MemberConfig> {
    let mut members: Vec<MemberConfig> = Vec::new();
    let named = top.named("stores");
    let count = named.len();
    for (name, section) in named {
        if !is_plain_name(name) {
            section.complain_of_it(NAME_RULE);
        }
        if !SIZE.contains(&count) {
            let (least, most) = (SIZE.start(), SIZE.end());
            section.complain_of_it(format!("is one of {count} stores; a quorum has {least} to {most}"));
        }
        let url = section.required("url", |text, _| check_url(text).map(|()| text.to_owned()));
        if let Some(url) = url {
            let is_main = matches!(main, ServerChoice::Urls(main) if main.contains(&url));
            if is_main || members.iter().any(|member| member.url == url) {
                section.complain("url", "is given twice; each store of a quorum is a server of its own");
            }
            members.push(MemberConfig { name: name.to_owned(), url });
        }
        section.finish();
    }
    members.sort_by(|a, b| a.name.cmp(&b.name));
    members
}

//! Why each waiter of a key waits: what the lock table says, with the record of the key as the store has it now.

use super::holds::Holds;
use super::principal::Principal;
use super::views::{Decision, Estimate, NoEstimate, PlanEntry, QueueEntry};
use crate::config::Verb;
use crate::lock::record::{Cause, Claim, Denial, Env, others_wait, place_in_global_queue, refusal};
use crate::lock::table::{Order, Queued, Reason, Rule, Why};
use crate::lock::{Key, Mode};
use crate::policy::ReadPart;
use crate::store::Stored;

/// What the loop knows of a key.
pub(super) struct KeyView {
    pub queue: Vec<Waiting>,
    pub holds: Holds,
    pub decisions: Vec<Decision>,
}

/// A waiter, as the loop knows it.
pub(super) struct Waiting {
    pub queued: Queued,
    pub claim: Claim,
    pub rank: i32,
    pub group: Box<str>,
    /// The longest wait, in milliseconds.
    pub wait_ms: u32,
    /// What the policy reads of the request.
    pub reads: Option<Vec<ReadPart>>,
}

/// A key whose queue is shown to a reader.
pub(super) struct Shown<'a> {
    pub key: &'a Key,
    /// The record, if the store has one.
    pub stored: Option<&'a Stored>,
    pub holds: &'a Holds,
    /// The name of this proxy.
    pub proxy: &'a str,
    pub reader: &'a Principal,
}

impl Shown<'_> {
    /// The waiter in this place of the queue, as the reader may see it.
    pub fn entry(&self, position: u32, waiting: Waiting) -> QueueEntry {
        let global_position = self.global_position(&waiting.claim);
        let why = self.why(&waiting, global_position);
        let estimate = self.estimate(&waiting, &why, global_position);
        let may_read = why.key == *self.key || self.may_read(&why.key);
        let Waiting { queued, claim, rank, group, wait_ms, reads } = waiting;
        let text = match may_read {
            true => words(&why, self.key, &queued, claim.mode, global_position),
            false => "one of its other keys is not free".to_owned(),
        };
        QueueEntry {
            position,
            owner: claim.owner.into(),
            mode: claim.mode,
            rank,
            group: group.into(),
            waited_ms: queued.waited_ms,
            wait_left_ms: queued.wait_left_ms,
            rule: queued.rule,
            global_position,
            why: Some(why).filter(|_| may_read),
            text,
            estimate,
            plan: PlanEntry {
                policy: claim.tag.policy.clone(),
                keys: claim.keys.iter().filter(|key| self.may_read(key)).cloned().collect(),
                any: claim.any,
                ttl_ms: claim.ttl_ms,
                wait_ms,
                reads: reads.map(|parts| parts.into_iter().map(|part| self.part(part)).collect()),
            },
        }
    }

    fn may_read(&self, key: &Key) -> bool {
        self.reader.may(Verb::Read, key.as_str())
    }

    /// A part of the request with its value, if the reader may see it. Labels may have secrets, as stored values may.
    fn part(&self, part: ReadPart) -> (String, Option<String>) {
        let name = part.name();
        let value = match part {
            ReadPart::Name(value) => Some(value).filter(|name| self.reader.may(Verb::Read, name)),
            ReadPart::Owner(value) => Some(value),
            ReadPart::Mode(mode) => Some(mode_words(mode)),
            ReadPart::Label(_, value) => {
                Some(value).filter(|_| self.reader.may(Verb::ReadValue, self.key.as_str()))
            }
            ReadPart::Unshown(_) => None,
        };
        (name, value)
    }

    fn global_position(&self, claim: &Claim) -> Option<u32> {
        let (stored, own) = (self.stored?, claim.global.as_ref()?);
        Some(place_in_global_queue(&stored.record, own.number, &environment(stored))? as u32 + 1)
    }

    /// What the table says, or what the store would say now: the key may have changed hands on another proxy since the
    /// store was asked last.
    fn why(&self, waiting: &Waiting, global_position: Option<u32>) -> Why {
        let why = waiting.queued.why.clone();
        if global_position.is_some_and(|position| position > 1) {
            return Why { key: self.key.clone(), reason: blocked(Cause::GlobalQueue) };
        }
        let is_next = match &why.reason {
            Reason::Asked | Reason::Free | Reason::Blocked { .. } => true,
            // The order of the store decides.
            Reason::Behind { by: Order::GlobalQueue, .. } => global_position == Some(1),
            Reason::Behind { .. }
            | Reason::Choosing
            | Reason::Fairness { .. }
            | Reason::Unanswered { .. } => false,
        };
        let Some(stored) = self.stored.filter(|_| is_next && why.key == *self.key) else { return why };
        let denial = refusal(&stored.record, self.key, &waiting.claim, &environment(stored));
        let reason = match (denial, why.reason) {
            (Some(denial), _) => reason_of(denial),
            (None, Reason::Blocked { cause, .. }) if is_of_record(cause) => Reason::Free,
            (None, Reason::Behind { .. }) => Reason::Free,
            (None, reason) => reason,
        };
        Why { key: why.key, reason }
    }

    fn estimate(&self, waiting: &Waiting, why: &Why, global_position: Option<u32>) -> Estimate {
        let Waiting { queued, claim, .. } = waiting;
        let none = |why| Estimate::None(why);
        if claim.keys.len() > 1 {
            return none(NoEstimate::SeveralKeys);
        }
        if queued.rule == Rule::Fairness {
            return none(NoEstimate::Fairness);
        }
        let live = self.stored.into_iter().flat_map(|stored| {
            let holders = stored.record.holders.iter().filter(|holder| !stored.has_ended(holder));
            holders.map(|holder| (holder.mode, stored.now.ms_since(holder.since)))
        });
        let (modes, held_ms): (Vec<Mode>, Vec<u32>) = live.unzip();
        if modes.iter().chain([&claim.mode]).any(|mode| matches!(mode, Mode::Permits { .. })) {
            return none(NoEstimate::Permits);
        }
        let turns_ahead = match why.reason {
            Reason::Blocked { cause: Cause::Held | Cause::GlobalQueue, .. } | Reason::Behind { .. } => {
                global_position.map_or(queued.turns_ahead, |position| position - 1)
            }
            _ => return none(NoEstimate::NotHeld),
        };
        self.holds.estimate(&held_ms, turns_ahead)
    }

    /// Whether other proxies wait for the key, whose waiters this proxy does not know.
    pub fn others_wait(&self) -> bool {
        self.stored.is_some_and(|stored| others_wait(&stored.record, self.proxy, &environment(stored)))
    }
}

/// What a decision of the store depends on, as far as it is known with the record.
fn environment(stored: &Stored) -> Env {
    let is_in_doubt = stored
        .record
        .holders
        .iter()
        .any(|holder| holder.free_at() <= stored.now && !stored.has_ended(holder));
    Env { takeover: !is_in_doubt, ..Env::certain(stored.now) }
}

/// Whether the record alone says whether the cause still holds.
fn is_of_record(cause: Cause) -> bool {
    match cause {
        Cause::Held | Cause::Permits { .. } | Cause::Delay | Cause::GlobalQueue | Cause::Turn => true,
        Cause::ClockInDoubt | Cause::FailOver | Cause::Delegated | Cause::OtherSession | Cause::Divided => {
            false
        }
    }
}

fn reason_of(denial: Denial) -> Reason {
    let Denial { cause, holder, free_in_us, next_waiter, .. } = denial;
    let free_in_ms = u32::try_from(free_in_us / 1_000).unwrap_or(u32::MAX);
    Reason::Blocked { cause, holder, free_in_ms, next_waiter }
}

fn blocked(cause: Cause) -> Reason {
    Reason::Blocked { cause, holder: None, free_in_ms: 0, next_waiter: None }
}

/// The reason as a sentence. `shown`: the key whose queue is shown.
fn words(why: &Why, shown: &Key, queued: &Queued, mode: Mode, global_position: Option<u32>) -> String {
    let key = match why.key == *shown {
        true => "the key".to_owned(),
        false => format!("its key `{}`", why.key),
    };
    let cause = match &why.reason {
        Reason::Asked => format!("the store is being asked for {key}"),
        Reason::Free => format!("{key} is free, and the store is asked next"),
        Reason::Choosing => return "the policy is choosing the next waiter".to_owned(),
        Reason::Fairness { waiting } => {
            return format!("the policy's fairness hook chooses among the {waiting} waiters");
        }
        Reason::Behind { owner, mode, by, .. } => {
            let wants = match mode {
                Mode::Exclusive => "wants the lock exclusively".to_owned(),
                Mode::Shared => "wants to share the lock".to_owned(),
                Mode::Permits { count, .. } => format!("wants {}", permits(*count)),
            };
            let order = match by {
                Order::Rank => "has a lower rank",
                Order::Arrival => "arrived earlier",
                Order::GlobalQueue => "is ahead in the global queue",
            };
            let at = if why.key == *shown { String::new() } else { format!(" at {key}") };
            return format!("behind {owner}{at}, which {wants} and {order}");
        }
        Reason::Unanswered { why } => format!("the store did not answer, and is asked again: {why}"),
        Reason::Blocked { cause, holder, next_waiter, .. } => {
            let holder = holder.as_ref();
            let by = holder.map_or_else(|| "another client".to_owned(), |holder| holder.owner.to_string());
            let proxy = next_waiter.as_ref().map_or_else(String::new, |next| format!(" {}", next.proxy));
            match cause {
                Cause::GlobalQueue => {
                    let position = global_position
                        .map_or_else(String::new, |position| format!(", as number {position}"));
                    return format!("in the global queue of all proxies{position}");
                }
                Cause::Held => {
                    let mode =
                        holder.map_or_else(String::new, |holder| format!(" ({})", mode_words(holder.mode)));
                    format!("{key} is held by {by}{mode}")
                }
                Cause::Permits { used, limit } => {
                    let Mode::Permits { count, .. } = mode else { return format!("{key} is held by {by}") };
                    format!("{used} of {limit} permits are taken, and it wants {}", permits(count))
                }
                Cause::Delay if holder.is_some() => format!("the lock delay after the lease of {by} runs"),
                Cause::Delay => format!("{key} stays locked for its shortest time"),
                Cause::ClockInDoubt => {
                    format!("the lease of {by} has ended by the store's clock, which is in doubt")
                }
                Cause::FailOver => "leases of the server before a fail-over may still run".to_owned(),
                Cause::Turn => format!("it is the turn of another proxy:{proxy}"),
                Cause::Delegated => format!("{key} is delegated to another proxy:{proxy}"),
                Cause::OtherSession => format!("another session has {key}"),
                Cause::Divided => format!("the stores are divided among several claims for {key}"),
            }
        }
    };
    let rule = match queued.rule {
        Rule::RankThenArrival => "next: first by rank, then arrival",
        Rule::Fairness => "the policy's fairness hook chooses the next waiter",
        Rule::GlobalQueue => "first in the global queue",
    };
    format!("{rule}; {cause}")
}

fn mode_words(mode: Mode) -> String {
    match mode {
        Mode::Exclusive => "exclusive".to_owned(),
        Mode::Shared => "shared".to_owned(),
        Mode::Permits { count, .. } => permits(count),
    }
}

fn permits(count: u32) -> String {
    if count == 1 { "1 permit".to_owned() } else { format!("{count} permits") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::ServerTime;
    use crate::lock::record::{Delegate, GlobalTicket, Op, Record, Records, Tag, apply};
    use crate::lock::table::WaiterId;

    const NOW: ServerTime = ServerTime(100_000_000);

    fn key(name: &str) -> Key {
        Key::new(name).expect("a key")
    }

    fn claim(owner: &str, attempt: u64, mode: Mode) -> Claim {
        Claim {
            keys: [key("k")].into(),
            proxy: "here".into(),
            waits: true,
            any: false,
            attempt,
            owner: owner.into(),
            request: None,
            fingerprint: 0,
            mode,
            ttl_ms: 30_000,
            at_least_ms: 0,
            delay_ms: 0,
            reentrant: false,
            keep_ms: None,
            global: None,
            delegable: None,
            tag: Tag::default(),
        }
    }

    /// The record of the key after these operations, ten seconds later.
    fn stored(ops: &[Op]) -> Stored {
        let mut records = Records::default();
        records.insert(key("k"), None);
        let env = Env::certain(NOW);
        ops.iter().for_each(|op| drop(apply(&mut records, op, &env)));
        let record: Record = records.take(&key("k")).expect("it is there");
        Stored { key: key("k"), record, now: NOW.plus_ms(10_000), doubt: Default::default() }
    }

    fn waiting(claim: Claim, rule: Rule, turns_ahead: u32, why: Why) -> Waiting {
        let queued =
            Queued { waiter: WaiterId(claim.attempt), waited_ms: 1, wait_left_ms: 2, turns_ahead, rule, why };
        let reads = Some(vec![
            ReadPart::Name("k".to_owned()),
            ReadPart::Label("tenant".to_owned(), "acme".to_owned()),
            ReadPart::Unshown("http".to_owned()),
        ]);
        Waiting { queued, claim, rank: 0, group: "".into(), wait_ms: 60_000, reads }
    }

    fn shown(stored: Option<&Stored>, holds: &Holds, waiting: Waiting) -> QueueEntry {
        let (key, reader) = (key("k"), Principal::ANONYMOUS);
        Shown { key: &key, stored, holds, proxy: "here", reader: &reader }.entry(1, waiting)
    }

    fn on(name: &str, reason: Reason) -> Why {
        Why { key: key(name), reason }
    }

    fn cause(entry: &QueueEntry) -> Option<Cause> {
        match entry.why.as_ref()?.reason {
            Reason::Blocked { cause, .. } => Some(cause),
            _ => None,
        }
    }

    #[test]
    fn the_record_of_now_counts_more_than_the_last_answer_of_the_store() {
        let held = stored(&[Op::Acquire(claim("new", 7, Mode::Exclusive))]);
        let last = || on("k", blocked(Cause::Turn));
        let asks = || waiting(claim("asks", 1, Mode::Shared), Rule::RankThenArrival, 0, last());
        let entry = shown(Some(&held), &Holds::default(), asks());
        assert_eq!(cause(&entry), Some(Cause::Held));
        assert_eq!(entry.text, "next: first by rank, then arrival; the key is held by new (exclusive)");
        // A key that has become free is asked for next.
        let free = shown(Some(&stored(&[])), &Holds::default(), asks());
        assert_eq!(free.why, Some(on("k", Reason::Free)));
        // Other things than the record decide about a fail-over.
        let waits = waiting(
            claim("asks", 1, Mode::Shared),
            Rule::RankThenArrival,
            0,
            on("k", blocked(Cause::FailOver)),
        );
        assert_eq!(cause(&shown(Some(&stored(&[])), &Holds::default(), waits)), Some(Cause::FailOver));
        assert_eq!(cause(&shown(None, &Holds::default(), asks())), Some(Cause::Turn), "no record is known");
    }

    #[test]
    fn a_delegation_to_another_proxy_is_named_while_the_store_is_asked() {
        let (nonce, extra_ms, tokens) = (9, 20_000, 100);
        let owner = Claim { proxy: "there".into(), ..claim("x", 7, Mode::Exclusive) };
        let delegate = Delegate { claim: owner, nonce, rules: "p@1".into(), extra_ms, tokens };
        let held = stored(&[Op::Delegate(Box::new(delegate))]);
        let asks =
            waiting(claim("asks", 1, Mode::Exclusive), Rule::RankThenArrival, 0, on("k", Reason::Asked));
        let entry = shown(Some(&held), &Holds::default(), asks);
        assert_eq!(cause(&entry), Some(Cause::Delegated));
        assert!(entry.text.ends_with("the key is delegated to another proxy: there"), "{}", entry.text);
    }

    #[test]
    fn the_places_of_the_global_queue_are_those_of_the_store() {
        let ticket = |number| Some(GlobalTicket { number, rank: 0, joined: None, returns: false });
        let of =
            |owner: &str, number| Claim { global: ticket(number), ..claim(owner, number, Mode::Exclusive) };
        let held = stored(&[
            Op::Acquire(claim("x", 7, Mode::Exclusive)),
            Op::Acquire(Claim { proxy: "there".into(), ..of("first", 8) }),
            Op::Acquire(of("asks", 1)),
        ]);
        // The places last for five seconds.
        let held = Stored { now: NOW.plus_ms(1_000), ..held };
        let mut holds = Holds::default();
        (0..20).for_each(|_| holds.add(3_000));
        let asks = waiting(of("asks", 1), Rule::GlobalQueue, 0, on("k", Reason::Asked));
        let entry = shown(Some(&held), &holds, asks);
        assert_eq!((cause(&entry), entry.global_position), (Some(Cause::GlobalQueue), Some(2)));
        assert_eq!(entry.text, "in the global queue of all proxies, as number 2");
        // Two seconds of the present hold, and one hold of the waiter ahead.
        let Estimate::Within(wait) = entry.estimate else { panic!("{:?}", entry.estimate) };
        assert_eq!((wait.low_ms, wait.median_ms, wait.high_ms), (5_000, 5_000, 5_000));
    }

    #[test]
    fn what_cannot_be_estimated_is_not() {
        let mut holds = Holds::default();
        (0..20).for_each(|n| holds.add(20_000 + n));
        let held = |mode| stored(&[Op::Acquire(claim("x", 7, mode))]);
        let (exclusive, shared) = (Mode::Exclusive, Mode::Shared);
        let permits = Mode::Permits { count: 1, limit: 1 };
        let estimate = |stored: &Stored, claim: Claim, rule| {
            let why = on("k", blocked(Cause::Held));
            shown(Some(stored), &holds, waiting(claim, rule, 0, why)).estimate
        };
        let none = |why| Estimate::None(why);
        let asks = |mode| claim("asks", 1, mode);
        let arrival = Rule::RankThenArrival;
        assert!(matches!(estimate(&held(exclusive), asks(shared), arrival), Estimate::Within(_)));
        assert_eq!(estimate(&held(permits), asks(permits), arrival), none(NoEstimate::Permits));
        assert_eq!(estimate(&held(exclusive), asks(shared), Rule::Fairness), none(NoEstimate::Fairness));
        assert_eq!(estimate(&stored(&[]), asks(shared), arrival), none(NoEstimate::NotHeld));
        let several = Claim { keys: [key("k"), key("l")].into(), ..asks(exclusive) };
        assert_eq!(estimate(&held(exclusive), several, arrival), none(NoEstimate::SeveralKeys));
        let late = Stored { now: NOW.plus_ms(25_000), ..held(exclusive) };
        assert_eq!(estimate(&late, asks(exclusive), arrival), none(NoEstimate::HeldLonger { holds: 20 }));
    }

    #[test]
    fn each_reason_is_told_in_words() {
        let told = |reason, mode| {
            let asks = waiting(claim("asks", 1, mode), Rule::RankThenArrival, 0, on("k", reason));
            shown(None, &Holds::default(), asks).text
        };
        let behind = |mode, by| Reason::Behind { ahead: WaiterId(2), owner: "w".into(), mode, by };
        let writer = told(behind(Mode::Exclusive, Order::Arrival), Mode::Shared);
        assert_eq!(writer, "behind w, which wants the lock exclusively and arrived earlier");
        let ranked = told(behind(Mode::Permits { count: 2, limit: 3 }, Order::Rank), Mode::Shared);
        assert_eq!(ranked, "behind w, which wants 2 permits and has a lower rank");
        let taken = blocked(Cause::Permits { used: 2, limit: 3 });
        let permits = told(taken, Mode::Permits { count: 2, limit: 3 });
        assert_eq!(
            permits,
            "next: first by rank, then arrival; 2 of 3 permits are taken, and it wants 2 permits"
        );
        let fairness = told(Reason::Fairness { waiting: 3 }, Mode::Exclusive);
        assert_eq!(fairness, "the policy's fairness hook chooses among the 3 waiters");
        let other =
            waiting(claim("asks", 1, Mode::Shared), Rule::RankThenArrival, 0, on("l", blocked(Cause::Held)));
        let text = shown(None, &Holds::default(), other).text;
        assert!(text.ends_with("its key `l` is held by another client"), "{text}");
    }
}

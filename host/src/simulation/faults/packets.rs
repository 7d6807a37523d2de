//! What the network does to packets.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::super::network::{Fate, Network, Trip};
use super::Tally;
use crate::clock;
use crate::mutex::Mutex;

/// The network between one proxy and all servers.
pub struct FaultyNetwork {
    random: Mutex<StdRng>,
    packet_faults_per_mille: AtomicU32,
    /// The time in which the proxy is cut off.
    cut: Spell,
    /// The time in which the proxy's heartbeats are lost.
    silence: Spell,
    /// The time in which packets on sessions with locks are late.
    slow_sessions: Spell,
    /// The fates that a packet with a fault may have, as numbers below [`PACKET_FAULTS`].
    kinds: Vec<u32>,
    tally: Arc<Tally>,
}

/// The number of fates that a packet with a fault may have.
const PACKET_FAULTS: u32 = 7;

impl FaultyNetwork {
    /// A network without faults, until [`FaultyNetwork::fail`].
    pub fn new(seed: u64, tally: Arc<Tally>) -> FaultyNetwork {
        let mut random = StdRng::seed_from_u64(seed);
        let kinds = match random.random_bool(0.5) {
            true => (0..PACKET_FAULTS).collect(),
            false => vec![random.random_range(0..PACKET_FAULTS)],
        };
        FaultyNetwork {
            random: Mutex::new(random),
            packet_faults_per_mille: AtomicU32::new(0),
            cut: Spell::default(),
            silence: Spell::default(),
            slow_sessions: Spell::default(),
            kinds,
            tally,
        }
    }

    /// Sets the share of packets, in thousandths, that have a fault from now on.
    pub fn fail(&self, per_mille: u32) {
        self.packet_faults_per_mille.store(per_mille, Relaxed);
    }

    pub fn heal(&self) {
        self.fail(0);
        [&self.cut, &self.silence, &self.slow_sessions].into_iter().for_each(Spell::end);
    }

    /// Loses everything in the next `ms`.
    pub fn cut(&self, ms: u32) {
        self.cut.last(ms);
    }

    /// Loses the proxy's heartbeats in the next `ms`.
    pub fn silence(&self, ms: u32) {
        self.silence.last(ms);
    }

    /// Delays packets on sessions with locks until the end of the next `ms`.
    pub fn slow_sessions(&self, ms: u32) {
        self.slow_sessions.last(ms);
    }
}

/// A period in which something goes wrong.
#[derive(Default)]
struct Spell(AtomicU64);

impl Spell {
    /// Extends the period to at least `ms` from now.
    fn last(&self, ms: u32) {
        self.0.fetch_max(clock::now().plus_ms(ms).0, Relaxed);
    }

    fn end(&self) {
        self.0.store(0, Relaxed);
    }

    /// The time that is left; `None` if the period is over.
    fn left(&self) -> Option<Duration> {
        let left_us = self.0.load(Relaxed).saturating_sub(clock::now().0);
        (left_us > 0).then(|| Duration::from_micros(left_us))
    }
}

fn contains(sql: &[u8], text: &[u8]) -> bool {
    sql.windows(text.len()).any(|part| part == text)
}

/// Text that every heartbeat of a proxy contains.
const BEAT: &[u8] = b"UPDATE lockkeeper_proxy SET beat_us";

/// Text of the statements that request named locks and row locks.
const ON_SESSIONS: [&[u8]; 2] = [b"GET_LOCK('", b"FROM lockkeeper_row "];

impl Network for FaultyNetwork {
    fn trip(&self, sql: &[u8]) -> Trip {
        let mut random = self.random.lock();
        let mut way = || Duration::from_micros(random.random_range(100..1_000));
        let (there, back, hesitation) = (way(), way(), Duration::ZERO);
        let trip = |fate| Trip { hesitation, there, back, fate };
        if self.silence.left().is_some() && contains(sql, BEAT) {
            return trip(Fate::Lost);
        }
        if let Some(left) = self.slow_sessions.left()
            && ON_SESSIONS.iter().any(|text| contains(sql, text))
        {
            self.tally.count("a packet of a session is slow");
            return Trip { there: left, ..trip(Fate::Delivered) };
        }
        if let Some(left) = self.cut.left() {
            self.tally.count("a packet is sent while its proxy is cut off");
            let again = left + Duration::from_millis(random.random_range(0..3_000));
            // By then, some packets have been sent again.
            return match random.random_bool(0.5) {
                true => Trip { there: again, ..trip(Fate::Delivered) },
                false => trip(Fate::Lost),
            };
        }
        if random.random_range(0..1_000_u32) >= self.packet_faults_per_mille.load(Relaxed) {
            return trip(Fate::Delivered);
        }
        let slow = Duration::from_millis(random.random_range(1..6_000));
        let (kind, trip) = match self.kinds.choose(&mut *random).copied().unwrap_or(0) {
            0 => ("a connection breaks before its packet", trip(Fate::Refused)),
            1 => ("a packet is lost", trip(Fate::Lost)),
            2 => ("a connection breaks before its answer", trip(Fate::Unanswered)),
            3 => ("an answer is lost", trip(Fate::AnswerLost)),
            4 => ("a packet is slow", Trip { there: slow, ..trip(Fate::Delivered) }),
            5 => ("an answer is slow", Trip { back: slow, ..trip(Fate::Delivered) }),
            _ => ("a packet is sent late", Trip { hesitation: slow / 2, ..trip(Fate::Delivered) }),
        };
        self.tally.count(kind);
        trip
    }
}

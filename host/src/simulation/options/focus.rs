//! Runs for one kind of mistake each, with events that seldom coincide by chance.

use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use super::{Options, PROMPT_MS, SHORT_MS};
use crate::simulation::application::GUARDED;
use crate::simulation::faults::{Fault, ORDERED, Planned, Settings};

/// The policies whose locks depend on database sessions.
const ON_SESSIONS: [&str; 2] = ["advisory", "row"];

impl Options {
    /// A run with a few resources of one policy.
    pub(super) fn focus(self, random: &mut StdRng) -> Options {
        let few = Options {
            clients: random.random_range(6..=24),
            resources: random.random_range(1..=2),
            asks_for_several: false,
            longest_ttl_ms: SHORT_MS,
            packet_faults_per_mille: 0,
            faults: Vec::new(),
            keep_names: false,
            second: None,
            second_ahead_ms: 0,
            in_order: false,
            late_ms: PROMPT_MS,
            ..self
        };
        // Mistakes that show in few of their runs get more runs.
        match random.random_range(0..24) {
            0 => few.with_a_proxy_that_is_alone(random),
            1 | 13 => few.with_claims_under_way(random),
            2 | 3 => few.with_a_member_that_returns(random),
            4 | 5 => few.with_changes_of_order(random),
            6 => few.with_slow_members_of_a_quorum(random),
            7 => few.with_a_member_that_is_silent_for_a_while(random),
            8 => few.with_requests_that_may_finish(random),
            9 | 10 => few.with_starts_beside_earlier_leases(random),
            11 => few.with_sessions_that_end(random),
            12 => few.with_requests_for_several_resources(random),
            14 => few.with_rules_that_go_back(random),
            15 => few.with_versions_that_get_other_names(random),
            16..19 => few.with_clocks_that_are_set(random),
            22 | 23 => few.with_canaries(random),
            _ => few.with_other_modes(random),
        }
    }

    /// While a member counts as gone, the policy renames its keys and renames them back. Leases under the other names
    /// exist when the member returns.
    fn with_a_member_that_returns(self, random: &mut StdRng) -> Options {
        let (policy, away, by) = ("lease", 0, 1);
        let began_ms = random.random_range(500..3_000);
        let back_ms = began_ms + 30_000;
        let settings = Settings { stripes: random.random_range(1..=2), ..Settings::of(policy) };
        let planned = |at_ms, fault| Planned { at_ms, fault };
        // By the second change, the leases under the old names have ended.
        let changed_ms = back_ms - random.random_range(9_000..12_000);
        Options {
            lasts: Duration::from_secs(38),
            faults: vec![
                planned(began_ms, Fault::Silence { proxy: away, ms: 30_000 }),
                planned(changed_ms, Fault::Replace { proxy: by, policy, settings }),
                planned(back_ms - random.random_range(200..1_500), Fault::RollBack { proxy: by, policy }),
            ],
            ..self.with_leases_that_are_left(policy)
        }
    }

    /// Two proxies, and long leases of one policy, half of which nobody releases.
    fn with_leases_that_are_left(self, policy: &'static str) -> Options {
        Options {
            policies: vec![policy],
            proxies: 2,
            work_ms: 800,
            forgets_per_mille: 500,
            longest_ttl_ms: 8_000,
            ..self
        }
    }

    /// Proxies start while long leases have the keys of an earlier policy: beside a proxy that has changed the policy, or
    /// one after the other with another policy in their files.
    fn with_starts_beside_earlier_leases(self, random: &mut StdRng) -> Options {
        let (policy, lasts) = ("lease", Duration::from_secs(30));
        let (mut at_ms, mut faults) = (random.random_range(1_000_u32..3_000), Vec::new());
        for stripes in [1, 0, 2, 0].into_iter().cycle() {
            if u128::from(at_ms) >= lasts.as_millis() {
                break;
            }
            let mut add = |after_ms, fault| faults.push(Planned { at_ms: at_ms + after_ms, fault });
            let settings = Settings { stripes, ..Settings::of(policy) };
            let down_ms = random.random_range(200..1_000);
            if random.random_bool(0.5) {
                add(0, Fault::Replace { proxy: 1, policy, settings });
                add(random.random_range(100..1_500), Fault::Restart { proxy: 0, down_ms });
            } else {
                add(0, Fault::Edit { policy, settings });
                add(10, Fault::Restart { proxy: 0, down_ms });
                let down_ms = down_ms + random.random_range(300..2_000);
                add(10, Fault::Restart { proxy: 1, down_ms });
            }
            at_ms += random.random_range(4_000..8_000);
        }
        Options { lasts, faults, ..self.with_leases_that_are_left(policy) }
    }

    /// A member's heartbeats are lost for a part of its membership. Meanwhile the policy renames its keys, and the
    /// store's clock is set forward past the end of the membership, and back.
    fn with_a_member_that_is_silent_for_a_while(self, random: &mut StdRng) -> Options {
        let (policy, away, by) = ("lease", 0, 1);
        let planned = |at_ms, fault| Planned { at_ms, fault };
        let step = |by_ms| Fault::SetClock { server: 0, by_ms };
        let mut faults = Vec::new();
        for (at_ms, stripes) in [(1_000, 1), (22_000, 0), (43_000, 2)] {
            let settings = Settings { stripes, ..Settings::of(policy) };
            let step_ms = at_ms + random.random_range(100..2_000);
            let back_ms = step_ms + random.random_range(1_000..4_000);
            faults.push(planned(at_ms, Fault::Silence { proxy: away, ms: 9_000 }));
            faults.push(planned(at_ms + 50, Fault::Replace { proxy: by, policy, settings }));
            faults.push(planned(step_ms, step(60_000)));
            faults.push(planned(back_ms, step(-60_000)));
        }
        Options { policies: vec![policy], proxies: 2, lasts: Duration::from_secs(55), faults, ..self }
    }

    /// While many clients wait, the policy changes between a primitive with all modes and primitives that lack some
    /// modes.
    fn with_other_modes(self, random: &mut StdRng) -> Options {
        let (policy, mut at_ms, mut faults) = ("lease", 0, Vec::new());
        let lasts = Duration::from_secs(20);
        for n in 0.. {
            at_ms += random.random_range(300..1_500);
            if u128::from(at_ms) >= lasts.as_millis() {
                break;
            }
            if random.random_bool(0.5) {
                let ms = random.random_range(50..400);
                faults.push(Planned { at_ms: at_ms - 100, fault: Fault::StallCommits { server: 0, ms } });
            }
            let others = ON_SESSIONS.choose(random).copied().unwrap_or(policy);
            let primitive = if n % 2 == 0 { others } else { policy };
            let settings = Settings { primitive, ..Settings::of(policy) };
            let proxy = random.random_range(0..self.proxies);
            faults.push(Planned { at_ms, fault: Fault::Replace { proxy, policy, settings } });
            // One proxy uses both policies while the others already use only the next policy.
            if random.random_bool(0.3) {
                let proxy = random.random_range(0..self.proxies);
                let silent_ms = at_ms + random.random_range(50..800);
                faults.push(Planned { at_ms: silent_ms, fault: Fault::Silence { proxy, ms: 3_000 } });
                at_ms += 3_000;
            }
        }
        Options { policies: vec![policy], shared_percent: 50, lasts, faults, ..self }
    }

    /// The policy [`ORDERED`] gets a global queue and loses it again, while clients wait.
    fn with_changes_of_order(self, random: &mut StdRng) -> Options {
        let (mut at_ms, proxies) = (0, self.proxies);
        let change = |global_order| {
            at_ms += random.random_range(500..5_000);
            let settings = Settings { global_order, ..Settings::of(ORDERED) };
            let proxy = random.random_range(0..proxies);
            Planned { at_ms, fault: Fault::Replace { proxy, policy: ORDERED, settings } }
        };
        let changes = [true, false].into_iter().cycle().map(change);
        let faults =
            changes.take_while(|planned| u128::from(planned.at_ms) < self.lasts.as_millis()).collect();
        Options { policies: vec![ORDERED], keep_names: true, faults, ..self }
    }

    /// A policy changes while only one proxy runs, whose clients hold locks on sessions for long.
    fn with_a_proxy_that_is_alone(self, random: &mut StdRng) -> Options {
        let policy = ON_SESSIONS.choose(random).copied().unwrap_or("row");
        let began_ms = random.random_range(4_000..10_000);
        let down_ms = random.random_range(2_000..4_000);
        let changed_ms = began_ms + random.random_range(0..down_ms);
        let settings = Settings { stripes: random.random_range(1..=2), ..Settings::of(policy) };
        Options {
            policies: vec![policy],
            proxies: 2,
            resources: self.resources * 4,
            long_holds_percent: 30,
            lasts: Duration::from_secs(25),
            faults: vec![
                Planned { at_ms: began_ms, fault: Fault::Restart { proxy: 0, down_ms } },
                Planned { at_ms: changed_ms, fault: Fault::Replace { proxy: 1, policy, settings } },
            ],
            ..self
        }
    }

    /// A new file of principals reaches one proxy. Then the other proxy starts first, with its earlier file.
    fn with_rules_that_go_back(self, random: &mut StdRng) -> Options {
        let (mut at_ms, mut faults, lasts) = (1_000_u32, Vec::new(), Duration::from_secs(30));
        for version in 1.. {
            if u128::from(at_ms) >= lasts.as_millis() {
                break;
            }
            let mut add = |after_ms, fault| faults.push(Planned { at_ms: at_ms + after_ms, fault });
            add(0, Fault::Deploy { proxy: 1, version });
            let (stops_ms, down_ms) = (random.random_range(500..2_000), random.random_range(200..1_000));
            add(stops_ms, Fault::Restart { proxy: 0, down_ms });
            add(stops_ms, Fault::Restart { proxy: 1, down_ms: down_ms + random.random_range(300..2_000) });
            at_ms += random.random_range(5_000..8_000);
        }
        Options { policies: vec!["lease"], proxies: 2, authenticates: true, lasts, faults, ..self }
    }

    /// The clocks of servers are set, by little and by much, and half of the times set right again. Many leases end without a
    /// release.
    fn with_clocks_that_are_set(self, random: &mut StdRng) -> Options {
        let policy = *["lease", "lease", "quorum"].choose(random).unwrap_or(&"lease");
        let (mut at_ms, mut faults, lasts) = (1_000_u32, Vec::new(), Duration::from_secs(30));
        while u128::from(at_ms) < lasts.as_millis() {
            let server = if policy == "quorum" { random.random_range(0..=self.members) } else { 0 };
            let by_ms = *[80, 80, 80, 300, 2_000, 5_000, 60_000].choose(random).unwrap_or(&80);
            let by_ms = if random.random_bool(0.5) { by_ms } else { -by_ms };
            faults.push(Planned { at_ms, fault: Fault::SetClock { server, by_ms } });
            if random.random_bool(0.5) {
                at_ms += random.random_range(50..4_000);
                faults.push(Planned { at_ms, fault: Fault::SetClock { server, by_ms: -by_ms } });
            }
            at_ms += random.random_range(100..3_000);
        }
        let work_ms = *[5, 20, 80].choose(random).unwrap_or(&20);
        Options { policies: vec![policy], work_ms, forgets_per_mille: 300, lasts, faults, ..self }
    }

    /// The keys of versions get other names again and again, while clients read and commit them.
    fn with_versions_that_get_other_names(self, random: &mut StdRng) -> Options {
        let (policy, lasts) = ("version", Duration::from_secs(20));
        let (mut at_ms, mut faults) = (0_u32, Vec::new());
        for stripes in [999_983, 0, 1_000_000, 0].into_iter().cycle() {
            at_ms += random.random_range(100..1_500);
            if u128::from(at_ms) >= lasts.as_millis() {
                break;
            }
            let proxy = random.random_range(0..self.proxies);
            let settings = Settings { stripes, ..Settings::of(policy) };
            faults.push(Planned { at_ms, fault: Fault::Replace { proxy, policy, settings } });
            // Reads and commits are under way for longer.
            if random.random_bool(0.5) {
                let ms = random.random_range(50..800);
                let stalled_ms = at_ms.saturating_sub(random.random_range(0..100));
                faults.push(Planned { at_ms: stalled_ms, fault: Fault::StallCommits { server: 0, ms } });
            }
        }
        faults.sort_by_key(|planned| planned.at_ms);
        Options { policies: vec![policy], lasts, faults, ..self }
    }

    /// Many clients ask for several of a few resources at once, through several proxies.
    fn with_requests_for_several_resources(self, random: &mut StdRng) -> Options {
        Options {
            policies: vec!["lease"],
            proxies: random.random_range(2..=3),
            clients: random.random_range(12..=48),
            resources: random.random_range(2..=4),
            asks_for_several: true,
            lasts: Duration::from_secs(20),
            ..self
        }
    }

    /// Sessions end while shared locks that begin one after another rest on them.
    fn with_sessions_that_end(self, random: &mut StdRng) -> Options {
        let policy = ON_SESSIONS.choose(random).copied().unwrap_or("row");
        let (mut at_ms, mut faults) = (random.random_range(200..2_000), Vec::new());
        let lasts = Duration::from_secs(20);
        while u128::from(at_ms) < lasts.as_millis() {
            let fault = Fault::KillSession { server: 0, nth: random.random_range(0..64) };
            faults.push(Planned { at_ms, fault });
            at_ms += random.random_range(50..1_000);
        }
        Options {
            policies: vec![policy],
            shared_percent: random.random_range(20..=90),
            lasts,
            faults,
            ..self
        }
    }

    /// Keys are renamed when all locks on sessions have ended and others are being requested.
    fn with_claims_under_way(self, random: &mut StdRng) -> Options {
        let policy = ON_SESSIONS.choose(random).copied().unwrap_or("row");
        let proxies = self.proxies.max(2);
        let (mut at_ms, mut faults) = (3_000, Vec::new());
        for stripes in [1, 0, 2] {
            // Longer than a lease, and a little shorter than the time-out of store calls.
            let ms = random.random_range(4_000..4_900);
            let slow = |proxy| Planned { at_ms, fault: Fault::SlowSessions { proxy, ms } };
            faults.extend((0..proxies).map(slow));
            let settings = Settings { stripes, ..Settings::of(policy) };
            let at = at_ms + random.random_range(SHORT_MS..ms);
            faults.push(Planned { at_ms: at, fault: Fault::Replace { proxy: 1, policy, settings } });
            at_ms += ms + random.random_range(2_000..5_000);
        }
        Options {
            policies: vec![policy],
            proxies,
            work_ms: 20,
            forgets_per_mille: 300,
            long_holds_percent: 0,
            lasts: Duration::from_secs(30),
            faults,
            ..self
        }
    }

    /// Guarded requests continue after their leases are lost, and proxies are cut off for longer than a lease,
    /// sometimes while a connection to the application opens.
    fn with_requests_that_may_finish(self, random: &mut StdRng) -> Options {
        let settings = Settings { lets_finish: true, ..Settings::of(GUARDED) };
        let replaced = Fault::Replace { proxy: 0, policy: GUARDED, settings };
        let (mut at_ms, mut faults) = (2_000, vec![Planned { at_ms: 0, fault: replaced }]);
        while u128::from(at_ms) < self.lasts.as_millis() {
            let (proxy, ms) = (random.random_range(0..2), random.random_range(2_000..4_500));
            faults.push(Planned { at_ms, fault: Fault::CutOff { proxy, ms } });
            at_ms += random.random_range(1_000..6_000);
        }
        Options { policies: vec![GUARDED], proxies: 2, work_ms: 80, keep_names: true, faults, ..self }
    }

    /// A proxy is killed that has granted long leases from its memory. While they last, the policy renames its keys.
    fn with_a_killed_owner(self, random: &mut StdRng) -> Options {
        let (policy, killed, by) = ("lease", 0, 1);
        let killed_ms = random.random_range(1_500..6_000);
        // With one stripe, one lease keeps all resources from being granted, and the leases of a key are for different ones.
        let (before, after) = *[(0, 1), (0, 1_000), (1, 0)].choose(random).unwrap_or(&(0, 1));
        let planned = |at_ms, fault| Planned { at_ms, fault };
        let renamed = |stripes| {
            let settings = Settings { stripes, ..Settings::of(policy) };
            Fault::Replace { proxy: by, policy, settings }
        };
        let changed_ms = killed_ms + random.random_range(0..3_000);
        let mut faults = vec![
            planned(killed_ms, Fault::Kill { proxy: killed, down_ms: 60_000 }),
            planned(changed_ms, renamed(after)),
        ];
        if before > 0 {
            faults.insert(0, planned(0, renamed(before)));
        }
        Options {
            policies: vec![policy],
            proxies: 2,
            clients: random.random_range(4..=12),
            resources: random.random_range(2..=6),
            asks_for_several: false,
            keep_names: false,
            in_order: false,
            forgets_per_mille: 300,
            longest_ttl_ms: 40_000,
            to_the_first_percent: 80,
            second: None,
            second_ahead_ms: 0,
            lasts: Duration::from_secs(45),
            faults,
            ..self
        }
    }

    /// The proxy that has got the keys is killed, paused or cut off, in some runs after late answers of the store. Clients
    /// rely on their leases until the end.
    fn with_owners_that_go_away(self, random: &mut StdRng) -> Options {
        let (mut at_ms, mut faults, is_slow) = (1_000, Vec::new(), random.random_bool(0.5));
        let lasts = Duration::from_secs(40);
        while u128::from(at_ms) < lasts.as_millis() {
            let ms = random.random_range(300..2_000);
            if is_slow {
                faults.push(Planned { at_ms, fault: Fault::StallCommits { server: 0, ms } });
            }
            let at = at_ms + ms + random.random_range(0..1_500);
            let away_ms = random.random_range(3_000..6_000);
            let fault = match random.random_range(0..3) {
                0 => Fault::Kill { proxy: 0, down_ms: away_ms },
                1 => Fault::Pause { proxy: 0, ms: away_ms },
                _ => Fault::CutOff { proxy: 0, ms: away_ms },
            };
            faults.push(Planned { at_ms: at, fault });
            at_ms = at + away_ms + random.random_range(500..5_000);
        }
        Options {
            policies: vec!["lease"],
            proxies: 2,
            clients: random.random_range(8..=32),
            resources: random.random_range(1..=2),
            asks_for_several: false,
            in_order: false,
            work_ms: 5,
            // Either many tokens are used up in a delegation, or many leases last until their end.
            forgets_per_mille: *[0, 300].choose(random).unwrap_or(&0),
            long_holds_percent: 0,
            longest_ttl_ms: SHORT_MS,
            // If no other proxy asks for the keys, they stay delegated.
            to_the_first_percent: *[80, 97, 100].choose(random).unwrap_or(&97),
            second: None,
            second_ahead_ms: 0,
            packet_faults_per_mille: 0,
            lasts,
            faults,
            ..self
        }
    }

    /// Many clients want a few keys that proxies may grant from their memory, with the faults that the run has.
    pub(super) fn with_few_delegated_keys(mut self, random: &mut StdRng) -> Options {
        match random.random_range(0..10) {
            0 | 1 => return self.with_a_killed_owner(random),
            2..=5 => return self.with_owners_that_go_away(random),
            _ => {}
        }
        self.planned_settings().for_each(|settings| settings.global_order = false);
        Options {
            policies: vec![*["lease", "lease", "lease", GUARDED].choose(random).unwrap_or(&"lease")],
            clients: random.random_range(4..=32),
            resources: random.random_range(1..=3),
            asks_for_several: random.random_bool(0.1),
            work_ms: *[5, 20, 200].choose(random).unwrap_or(&20),
            in_order: false,
            // Otherwise keys go from one proxy to the next with each call.
            to_the_first_percent: *[0, 80, 97].choose(random).unwrap_or(&0),
            ..self
        }
    }

    /// Versions that give keys other names, or hold them in another way, decide for a share of the keys, on one proxy
    /// earlier than on the other.
    fn with_canaries(self, random: &mut StdRng) -> Options {
        let policy = *["lease", "lease", "version", "row", GUARDED].choose(random).unwrap_or(&"lease");
        let (mut at_ms, mut faults) = (random.random_range(200..1_500), Vec::new());
        while u128::from(at_ms) < self.lasts.as_millis() {
            let proxy = random.random_range(0..2);
            let stripes = random.random_range(0..=2);
            let settings = Settings { stripes, ..Settings::of(policy) };
            let (percent, every_ms) = (*[30, 60, 90].choose(random).unwrap_or(&60), 0);
            let fault = match random.random_range(0..6) {
                0..=3 => Fault::Canary { proxy, policy, settings, percent, every_ms },
                4 => Fault::Promote { proxy, policy },
                _ => Fault::RollBack { proxy, policy },
            };
            faults.push(Planned { at_ms, fault });
            at_ms += random.random_range(300..4_000);
        }
        Options { policies: vec![policy], proxies: 2, resources: random.random_range(1..=4), faults, ..self }
    }

    /// A member of the quorum is slow to undo a refused claim for several keys.
    fn with_slow_members_of_a_quorum(self, random: &mut StdRng) -> Options {
        let (mut at_ms, mut faults) = (0, Vec::new());
        while u128::from(at_ms) < self.lasts.as_millis() {
            let (server, ms) = (random.random_range(1..=3), random.random_range(300..2_000));
            faults.push(Planned { at_ms, fault: Fault::StallCommits { server, ms } });
            at_ms += random.random_range(500..3_000);
        }
        Options {
            policies: vec!["quorum"],
            members: 3,
            resources: random.random_range(2..=3),
            asks_for_several: true,
            packet_faults_per_mille: 20,
            faults,
            ..self
        }
    }
}

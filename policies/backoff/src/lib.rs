//! Polling: the policy decides how long a request sleeps before it tries again to get a held key, and when it gives
//! up.
//!
//! README.md documents the settings.

use lockkeeper_sdk::backoff::{Contention, Decision};
use lockkeeper_sdk::reads::Part;
use lockkeeper_sdk::{Plan, Policy, Random, Refusal, Request, within};
use serde::{Deserialize, Serialize};

/// The policy.
pub struct Backoff;

/// How the length of a sleep is chosen within its bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sleep {
    /// Always `min_ms`.
    Fixed,
    /// A random time between `min_ms` and `max_ms`.
    Random,
    /// A random time between `min_ms` and a bound, which starts at `min_ms` and doubles with each attempt, up to
    /// `max_ms`.
    Exponential,
}

/// The settings, which README.md documents.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    pub sleep: Sleep,
    pub min_ms: u32,
    pub max_ms: u32,
    pub attempts: u32,
    pub wait_ms: u32,
    pub ttl_ms: u32,
    pub max_waiters: u32,
    pub permits: u32,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            sleep: Sleep::Random,
            min_ms: 50,
            max_ms: 200,
            attempts: 0,
            wait_ms: 10_000,
            ttl_ms: Plan::TTL,
            max_waiters: Plan::MAX_WAITERS,
            permits: 10,
        }
    }
}

impl Policy for Backoff {
    type Settings = Settings;

    fn check(settings: &Settings) -> Result<(), String> {
        within("min_ms", settings.min_ms, 5..=60_000)?;
        within("max_ms", settings.max_ms, settings.min_ms..=60_000)?;
        within("wait_ms", settings.wait_ms, 0..=3_600_000)?;
        within("ttl_ms", settings.ttl_ms, 100..=3_600_000)?;
        within("max_waiters", settings.max_waiters, 0..=20_000)?;
        within("permits", settings.permits, 1..=1_024)
    }

    /// `wait_ms` is the longest wait: a request may ask for less, but not for more.
    fn plan(settings: &Settings, request: &Request) -> Result<Plan, Refusal> {
        let plan = Plan {
            ttl: request.ttl.unwrap_or(settings.ttl_ms),
            wait: request.wait.unwrap_or(settings.wait_ms).min(settings.wait_ms),
            max_waiters: settings.max_waiters,
            ..Plan::of(request)
        };
        plan.with_permits(settings.permits)
    }

    fn plan_reads(_: &Settings) -> Vec<Part> {
        vec![Part::Name, Part::Mode, Part::Ttl, Part::Wait]
    }

    fn contended(settings: &Settings, contention: &Contention) -> Decision {
        if settings.attempts != 0 && contention.attempt >= settings.attempts {
            return Decision::GiveUp(format!("still held after {} attempts", contention.attempt));
        }
        let Settings { min_ms, max_ms, .. } = *settings;
        let mut random = Random::new(contention.seed);
        Decision::Poll(match settings.sleep {
            Sleep::Fixed => min_ms,
            Sleep::Random => random.between(min_ms, max_ms),
            Sleep::Exponential => {
                let doublings = contention.attempt.min(16);
                random.between(min_ms, min_ms.saturating_mul(1 << doublings).min(max_ms))
            }
        })
    }
}

lockkeeper_sdk::export!(Backoff, backoff, reads);

#[cfg(test)]
mod tests {
    use super::*;

    fn sleep(settings: &Settings, attempt: u32, seed: u32) -> Decision {
        let contention = Contention {
            key: "a".into(),
            attempt,
            waited: 0,
            wait_left: 1_000,
            holder_left: 0,
            holder: String::new(),
            waiters: 1,
            last_sleep: 0,
            labels: Vec::new(),
            seed,
        };
        Backoff::contended(settings, &contention)
    }

    fn range(settings: &Settings, attempt: u32) -> (u32, u32) {
        let sleeps = (0..1_000).map(|seed| match sleep(settings, attempt, seed) {
            Decision::Poll(ms) => ms,
            other => panic!("{other:?}"),
        });
        let sleeps: Vec<u32> = sleeps.collect();
        (*sleeps.iter().min().unwrap(), *sleeps.iter().max().unwrap())
    }

    fn settings(sleep: Sleep) -> Settings {
        Settings { sleep, min_ms: 10, max_ms: 100, ..Settings::default() }
    }

    #[test]
    fn sleeps_stay_inside_their_bounds() {
        assert_eq!(range(&settings(Sleep::Fixed), 7), (10, 10));
        let (low, high) = range(&settings(Sleep::Random), 1);
        assert!((10..14).contains(&low) && (97..=100).contains(&high), "{low} to {high}");
    }

    #[test]
    fn exponential_sleeps_double_up_to_the_bound() {
        let settings = settings(Sleep::Exponential);
        assert_eq!(range(&settings, 1), (10, 20));
        assert!(range(&settings, 2).1 > 30 && range(&settings, 2).1 <= 40);
        assert!(range(&settings, u32::MAX).1 <= 100);
    }

    #[test]
    fn the_policy_gives_up_only_after_the_last_attempt() {
        let settings = Settings { attempts: 3, ..settings(Sleep::Fixed) };
        assert_eq!(sleep(&settings, 2, 0), Decision::Poll(10));
        assert!(matches!(sleep(&settings, 3, 0), Decision::GiveUp(reason) if reason.contains('3')));
        let tireless = Settings { attempts: 0, ..settings };
        assert_eq!(sleep(&tireless, u32::MAX, 0), Decision::Poll(10));
    }

    #[test]
    fn the_settings_bound_the_wait() {
        let settings = Settings { wait_ms: 500, ..Settings::default() };
        let wait = |request: Request| Backoff::plan(&settings, &request).unwrap().wait;
        assert_eq!(wait(Request::new("a")), 500);
        assert_eq!(wait(Request::new("a").with_wait(200)), 200);
        assert_eq!(wait(Request::new("a").with_wait(900)), 500);
    }

    #[test]
    fn settings_have_bounds() {
        let error = Backoff::check(&Settings { min_ms: 300, ..Settings::default() }).unwrap_err();
        assert_eq!(error, "`max_ms` must be between 300 and 60000, and is 200");
    }
}

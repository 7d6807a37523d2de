//! A policy that misbehaves on request: the name of the resource or key says how.

use std::hint::black_box;

use lockkeeper_sdk::{
    Mode, Permits, Plan, Policy, Primitive, Refusal, Request, backoff, fairness, reads, renewal, response,
};
use serde::{Deserialize, Serialize};

pub struct Bad;

#[derive(Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// How `check` misbehaves.
    configure: String,
    /// How `plan` misbehaves, whatever is asked.
    always: String,
    /// What `plan` is said to read; all parts if there are none.
    reads: Vec<String>,
}

impl Policy for Bad {
    type Settings = Settings;

    fn check(settings: &Settings) -> Result<(), String> {
        match settings.configure.as_str() {
            "reject" => Err("`configure` must not be \"reject\"".into()),
            how => {
                misbehave(how);
                Ok(())
            }
        }
    }

    fn plan(settings: &Settings, request: &Request) -> Result<Plan, Refusal> {
        misbehave(&settings.always);
        misbehave(&request.name);
        let plan = Plan::of(request).with_permits(1)?;
        Ok(match request.name.as_str() {
            "huge" => plan.with_key(unchecked(vec![0; 10_000_000])),
            "utf8" => plan.with_key(unchecked(vec![0xff, 0xfe, 0x80])),
            "empty" => plan.with_key(""),
            "no-keys" => plan.with_keys::<String>([]),
            "long" => plan.with_key("x".repeat(10_000)),
            "ttl" => plan.with_ttl(u32::MAX),
            "primitive" => Plan { primitive: Primitive::Advisory, mode: Mode::Shared, ..plan },
            "permits" => plan.with_mode(Mode::Permits(Permits { count: 2, limit: 1 })),
            "refuse" => return Err(Refusal::new("ä".repeat(5_000))),
            name if name.starts_with("moved/") => plan.with_key(format!("x/{name}")),
            _ => plan,
        })
    }

    fn plan_reads(settings: &Settings) -> Vec<reads::Part> {
        if settings.reads.is_empty() {
            return reads::Part::all();
        }
        let part = |name: &String| match name.as_str() {
            "name" => reads::Part::Name,
            "mode" => reads::Part::Mode,
            "ttl" => reads::Part::Ttl,
            "wait" => reads::Part::Wait,
            other => panic!("{other}"),
        };
        settings.reads.iter().map(part).collect()
    }

    fn choose(_: &Settings, queue: &fairness::Queue) -> u32 {
        let how = how("choose/", &queue.key);
        misbehave(how);
        if how == "range" { queue.waiters.len() as u32 } else { 0 }
    }

    fn contended(_: &Settings, contention: &backoff::Contention) -> backoff::Decision {
        let how = how("backoff/", &contention.key);
        misbehave(how);
        backoff::Decision::Poll(if how == "most" { u32::MAX } else { 0 })
    }

    fn renewal_due(_: &Settings, expiring: &renewal::Expiring) -> renewal::Decision {
        let how = how("renewal/", &expiring.key);
        misbehave(how);
        match how {
            "lapse" => renewal::Decision::Lapse,
            "most" => renewal::Decision::Extend(u32::MAX),
            _ => renewal::Decision::Extend(expiring.ttl),
        }
    }

    fn response(_: &Settings, _: &Request, contention: &response::Contention) -> response::Answer {
        misbehave(&contention.key);
        let status = if contention.key == "range" { 200 } else { 429 };
        response::Answer { status, retry_after: u32::MAX, headers: Vec::new(), detail: "d".repeat(5_000) }
    }
}

lockkeeper_sdk::export!(Bad, fairness, backoff, renewal, response, reads);

/// `choose/loop` loops when it is asked who is next, and at no other hook; `loop` at all of them.
fn how<'a>(hook: &str, key: &'a str) -> &'a str {
    key.strip_prefix(hook).unwrap_or(key)
}

fn misbehave(how: &str) {
    match how {
        "loop" => loop {
            black_box(());
        },
        // Little fuel and much time: one instruction fills the memory.
        "fill" => {
            let mut memory = vec![0_u8; 12 << 20];
            for byte in 0.. {
                memory.fill(black_box(byte));
            }
        }
        "recurse" => {
            black_box(recurse(black_box(1)));
        }
        "memory" => loop {
            black_box(Vec::<u8>::with_capacity(1 << 20));
        },
        "panic" => panic!("as asked"),
        _ => {}
    }
}

#[allow(unconditional_recursion)]
fn recurse(depth: u64) -> u64 {
    let frame = black_box([depth; 16]);
    recurse(frame[3] + 1) + black_box(frame)[7]
}

/// Without the check, which is much work for a long text.
fn unchecked(bytes: Vec<u8>) -> String {
    // SAFETY: it may be no UTF-8; that is the test.
    unsafe { String::from_utf8_unchecked(bytes) }
}

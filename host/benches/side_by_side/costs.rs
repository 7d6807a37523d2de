//! What a turn costs the processes that take part in it.

use std::cell::RefCell;
use std::fs;
use std::ops::{AddAssign, Sub};
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::report::Row;
use crate::world::{Proxy, World};

/// What processes used in the rounds of a measurement.
pub struct Costs {
    /// The processes, with their names.
    processes: Vec<(&'static str, u32)>,
    used: RefCell<Vec<Used>>,
    turns: RefCell<f64>,
}

/// What a process has used.
#[derive(Clone, Copy, Default)]
pub struct Used {
    /// Time of its threads on a processor, in nanoseconds.
    pub cpu_ns: u64,
    /// How often its threads waited: for a lock, a message or the network.
    pub waits: u64,
    /// How often the system took the processor from a thread.
    pub preempted: u64,
}

impl Costs {
    /// The costs of the proxy, its server and its clients.
    pub fn of(world: &World) -> Costs {
        Costs::with(world, world.proxy())
    }

    /// The costs of another proxy, the same server, and the clients, which are this process.
    pub fn with(world: &World, proxy: &Proxy) -> Costs {
        let server = world.server_pid().map(|pid| ("server", pid));
        let ours = [("proxy", proxy.pid()), ("clients", std::process::id())];
        let processes: Vec<_> = ours.into_iter().chain(server).collect();
        let used = RefCell::new(vec![Used::default(); processes.len()]);
        Costs { processes, used, turns: RefCell::default() }
    }

    /// Runs a round, and adds what it costs. A round returns its clients, and its turns per second.
    pub async fn around<T>(&self, round: impl Future<Output = Result<(T, f64)>>) -> Result<(T, f64)> {
        let before = self.now()?;
        let began = Instant::now();
        let (clients, rate) = round.await?;
        let took = began.elapsed();
        for ((used, after), before) in self.used.borrow_mut().iter_mut().zip(self.now()?).zip(before) {
            *used += after - before;
        }
        *self.turns.borrow_mut() += rate * took.as_secs_f64();
        Ok((clients, rate))
    }

    /// The costs of a turn, by process.
    pub fn of_a_turn(&self) -> Vec<(&'static str, [f64; 3])> {
        let turns = *self.turns.borrow();
        let of = |used: &Used| {
            [used.cpu_ns as f64 / 1_000.0, used.waits as f64, used.preempted as f64].map(|sum| sum / turns)
        };
        self.processes.iter().zip(&*self.used.borrow()).map(|((name, _), used)| (*name, of(used))).collect()
    }

    /// Adds the costs of a turn to the details of a row.
    pub fn add_to(&self, mut row: Row) -> Row {
        row.details["costs_of_a_turn"] = self.json();
        row
    }

    /// The costs of a turn.
    pub fn json(&self) -> Value {
        let of = |(name, [cpu_us, waits, preempted]): (&str, [f64; 3])| {
            (name.to_owned(), json!({ "cpu_us": cpu_us, "waits": waits, "preempted": preempted }))
        };
        Value::Object(self.of_a_turn().into_iter().map(of).collect())
    }

    fn now(&self) -> Result<Vec<Used>> {
        self.processes.iter().map(|(_, pid)| used(*pid)).collect()
    }
}

/// What the threads of a process have used. Threads that have ended do not count.
fn used(pid: u32) -> Result<Used> {
    let mut sum = Used::default();
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let folder = thread?.path();
        let (Ok(times), Ok(status)) =
            (fs::read_to_string(folder.join("schedstat")), fs::read_to_string(folder.join("status")))
        else {
            continue;
        };
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).context("no such field")?;
            anyhow::Ok(line.trim_start_matches(':').trim().parse::<u64>()?)
        };
        sum += Used {
            cpu_ns: times.split(' ').next().context("an empty schedstat")?.parse()?,
            waits: field("voluntary_ctxt_switches")?,
            preempted: field("nonvoluntary_ctxt_switches")?,
        };
    }
    Ok(sum)
}

impl Sub for Used {
    type Output = Used;

    fn sub(self, before: Used) -> Used {
        Used {
            cpu_ns: self.cpu_ns.saturating_sub(before.cpu_ns),
            waits: self.waits.saturating_sub(before.waits),
            preempted: self.preempted.saturating_sub(before.preempted),
        }
    }
}

impl AddAssign for Used {
    fn add_assign(&mut self, more: Used) {
        self.cpu_ns += more.cpu_ns;
        self.waits += more.waits;
        self.preempted += more.preempted;
    }
}

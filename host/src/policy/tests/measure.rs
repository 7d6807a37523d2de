//! `cargo test -p lockkeeper measure -- --ignored --nocapture`

use std::time::{Duration, Instant};

use super::*;

#[test]
#[ignore = "a measurement"]
fn a_plan_on_a_fresh_instance() {
    let default = policies(&ENGINE).get("default").unwrap();
    let labels = [("tenant", "acme"), ("region", "eu-west-1"), ("kind", "order")];
    let asked = PlanRequest {
        labels: labels.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
        ..request("orders/42")
    };
    let mut took: Vec<Duration> = (0..100_000)
        .map(|_| {
            let start = Instant::now();
            default.plan(&asked).unwrap();
            start.elapsed()
        })
        .collect();
    took.sort_unstable();
    let at = |percent: usize| took[(took.len() - 1) * percent / 100];
    println!("plan: 10 % {:?}, median {:?}, 90 % {:?}, 99 % {:?}", at(10), at(50), at(90), at(99));
    assert!(at(50) < Duration::from_micros(if cfg!(debug_assertions) { 50 } else { 10 }));
}

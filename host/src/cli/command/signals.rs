//! The signals that are passed on to the command.

use std::future::poll_fn;
use std::task::Poll;

use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind, signal};

use crate::cli::failure::Failure;

/// The signals that are passed on.
const PASSED_ON: [Signal; 7] =
    [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2, Signal::CONT];

/// The signals of [`PASSED_ON`] that were not ignored when this process started. Signals that `nohup` or a shell's
/// background job set to be ignored stay ignored, here and in the command.
pub struct Signals(Vec<(Signal, unix::Signal)>);

impl Signals {
    /// Starts to catch the signals.
    pub fn new() -> Result<Signals, Failure> {
        let ignored = ignored();
        let mut heard = Vec::new();
        for number in PASSED_ON.map(Signal::as_raw).into_iter().zip(PASSED_ON) {
            let (raw, number) = number;
            if ignored & (1 << (raw - 1)) == 0 {
                let listener = signal(SignalKind::from_raw(raw))
                    .map_err(|error| Failure::Other(format!("cannot handle signals: {error}")))?;
                heard.push((number, listener));
            }
        }
        Ok(Signals(heard))
    }

    /// Waits for the next signal. Cancel-safe.
    pub async fn next(&mut self) -> Signal {
        poll_fn(|context| {
            for (number, listener) in &mut self.0 {
                if listener.poll_recv(context).is_ready() {
                    return Poll::Ready(*number);
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Waits for a signal that should end this process, and returns the exit code. Cancel-safe.
    pub async fn end(&mut self) -> u8 {
        loop {
            let signal = self.next().await;
            if signal != Signal::CONT {
                return 128 + signal.as_raw() as u8;
            }
        }
    }
}

/// A bit for each signal that this process ignores; the lowest bit is signal 1.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

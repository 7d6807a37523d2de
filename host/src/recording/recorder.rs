//! What a running proxy tells the recording. Nothing here waits: what the writer has no room for is dropped and counted.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::entry::{Asked, Counts, Entry, Kept, WAITING};
use super::writer;
use crate::clock;
use crate::config::{Limits, RecordingConfig};
use crate::lock::{Call, Instant, Key, Token};
use crate::mutex::Mutex;
use crate::policy::{Generation, Plan, PlanRequest};
use crate::telemetry::Metrics;

/// How long the end of a recording may take.
const LONGEST_END: Duration = Duration::from_secs(5);
/// How often it is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// The recording of a proxy. Cheap to clone; without `[recording]`, it does nothing.
#[derive(Clone, Default)]
pub struct Recorder(Option<Arc<Inner>>);

struct Inner {
    /// The keys that are recorded.
    share: Share,
    entries: SyncSender<Entry>,
    shared: Arc<Counts>,
    writer: Mutex<Option<JoinHandle<()>>>,
    metrics: Metrics,
}

impl Recorder {
    /// No recording.
    pub fn off() -> Recorder {
        Recorder::default()
    }

    /// Begins the recording, if there is to be one, with a file of its own.
    ///
    /// # Errors
    /// The folder or the file cannot be written.
    pub fn begin(config: &RecordingConfig, limits: &Limits, metrics: &Metrics) -> std::io::Result<Recorder> {
        let Some(dir) = &config.dir else { return Ok(Recorder::off()) };
        let (entries, received): (_, Receiver<Entry>) = sync_channel(WAITING);
        let shared = Arc::new(Counts::default());
        let writer = writer::start(dir, config, limits, received, shared.clone(), metrics)?;
        let share = Share::of(config.share);
        let writer = Mutex::new(Some(writer));
        Ok(Recorder(Some(Arc::new(Inner { share, entries, shared, writer, metrics: metrics.clone() }))))
    }

    /// Writes what is left, and ends the recording, unless the disk does not answer.
    pub async fn close(&self) {
        let Some(inner) = &self.0 else { return };
        inner.shared.is_over.store(true, Relaxed);
        let Some(writer) = inner.writer.lock().take() else { return };
        let ended = async {
            while !writer.is_finished() {
                tokio::time::sleep(LOOK).await;
            }
        };
        if tokio::time::timeout(LONGEST_END, ended).await.is_err() {
            tracing::warn!("the end of the recording is not on the disk: the disk does not answer");
        }
    }

    /// Begins to record a request, unless there is no recording.
    pub fn asking(&self, call: Call) -> Option<Asking> {
        let inner = self.0.clone()?;
        Some(Asking { inner, call, at_us: clock::wall_us(), began: clock::now(), asked: None })
    }

    /// A lease that was granted to a recorded request has ended. `held_us`: from the grant to the client's release, or to the
    /// moment at which the proxy learned of its end.
    pub fn ended(&self, (key, token): (Key, Token), how: &'static str, held_us: u64) {
        if let Some(inner) = &self.0 {
            inner.tell(Entry::Ended { at_us: clock::wall_us(), key, token, how, held_us });
        }
    }

    /// The store has answered what it was asked at `asked_at`.
    pub fn answered(&self, asked_at: Instant) {
        if let Some(inner) = &self.0 {
            inner.shared.times.count(clock::now().us_since(asked_at));
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Relaxed);
    }
}

impl Inner {
    fn is_sampled(&self, text: &str) -> bool {
        self.share.has(text)
    }

    fn tell(&self, entry: Entry) {
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = self.entries.try_send(entry) {
            self.shared.dropped.fetch_add(1, Relaxed);
            self.metrics.recording.dropped(1);
        }
    }
}

/// A share of all names. Names are in the same share on all proxies.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// Names whose hash is at most this.
    most: u64,
}

impl Share {
    /// A share, from 0 to 1.
    pub fn of(share: f64) -> Share {
        // A part of all 64-bit numbers.
        Share { most: (share * u64::MAX as f64) as u64 }
    }

    /// Whether it has this name.
    pub fn has(self, name: &str) -> bool {
        hash(name) <= self.most
    }
}

/// A hash that is the same on all proxies (FNV-1a, with the bits mixed at the end).
fn hash(text: &str) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in text.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash = (hash ^ (hash >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    hash ^ (hash >> 32)
}

/// A request that is under way. When it is dropped without an answer, its client has left.
pub struct Asking {
    inner: Arc<Inner>,
    call: Call,
    at_us: u64,
    began: Instant,
    asked: Option<Box<Asked>>,
}

impl Asking {
    /// The policy has answered. Nothing is recorded if the key of the plan is not in the sample.
    pub fn planned(
        &mut self,
        request: PlanRequest,
        generation: &Arc<Generation>,
        plan: Result<&Plan, String>,
    ) {
        let sampled = plan.as_ref().map_or(request.resource.as_str(), |plan| plan.keys[0].as_str());
        self.asked = self.inner.is_sampled(sampled).then(|| {
            let (plan, reason) = match plan {
                Ok(plan) => (Some(Kept::of(plan)), None),
                Err(reason) => (None, Some(reason)),
            };
            Box::new(Asked {
                at_us: self.at_us,
                call: self.call,
                request,
                generation: generation.clone(),
                plan,
                outcome: "left",
                reason,
                waited_us: 0,
                lease: None,
            })
        });
    }

    /// Whether the request is recorded.
    pub fn is_sampled(&self) -> bool {
        self.asked.is_some()
    }

    /// The request has its answer.
    pub fn answered(&mut self, outcome: &'static str, lease: Option<(&Key, Token)>) {
        if let Some(asked) = &mut self.asked {
            asked.outcome = outcome;
            asked.lease = lease.map(|(key, token)| (key.clone(), token));
        }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if let Some(mut asked) = self.asked.take() {
            asked.waited_us = clock::now().us_since(self.began);
            self.inner.tell(Entry::Asked(asked));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_keys_is_sampled() {
        let sampled = |share| {
            let share = Share::of(share);
            (0..10_000).filter(|n| share.has(&format!("orders/{n}"))).count()
        };
        assert!((800..1_200).contains(&sampled(0.1)), "{}", sampled(0.1));
        assert_eq!(sampled(1.0), 10_000);
    }
}

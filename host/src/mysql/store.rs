//! [`MysqlStore`]: the handle on the lanes. Starts and stops them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use mysql_async::{Opts, OptsBuilder};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::clock_steps::ClockSteps;
use super::context::{Context, longest_us};
use super::failover::prober;
use super::failover::servers::{Endpoint, Servers};
use super::health::LaneHealth;
use super::membership::Membership;
use super::pipeline::cache::{Cache, spread};
use super::pipeline::lanes;
use super::pipeline::queue::{Job, Places, Queue};
use super::read::Reader;
use super::registry::MysqlRegistry;
use super::session::fault::Fault;
use super::session::link::Link;
use super::session::tls::ClientTls;
use super::session::wire::{Address, Target};
use super::sql::PREPARED_ROWS;
use super::{clean, clock_watch};
use crate::clock;
use crate::config::StoreConfig;
use crate::lock::record::Op;
use crate::lock::{Instant, Key, Space, Token};
use crate::mutex::Mutex;
use crate::store::{Done, Health, Life, Lives, Page, Reply, Store, StoreError, StoreFuture, Stored};
use crate::telemetry::Metrics;
use crate::vital;

/// The database that is used if the URL names none.
pub(super) const DEFAULT_DATABASE: &str = "lockkeeper";
/// How long [`MysqlStore::close`] waits for work in progress.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// `store.url` cannot be used. [`Store::health`] reports every other problem.
#[derive(Debug, thiserror::Error)]
#[error("store.url is not valid: {why} (mysql://user:password@host:3306/database, or with ?socket=/path)")]
pub struct OpenError {
    why: String,
}

/// Locks on a MySQL or MariaDB server, or on the primary of several servers.
pub struct MysqlStore {
    pub(super) context: Arc<Context>,
    places: Places,
    /// Separate from `places`, so that a flood of claims cannot block renewals.
    renewal_places: Places,
    lanes: Vec<UnboundedSender<Job>>,
    renewal_lanes: Vec<UnboundedSender<Job>>,
    reader: Arc<Reader>,
    tasks: TaskTracker,
    /// Connections that others may read, one sentence for each server.
    plaintext: Vec<String>,
}

impl MysqlStore {
    /// Starts the lanes and returns at once; [`MysqlStore::ready`] waits until they can be used. `max_ttl_ms`
    /// is the longest lease that any proxy on this server grants. No connection is encrypted.
    ///
    /// # Errors
    /// If `url` cannot be parsed.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn open(
        config: &StoreConfig,
        url: &str,
        max_ttl_ms: u32,
        metrics: Metrics,
    ) -> Result<MysqlStore, OpenError> {
        MysqlStore::open_any(config, &[url.to_owned()], None, max_ttl_ms, metrics)
    }

    /// Like [`MysqlStore::open`], but uses the primary of several servers. The first server is preferred. With `tls`,
    /// every connection over TCP is encrypted.
    ///
    /// # Errors
    /// If one of `urls` cannot be parsed, or if there is none.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn open_any(
        config: &StoreConfig,
        urls: &[String],
        tls: Option<&Arc<ClientTls>>,
        max_ttl_ms: u32,
        metrics: Metrics,
    ) -> Result<MysqlStore, OpenError> {
        if urls.is_empty() {
            return Err(OpenError { why: "it names no server".to_owned() });
        }
        let endpoints = urls.iter().map(|url| read_url(url, tls)).collect::<Result<_, _>>()?;
        let plaintext = urls.iter().filter_map(|url| config.plaintext_warning(url)).collect();
        Ok(MysqlStore::start(config, endpoints, plaintext, max_ttl_ms, metrics))
    }

    /// Like [`MysqlStore::open_any`], on simulated servers, each with its name.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    #[cfg(any(test, feature = "simulation"))]
    pub fn simulated(
        config: &StoreConfig,
        servers: Vec<(String, Arc<dyn super::session::wire::Connect>)>,
        max_ttl_ms: u32,
        metrics: Metrics,
    ) -> MysqlStore {
        let endpoint = |(address, route)| Endpoint {
            address,
            database: DEFAULT_DATABASE.to_owned(),
            target: Target::Simulated(route),
        };
        MysqlStore::start(
            config,
            servers.into_iter().map(endpoint).collect(),
            Vec::new(),
            max_ttl_ms,
            metrics,
        )
    }

    fn start(
        config: &StoreConfig,
        endpoints: Vec<Endpoint>,
        plaintext: Vec<String>,
        max_ttl_ms: u32,
        metrics: Metrics,
    ) -> MysqlStore {
        let servers = Arc::new(Servers::new(endpoints));
        let lanes = config.lanes + config.renewal_lanes;
        let context = Arc::new(Context {
            config: config.clone(),
            max_ttl_ms,
            cache: Cache::new(),
            health: LaneHealth::new(lanes, &servers.addresses()),
            servers,
            membership: Arc::new(Membership::new()),
            metrics,
            stop: CancellationToken::new(),
            probed: AtomicU64::new(0),
            galera: AtomicBool::new(false),
            sampled_after: AtomicU64::new(0),
            steps: Mutex::new(ClockSteps::new(longest_us(max_ttl_ms))),
            identity: Mutex::default(),
        });
        let tasks = TaskTracker::new();
        let mut senders = (0..lanes).map(|lane_index| {
            let (sender, receiver) = unbounded_channel();
            let queue = Queue::new(receiver, config.batch);
            tasks
                .spawn(vital::watched("a lane of the store", lanes::run(context.clone(), queue, lane_index)));
            sender
        });
        let lanes = senders.by_ref().take(config.lanes).collect();
        let renewal_lanes = senders.collect();
        tasks.spawn(vital::watched("the clean-up of the store", clean::run(context.clone())));
        tasks.spawn(vital::watched("the watch of the server's clock", clock_watch::run(context.clone())));
        if !context.servers.is_single() {
            tasks.spawn(vital::watched("the prober of the servers", prober::run(context.clone())));
        }
        let reader = Arc::new(Reader::new(context.clone()));
        let (places, renewal_places) = (Places::new(config.max_queued), Places::new(config.max_queued));
        MysqlStore { context, places, renewal_places, lanes, renewal_lanes, reader, tasks, plaintext }
    }

    /// Waits until every lane has a connection, but no longer than `within`. Returns the store's health.
    pub async fn ready(&self, within: Duration) -> Health {
        self.context.health.ready(within).await
    }

    /// The registry of the proxies on this server. After this call, leases are written only while
    /// [`Registry::allow`](crate::store::registry::Registry::allow) permits it.
    pub fn registry(&self) -> MysqlRegistry {
        self.context.membership.close();
        MysqlRegistry::new(self.context.clone())
    }

    /// The membership in which this proxy may grant leases from its memory.
    pub fn lives(&self) -> Lives {
        let membership = self.context.membership.clone();
        Box::new(move || {
            let standing = membership.standing();
            Life { number: standing.life, may_grant: clock::now() < standing.until }
        })
    }

    /// Until when this proxy is certain to be a member of its fleet.
    pub fn may_write_until(&self) -> Instant {
        self.context.membership.until_own()
    }

    /// Runs a task that ends when the store is closed.
    pub(super) fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(vital::watched(name, task));
    }

    /// Like [`MysqlStore::spawn`], but on a thread of its own. This is for a task that thousands of locks
    /// wait for, and that must not wait behind requests.
    ///
    /// # Panics
    /// If no thread can be started.
    pub(super) fn spawn_apart(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        #[cfg(any(test, feature = "simulation"))]
        if clock::simulated::now().is_some() {
            return self.spawn(name, task);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("the runtime of a thread can be built");
        let task = self.tasks.track_future(vital::watched(name, task));
        let thread = std::thread::Builder::new().name(name.to_owned());
        thread.spawn(move || runtime.block_on(task)).expect("a thread can be started");
    }

    /// Accepts no more work, waits a few seconds for work in progress, and closes the connections.
    pub async fn close(&self) {
        self.context.stop.cancel();
        self.tasks.close();
        if tokio::time::timeout(CLOSE_LIMIT, self.tasks.wait()).await.is_err() {
            tracing::warn!("the MySQL server did not answer while the store was closed");
        }
        self.reader.close().await;
    }

    fn send(
        &self,
        (lanes, places): (&[UnboundedSender<Job>], &Places),
        ops: Vec<Op>,
        deadline: Instant,
        done: Done,
    ) {
        let Some(key) = ops.first().and_then(|op| op.keys().first()) else {
            let now = crate::lock::ServerTime::default();
            done(Ok(Reply { outcomes: Vec::new(), asked_at: clock::now(), now }));
            return;
        };
        let lane = &lanes[spread(key, lanes.len())];
        if let Some(job) = places.admit(ops, deadline, done) {
            // If the lane is gone, the job's responder answers when it is dropped.
            let _ = lane.send(job);
        }
    }
}

impl Drop for MysqlStore {
    fn drop(&mut self) {
        self.context.stop.cancel();
    }
}

impl Store for MysqlStore {
    fn submit(&self, group: Vec<Op>, deadline: Instant, done: Done) {
        self.send((&self.lanes, &self.places), group, deadline, done);
    }

    fn submit_renewal(&self, op: Op, deadline: Instant, done: Done) {
        self.send((&self.renewal_lanes, &self.renewal_places), vec![op], deadline, done);
    }

    fn list(
        &self,
        prefix: String,
        after: Option<Key>,
        limit: usize,
    ) -> StoreFuture<Result<Page, StoreError>> {
        let reader = self.reader.clone();
        Box::pin(async move { reader.list(&prefix, after, limit).await })
    }

    fn read(&self, key: Key) -> StoreFuture<Result<Option<Stored>, StoreError>> {
        let reader = self.reader.clone();
        Box::pin(async move { reader.read(key).await })
    }

    fn health(&self) -> Health {
        let mut health = self.context.health.now();
        let Health::Ready { warnings, .. } = &mut health else { return health };
        warnings.extend(self.plaintext.iter().cloned());
        if let Some(wait_ms) = self.context.wait_ms() {
            warnings.push(format!(
                "the server has changed: no lease is granted for {} s more, until the leases of the previous server \
                 have ended (limits.max_ttl_ms); renewals and releases continue",
                wait_ms.div_ceil(1_000)
            ));
        }
        health
    }

    fn lacks(&self, space: Space) -> Option<String> {
        (space != Space::Table).then(|| format!("{space:?} locks are not kept in the lease table"))
    }

    fn raise_tokens(&self, least: Option<Token>) -> StoreFuture<Result<Token, StoreError>> {
        let context = self.context.clone();
        Box::pin(async move {
            let work = async {
                let mut link = Link::open(&context).await?;
                let floor = link.raise_tokens(least).await?;
                link.close().await;
                Ok(floor)
            };
            let done = tokio::time::timeout(context.config.timeout, work).await;
            let done = done.unwrap_or_else(|_| Err(Fault::timeout("raising the token floor")));
            done.map_err(|fault: Fault| StoreError::Unavailable { why: fault.to_string() })
        })
    }

    fn outdated(&self, key: &Key) {
        self.context.cache.forget(key);
    }

    fn forget(&self) {
        self.context.sampled_after.store(clock::now().0, Ordering::SeqCst);
    }
}

/// Parses a URL of `store.url`.
pub(super) fn read_url(url: &str, tls: Option<&Arc<ClientTls>>) -> Result<Endpoint, OpenError> {
    let opts = Opts::from_url(url).map_err(|error| OpenError { why: error.to_string() })?;
    let database = opts.db_name().filter(|name| !name.is_empty()).unwrap_or(DEFAULT_DATABASE).to_owned();
    let address = match opts.socket() {
        Some(socket) => socket.to_owned(),
        None => format!("{}:{}", opts.ip_or_hostname(), opts.tcp_port()),
    };
    let opts = OptsBuilder::from_opts(opts)
        .db_name(Some(database.clone()))
        .tcp_nodelay(true)
        // The socket path that a server reports may lead to another server on this machine.
        .prefer_socket(false)
        // One statement for each number of rows.
        .stmt_cache_size(PREPARED_ROWS)
        .into();
    Ok(Endpoint { target: Target::Address(Address { opts, tls: tls.cloned() }), database, address })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_url_gives_the_server_and_the_database() {
        let read = |url| {
            let Endpoint { target, database, address } = read_url(url, None).expect("it is valid");
            let Target::Address(Address { opts, .. }) = target else { panic!("a URL names a real server") };
            (opts, database, address)
        };
        let (opts, database, address) = read("mysql://u:p@db.example:3307/locks");
        assert_eq!((opts.db_name(), database.as_str()), (Some("locks"), "locks"));
        assert_eq!(address, "db.example:3307");
        let (opts, database, address) = read("mysql://root@localhost?socket=/tmp/s");
        assert_eq!((opts.socket(), database.as_str()), (Some("/tmp/s"), DEFAULT_DATABASE));
        assert_eq!(address, "/tmp/s");
        assert!(read_url("postgres://u@h/d", None).is_err());
        assert!(read_url("nonsense", None).is_err());
    }
}

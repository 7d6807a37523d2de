//! The clients, in their own processes. Each process reports what its clients are told as soon as they are told it,
//! and one ledger collects everything.

use std::collections::{BTreeSet, HashMap};
use std::env;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch};

use crate::harness::{self, Habits, Ledger, Noted, Said, World, kind, within};

/// The number of grants between two faults that have been mended.
const ROUND: usize = 60;
/// The variable that tells a client process where to connect to this process.
const SOCKET: &str = "LOCKKEEPER_TORTURE_SOCKET";
const THIS_TEST: &str = "torture::crowd::a_process_of_clients";

/// A message to a client process.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    Start {
        name: String,
        clients: usize,
        resources: Vec<String>,
        proxies: Vec<SocketAddr>,
    },
    SetAddress(usize, SocketAddr),
    Joins(SocketAddr),
    Leaves,
    /// To be answered when everything that happened before was reported.
    Report(u64),
    Stop,
}

/// A message from a client process.
#[derive(Serialize, Deserialize)]
enum Answer {
    Said(Said),
    Reported(u64),
}

/// The client processes, with their common ledger.
pub struct Crowd {
    ledger: Arc<Ledger>,
    /// The kinds of the resources.
    kinds: BTreeSet<String>,
    processes: Vec<Process>,
    reports: u64,
}

struct Process {
    child: Child,
    orders: OwnedWriteHalf,
    /// The number of the last report.
    reported: watch::Receiver<u64>,
}

impl Crowd {
    /// Starts these processes, with this many clients each.
    pub async fn start(
        dir: &Path,
        (processes, clients): (usize, usize),
        resources: &[String],
        proxies: &[SocketAddr],
    ) -> Crowd {
        let ledger = Arc::new(Ledger::default());
        let mut started = Vec::new();
        for n in 0..processes {
            let socket = dir.join(format!("clients-{n}"));
            let listener = UnixListener::bind(&socket).expect("the folder is new");
            let child = Command::new(env::current_exe().expect("this program"))
                .args(["--ignored", "--exact", "--nocapture", THIS_TEST])
                .env(SOCKET, &socket)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .kill_on_drop(true)
                .spawn()
                .expect("a process of clients");
            let (stream, _) = listener.accept().await.expect("the process connects");
            let (answers, orders) = stream.into_split();
            let (report, reported) = watch::channel(0);
            tokio::spawn(take_in(ledger.clone(), answers, report));
            let mut process = Process { child, orders, reported };
            let (resources, proxies) = (resources.to_vec(), proxies.to_vec());
            process.order(&Order::Start { name: format!("client-{n}"), clients, resources, proxies }).await;
            started.push(process);
        }
        let kinds = resources.iter().map(|resource| kind(resource).to_owned()).collect();
        Crowd { ledger, kinds, processes: started, reports: 0 }
    }

    /// Everything that the clients were told so far.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Call this before the proxy is killed.
    pub fn killed(&self, address: SocketAddr) {
        self.ledger.killed(address);
    }

    /// Replaces the address of a proxy.
    pub async fn set_address(&mut self, n: usize, address: SocketAddr) {
        self.order_all(|| Order::SetAddress(n, address)).await;
    }

    /// Adds a proxy, at the end of the list.
    pub async fn joins(&mut self, address: SocketAddr) {
        self.order_all(|| Order::Joins(address)).await;
    }

    /// Removes the last proxy of the list.
    pub async fn leaves(&mut self) {
        self.order_all(|| Order::Leaves).await;
    }

    /// Whether a client has found a broken promise, so that its process has ended.
    pub fn is_broken(&mut self) -> bool {
        self.processes.iter_mut().any(|process| !matches!(process.child.try_wait(), Ok(None)))
    }

    /// Waits for enough further grants that clients have met the last fault, with some grants of each primitive.
    pub async fn another_round(&self) {
        let before = self.ledger.grants_by_kind();
        let goal = before.values().sum::<usize>() + ROUND;
        let limit = Duration::from_secs(90);
        within(limit, "leases of each primitive are granted again", async || {
            let now = self.ledger.grants_by_kind();
            now.values().sum::<usize>() >= goal
                && self.kinds.iter().all(|kind| now.get(kind) > before.get(kind))
        })
        .await;
    }

    /// Checks everything that the clients were told so far.
    pub async fn check(&mut self) {
        self.reports += 1;
        let report = self.reports;
        self.order_all(|| Order::Report(report)).await;
        for process in &mut self.processes {
            let reported = process.reported.wait_for(|last| *last >= report);
            tokio::time::timeout(Duration::from_secs(30), reported)
                .await
                .expect("a process of clients reports")
                .expect("the process lives");
        }
        self.ledger.check();
    }

    /// Stops the clients, and checks what they were told.
    pub async fn finish(&mut self) {
        self.order_all(|| Order::Stop).await;
        for process in &mut self.processes {
            let status = process.child.wait().await.expect("a process of clients");
            assert!(status.success(), "a client was told what cannot be");
            process.reported.wait_for(|last| *last == u64::MAX).await.expect("all was said");
        }
        self.ledger.check();
    }

    async fn order_all(&mut self, order: impl Fn() -> Order) {
        for process in &mut self.processes {
            process.order(&order()).await;
        }
    }
}

impl Process {
    async fn order(&mut self, order: &Order) {
        self.orders.write_all(&line(order)).await.expect("the process of clients lives");
    }
}

fn line(message: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("JSON");
    line.push(b'\n');
    line
}

/// Records the messages of a client process, until the process ends.
async fn take_in(ledger: Arc<Ledger>, answers: OwnedReadHalf, report: watch::Sender<u64>) {
    let mut lines = BufReader::new(answers).lines();
    let mut places: HashMap<(String, usize), Noted> = HashMap::new();
    while let Ok(Some(line)) = lines.next_line().await {
        match serde_json::from_str(&line).expect("an answer") {
            Answer::Said(said) => ledger.take_in(said, &mut places),
            Answer::Reported(number) => drop(report.send(number)),
        }
    }
    let _ = report.send(u64::MAX);
}

#[test]
#[ignore = "the torture starts it"]
fn a_process_of_clients() {
    let socket: PathBuf = env::var_os(SOCKET).expect("the torture starts it").into();
    harness::run_without_limit(serve(socket));
}

async fn serve(socket: PathBuf) {
    let stream = UnixStream::connect(socket).await.expect("the torture listens");
    let (orders, mut answers) = stream.into_split();
    let mut orders = BufReader::new(orders).lines();
    let mut next = async || {
        let line = orders.next_line().await.ok()??;
        Some(serde_json::from_str::<Order>(&line).expect("an order"))
    };
    let Some(Order::Start { name, clients, resources, proxies }) = next().await else {
        panic!("the first order starts the clients");
    };
    let (say, mut said) = mpsc::unbounded_channel();
    let habits = Habits { name, clients, resources, ..Habits::default() };
    let world = World::that_says(&proxies, habits, say.clone());
    let (ask, mut asked) = mpsc::unbounded_channel();
    let writes = tokio::spawn(async move {
        loop {
            // Send everything that was recorded before a report was requested first.
            let answer = tokio::select! {
                biased;
                Some(said) = said.recv() => Answer::Said(said),
                Some(report) = asked.recv() => Answer::Reported(report),
                else => break,
            };
            answers.write_all(&line(&answer)).await.expect("the torture listens");
        }
    });
    loop {
        match next().await {
            Some(Order::SetAddress(n, address)) => world.set_address(n, address),
            Some(Order::Joins(address)) => world.joins(address),
            Some(Order::Leaves) => world.leaves(),
            Some(Order::Report(report)) => ask.send(report).expect("answers are written"),
            Some(Order::Start { .. }) => panic!("they have started"),
            Some(Order::Stop) => break,
            // The parent has ended.
            None => return,
        }
        assert!(!world.is_broken(), "a client was told what cannot be");
    }
    // Only the parent knows which sessions have ended.
    world.stop().await;
    drop((say, ask));
    writes.await.expect("all is said");
}

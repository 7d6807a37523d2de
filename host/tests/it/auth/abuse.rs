//! One client cannot starve another: an abusive client with limits beside a well-behaved client.
//!
//! The abusive client is a process of its own with the lowest priority, and pauses before it connects again: both clients, the
//! proxy and the server share the machine, and the test is about the time that the proxy gives to each client, not about the
//! time that the scheduler gives to each process. Phases with and without the abusive client alternate, and the medians of the
//! phases are compared, so that other work on the machine affects both alike.

use std::env;
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::{TcpSocket, TcpStream};
use tokio::process::{Child, ChildStdout, Command};
use tokio::task::JoinSet;

use super::*;
use crate::harness;

const THIS_TEST: &str = "auth::abuse::a_process_of_an_abusive_client";
/// The variable that tells the process its orders.
const ORDERS: &str = "LOCKKEEPER_TEST_ABUSE";
/// With this variable, the abusive client has no limits, and the test fails: it shows what the limits prevent.
const UNLIMITED: &str = "LOCKKEEPER_TEST_UNLIMITED";
/// The address of the abusive client; all of 127.0.0.0/8 is this machine.
const ABUSER: &str = "127.0.0.2:0";
/// The test on the other server has an abusive client as well.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
const PHASES: usize = 7;
/// Other work on the machine can spoil one comparison. A proxy that is unfair fails each of them.
const ATTEMPTS: usize = 3;
const PHASE: Duration = Duration::from_millis(1_500);
/// The connections of the well-behaved client.
const CONNECTIONS: usize = 8;
const LIMITS: &str = "limits = { per_second = 100, in_progress = 40, waiters = 20, watchers = 4, leases = 50, \
                      pushes_per_minute = 2 }\n";

/// The limits that the abusive client reaches in any case; whether it reaches others depends on their order.
const REACHED: [&str; 6] = [
    "per_second",
    "watchers",
    "leases",
    "pushes_per_minute",
    "http.max_connections_per_address",
    "auth.max_refused_per_second",
];

/// What the well-behaved client got in a phase, or in the median of some.
#[derive(Clone, Copy, Debug)]
struct Served {
    /// Acquires with their releases, in a second.
    per_second: f64,
    /// The 99th percentile of the time for both.
    p99: Duration,
}

const ROLES: &str = r#"
[roles.good]
allow = [{ do = "acquire", on = "good/*" }]
[roles.abusive]
allow = [{ do = ["acquire", "read", "watch"], on = "abuse/*" }, { do = "policy.push", on = "abused" }]
[roles.operator]
allow = [{ do = "*" }]
"#;

on_both! {
    #[ignore = "it compares times, so nothing else may run: `cargo xtask test fairness`"]
    async fn an_abusive_client_leaves_a_well_behaved_one_its_share(kind: Kind) {
        let _alone = ONE_AT_A_TIME.lock().await;
        let (folder, good, abusive, operator) = (folder(), new_token(), new_token(), new_token());
        let (limits, per_address) = match env::var_os(UNLIMITED) {
            None => (LIMITS, 100),
            Some(_) => ("", 0),
        };
        let principal = |name: &str, NewToken { id, sha256, .. }: &NewToken, limits: &str| {
            let tokens = format!("tokens = [{{ id = \"{id}\", sha256 = \"{sha256}\" }}]");
            format!("[[principal]]\nname = \"{name}\"\nroles = [\"{name}\"]\n{tokens}\n{limits}")
        };
        let principals =
            [principal("good", &good, ""), principal("abusive", &abusive, limits), principal("operator", &operator, "")];
        let file = folder.path().join("auth.toml");
        write(&file, &(principals.concat() + ROLES));
        let sections = format!(
            "[auth]\nfile = \"{}\"\nmax_refused_per_second = 20\n[http]\nmax_connections_per_address = {per_address}\n\
             [policies.default]\npath = \"builtin:default\"\n[policies.abused]\npath = \"builtin:default\"\n",
            file.display()
        );
        let proxy = Proxy::with(Settings { url: database(kind).await, sections, ..Settings::default() }).await;
        proxy.until_ready().await;

        let mut abuse = Abuse::start(&proxy, &abusive).await;
        phase(&proxy, &good).await;
        let mut unfair = String::new();
        for _ in 0..ATTEMPTS {
            let (alone, beside) = alone_and_beside(&proxy, &good, &mut abuse).await;
            println!("{kind:?}: alone {alone:?}, beside the abusive client {beside:?}");
            if beside.per_second >= alone.per_second / 2. && beside.p99 <= alone.p99 * 3 {
                unfair.clear();
                break;
            }
            unfair += &format!("{beside:?} is less than half of {alone:?}, or takes more than three times as long\n");
        }
        let metrics = proxy.admin().with_token(&operator.token).get("/metrics").await.text;
        let refused = metrics.lines().filter(|line| line.contains("limit_refusals_total{")).collect::<Vec<_>>().join("\n");
        println!("{refused}");
        assert!(unfair.is_empty(), "{ATTEMPTS} times:\n{unfair}");
        for limit in REACHED {
            assert!(refused.contains(&format!("limit=\"{limit}\"")), "it never reached {limit}: {refused}");
        }
    }
}

/// What the well-behaved client gets in the median of phases alone, and of phases beside the abusive client.
async fn alone_and_beside(proxy: &Proxy, good: &NewToken, abuse: &mut Abuse) -> (Served, Served) {
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..PHASES {
        alone.push(phase(proxy, good).await);
        abuse.order("on").await;
        beside.push(phase(proxy, good).await);
        abuse.order("off").await;
    }
    (median(&alone), median(&beside))
}

/// Each connection of the well-behaved client takes and releases locks of its own, one after another.
async fn phase(proxy: &Proxy, token: &NewToken) -> Served {
    let until = Instant::now() + PHASE;
    let mut clients = JoinSet::new();
    for connection in 0..CONNECTIONS {
        let client = proxy.client().with_token(&token.token);
        clients.spawn(async move {
            let mut took = Vec::new();
            while Instant::now() < until {
                let began = Instant::now();
                let lease = client.lease(&format!("good/{connection}/{}", took.len() % 16), 60_000).await;
                assert_eq!(client.release(&lease).await.status, 200);
                took.push(began.elapsed());
            }
            took
        });
    }
    let mut took: Vec<Duration> = clients.join_all().await.concat();
    took.sort_unstable();
    let p99 = took.get(took.len() * 99 / 100).copied().unwrap_or(PHASE);
    Served { per_second: took.len() as f64 / PHASE.as_secs_f64(), p99 }
}

fn median(phases: &[Served]) -> Served {
    let mut rates: Vec<f64> = phases.iter().map(|phase| phase.per_second).collect();
    let mut times: Vec<Duration> = phases.iter().map(|phase| phase.p99).collect();
    rates.sort_unstable_by(f64::total_cmp);
    times.sort_unstable();
    println!("{rates:.0?} a second, {times:?}");
    Served { per_second: rates[rates.len() / 2], p99: times[times.len() / 2] }
}

/// The process of the abusive client.
struct Abuse {
    child: Child,
    said: Lines<BufReader<ChildStdout>>,
}

impl Abuse {
    async fn start(proxy: &Proxy, token: &NewToken) -> Abuse {
        let orders = format!("{},{},{}", proxy.api_address(), proxy.admin_address(), token.token);
        let mut child = Command::new("nice")
            .args(["-n", "19"])
            .arg(env::current_exe().expect("this program"))
            .args(["--ignored", "--exact", "--nocapture", THIS_TEST])
            .env(ORDERS, orders)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("a process");
        let said = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Abuse { child, said }
    }

    /// Gives an order, and waits until the process has carried it out.
    async fn order(&mut self, order: &str) {
        let orders = self.child.stdin.as_mut().expect("a pipe");
        orders.write_all(format!("{order}\n").as_bytes()).await.expect("it listens");
        loop {
            let line = self.said.next_line().await.expect("it speaks").expect("it runs");
            if line == order {
                return;
            }
        }
    }
}

#[test]
#[ignore = "another test starts it"]
fn a_process_of_an_abusive_client() {
    let orders = env::var(ORDERS).expect("another test starts it");
    let [api, admin, token] = orders.split(',').collect::<Vec<_>>()[..] else { panic!("{orders}") };
    let abusive =
        Abusive { api: api.parse().unwrap(), admin: admin.parse().unwrap(), token: token.to_owned() };
    harness::run_without_limit(abusive.obey());
}

/// Does everything that costs a proxy something.
#[derive(Clone)]
struct Abusive {
    api: SocketAddr,
    admin: SocketAddr,
    token: String,
}

impl Abusive {
    async fn obey(self) {
        let mut orders = BufReader::new(tokio::io::stdin()).lines();
        let mut tasks = JoinSet::new();
        while let Some(order) = orders.next_line().await.expect("orders") {
            match order.as_str() {
                "on" => self.begin(&mut tasks),
                _ => tasks.shutdown().await,
            }
            // Test runners begin the line with the name of the test.
            println!("\n{order}");
        }
    }

    fn begin(&self, tasks: &mut JoinSet<()>) {
        for n in 0..16 {
            let resource = format!("abuse/{n}");
            tasks.spawn(self.clone().repeat(n, move |round| {
                // Some locks are taken and kept, others are waited for.
                let body = match n % 2 {
                    0 => json!({"resource": format!("{resource}/{round}"), "ttl_ms": 600_000}),
                    _ => json!({"resource": "abuse/one", "ttl_ms": 600_000, "wait_ms": 600_000}),
                };
                ("POST /v1/acquire", body.to_string().into_bytes())
            }));
            tasks.spawn(self.clone().leave(n));
            tasks.spawn(self.clone().repeat(n, |_| ("GET /v1/watch", Vec::new())));
        }
        let guessing = Abusive { token: new_token().token, ..self.clone() };
        for n in 0..4 {
            tasks.spawn(guessing.clone().repeat(n, |_| ("GET /v1/locks", Vec::new())));
        }
        let pushing = Abusive { api: self.admin, ..self.clone() };
        tasks.spawn(pushing.repeat(0, |round| {
            // A custom section makes it another component.
            let mut component = lockkeeper::policy::builtin("default").expect("it is there").to_vec();
            let name = format!("{round:08}");
            component.extend([0, name.len() as u8 + 1, name.len() as u8]);
            component.extend(name.as_bytes());
            ("PUT /v1/policies/abused", component)
        }));
        tasks.spawn(self.clone().connect());
    }

    async fn open(&self) -> Option<TcpStream> {
        let socket = TcpSocket::new_v4().ok()?;
        socket.bind(ABUSER.parse().ok()?).ok()?;
        socket.connect(self.api).await.ok()
    }

    fn request(&self, line: &str, body: &[u8]) -> Vec<u8> {
        let (token, length) = (&self.token, body.len());
        let head = format!(
            "{line} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\ncontent-length: {length}\r\n\r\n"
        );
        [head.as_bytes(), body].concat()
    }

    /// Sends one request after another, and connects again when the proxy closes the connection.
    async fn repeat(self, n: usize, request: impl Fn(usize) -> (&'static str, Vec<u8>)) {
        let mut round = 0;
        loop {
            if let Some(mut connection) = self.open().await {
                loop {
                    round += 1;
                    let (line, body) = request(round);
                    let request = self.request(line, &body);
                    if connection.write_all(&request).await.is_err()
                        || answer(&mut connection).await.is_none()
                    {
                        break;
                    }
                }
            }
            pause(n).await;
        }
    }

    /// Leaves in the middle of an acquire, again and again.
    async fn leave(self, n: usize) {
        for round in 0.. {
            if let Some(mut connection) = self.open().await {
                let wait_ms = if round % 2 == 0 { 0 } else { 600_000 };
                let body = json!({"resource": format!("abuse/left/{n}/{}", round % 4), "ttl_ms": 600_000, "wait_ms": wait_ms});
                let request = self.request("POST /v1/acquire", body.to_string().as_bytes());
                let _ = connection.write_all(&request).await;
                tokio::time::sleep(Duration::from_millis(round % 4)).await;
            }
            pause(n).await;
        }
    }

    /// Opens connections, and keeps as many as it gets.
    async fn connect(self) {
        let mut open = std::collections::VecDeque::new();
        loop {
            open.extend(self.open().await);
            if open.len() > 300 {
                open.pop_front();
            }
            pause(0).await;
        }
    }
}

/// A client that connects again in a loop would be limited by its own processor time.
async fn pause(n: usize) {
    tokio::time::sleep(Duration::from_millis(1 + n as u64 % 4)).await;
}

/// Reads an answer. Returns when a stream begins another event. `None` if the connection ends.
async fn answer(connection: &mut TcpStream) -> Option<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(connection.read_u8().await.ok()?);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    match length {
        Some(length) => {
            let mut body = vec![0; length.parse().ok()?];
            connection.read_exact(&mut body).await.ok()?;
        }
        // A stream: read it until it ends.
        None => {
            let mut bytes = [0; 4096];
            while connection.read(&mut bytes).await.ok()? > 0 {}
            return None;
        }
    }
    Some(())
}

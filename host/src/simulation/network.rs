//! Connections to simulated servers. Packets and answers may arrive late or never.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use futures_util::future::BoxFuture;
use mysql_async::{Column, DriverError, Error, Row, ServerError};
use mysql_common::constants::ColumnType;
use mysql_common::row::new_row;
use tokio::sync::{mpsc, oneshot};

use super::server::value::Value;
use super::server::{Failure, Server, Set};
use crate::mysql::wire::{Connect, Exchange};

/// The fate of a packet and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Delivered,
    /// The connection breaks before the packet reaches the server.
    Refused,
    /// The packet is lost without a notice.
    Lost,
    /// The server runs the packet, and the connection breaks before the answer arrives.
    Unanswered,
    /// The server runs the packet, and the answer is lost without a notice.
    AnswerLost,
}

/// The way of one packet.
#[derive(Clone, Copy, Debug)]
pub struct Trip {
    /// The delay between the proxy's decision to send and the sending. The proxy may be paused during this time.
    pub hesitation: Duration,
    pub there: Duration,
    pub back: Duration,
    pub fate: Fate,
}

/// Decides the fate of each packet.
pub trait Network: Send + Sync {
    /// The way of the next packet. `sql` is empty when a connection is opened.
    fn trip(&self, sql: &[u8]) -> Trip;
}

/// The route from a proxy to an address.
#[derive(Clone)]
pub struct Route {
    /// The index of the proxy.
    pub from: usize,
    /// The servers behind the address. A connection goes to the first one that is up.
    pub servers: Vec<Arc<Server>>,
    pub network: Arc<dyn Network>,
}

/// The client side of a connection.
pub struct Client {
    from: usize,
    server: Arc<Server>,
    network: Arc<dyn Network>,
    packets: mpsc::UnboundedSender<Packet>,
    /// Nothing more can be sent.
    is_broken: bool,
    /// The network has cut the connection: the session ends although the client did not close it.
    is_cut: Arc<AtomicBool>,
}

struct Packet {
    sql: Vec<u8>,
    parameters: Vec<Value>,
    answer: oneshot::Sender<Result<Vec<Set>, Failure>>,
}

impl Route {
    /// The route's name and connector, for [`MysqlStore::simulated`](crate::mysql::MysqlStore::simulated).
    pub fn named(self) -> (String, Arc<dyn Connect>) {
        (self.servers[0].name.clone(), Arc::new(self))
    }
}

impl Connect for Route {
    fn connect(&self) -> BoxFuture<'_, Result<Box<dyn Exchange>, Error>> {
        Box::pin(async { Ok(Box::new(self.open().await?) as Box<dyn Exchange>) })
    }
}

impl Exchange for Client {
    fn exchange<'a>(
        &'a mut self,
        sql: Vec<u8>,
        parameters: &'a [mysql_async::Value],
    ) -> BoxFuture<'a, Result<Vec<Vec<Row>>, Error>> {
        Box::pin(self.send(sql, parameters))
    }
}

impl Route {
    /// Opens a connection. Returns an error if the network cuts the connection at once.
    async fn open(&self) -> Result<Client, Error> {
        let trip = self.network.trip(b"");
        tokio::time::sleep(trip.there + trip.back).await;
        match trip.fate {
            Fate::Delivered => {}
            Fate::Refused | Fate::Unanswered => return Err(closed()),
            Fate::Lost | Fate::AnswerLost => return std::future::pending().await,
        }
        let is_there = |server: &&Arc<Server>| !server.is_down() && !server.is_hidden_from(self.from);
        let server = self.servers.iter().find(is_there).ok_or_else(closed)?.clone();
        let (packets, incoming) = mpsc::unbounded_channel();
        let is_cut = Arc::new(AtomicBool::new(false));
        tokio::spawn(serve(server.clone(), self.from, incoming, is_cut.clone()));
        let (from, network) = (self.from, self.network.clone());
        Ok(Client { from, server, network, packets, is_broken: false, is_cut })
    }
}

impl Client {
    async fn send(
        &mut self,
        sql: Vec<u8>,
        parameters: &[mysql_async::Value],
    ) -> Result<Vec<Vec<Row>>, Error> {
        let trip = self.network.trip(&sql);
        if self.is_broken {
            return Err(closed());
        }
        // A client that drops a call half-way cannot use the connection any more.
        self.is_broken = true;
        if trip.hesitation > Duration::ZERO {
            tokio::time::sleep(trip.hesitation).await;
        }
        let is_hidden = self.server.is_hidden_from(self.from);
        match trip.fate {
            _ if is_hidden => {
                self.is_cut.store(true, Relaxed);
                return Err(closed());
            }
            Fate::Refused => {
                tokio::time::sleep(trip.there).await;
                self.is_cut.store(true, Relaxed);
                return Err(closed());
            }
            Fate::Lost => return std::future::pending().await,
            _ => {}
        }
        let (answer, answered) = oneshot::channel();
        let parameters = parameters.iter().map(read).collect();
        let packet = Packet { sql, parameters, answer };
        let packets = self.packets.clone();
        // A packet in flight arrives even if its client gives up or is killed.
        tokio::spawn(async move {
            tokio::time::sleep(trip.there).await;
            let _ = packets.send(packet);
        });
        let answer = answered.await.map_err(|_| closed())?;
        tokio::time::sleep(trip.back).await;
        match trip.fate {
            Fate::Unanswered => {
                self.is_cut.store(true, Relaxed);
                return Err(closed());
            }
            Fate::AnswerLost => return std::future::pending().await,
            _ => {}
        }
        match answer {
            Ok(sets) => {
                self.is_broken = false;
                Ok(sets.into_iter().map(rows).collect())
            }
            Err(Failure { code, message }) => {
                self.is_broken = code == 1927;
                Err(Error::Server(ServerError { code, message, state: "HY000".to_owned() }))
            }
        }
    }
}

/// Serves a session from its first packet to its end.
async fn serve(
    server: Arc<Server>,
    from: usize,
    mut packets: mpsc::UnboundedReceiver<Packet>,
    is_cut: Arc<AtomicBool>,
) {
    let session = server.connect(from);
    let mut is_closed = false;
    while let Some(limit) = server.idle_limit(session) {
        let packet = match tokio::time::timeout(limit, packets.recv()).await {
            Ok(Some(packet)) => packet,
            Ok(None) => {
                is_closed = !is_cut.load(Relaxed);
                break;
            }
            Err(_elapsed) => break,
        };
        let done = server.packet(session, &packet.sql, &packet.parameters).await;
        // The client may have given up.
        let _ = packet.answer.send(done);
    }
    server.end(session, is_closed);
}

fn closed() -> Error {
    Error::Driver(DriverError::ConnectionClosed)
}

fn read(value: &mysql_async::Value) -> Value {
    match value {
        mysql_async::Value::NULL => Value::Null,
        mysql_async::Value::Bytes(text) => Value::Text(text.clone()),
        mysql_async::Value::UInt(value) => Value::unsigned(*value),
        mysql_async::Value::Int(value) => Value::signed((*value).into()),
        other => Value::Text(other.as_sql(false).into_bytes()),
    }
}

/// Converts rows to the form of a real server, in which all values are text.
fn rows(set: Set) -> Vec<Row> {
    let width = set.first().map_or(0, Vec::len);
    let columns: Arc<[Column]> = vec![Column::new(ColumnType::MYSQL_TYPE_VAR_STRING); width].into();
    let text = |value: Value| value.text().map_or(mysql_async::Value::NULL, mysql_async::Value::Bytes);
    set.into_iter().map(|values| new_row(values.into_iter().map(text).collect(), columns.clone())).collect()
}

//! Connections to simulated servers: what is sent arrives later, or never, and so do answers.

use std::sync::Arc;
use std::time::Duration;

use mysql_async::{Column, DriverError, Error, Row, ServerError};
use mysql_common::constants::ColumnType;
use mysql_common::row::new_row;
use tokio::sync::{mpsc, oneshot};

use super::server::value::Value;
use super::server::{Failure, Server, Set};

/// What becomes of a packet and of its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Delivered,
    /// The connection breaks before the server has the packet.
    Refused,
    /// The packet is lost, and nobody says so.
    Lost,
    /// The server runs it, and the connection breaks before the answer is there.
    Unanswered,
    /// The server runs it, and the answer never comes.
    AnswerLost,
}

/// One packet on its way.
#[derive(Clone, Copy, Debug)]
pub struct Trip {
    pub there: Duration,
    pub back: Duration,
    pub fate: Fate,
}

/// What the network does with each packet.
pub trait Network: Send + Sync {
    fn trip(&self) -> Trip;
}

/// The way from one proxy to one server.
#[derive(Clone)]
pub struct Route {
    pub server: Arc<Server>,
    pub network: Arc<dyn Network>,
}

/// A connection.
pub struct Client {
    network: Arc<dyn Network>,
    packets: mpsc::UnboundedSender<Packet>,
    is_broken: bool,
}

struct Packet {
    sql: Vec<u8>,
    parameters: Vec<Value>,
    answer: oneshot::Sender<Result<Vec<Set>, Failure>>,
}

impl Client {
    /// Opens a connection.
    pub async fn connect(route: &Route) -> Client {
        let trip = route.network.trip();
        tokio::time::sleep(trip.there + trip.back).await;
        let (packets, incoming) = mpsc::unbounded_channel();
        tokio::spawn(serve(route.server.clone(), incoming));
        Client { network: route.network.clone(), packets, is_broken: false }
    }

    /// Sends statements and waits for their rows.
    ///
    /// # Errors
    /// The server's, and where the connection breaks.
    pub async fn exchange(
        &mut self,
        sql: Vec<u8>,
        parameters: &[mysql_async::Value],
    ) -> Result<Vec<Vec<Row>>, Error> {
        let trip = self.network.trip();
        if self.is_broken {
            return Err(closed());
        }
        // Whoever gives up half-way cannot use the connection any more.
        self.is_broken = true;
        tokio::time::sleep(trip.there).await;
        match trip.fate {
            Fate::Refused => return Err(closed()),
            Fate::Lost => return std::future::pending().await,
            _ => {}
        }
        let (answer, answered) = oneshot::channel();
        let parameters = parameters.iter().map(read).collect();
        self.packets.send(Packet { sql, parameters, answer }).map_err(|_| closed())?;
        let answer = answered.await.map_err(|_| closed())?;
        tokio::time::sleep(trip.back).await;
        match trip.fate {
            Fate::Unanswered => return Err(closed()),
            Fate::AnswerLost => return std::future::pending().await,
            _ => {}
        }
        match answer {
            Ok(sets) => {
                self.is_broken = false;
                Ok(sets.into_iter().map(|set| set.into_iter().map(row).collect()).collect())
            }
            Err(Failure { code, message }) => {
                self.is_broken = code == 1927;
                Err(Error::Server(ServerError { code, message, state: "HY000".to_owned() }))
            }
        }
    }
}

/// A session of the server, from its first packet to its end.
async fn serve(server: Arc<Server>, mut packets: mpsc::UnboundedReceiver<Packet>) {
    let session = server.connect();
    while let Some(limit) = server.idle_limit(session) {
        let Ok(Some(packet)) = tokio::time::timeout(limit, packets.recv()).await else { break };
        let done = server.packet(session, &packet.sql, &packet.parameters).await;
        // Its client may have given up.
        let _ = packet.answer.send(done);
    }
    server.end(session);
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

/// A row as a real server sends it: all values are text.
fn row(values: Vec<Value>) -> Row {
    let text = |value: Value| value.text().map_or(mysql_async::Value::NULL, mysql_async::Value::Bytes);
    let columns: Vec<Column> =
        values.iter().map(|_| Column::new(ColumnType::MYSQL_TYPE_VAR_STRING)).collect();
    new_row(values.into_iter().map(text).collect(), columns.into())
}

//! A connection to a server, as far as it carries statements.
//!
//! All statements go through here, so that a simulated server can replace a real one.

use std::sync::Arc;

use mysql_async::prelude::{AsQuery, FromRow, Queryable};
use mysql_async::{Conn, Error, Opts, OptsBuilder, Row, Statement, Value};

use super::tls::ClientTls;

#[cfg(any(test, feature = "simulation"))]
pub use simulated::{Connect, Exchange};

#[cfg(any(test, feature = "simulation"))]
mod simulated {
    use std::sync::Arc;

    use futures_util::future::BoxFuture;
    use mysql_async::{Error, Row, Value};

    /// The way to a simulated server.
    pub trait Connect: Send + Sync {
        /// Opens a connection.
        fn connect(&self) -> BoxFuture<'_, Result<Box<dyn Exchange>, Error>>;
    }

    /// A connection to a simulated server.
    pub trait Exchange: Send {
        /// Sends statements in one packet and waits for their rows.
        fn exchange<'a>(
            &'a mut self,
            sql: Vec<u8>,
            parameters: &'a [Value],
        ) -> BoxFuture<'a, Result<Vec<Vec<Row>>, Error>>;
    }

    /// A shared [`Connect`].
    pub type Route = Arc<dyn Connect>;
}

/// Where a server is.
#[derive(Clone)]
pub enum Target {
    /// A MySQL or MariaDB server.
    Address(Address),
    /// A simulated server.
    #[cfg(any(test, feature = "simulation"))]
    Simulated(simulated::Route),
}

/// Where a MySQL or MariaDB server is, and how to connect to it.
#[derive(Clone)]
pub struct Address {
    /// The connection options, other than TLS.
    pub opts: Opts,
    /// TLS, which a connection over TCP then has.
    pub tls: Option<Arc<ClientTls>>,
}

impl Address {
    /// The connection options as of now.
    fn builder(&self) -> OptsBuilder {
        // A Unix socket has no TLS.
        let tls = self.tls.as_ref().filter(|_| self.opts.socket().is_none());
        let options = tls.map(|tls| tls.options(self.opts.ip_or_hostname()));
        OptsBuilder::from_opts(self.opts.clone()).ssl_opts(options)
    }
}

/// A connection.
pub enum Wire {
    /// A connection to a MySQL or MariaDB server.
    Mysql(Conn),
    /// A connection to a simulated server.
    #[cfg(any(test, feature = "simulation"))]
    Simulated(Box<dyn Exchange>),
}

/// A statement that a connection has prepared.
pub enum Prepared {
    /// A statement that the server has prepared.
    Mysql(Statement),
    /// The text of a statement for a simulated server.
    #[cfg(any(test, feature = "simulation"))]
    Simulated(String),
}

impl Wire {
    /// Opens a connection.
    pub async fn connect(target: &Target) -> Result<Wire, Error> {
        match target {
            Target::Address(address) => Conn::new(address.builder()).await.map(Wire::Mysql),
            #[cfg(any(test, feature = "simulation"))]
            Target::Simulated(route) => route.connect().await.map(Wire::Simulated),
        }
    }

    /// Like [`Wire::connect`], but selects no database, because it may be missing.
    pub async fn connect_plain(target: &Target) -> Result<Wire, Error> {
        match target {
            Target::Address(address) => {
                Conn::new(address.builder().db_name(None::<String>)).await.map(Wire::Mysql)
            }
            #[cfg(any(test, feature = "simulation"))]
            Target::Simulated(_) => Wire::connect(target).await,
        }
    }

    /// Sends statements in one packet and waits for all answers. Returns one set of rows for each statement
    /// that returns rows.
    pub async fn exchange(&mut self, sql: impl AsQuery + 'static) -> Result<Vec<Vec<Row>>, Error> {
        match self {
            Wire::Mysql(conn) => exchange(conn, sql).await,
            #[cfg(any(test, feature = "simulation"))]
            Wire::Simulated(client) => client.exchange(sql.as_query().into_owned(), &[]).await,
        }
    }

    /// The first row of a statement that returns rows.
    pub async fn first<T: FromRow>(&mut self, sql: impl AsQuery + 'static) -> Result<Option<T>, Error> {
        let row = self.exchange(sql).await?.pop().and_then(|rows| rows.into_iter().next());
        Ok(row.map(mysql_async::from_row))
    }

    /// Prepares a statement, unless this connection has prepared it before.
    pub async fn prepare(&mut self, sql: String) -> Result<Prepared, Error> {
        match self {
            Wire::Mysql(conn) => conn.prep(sql).await.map(Prepared::Mysql),
            #[cfg(any(test, feature = "simulation"))]
            Wire::Simulated(_) => Ok(Prepared::Simulated(sql)),
        }
    }

    /// Runs a statement that this connection has prepared.
    pub async fn execute(&mut self, statement: Prepared, params: Vec<Value>) -> Result<(), Error> {
        match (self, statement) {
            (Wire::Mysql(conn), Prepared::Mysql(statement)) => conn.exec_drop(statement, params).await,
            #[cfg(any(test, feature = "simulation"))]
            (Wire::Simulated(client), Prepared::Simulated(sql)) => {
                client.exchange(sql.into_bytes(), &params).await.map(drop)
            }
            #[cfg(any(test, feature = "simulation"))]
            _ => unreachable!("a statement belongs to the connection that has prepared it"),
        }
    }

    /// Closes the connection.
    pub async fn disconnect(self) -> Result<(), Error> {
        match self {
            Wire::Mysql(conn) => conn.disconnect().await,
            #[cfg(any(test, feature = "simulation"))]
            Wire::Simulated(_) => Ok(()),
        }
    }
}

async fn exchange(conn: &mut Conn, sql: impl AsQuery + 'static) -> Result<Vec<Vec<Row>>, Error> {
    let mut result = conn.query_iter(sql).await?;
    let mut sets = Vec::new();
    while !result.is_empty() {
        let returns_rows = !result.columns_ref().is_empty();
        let set = result.collect().await?;
        if returns_rows {
            sets.push(set);
        }
    }
    // If a later statement fails, the result looks as if it had ended; only this call returns the error.
    result.drop_result().await?;
    Ok(sets)
}

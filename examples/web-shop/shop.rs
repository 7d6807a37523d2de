//! The shop: a web server that knows nothing of locks. It reads, thinks for a moment, and writes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::CONTENT_TYPE;
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, OptsBuilder, Pool, PoolConstraints, PoolOpts, TxOpts};
use serde_json::{Value, json};
use stage::{Context, LISTENING, Result};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};

/// How long another service takes to answer.
const THINKING: Duration = Duration::from_millis(10);
/// How long a page of the catalogue is kept.
const FRESH: Duration = Duration::from_millis(300);
/// Connections to the database, at most.
const CONNECTIONS: usize = 32;

const TABLES: [&str; 7] = [
    "items (sku INT PRIMARY KEY, stock BIGINT NOT NULL, price BIGINT NOT NULL, fence BIGINT NOT NULL)",
    "orders (id BIGINT AUTO_INCREMENT PRIMARY KEY, sku INT NOT NULL, charge BIGINT)",
    "charges (id BIGINT AUTO_INCREMENT PRIMARY KEY, order_id BIGINT NOT NULL)",
    "reports (id BIGINT AUTO_INCREMENT PRIMARY KEY, day VARCHAR(40) NOT NULL)",
    "computations (id BIGINT AUTO_INCREMENT PRIMARY KEY, page VARCHAR(40) NOT NULL, \
     began DATETIME(6) NOT NULL, ended DATETIME(6))",
    "offers (supplier VARCHAR(40) PRIMARY KEY, price BIGINT)",
    "price_changes (id BIGINT AUTO_INCREMENT PRIMARY KEY, sku INT NOT NULL, price BIGINT NOT NULL, \
     is_stale BOOL NOT NULL)",
];

/// The shop alone, as a server.
#[derive(clap::Parser)]
#[command(name = "example-web-shop shop")]
pub struct Args {
    #[arg(long, default_value = "127.0.0.1:9000")]
    listen: String,
    /// Its database, which is made if need be
    #[arg(long, value_name = "mysql://USER:PASS@HOST:PORT/DATABASE")]
    url: String,
}

struct Shop {
    db: Pool,
    /// Pages of the catalogue, and when each was made.
    cache: Mutex<HashMap<String, (Instant, String)>>,
}

/// A status, and a body.
type Answer = (u16, Value);

pub async fn run(args: &Args) -> Result<()> {
    let db = open(&args.url).await.context("the shop's database")?;
    let shop = Arc::new(Shop { db, cache: Mutex::default() });
    let listener = TcpListener::bind(&args.listen).await?;
    println!("{LISTENING}http://{}", listener.local_addr()?);
    loop {
        let (connection, _) = listener.accept().await?;
        let shop = shop.clone();
        tokio::spawn(async move {
            let service = service_fn(|request| serve(shop.clone(), request));
            // A client that goes away is no matter of the shop's.
            let _ = auto::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(connection), service)
                .await;
        });
    }
}

/// The database, with its tables, and with items to sell.
async fn open(url: &str) -> Result<Pool> {
    let opts = Opts::from_url(url)?;
    let name = opts.db_name().context("the URL names no database")?.to_owned();
    let mut conn = Conn::new(OptsBuilder::from_opts(opts.clone()).db_name(None::<String>)).await?;
    conn.query_drop(format!("CREATE DATABASE IF NOT EXISTS `{name}`")).await?;
    conn.query_drop(format!("USE `{name}`")).await?;
    for table in TABLES {
        conn.query_drop(format!("CREATE TABLE IF NOT EXISTS {table}")).await?;
    }
    conn.query_drop("INSERT IGNORE INTO items VALUES (1, 100, 999, 0), (2, 100, 1999, 0)").await?;
    let most = PoolConstraints::new(1, CONNECTIONS).context("a pool of connections")?;
    Ok(Pool::new(OptsBuilder::from_opts(opts).pool_opts(PoolOpts::default().with_constraints(most))))
}

/// Answers a request. What has begun is done to its end, also where the client has gone away.
async fn serve(shop: Arc<Shop>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>> {
    let (status, body) =
        tokio::spawn(async move { shop.answer(request).await }).await?.unwrap_or_else(|error| {
            eprintln!("the shop: {error:#}");
            (500, json!({"error": "the shop is broken"}))
        });
    let answer = Response::builder().status(status).header(CONTENT_TYPE, "application/json");
    Ok(answer.body(Full::new(format!("{body}\n").into()))?)
}

impl Shop {
    async fn answer(&self, request: Request<Incoming>) -> Result<Answer> {
        let (head, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let path: Vec<&str> = head.uri.path().split('/').skip(1).collect();
        match (head.method.as_str(), &path[..]) {
            ("POST", ["items", sku, "buy"]) => self.buy(sku).await,
            ("POST", ["items", sku, "price"]) => self.change_price(sku, &body, token(&head.headers)).await,
            ("POST", ["orders", order, "pay"]) => self.pay(order).await,
            ("POST", ["reports", day]) => self.report(day).await,
            ("GET", ["catalogue", page]) => self.catalogue(page).await,
            _ => Ok((404, json!({"error": "there is no such page"}))),
        }
    }

    /// Sells one piece, if there is one.
    async fn buy(&self, sku: &str) -> Result<Answer> {
        let mut db = self.db.get_conn().await?;
        let stock: Option<u64> = db.exec_first("SELECT stock FROM items WHERE sku = ?", (sku,)).await?;
        let Some(stock) = stock else {
            return Ok((404, json!({"error": "there is no such item"})));
        };
        if stock == 0 {
            return Ok((409, json!({"error": "sold out"})));
        }
        sleep(THINKING).await;
        db.exec_drop("INSERT INTO orders (sku) VALUES (?)", (sku,)).await?;
        let order = db.last_insert_id();
        db.exec_drop("UPDATE items SET stock = ? WHERE sku = ?", (stock - 1, sku)).await?;
        Ok((201, json!({"order": order})))
    }

    /// Charges for an order, unless that has been done.
    async fn pay(&self, order: &str) -> Result<Answer> {
        let mut db = self.db.get_conn().await?;
        let known = "SELECT charge FROM orders WHERE id = ?";
        let charge: Option<Option<u64>> = db.exec_first(known, (order,)).await?;
        let charge = match charge {
            None => return Ok((404, json!({"error": "there is no such order"}))),
            Some(Some(charge)) => charge,
            Some(None) => {
                // The payment provider.
                sleep(THINKING).await;
                db.exec_drop("INSERT INTO charges (order_id) VALUES (?)", (order,)).await?;
                let charge = db.last_insert_id().unwrap_or_default();
                db.exec_drop("UPDATE orders SET charge = ? WHERE id = ?", (charge, order)).await?;
                charge
            }
        };
        Ok((200, json!({"order": order, "charge": charge})))
    }

    /// Makes the report of a day, unless it is there.
    async fn report(&self, day: &str) -> Result<Answer> {
        let mut db = self.db.get_conn().await?;
        let known = "SELECT id FROM reports WHERE day = ?";
        if let Some(report) = db.exec_first::<u64, _, _>(known, (day,)).await? {
            return Ok((200, json!({"report": report})));
        }
        sleep(2 * THINKING).await;
        db.exec_drop("INSERT INTO reports (day) VALUES (?)", (day,)).await?;
        Ok((201, json!({"report": db.last_insert_id()})))
    }

    /// A page of the catalogue: from the cache, or made with a slow query.
    async fn catalogue(&self, page: &str) -> Result<Answer> {
        let cached = self.cache.lock().unwrap_or_else(PoisonError::into_inner).get(page).cloned();
        if let Some((made, text)) = cached
            && made.elapsed() < FRESH
        {
            return Ok((200, json!({"page": text})));
        }
        let mut db = self.db.get_conn().await?;
        db.exec_drop("INSERT INTO computations (page, began) VALUES (?, NOW(6))", (page,)).await?;
        let computation = db.last_insert_id();
        let slow = "SELECT CONCAT('<h1>', ?, '</h1>', SLEEP(0.1))";
        let text: String = db.exec_first(slow, (page,)).await?.unwrap_or_default();
        db.exec_drop("UPDATE computations SET ended = NOW(6) WHERE id = ?", (computation,)).await?;
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.insert(page.to_owned(), (Instant::now(), text.clone()));
        Ok((200, json!({"page": text})))
    }

    /// Sets a price: the one that is sent, or what a supplier asks for.
    async fn change_price(&self, sku: &str, body: &[u8], token: Option<u64>) -> Result<Answer> {
        let wish: Value = serde_json::from_slice(body).unwrap_or_default();
        let price = match (wish["price"].as_u64(), wish["supplier"].as_str()) {
            (Some(price), _) => price,
            (None, Some(supplier)) => self.ask(supplier).await?,
            (None, None) => return Ok((400, json!({"error": "`price` or `supplier` is missing"}))),
        };
        if self.write_price(sku, price, token).await? {
            Ok((200, json!({"price": price})))
        } else {
            Ok((409, json!({"error": "a later request has set the price"})))
        }
    }

    /// Asks for an offer, and waits until it is there.
    async fn ask(&self, supplier: &str) -> Result<u64> {
        let mut db = self.db.get_conn().await?;
        db.exec_drop("INSERT INTO offers (supplier) VALUES (?)", (supplier,)).await?;
        loop {
            let offer = "SELECT price FROM offers WHERE supplier = ? AND price IS NOT NULL";
            if let Some(price) = db.exec_first(offer, (supplier,)).await? {
                return Ok(price);
            }
            sleep(THINKING).await;
        }
    }

    /// With a token, only while no higher one has been seen: `false` where it is stale. Without one, always.
    async fn write_price(&self, sku: &str, price: u64, token: Option<u64>) -> Result<bool> {
        let mut db = self.db.get_conn().await?;
        let mut both = db.start_transaction(TxOpts::default()).await?;
        let is_stale = if let Some(token) = token {
            let update = "UPDATE items SET price = ?, fence = ? WHERE sku = ? AND fence < ?";
            both.exec_drop(update, (price, token, sku, token)).await?;
            both.affected_rows() == 0
        } else {
            both.exec_drop("UPDATE items SET price = ? WHERE sku = ?", (price, sku)).await?;
            false
        };
        let note = "INSERT INTO price_changes (sku, price, is_stale) VALUES (?, ?, ?)";
        both.exec_drop(note, (sku, price, is_stale)).await?;
        both.commit().await?;
        Ok(!is_stale)
    }
}

/// What the proxy in front of the shop says of the lock that it holds for this request.
fn token(headers: &HeaderMap) -> Option<u64> {
    headers.get("lock-token")?.to_str().ok()?.parse().ok()
}

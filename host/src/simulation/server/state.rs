//! The state of the server: tables, locks, sessions, names.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use super::Failure;
use super::parse::{ColumnType, Strength};
use super::value::{PrimaryKey, Value};
use crate::clock;
use crate::lock::Instant;

/// The number of a session.
pub type SessionId = u64;
/// The values of a row, in the order of the columns.
pub type Row = Arc<Vec<Value>>;
/// A row of a table, by its primary key.
pub type RowId = (usize, PrimaryKey);

/// The columns of a table.
pub struct Definition {
    pub name: Arc<str>,
    pub columns: Vec<ColumnType>,
}

/// A change that is replicated: a new table, or a committed row.
#[derive(Clone)]
pub enum Change {
    Table(Arc<Definition>),
    Row { place: RowId, row: Option<Row> },
}

/// A table.
#[derive(Clone)]
pub struct Table {
    pub definition: Arc<Definition>,
    /// The rows as the last statement left them, committed or not.
    pub rows: BTreeMap<PrimaryKey, Row>,
}

/// A row that a transaction has changed and not committed.
struct Uncommitted {
    owner: SessionId,
    /// The committed row, if there is one.
    before: Option<Row>,
}

#[derive(Default)]
struct Lock {
    holders: Vec<(SessionId, Strength)>,
    /// In order of arrival.
    waiters: VecDeque<(SessionId, Strength)>,
}

/// A connection, as the server knows it.
pub struct Session {
    /// The proxy that opened the connection.
    proxy: usize,
    /// Whether a transaction is open.
    pub in_transaction: bool,
    undo: Vec<(RowId, Option<Row>)>,
    locks: Vec<RowId>,
    pub variables: BTreeMap<String, Value>,
    pub last_insert_id: u64,
    pub row_count: i64,
    pub lock_wait_s: u64,
    /// The session ends after this long without a packet.
    pub wait_timeout_s: u64,
    /// Whether the session was killed.
    pub killed: bool,
    /// Whether the other node of the cluster has undone its transaction.
    pub is_undone: bool,
}

/// Everything that the server stores.
#[derive(Default)]
pub struct State {
    pub tables: Vec<Table>,
    uncommitted: BTreeMap<RowId, Uncommitted>,
    locks: BTreeMap<RowId, Lock>,
    pub sessions: BTreeMap<SessionId, Session>,
    /// Named locks: the session that has each, and how many times it has taken it.
    pub names: BTreeMap<String, (SessionId, u32)>,
    /// Global variables, by name.
    pub settings: BTreeMap<String, String>,
    pub last_session: SessionId,
    /// The next value of `UUID_SHORT`.
    pub next_number: u64,
    /// The content of each lease row, by key and revision.
    contents: BTreeMap<(PrimaryKey, i128), Row>,
    /// Whether the clock was set back. A new row may then begin with a revision that an earlier row of its key had.
    pub is_set_back: bool,
    /// The first event that may not happen on any server.
    pub broken: Option<String>,
    /// Commits that no replica has yet; `None` if there is no replica.
    pub log: Option<VecDeque<(Instant, Change)>>,
}

impl State {
    /// The index of a table.
    pub fn table(&self, name: &str) -> Result<usize, Failure> {
        let found = self.tables.iter().position(|table| &*table.definition.name == name);
        found.ok_or_else(|| Failure::new(1146, &format!("Table '{name}' doesn't exist")))
    }

    /// Whether the server refuses writes.
    pub fn is_read_only(&self) -> bool {
        self.settings.get("read_only").is_some_and(|value| value == "ON")
    }

    /// A session, unless it was killed or has ended.
    pub fn session(&mut self, id: SessionId) -> Result<&mut Session, Failure> {
        let gone = || Failure::new(1927, "Connection was killed");
        self.sessions.get_mut(&id).filter(|session| !session.killed).ok_or_else(gone)
    }

    /// Opens a session for this proxy.
    pub fn open_session(&mut self, proxy: usize) -> SessionId {
        self.last_session += 1;
        let session = Session {
            proxy,
            in_transaction: false,
            undo: Vec::new(),
            locks: Vec::new(),
            variables: BTreeMap::new(),
            last_insert_id: 0,
            row_count: 0,
            lock_wait_s: 50,
            wait_timeout_s: 28_800,
            killed: false,
            is_undone: false,
        };
        self.sessions.insert(self.last_session, session);
        self.last_session
    }

    /// Named locks and row locks, each with its session and that session's proxy.
    pub fn locked(&self) -> Vec<String> {
        let of = |id: &SessionId| {
            let proxy =
                self.sessions.get(id).map_or("nobody".to_owned(), |session| session.proxy.to_string());
            format!("by session {id} of proxy {proxy}")
        };
        let names = self.names.iter().map(|(name, (id, times))| format!("{name} {times} times {}", of(id)));
        let rows = self.locks.iter().flat_map(|((table, key), lock)| {
            let row = move |strength: &Strength| {
                format!("{} {key:?} {strength:?}", self.tables[*table].definition.name)
            };
            let held = lock.holders.iter().map(move |(id, strength)| format!("{} {}", row(strength), of(id)));
            let wanted = lock
                .waiters
                .iter()
                .map(move |(id, strength)| format!("{} waited for {}", row(strength), of(id)));
            held.chain(wanted)
        });
        names.chain(rows).collect()
    }

    /// The sessions that have a named lock or a row lock, the oldest first.
    pub fn sessions_with_locks(&self) -> Vec<SessionId> {
        let has_locks = |(id, session): (&SessionId, &Session)| {
            let has_name = self.names.values().any(|(owner, _)| owner == id);
            (has_name || !session.locks.is_empty()).then_some(*id)
        };
        self.sessions.iter().filter_map(has_locks).collect()
    }

    /// Ends a session: undoes uncommitted changes and frees its locks. Returns the session's proxy and what it had
    /// locked, or `None` if the session has already ended.
    pub fn end_session(&mut self, id: SessionId) -> Option<(usize, Vec<Vec<u8>>)> {
        let session = self.sessions.get(&id)?;
        let proxy = session.proxy;
        let rows = session.locks.iter().filter_map(|(_, key)| match key {
            PrimaryKey::Text(text) => Some(text.clone()),
            PrimaryKey::Number(_) => None,
        });
        let names = self.names.iter().filter(|(_, (owner, _))| *owner == id);
        let locked = rows.chain(names.map(|(name, _)| name.clone().into_bytes())).collect();
        self.rollback(id);
        self.sessions.remove(&id);
        self.names.retain(|_, (owner, _)| *owner != id);
        Some((proxy, locked))
    }

    /// The row as this session sees it without locks: the committed row, or the session's own version.
    pub fn visible(&self, place: &RowId, session: SessionId) -> Option<Row> {
        match self.uncommitted.get(place) {
            Some(change) if change.owner != session => change.before.clone(),
            _ => self.tables[place.0].rows.get(&place.1).cloned(),
        }
    }

    /// The row as the last statement left it, for a session that has locked it.
    pub fn latest(&self, place: &RowId) -> Option<Row> {
        self.tables[place.0].rows.get(&place.1).cloned()
    }

    /// All primary keys of a table between two bounds, in order, including rows that others are deleting.
    pub fn keys(&self, table: usize, bounds: (Bound<PrimaryKey>, Bound<PrimaryKey>)) -> Vec<PrimaryKey> {
        let is_empty = match &bounds {
            (Bound::Included(from) | Bound::Excluded(from), Bound::Included(to) | Bound::Excluded(to)) => {
                from >= to
            }
            _ => false,
        };
        if is_empty {
            return Vec::new();
        }
        let mut keys: Vec<PrimaryKey> =
            self.tables[table].rows.range(bounds.clone()).map(|(key, _)| key.clone()).collect();
        let within = |key: &PrimaryKey| {
            (match &bounds.0 {
                Bound::Included(from) => key >= from,
                Bound::Excluded(from) => key > from,
                Bound::Unbounded => true,
            }) && (match &bounds.1 {
                Bound::Included(to) => key <= to,
                Bound::Excluded(to) => key < to,
                Bound::Unbounded => true,
            })
        };
        let deleted = self.uncommitted.keys().filter(|(of, key)| *of == table && within(key));
        let deleted: Vec<PrimaryKey> = deleted
            .filter(|place| !self.tables[table].rows.contains_key(&place.1))
            .map(|place| place.1.clone())
            .collect();
        if !deleted.is_empty() {
            keys.extend(deleted);
            keys.sort_unstable();
        }
        keys
    }

    /// Changes a row that the session has locked.
    pub fn write(&mut self, session: SessionId, place: &RowId, row: Option<Row>) {
        let rows = &mut self.tables[place.0].rows;
        let last = match row {
            Some(row) => rows.insert(place.1.clone(), row),
            None => rows.remove(&place.1),
        };
        let change = Uncommitted { owner: session, before: last.clone() };
        self.uncommitted.entry(place.clone()).or_insert(change);
        if let Some(session) = self.sessions.get_mut(&session) {
            session.undo.push((place.clone(), last));
        }
    }

    /// The position to which a statement that begins now would undo its changes.
    pub fn savepoint(&self, session: SessionId) -> usize {
        self.sessions.get(&session).map_or(0, |session| session.undo.len())
    }

    /// Undoes the changes since the savepoint; locks stay.
    pub fn undo_to(&mut self, id: SessionId, savepoint: usize) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        // A failed COMMIT has undone everything.
        let from = savepoint.min(session.undo.len());
        let undone: Vec<(RowId, Option<Row>)> = session.undo.drain(from..).rev().collect();
        for (place, row) in undone {
            let rows = &mut self.tables[place.0].rows;
            match row {
                Some(row) => drop(rows.insert(place.1, row)),
                None => drop(rows.remove(&place.1)),
            }
        }
    }

    /// Commits: makes the transaction's changes visible, and frees its locks.
    pub fn commit(&mut self, id: SessionId) {
        self.note_contents(id);
        if self.log.is_some() {
            let changed = self.sessions.get(&id).into_iter().flat_map(|session| &session.undo);
            let places: BTreeSet<RowId> = changed.map(|(place, _)| place.clone()).collect();
            for place in places {
                let row = self.latest(&place);
                self.note(Change::Row { place, row });
            }
        }
        self.end_transaction(id);
    }

    fn note_contents(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get(&id).filter(|session| !session.undo.is_empty()) else { return };
        let Ok(leases) = self.table("lockkeeper_lease") else { return };
        let columns = &self.tables[leases].definition.columns;
        let Some(revision) = columns.iter().position(|column| column.name == "revision") else { return };
        for ((_, key), _) in session.undo.iter().filter(|((table, _), _)| *table == leases) {
            let Some(row) = self.tables[leases].rows.get(key) else {
                // Proxies that remember the row do not use it, because the token floor rises before a row is deleted.
                if self.is_set_back {
                    self.contents.retain(|(of, _), _| of != key);
                }
                continue;
            };
            let Some(number) = row[revision].number() else { continue };
            let known = self.contents.entry((key.clone(), number)).or_insert_with(|| row.clone());
            if known != row {
                let (now, before) = (shown(row), shown(known));
                let why =
                    format!("two contents: revision {number} of a row is ({now}), and was ({before}) before");
                self.broken.get_or_insert(why);
            }
        }
    }

    /// Forgets the contents of earlier revisions: the rows now come from another server.
    pub fn forget_contents(&mut self) {
        self.contents.clear();
    }

    /// Records a change for the replica.
    pub fn note(&mut self, change: Change) {
        if let Some(log) = &mut self.log {
            log.push_back((clock::now(), change));
        }
    }

    /// Applies a change from the primary. A replica has no other writer.
    pub fn apply(&mut self, change: Change) {
        match change {
            Change::Table(definition) => {
                self.tables.push(Table { definition, rows: BTreeMap::new() });
            }
            Change::Row { place: (table, key), row: Some(row) } => {
                self.tables[table].rows.insert(key, row);
            }
            Change::Row { place: (table, key), row: None } => {
                self.tables[table].rows.remove(&key);
            }
        }
    }

    /// Applies a change from the other node. Transactions that have locked the row are undone.
    pub fn apply_over(&mut self, change: Change) {
        if let Change::Row { place, .. } = &change {
            let lock = self.locks.get(place);
            let holders: Vec<SessionId> =
                lock.into_iter().flat_map(|lock| &lock.holders).map(|(holder, _)| *holder).collect();
            for holder in holders {
                self.rollback(holder);
                if let Some(session) = self.sessions.get_mut(&holder) {
                    session.is_undone = true;
                }
            }
        }
        let is_there = |definition: &Definition| {
            self.tables.iter().any(|table| table.definition.name == definition.name)
        };
        if !matches!(&change, Change::Table(definition) if is_there(definition)) {
            self.apply(change);
        }
    }

    /// The committed tables.
    pub fn committed(&self) -> Vec<Table> {
        let mut tables = self.tables.clone();
        for ((table, key), change) in &self.uncommitted {
            match &change.before {
                Some(row) => drop(tables[*table].rows.insert(key.clone(), row.clone())),
                None => drop(tables[*table].rows.remove(key)),
            }
        }
        tables
    }

    /// Undoes the session's transaction.
    pub fn rollback(&mut self, id: SessionId) {
        self.undo_to(id, 0);
        self.end_transaction(id);
    }

    fn end_transaction(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.in_transaction = false;
        session.undo.clear();
        for place in std::mem::take(&mut session.locks) {
            if self.uncommitted.get(&place).is_some_and(|change| change.owner == id) {
                self.uncommitted.remove(&place);
            }
            if let Some(lock) = self.locks.get_mut(&place) {
                lock.holders.retain(|(holder, _)| *holder != id);
                if lock.holders.is_empty() && lock.waiters.is_empty() {
                    self.locks.remove(&place);
                }
            }
        }
    }

    /// Locks the row if no other session is in the way. Returns whether this session had not locked it before.
    pub fn try_lock(&mut self, id: SessionId, place: &RowId, strength: Strength) -> Option<bool> {
        let lock = self.locks.entry(place.clone()).or_default();
        let held = lock.holders.iter().position(|(holder, _)| *holder == id);
        if held.is_some_and(|at| lock.holders[at].1 == Strength::Exclusive || strength == Strength::Shared) {
            return Some(false);
        }
        let conflicts = |other: &(SessionId, Strength)| {
            other.0 != id && (other.1 == Strength::Exclusive || strength == Strength::Exclusive)
        };
        let is_behind = || lock.waiters.iter().take_while(|(waiter, _)| *waiter != id).any(conflicts);
        if lock.holders.iter().any(conflicts) || (held.is_none() && is_behind()) {
            return None;
        }
        lock.waiters.retain(|(waiter, _)| *waiter != id);
        match held {
            Some(at) => lock.holders[at].1 = strength,
            None => {
                lock.holders.push((id, strength));
                if let Some(session) = self.sessions.get_mut(&id) {
                    session.locks.push(place.clone());
                }
            }
        }
        Some(held.is_none())
    }

    /// Enqueues the session for the row's lock. Returns an error in case of a deadlock.
    pub fn stand_in_line(&mut self, id: SessionId, place: &RowId, strength: Strength) -> Result<(), Failure> {
        let lock = self.locks.entry(place.clone()).or_default();
        if !lock.waiters.iter().any(|(waiter, _)| *waiter == id) {
            lock.waiters.push_back((id, strength));
        }
        if self.waits_for(id, id, &mut Vec::new()) {
            // A batch of leases locks the rows that are there in order, and inserts the others after that: two batches with new
            // rows may wait for each other, and one is run again.
            if !self.is_of_leases(place) {
                let why =
                    format!("deadlock: session {id} would wait for itself: {}", self.locked().join(", "));
                self.broken.get_or_insert(why);
            }
            self.leave_line(id, place);
            return Err(Failure::new(
                1213,
                "Deadlock found when trying to get lock; try restarting transaction",
            ));
        }
        Ok(())
    }

    fn is_of_leases(&self, (table, _): &RowId) -> bool {
        &*self.tables[*table].definition.name == "lockkeeper_lease"
    }

    pub fn leave_line(&mut self, id: SessionId, place: &RowId) {
        if let Some(lock) = self.locks.get_mut(place) {
            lock.waiters.retain(|(waiter, _)| *waiter != id);
            if lock.holders.is_empty() && lock.waiters.is_empty() {
                self.locks.remove(place);
            }
        }
    }

    /// Unlocks a row that was locked to be checked and does not match.
    pub fn unlock(&mut self, id: SessionId, place: &RowId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.locks.retain(|locked| locked != place);
        }
        if let Some(lock) = self.locks.get_mut(place) {
            lock.holders.retain(|(holder, _)| *holder != id);
        }
        self.leave_line(id, place);
    }

    /// Whether `from` waits for `wanted`, directly or through other sessions.
    fn waits_for(&self, from: SessionId, wanted: SessionId, seen: &mut Vec<SessionId>) -> bool {
        let waits = self.locks.values().filter_map(|lock| {
            let at = lock.waiters.iter().position(|(waiter, _)| *waiter == from)?;
            let before = lock.waiters.iter().take(at).chain(&lock.holders);
            let strength = lock.waiters[at].1;
            let conflicts = move |other: &&(SessionId, Strength)| {
                other.0 != from && (other.1 == Strength::Exclusive || strength == Strength::Exclusive)
            };
            Some(before.filter(conflicts).map(|(other, _)| *other).collect::<Vec<_>>())
        });
        let others: Vec<SessionId> = waits.flatten().collect();
        others.into_iter().any(|other| {
            if other == wanted {
                return true;
            }
            let is_new = !seen.contains(&other);
            seen.push(other);
            is_new && self.waits_for(other, wanted, seen)
        })
    }
}

/// A row, for people.
fn shown(row: &[Value]) -> String {
    let text = |value: &Value| String::from_utf8_lossy(&value.text().unwrap_or_default()).into_owned();
    row.iter().map(text).collect::<Vec<_>>().join(", ")
}

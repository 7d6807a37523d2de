//! The fleet's tables, as calls on a connection.

use std::collections::BTreeMap;

use bytes::Bytes;
use mysql_async::Row;

use crate::clock;
use crate::lock::ServerTime;
use crate::mysql::context::Context;
use crate::mysql::session::fault::Fault;
use crate::mysql::session::link::Link;
use crate::mysql::sql::{self, NOW_US};
use crate::store::registry::{
    CanaryRecord, Component, Member, PeerSecret, PolicyRecord, PolicyVersion, Pulse, RulesRecord,
    RulesVersion, View,
};

const PROXIES: &str = "lockkeeper_proxy";
const POLICIES: &str = "lockkeeper_policy";
const BEFORE: &str = "lockkeeper_policy_before";
const SHARED: &str = "lockkeeper_shared";

/// The row of [`SHARED`] with the secret of the proxies.
const SECRET: &str = "peers";
/// The row of [`SHARED`] with the rules of who may do what. Also the name under which a member has its rules' mark among its
/// acknowledgements: no policy has a name like this, and earlier versions of the program look for names that they know.
const RULES: &str = "[[auth]]";
/// The row of [`SHARED`] with [`View::named_by`].
const NAMED_BY: &str = "named by";

/// The columns that [`read_member`] reads.
const MEMBER: &str = "id,address,host,routes,beat_us,until_us,acks";
/// Ends the change of a record without its candidate.
const NO_CANDIDATE: &str = "candidate=NULL,candidate_digest=NULL,candidate_settings=NULL";

/// The tables.
impl Link {
    /// Creates missing tables.
    pub(super) async fn create_fleet_tables(&mut self) -> Result<(), Fault> {
        let there = format!(
            "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema=DATABASE() \
             AND table_name IN ('{PROXIES}','{POLICIES}','{BEFORE}','{SHARED}')"
        );
        if count(&self.exchange(there).await?) == 4 {
            return Ok(());
        }
        let proxies = format!(
            "CREATE TABLE IF NOT EXISTS {PROXIES} (\
             id BIGINT UNSIGNED NOT NULL PRIMARY KEY COMMENT 'one life of a proxy',\
             address VARBINARY(255) NOT NULL COMMENT 'where other proxies reach it, or empty',\
             host VARBINARY(255) NOT NULL COMMENT 'machine and process',\
             routes VARBINARY(64) NOT NULL COMMENT 'digest of the routes to policies',\
             beat_us BIGINT UNSIGNED NOT NULL COMMENT 'the last sign of life: microseconds since 1970',\
             until_us BIGINT UNSIGNED NOT NULL COMMENT 'it is gone after this: microseconds since 1970',\
             acks MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NULL COMMENT 'what it has acknowledged \
             of each policy, as JSON; NULL while it joins'\
             ) ENGINE=InnoDB DEFAULT CHARACTER SET binary"
        );
        let policies = format!(
            "CREATE TABLE IF NOT EXISTS {POLICIES} (\
             name VARBINARY(64) NOT NULL PRIMARY KEY,\
             seq BIGINT UNSIGNED NOT NULL COMMENT 'rises with every change of the row',\
             phase VARBINARY(16) NOT NULL COMMENT 'settled; both while a change is under way; canary while a version is tried',\
             live_digest VARBINARY(80) NOT NULL,\
             live_settings MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,\
             live LONGBLOB NOT NULL,\
             candidate_digest VARBINARY(80) NULL,\
             candidate_settings MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NULL,\
             candidate LONGBLOB NULL,\
             since_us BIGINT UNSIGNED NOT NULL COMMENT 'when the row was changed: microseconds since 1970',\
             note TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NULL COMMENT 'why the last change was called off, or the terms \
             of a canary'\
             ) ENGINE=InnoDB DEFAULT CHARACTER SET binary"
        );
        // A table of its own, because a new column would need ALTER, a privilege that the account may lack.
        let before = format!(
            "CREATE TABLE IF NOT EXISTS {BEFORE} (\
             name VARBINARY(64) NOT NULL PRIMARY KEY,\
             successor VARBINARY(80) NOT NULL COMMENT 'the digest of what took its place: where another one is live, \
             this row says nothing',\
             digest VARBINARY(80) NOT NULL,\
             settings MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,\
             component LONGBLOB NOT NULL\
             ) ENGINE=InnoDB DEFAULT CHARACTER SET binary"
        );
        let shared = format!(
            "CREATE TABLE IF NOT EXISTS {SHARED} (\
             name VARBINARY(64) NOT NULL PRIMARY KEY COMMENT 'what it is',\
             value VARBINARY(255) NOT NULL,\
             since_us BIGINT UNSIGNED NOT NULL COMMENT 'when the row was written: microseconds since 1970'\
             ) ENGINE=InnoDB DEFAULT CHARACTER SET binary"
        );
        for table in [proxies, policies, before, shared] {
            self.exchange(table).await?;
        }
        Ok(())
    }
}

/// The rows of proxies.
impl Link {
    /// Adds the row of a proxy that joins.
    pub(super) async fn insert_member(&mut self, me: &Pulse) -> Result<(), Fault> {
        let sql = format!(
            "SET @b={NOW_US};INSERT INTO {PROXIES} (id,address,host,routes,beat_us,until_us) \
             VALUES ({},{},{},{},@b,@b+{})",
            me.id,
            hexed(&me.address),
            hexed(&me.host),
            hexed(&me.routes),
            me.lives.as_micros()
        );
        self.exchange(sql).await.map(drop)
    }

    /// Renews the row of a proxy, if it has one, and reads the rows of all proxies and policies.
    pub(super) async fn beat(&mut self, context: &Context, me: &Pulse) -> Result<View, Fault> {
        let acks = me.acks.as_ref().map(|_| format!(",acks={}", acknowledged(me))).unwrap_or_default();
        // The time is read first, so a wait for the lock of the row does not make it later.
        let sql = format!(
            "SET @b={NOW_US};UPDATE {PROXIES} SET beat_us=@b,until_us=@b+{},address={}{acks} WHERE id={};{};\
             SELECT {MEMBER} FROM {PROXIES} ORDER BY id;\
             SELECT p.name,seq,live_digest,live_settings,candidate_digest,candidate_settings,since_us,note,\
             digest,settings,phase FROM {POLICIES} p LEFT JOIN {BEFORE} b ON b.name=p.name AND successor=live_digest \
             ORDER BY p.name;SELECT name,value,since_us FROM {SHARED}",
            me.lives.as_micros(),
            hexed(&me.address),
            me.id,
            sql::sample(),
        );
        let asked_at = clock::now();
        let mut sets = self.exchange(sql).await?.into_iter();
        // The sample also tells whether the server has become read-only.
        self.learn(context, sets.next(), asked_at)?;
        let members = read_all(sets.next(), PROXIES, read_member)?;
        let records = read_all(sets.next(), POLICIES, read_record)?;
        let shared: Vec<(Vec<u8>, Vec<u8>, u64)> = rows(sets.next(), SHARED)?;
        let value = |of: &str| shared.iter().find(|(name, ..)| name == of.as_bytes());
        let peer_secret = value(SECRET).and_then(|(_, value, _)| PeerSecret::from_bytes(value));
        let rules = value(RULES).and_then(|(_, value, since)| {
            Some(RulesRecord { rules: RulesVersion::parse(&text(value))?, since: ServerTime(*since) })
        });
        let named_by = value(NAMED_BY).map(|(_, value, _)| text(value)).unwrap_or_default();
        let server = format!("{}:{}", self.server.identity, self.sample.epoch);
        Ok(View { now: self.sample.now, asked_at, members, records, peer_secret, rules, server, named_by })
    }

    /// Writes the secret of the proxies, if there is none.
    pub(super) async fn insert_secret(&mut self, secret: &PeerSecret) -> Result<(), Fault> {
        self.exchange(insert_shared(SECRET, &sql::hexed(secret.bytes()), "name=name")).await.map(drop)
    }

    /// Writes the rules of who may do what, if they are still those `before`. Tells whether they were.
    pub(super) async fn write_rules(
        &mut self,
        before: Option<&RulesVersion>,
        now: &RulesVersion,
    ) -> Result<bool, Fault> {
        let value = hexed(&now.to_string());
        let write = match before {
            None => insert_shared(RULES, &value, "name=name"),
            Some(before) => format!(
                "UPDATE {SHARED} SET value={value},since_us={NOW_US} WHERE name={} AND value={}",
                hexed(RULES),
                hexed(&before.to_string())
            ),
        };
        self.changes_a_row(write).await
    }

    /// Writes by which records all leases are named.
    pub(super) async fn write_named_by(&mut self, names: &str) -> Result<(), Fault> {
        let value = hexed(names);
        let replace = format!("value={value},since_us={NOW_US}");
        self.exchange(insert_shared(NAMED_BY, &value, &replace)).await.map(drop)
    }

    /// Deletes the row of a proxy.
    pub(super) async fn delete_member(&mut self, id: u64) -> Result<(), Fault> {
        self.exchange(format!("DELETE FROM {PROXIES} WHERE id={id}")).await.map(drop)
    }

    /// Deletes the row of a proxy whose last heartbeat was at `beat`. Tells whether there was such a row.
    pub(super) async fn evict_member(&mut self, id: u64, beat: ServerTime) -> Result<bool, Fault> {
        self.changes_a_row(format!("DELETE FROM {PROXIES} WHERE id={id} AND beat_us={}", beat.0)).await
    }

    /// Writes what a proxy has acknowledged. Tells whether the proxy has a row.
    pub(super) async fn acknowledge(&mut self, me: &Pulse) -> Result<bool, Fault> {
        let id = me.id;
        self.exchange(format!("UPDATE {PROXIES} SET acks={} WHERE id={id}", acknowledged(me))).await?;
        let there = format!("SELECT COUNT(*) FROM {PROXIES} WHERE id={id}");
        Ok(count(&self.exchange(there).await?) == 1)
    }

    /// Locks the rows of all proxies. Tells whether `id` has a row, and no other proxy may grant.
    pub(super) async fn lock_as_only_member(&mut self, id: u64) -> Result<bool, Fault> {
        let all = format!(
            "SELECT id FROM {PROXIES} FORCE INDEX (PRIMARY) ORDER BY id FOR UPDATE;\
             SELECT CONCAT(COALESCE(SUM(id={id}),0),COALESCE(SUM(id<>{id} AND acks IS NOT NULL),0)) FROM {PROXIES}"
        );
        // 10: the proxy has its row, and no other member may grant.
        Ok(count(&self.exchange(all).await?) == 10)
    }

    /// Locks the rows of all proxies, writes what the proxy `me` has acknowledged if it has joined, and reads
    /// the rows. They do not change before the transaction ends.
    pub(super) async fn lock_members(&mut self, me: &Pulse) -> Result<Vec<Member>, Fault> {
        let (id, acks) = (me.id, acknowledged(me));
        let acknowledge = format!("UPDATE {PROXIES} SET acks={acks} WHERE id={id} AND acks IS NOT NULL");
        let members = format!(
            "SELECT {MEMBER} FROM {PROXIES} FORCE INDEX (PRIMARY) \
             ORDER BY id FOR UPDATE;{acknowledge};SELECT {MEMBER} FROM {PROXIES}"
        );
        read_all(self.exchange(members).await?.pop(), PROXIES, read_member)
    }
}

/// The rows of policies.
impl Link {
    /// Begins a transaction, and locks the records of all policies. Returns each policy's name and `seq`.
    pub(super) async fn lock_records(&mut self) -> Result<Vec<(String, u64)>, Fault> {
        let records =
            format!("BEGIN;SELECT name,seq FROM {POLICIES} FORCE INDEX (PRIMARY) ORDER BY name FOR UPDATE");
        let records: Vec<(Vec<u8>, u64)> = rows(self.exchange(records).await?.pop(), POLICIES)?;
        Ok(records.into_iter().map(|(name, seq)| (text(&name), seq)).collect())
    }

    /// Begins a transaction, and locks the record of a policy. Tells whether its change `seq` is pending.
    pub(super) async fn lock_change(&mut self, name: &str, seq: u64) -> Result<bool, Fault> {
        let record = format!("BEGIN;SELECT seq FROM {POLICIES} WHERE {} FOR UPDATE", pending(name, seq));
        Ok(self.exchange(record).await?.pop().is_some_and(|rows| !rows.is_empty()))
    }

    /// Records a policy that has no record. Leaves an existing record unchanged, and locks it exclusively: `INSERT
    /// IGNORE` would take a shared lock, and of two transactions with shared locks neither could change the
    /// record. Tells whether there was none.
    pub(super) async fn insert_record(&mut self, name: &str, live: &Component) -> Result<bool, Fault> {
        let head = format!(
            "INSERT INTO {POLICIES} (name,seq,phase,live_digest,live_settings,since_us,live) \
             VALUES ({},1,'settled',{},{},{NOW_US},",
            hexed(name),
            hexed(&live.version.digest),
            hexed(&live.version.settings)
        );
        self.changes_a_row(with_component(head, live, ") ON DUPLICATE KEY UPDATE seq=seq")).await
    }

    /// Replaces the live version of a record, and keeps the one before it as the previous version. Leaves a
    /// record with the same content unchanged. Tells whether it differed.
    pub(super) async fn replace_record(&mut self, name: &str, live: &Component) -> Result<bool, Fault> {
        let (name, digest, settings) =
            (hexed(name), hexed(&live.version.digest), hexed(&live.version.settings));
        let differs = format!("live_digest<>{digest} OR BINARY live_settings<>{settings}");
        self.exchange(keep_live(&digest, &format!("name={name} AND ({differs})"))).await?;
        let head = format!(
            "UPDATE {POLICIES} SET seq=seq+1,phase='settled',since_us={NOW_US},note=NULL,{NO_CANDIDATE},\
             live_digest={digest},live_settings={settings},live="
        );
        let tail = format!(" WHERE name={name} AND (phase<>'settled' OR {differs})");
        self.changes_a_row(with_component(head, live, &tail)).await
    }

    /// Makes a version the candidate of the record `seq`. Tells whether that record was settled.
    pub(super) async fn propose(
        &mut self,
        name: &str,
        seq: u64,
        candidate: &Component,
        why: Option<&str>,
    ) -> Result<bool, Fault> {
        let why = why.map_or("NULL".to_owned(), hexed);
        let head = format!(
            "UPDATE {POLICIES} SET seq=seq+1,phase='both',since_us={NOW_US},note={why},candidate_digest={},\
             candidate_settings={},candidate=",
            hexed(&candidate.version.digest),
            hexed(&candidate.version.settings)
        );
        self.changes_a_row(with_component(head, candidate, &unchanged(name, seq))).await
    }

    /// Makes a version the canary of the record `seq`. Tells whether no change was pending.
    pub(super) async fn write_canary(
        &mut self,
        name: &str,
        seq: u64,
        canary: &Component,
        terms: &str,
    ) -> Result<bool, Fault> {
        let head = format!(
            "UPDATE {POLICIES} SET seq=seq+1,phase='canary',since_us={NOW_US},note={},candidate_digest={},\
             candidate_settings={},candidate=",
            hexed(terms),
            hexed(&canary.version.digest),
            hexed(&canary.version.settings)
        );
        self.changes_a_row(with_component(head, canary, &unchanged(name, seq))).await
    }

    /// Changes the terms of the canary of the record `seq`. Tells whether it had one.
    pub(super) async fn write_canary_terms(
        &mut self,
        name: &str,
        seq: u64,
        terms: &str,
    ) -> Result<bool, Fault> {
        let sql = format!(
            "UPDATE {POLICIES} SET seq=seq+1,since_us={NOW_US},note={} WHERE name={} AND seq={seq} AND phase='canary'",
            hexed(terms),
            hexed(name)
        );
        self.changes_a_row(sql).await
    }

    /// Ends a pending change without its candidate, or a canary. Tells whether there was one.
    pub(super) async fn call_off(&mut self, name: &str, seq: u64, why: &str) -> Result<bool, Fault> {
        let sql = format!(
            "UPDATE {POLICIES} SET seq=seq+1,phase='settled',since_us={NOW_US},note={},{NO_CANDIDATE} \
             WHERE name={} AND seq={seq} AND phase<>'settled'",
            hexed(why),
            hexed(name)
        );
        self.changes_a_row(sql).await
    }

    /// Makes the candidate of a locked change the live version, raises the token floor, and commits.
    pub(super) async fn commit_change(&mut self, name: &str, seq: u64) -> Result<(), Fault> {
        let condition = pending(name, seq);
        // The floor is raised last, because the writes of all proxies read it.
        let sql = format!(
            "{};UPDATE {POLICIES} SET seq=seq+1,phase='settled',since_us={NOW_US},live=candidate,\
             live_digest=candidate_digest,live_settings=candidate_settings,{NO_CANDIDATE} WHERE {condition};{};COMMIT",
            keep_live("candidate_digest", &condition),
            sql::raise_above_all(),
        );
        self.commit(sql).await.map(drop)
    }

    /// Commits; before that raises the token floor, if keys may get other names.
    pub(super) async fn commit_records(&mut self, renames_keys: bool) -> Result<(), Fault> {
        let raise = if renames_keys { sql::raise_above_all() + ";" } else { String::new() };
        self.commit(raise + "COMMIT").await.map(drop)
    }

    /// The component of a version. Settings are not compared: the component does not depend on them.
    pub(super) async fn component(
        &mut self,
        name: &str,
        version: &PolicyVersion,
    ) -> Result<Option<Bytes>, Fault> {
        let (name, digest) = (hexed(name), hexed(&version.digest));
        let sql = format!(
            "SELECT IF(live_digest={digest},live,candidate) FROM {POLICIES} \
             WHERE name={name} AND (live_digest={digest} OR candidate_digest={digest}) \
             UNION ALL SELECT component FROM {BEFORE} WHERE name={name} AND digest={digest}"
        );
        let found: Vec<(Vec<u8>,)> = rows(self.exchange(sql).await?.pop(), POLICIES)?;
        Ok(found.into_iter().next().map(|(bytes,)| bytes.into()))
    }

    /// Runs one statement. Tells whether it changed a row.
    async fn changes_a_row(&mut self, statement: impl Into<Vec<u8>>) -> Result<bool, Fault> {
        let mut sql: Vec<u8> = statement.into();
        sql.extend_from_slice(b";SELECT ROW_COUNT()");
        let counts: Vec<(i64,)> = rows(self.exchange(sql).await?.pop(), POLICIES)?;
        Ok(counts.first().is_some_and(|(count,)| *count > 0))
    }
}

/// Adds a row of [`SHARED`], or makes this change to the row that there is.
fn insert_shared(name: &str, value: &str, change: &str) -> String {
    let name = hexed(name);
    format!(
        "INSERT INTO {SHARED} (name,value,since_us) VALUES ({name},{value},{NOW_US}) \
         ON DUPLICATE KEY UPDATE {change}"
    )
}

/// The condition for a record without a pending change.
fn unchanged(name: &str, seq: u64) -> String {
    format!(" WHERE name={} AND seq={seq} AND phase<>'both'", hexed(name))
}

/// The condition for the record of a pending change.
fn pending(name: &str, seq: u64) -> String {
    format!("name={} AND seq={seq} AND phase='both'", hexed(name))
}

/// Keeps the live version of a record as the version before `successor`.
fn keep_live(successor: &str, condition: &str) -> String {
    format!(
        "REPLACE INTO {BEFORE} (name,successor,digest,settings,component) \
         SELECT name,{successor},live_digest,live_settings,live FROM {POLICIES} WHERE {condition}"
    )
}

fn with_component(head: String, component: &Component, tail: &str) -> Vec<u8> {
    let mut sql = head.into_bytes();
    sql::quote(&mut sql, &component.bytes);
    sql.extend_from_slice(tail.as_bytes());
    sql
}

fn read_all<T>(set: Option<Vec<Row>>, table: &str, read: impl Fn(Row) -> Option<T>) -> Result<Vec<T>, Fault> {
    set.unwrap_or_default().into_iter().map(read).collect::<Option<Vec<_>>>().ok_or_else(|| foreign(table))
}

fn read_member(row: Row) -> Option<Member> {
    type Columns = (u64, Vec<u8>, Vec<u8>, Vec<u8>, u64, u64, Option<Vec<u8>>);
    let (id, address, host, routes, beat, until, acks) = mysql_async::from_row_opt::<Columns>(row).ok()?;
    let mut acks: Option<BTreeMap<String, u64>> = match acks {
        Some(acks) => Some(serde_json::from_slice(&acks).ok()?),
        None => None,
    };
    let rules = acks.as_mut().and_then(|acks| acks.remove(RULES));
    Some(Member {
        id,
        address: text(&address),
        host: text(&host),
        routes: text(&routes),
        beat: ServerTime(beat),
        until: ServerTime(until),
        acks,
        rules,
    })
}

fn read_record(row: Row) -> Option<PolicyRecord> {
    type Bytes = Vec<u8>;
    type Other = Option<Bytes>;
    type Columns = (Bytes, u64, Bytes, Bytes, Other, Other, u64, Other, Other, Other, Bytes);
    let (
        name,
        seq,
        digest,
        settings,
        next_digest,
        next_settings,
        since,
        note,
        last_digest,
        last_settings,
        phase,
    ) = mysql_async::from_row_opt::<Columns>(row).ok()?;
    let version =
        |digest: &[u8], settings: &[u8]| PolicyVersion { digest: text(digest), settings: text(settings) };
    let other = |digest: Other, settings: Other| Some(version(&digest?, &settings?));
    let (next, note) = (other(next_digest, next_settings), note.as_deref().map(text));
    let (candidate, canary, note) = match (&*phase == b"canary", next, note) {
        (true, Some(version), terms) => {
            (None, Some(CanaryRecord { version, terms: terms.unwrap_or_default() }), None)
        }
        (_, next, note) => (next, None, note),
    };
    Some(PolicyRecord {
        name: text(&name),
        seq,
        live: version(&digest, &settings),
        candidate,
        canary,
        previous: other(last_digest, last_settings),
        since: ServerTime(since),
        note,
    })
}

fn rows<T: mysql_async::prelude::FromRow>(set: Option<Vec<Row>>, table: &str) -> Result<Vec<T>, Fault> {
    read_all(set, table, |row| mysql_async::from_row_opt(row).ok())
}

fn count(sets: &[Vec<Row>]) -> u64 {
    sets.last().and_then(|rows| rows.first()).and_then(|row| row.get(0)).unwrap_or(0)
}

fn foreign(table: &str) -> Fault {
    Fault::Rejected { why: format!("a row of {table} has unknown content: was it changed by hand?") }
}

/// What a proxy has acknowledged, with the mark of its rules.
fn acknowledged(me: &Pulse) -> String {
    let mut acks = me.acks.clone().unwrap_or_default();
    acks.insert(RULES.to_owned(), me.rules);
    hexed(&serde_json::to_string(&acks).unwrap_or_default())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn hexed(text: &str) -> String {
    sql::hexed(text.as_bytes())
}

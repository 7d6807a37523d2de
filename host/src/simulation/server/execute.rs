//! Runs statements, including their waits for locks.

use std::borrow::Cow;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::evaluate::{Named, Scope, candidates, evaluate, holds, limit, project, run};
use super::parse::{Expression, Insert, Rows, Select, Statement, Strength, Wait};
use super::state::{Change, Definition, Row, RowId, SessionId, State, Table};
use super::value::Value;
use super::{Failure, Server, read_only};

/// The rows of a statement; `None` if it returns no rows.
pub type Results = Option<Vec<Vec<Value>>>;

impl Server {
    /// Runs a statement of a session.
    pub async fn execute(
        &self,
        session: SessionId,
        statement: &Statement,
        values: &Arc<[Value]>,
    ) -> Result<Results, Failure> {
        let savepoint = self.state.lock().savepoint(session);
        let is_alone = {
            let mut state = self.state.lock();
            let session = state.session(session)?;
            // The session is not told of a transaction that was undone earlier in the packet.
            !session.in_transaction && !session.is_undone
        };
        let done = self.run(self.scope(session, values), statement).await;
        let in_transaction = self.state.lock().session(session)?.in_transaction;
        match &done {
            // In a deadlock, InnoDB undoes the transaction; after other errors, only the statement.
            Err(failure) if failure.code == 1213 => self.state.lock().rollback(session),
            Err(_) => self.state.lock().undo_to(session, savepoint),
            Ok(_) => {}
        }
        if done.is_err() && !in_transaction {
            self.state.lock().rollback(session);
        }
        if done.is_ok() && !in_transaction {
            self.commit(session).await?;
            if is_alone {
                // Galera reports that a single statement was undone.
                self.is_undone(session)?;
            }
        }
        self.share();
        self.changed.notify_waiters();
        done
    }

    async fn run(&self, mut scope: Scope, statement: &Statement) -> Result<Results, Failure> {
        let session = scope.session;
        let is_write = matches!(
            statement,
            Statement::Insert(_)
                | Statement::Update { .. }
                | Statement::Delete { .. }
                | Statement::CreateTable { .. }
        );
        if is_write && self.state.lock().is_read_only() {
            return Err(read_only());
        }
        match statement {
            Statement::Begin => {
                self.commit(session).await?;
                self.state.lock().session(session)?.in_transaction = true;
            }
            Statement::Commit => {
                self.commit(session).await?;
                self.state.lock().session(session)?.in_transaction = false;
            }
            Statement::Rollback => self.state.lock().rollback(session),
            Statement::Select(select) => {
                if select
                    .items
                    .iter()
                    .any(|item| matches!(item, Expression::Call(name, _) if name == "SLEEP"))
                {
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                    scope.now = self.now_us();
                }
                return self.select(&scope, select).await.map(Some);
            }
            Statement::Insert(insert) => self.insert(&scope, insert).await?,
            Statement::Update { table, assignments, condition } => {
                self.update(&scope, table, assignments, condition.as_ref()).await?;
            }
            Statement::Delete { table, condition } => self.delete(&scope, table, condition.as_ref()).await?,
            Statement::CreateTable { name, columns } => {
                let mut state = self.state.lock();
                if state.table(name).is_err() {
                    let definition =
                        Arc::new(Definition { name: name.as_str().into(), columns: columns.clone() });
                    state.note(Change::Table(definition.clone()));
                    state.tables.push(Table { definition, rows: Default::default() });
                }
            }
            Statement::CreateDatabase => {}
            Statement::SetSession(settings) => {
                let mut state = self.state.lock();
                for (name, value) in settings {
                    let value = evaluate(&mut state, &scope, value)?.number().unwrap_or_default() as u64;
                    let session = state.session(session)?;
                    match &**name {
                        "innodb_lock_wait_timeout" => session.lock_wait_s = value,
                        "wait_timeout" => session.wait_timeout_s = value,
                        _ => {}
                    }
                }
            }
            Statement::SetVariable(name, value) => {
                let value = self.resolved(&scope, value).await?;
                let mut state = self.state.lock();
                let value = evaluate(&mut state, &scope, &value)?;
                state.session(session)?.variables.insert(name.clone(), value);
            }
            Statement::Do(expressions) => {
                let mut state = self.state.lock();
                for expression in expressions {
                    evaluate(&mut state, &scope, expression)?;
                }
            }
            Statement::Show { names } => return show(&mut self.state.lock(), &scope, names).map(Some),
        }
        Ok(None)
    }

    fn scope(&self, session: SessionId, values: &Arc<[Value]>) -> Scope {
        let now = self.now_us();
        Scope { session, time: now, now, rows: Vec::new(), values: values.clone(), inserted: None }
    }

    /// Locks a row, and waits for it as long as the session waits. Returns whether the session had not locked it
    /// before, or `None` if another session has locked the row and the statement does not wait.
    async fn lock(
        &self,
        session: SessionId,
        place: &RowId,
        (strength, wait): (Strength, Wait),
    ) -> Result<Option<bool>, Failure> {
        let limit = std::time::Duration::from_secs(self.state.lock().session(session)?.lock_wait_s);
        let waiting = async {
            loop {
                let changed = self.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                if let ControlFlow::Break(done) = self.lock_now(session, place, strength, wait) {
                    return done;
                }
                changed.await;
            }
        };
        match tokio::time::timeout(limit, waiting).await {
            Ok(done) => done,
            Err(_elapsed) => {
                self.state.lock().leave_line(session, place);
                Err(Failure::new(1205, "Lock wait timeout exceeded; try restarting transaction"))
            }
        }
    }

    fn lock_now(
        &self,
        session: SessionId,
        place: &RowId,
        strength: Strength,
        wait: Wait,
    ) -> ControlFlow<Result<Option<bool>, Failure>> {
        let mut state = self.state.lock();
        if let Err(failure) = state.session(session) {
            state.leave_line(session, place);
            return ControlFlow::Break(Err(failure));
        }
        match (state.try_lock(session, place, strength), wait) {
            (Some(is_new), _) => ControlFlow::Break(Ok(Some(is_new))),
            (None, Wait::Not) => ControlFlow::Break(Err(Failure::new(
                3572,
                "Statement aborted because lock(s) could not be acquired",
            ))),
            (None, Wait::SkipLocked) => ControlFlow::Break(Ok(None)),
            (None, Wait::UntilFree) => match state.stand_in_line(session, place, strength) {
                Ok(()) => ControlFlow::Continue(()),
                Err(failure) => ControlFlow::Break(Err(failure)),
            },
        }
    }

    async fn select(&self, scope: &Scope, select: &Select) -> Result<Vec<Vec<Value>>, Failure> {
        let Some(lock) = select.lock else { return run(&mut self.state.lock(), scope, select) };
        let Some(table) = &select.from else { return Err(Failure::syntax("a lock without a table")) };
        let limit = limit(&mut self.state.lock(), scope, select)?;
        let (definition, found) =
            self.lock_rows(scope, &table.name, select.condition.as_ref(), lock, limit).await?;
        let named = |(_, row)| vec![Named { alias: table.alias.clone(), ..Named::of(&definition, row) }];
        let rows = found.into_iter().map(named).collect();
        project(&mut self.state.lock(), scope, select, rows)
    }

    /// Locks the rows that match a condition, in the order of their keys. As at READ COMMITTED, rows that do not
    /// match do not stay locked.
    async fn lock_rows(
        &self,
        scope: &Scope,
        table: &str,
        condition: Option<&Expression>,
        lock: (Strength, Wait),
        limit: usize,
    ) -> Result<(Arc<Definition>, Vec<(RowId, Row)>), Failure> {
        let (index, definition, keys) = {
            let mut state = self.state.lock();
            let index = state.table(table)?;
            let keys = candidates(&mut state, scope, index, condition)?;
            (index, state.tables[index].definition.clone(), keys)
        };
        let mut found = Vec::new();
        for key in keys {
            if found.len() == limit {
                break;
            }
            let place = (index, key);
            // A row that does not exist, and did not exist a moment ago, cannot be locked.
            let is_there = {
                let state = self.state.lock();
                state.latest(&place).is_some() || state.visible(&place, scope.session).is_some()
            };
            if !is_there {
                continue;
            }
            let Some(is_new) = self.lock(scope.session, &place, lock).await? else { continue };
            let mut state = self.state.lock();
            let row = state.latest(&place);
            let is_wanted = match row.clone() {
                Some(row) => holds(&mut state, &scope.with(vec![Named::of(&definition, row)]), condition)?,
                None => false,
            };
            match row.filter(|_| is_wanted) {
                Some(row) => found.push((place, row)),
                None if is_new => {
                    state.unlock(scope.session, &place);
                    drop(state);
                    self.changed.notify_waiters();
                }
                None => {}
            }
        }
        Ok((definition, found))
    }

    /// The expression with each locking SELECT replaced by its result.
    async fn resolved<'a>(
        &self,
        scope: &Scope,
        expression: &'a Expression,
    ) -> Result<Cow<'a, Expression>, Failure> {
        Ok(match locks_rows(expression) {
            true => Cow::Owned(self.replaced(scope, expression).await?),
            false => Cow::Borrowed(expression),
        })
    }

    fn replaced<'a>(
        &'a self,
        scope: &'a Scope,
        expression: &'a Expression,
    ) -> std::pin::Pin<Box<dyn Future<Output = Result<Expression, Failure>> + Send + 'a>> {
        Box::pin(async move {
            Ok(match expression {
                Expression::Select(select) if select.lock.is_some() => {
                    let rows = self.select(scope, select).await?;
                    let value = rows.into_iter().next().and_then(|row| row.into_iter().next());
                    Expression::Literal(value.unwrap_or(Value::Null))
                }
                Expression::Binary(sign, one, other) => {
                    let one = self.replaced(scope, one).await?;
                    Expression::Binary(sign, Box::new(one), Box::new(self.replaced(scope, other).await?))
                }
                Expression::Not(inner) => Expression::Not(Box::new(self.replaced(scope, inner).await?)),
                Expression::Call(name, arguments) => {
                    let mut resolved = Vec::new();
                    for argument in arguments {
                        resolved.push(self.replaced(scope, argument).await?);
                    }
                    Expression::Call(name.clone(), resolved)
                }
                other => other.clone(),
            })
        })
    }

    async fn insert(&self, scope: &Scope, insert: &Insert) -> Result<(), Failure> {
        let (index, definition) = {
            let state = self.state.lock();
            let index = state.table(&insert.table)?;
            (index, state.tables[index].definition.clone())
        };
        let mut changed = 0;
        match &insert.rows {
            Rows::Select(select) => {
                let rows = run(&mut self.state.lock(), scope, select)?;
                for values in rows {
                    changed += self.insert_row(scope, insert, (index, &definition), values).await?;
                }
            }
            Rows::Values(rows) => {
                for row in rows {
                    let mut resolved = Vec::new();
                    for expression in row {
                        resolved.push(self.resolved(scope, expression).await?);
                    }
                    // One row after another, because the clock may be read again before the last one.
                    let values = {
                        let mut state = self.state.lock();
                        let scope = Scope { now: self.now_us(), ..scope.clone() };
                        resolved
                            .iter()
                            .map(|one| evaluate(&mut state, &scope, one))
                            .collect::<Result<Vec<_>, _>>()?
                    };
                    changed += self.insert_row(scope, insert, (index, &definition), values).await?;
                }
            }
        }
        self.state.lock().session(scope.session)?.row_count = changed;
        Ok(())
    }

    /// Inserts a row. Returns the number of affected rows.
    async fn insert_row(
        &self,
        scope: &Scope,
        insert: &Insert,
        (index, definition): (usize, &Arc<Definition>),
        values: Vec<Value>,
    ) -> Result<i64, Failure> {
        let mut row = vec![Value::Null; definition.columns.len()];
        for (n, value) in values.into_iter().enumerate() {
            let at = match insert.columns.get(n) {
                Some(name) => position(definition, name)?,
                None => n,
            };
            row[at] = value;
        }
        let row = stored(definition, row)?;
        let place = (index, row[0].primary_key());
        let takes_us = self.insertion_us.load(Relaxed);
        if takes_us > 0 {
            tokio::time::sleep(std::time::Duration::from_micros(takes_us)).await;
        }
        self.lock(scope.session, &place, (Strength::Exclusive, Wait::UntilFree)).await?;
        let mut state = self.state.lock();
        let Some(last) = state.latest(&place) else {
            state.write(scope.session, &place, Some(Arc::new(row)));
            return Ok(1);
        };
        if insert.ignore {
            return Ok(0);
        }
        if insert.replace {
            state.write(scope.session, &place, Some(Arc::new(row)));
            return Ok(2);
        }
        if insert.on_duplicate.is_empty() {
            return Err(Failure::new(1062, "Duplicate entry for key 'PRIMARY'"));
        }
        let inserted = Some(Named::of(definition, Arc::new(row)));
        let scope = Scope { inserted, now: self.now_us(), ..scope.clone() };
        let is_changed = assign(&mut state, &scope, &place, &last, definition, &insert.on_duplicate)?;
        Ok(if is_changed { 2 } else { 0 })
    }

    async fn update(
        &self,
        scope: &Scope,
        table: &str,
        assignments: &[(String, Expression)],
        condition: Option<&Expression>,
    ) -> Result<(), Failure> {
        let lock = (Strength::Exclusive, Wait::UntilFree);
        let (definition, found) = self.lock_rows(scope, table, condition, lock, usize::MAX).await?;
        let mut state = self.state.lock();
        let mut changed = 0;
        for (place, row) in found {
            let is_changed = assign(&mut state, scope, &place, &row, &definition, assignments)?;
            changed += i64::from(is_changed);
        }
        state.session(scope.session)?.row_count = changed;
        Ok(())
    }

    async fn delete(
        &self,
        scope: &Scope,
        table: &str,
        condition: Option<&Expression>,
    ) -> Result<(), Failure> {
        let lock = (Strength::Exclusive, Wait::UntilFree);
        let (_, found) = self.lock_rows(scope, table, condition, lock, usize::MAX).await?;
        let mut state = self.state.lock();
        for (place, _) in &found {
            state.write(scope.session, place, None);
        }
        state.session(scope.session)?.row_count = found.len() as i64;
        Ok(())
    }
}

/// Whether the expression contains a SELECT that locks rows.
fn locks_rows(expression: &Expression) -> bool {
    match expression {
        Expression::Select(select) => select.lock.is_some(),
        Expression::Binary(_, one, other) => locks_rows(one) || locks_rows(other),
        Expression::Not(inner) => locks_rows(inner),
        Expression::Call(_, arguments) => arguments.iter().any(locks_rows),
        _ => false,
    }
}

/// Assigns from left to right, so later assignments see earlier ones. Returns whether the row has changed.
fn assign(
    state: &mut State,
    scope: &Scope,
    place: &RowId,
    row: &Row,
    definition: &Arc<Definition>,
    assignments: &[(String, Expression)],
) -> Result<bool, Failure> {
    let mut new = (**row).clone();
    for (name, expression) in assignments {
        let so_far = Arc::new(new.clone());
        let named = Named::of(definition, so_far);
        new[position(definition, name)?] = evaluate(state, &scope.with(vec![named]), expression)?;
    }
    let new = stored(definition, new)?;
    let is_same = |(one, other): (&Value, &Value)| one.text() == other.text();
    let is_changed = !row.iter().zip(&new).all(is_same);
    if is_changed {
        state.write(scope.session, place, Some(Arc::new(new)));
    }
    Ok(is_changed)
}

fn position(definition: &Definition, name: &str) -> Result<usize, Failure> {
    let at = definition.columns.iter().position(|column| column.name == name);
    at.ok_or_else(|| Failure::new(1054, &format!("Unknown column '{name}'")))
}

/// The values in the types of their columns, in strict mode.
fn stored(definition: &Definition, row: Vec<Value>) -> Result<Vec<Value>, Failure> {
    let taken = row.into_iter().zip(&definition.columns).map(|(value, column)| match value {
        Value::Null if column.nullable => Ok(Value::Null),
        Value::Null => Err(Failure::new(1048, &format!("Column '{}' cannot be null", column.name))),
        Value::Number { value, .. } if column.is_number => match u64::try_from(value) {
            Ok(value) => Ok(Value::unsigned(value)),
            Err(_) => Err(Failure::new(1264, &format!("Out of range value for column '{}'", column.name))),
        },
        value if column.is_number => Err(Failure::new(
            1366,
            &format!("Incorrect integer value {value:?} for column '{}'", column.name),
        )),
        value => Ok(Value::Text(value.text().unwrap_or_default())),
    });
    taken.collect()
}

fn show(state: &mut State, scope: &Scope, names: &[Expression]) -> Result<Vec<Vec<Value>>, Failure> {
    let mut found = Vec::new();
    for name in names {
        let name = evaluate(state, scope, name)?.text().unwrap_or_default();
        if let Some(value) = state.settings.get(&*String::from_utf8_lossy(&name)) {
            found.push(vec![Value::Text(name), Value::Text(value.as_bytes().to_vec())]);
        }
    }
    Ok(found)
}

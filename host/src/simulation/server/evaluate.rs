//! Evaluates expressions.

use std::ops::Bound;
use std::sync::Arc;

use super::Failure;
use super::parse::{Expression, Join, Select, TableName};
use super::state::{Definition, Row, SessionId, State};
use super::value::{PrimaryKey, Value};

/// A row, with the names by which an expression refers to it.
#[derive(Clone)]
pub struct Named {
    pub alias: Arc<str>,
    pub definition: Arc<Definition>,
    /// `None` if a LEFT JOIN has found no row.
    pub row: Option<Row>,
}

/// Everything that an expression may refer to.
#[derive(Clone)]
pub struct Scope {
    pub session: SessionId,
    /// The server's time at the start of the statement, in microseconds since 1970.
    pub time: u64,
    /// The server's current time.
    pub now: u64,
    pub rows: Vec<Named>,
    /// The values of the statement's parameters.
    pub values: Arc<[Value]>,
    /// The new row of an INSERT whose place is taken.
    pub inserted: Option<Named>,
}

impl Named {
    /// A row under the name of its table.
    pub fn of(definition: &Arc<Definition>, row: Row) -> Named {
        Named { alias: definition.name.clone(), definition: definition.clone(), row: Some(row) }
    }

    fn column(&self, name: &str) -> Option<Value> {
        let at = self.definition.columns.iter().position(|column| column.name == name)?;
        Some(self.row.as_ref().map_or(Value::Null, |row| row[at].clone()))
    }
}

impl Scope {
    /// The scope with other rows.
    pub fn with(&self, rows: Vec<Named>) -> Scope {
        Scope { rows, ..self.clone() }
    }

    fn column(&self, table: Option<&str>, name: &str) -> Result<Value, Failure> {
        let mut rows = self.rows.iter().filter(|row| table.is_none_or(|table| &*row.alias == table));
        let unknown = || Failure::new(1054, &format!("Unknown column '{name}'"));
        rows.find_map(|row| row.column(name)).ok_or_else(unknown)
    }
}

/// The value of an expression.
pub fn evaluate(state: &mut State, scope: &Scope, expression: &Expression) -> Result<Value, Failure> {
    let mut worth = |expression: &Expression| evaluate(state, scope, expression);
    Ok(match expression {
        Expression::Literal(value) => value.clone(),
        Expression::Parameter(n) => {
            let value = scope.values.get(*n).cloned();
            value.ok_or_else(|| Failure::new(1210, "too few parameters"))?
        }
        Expression::Column { table, name } => scope.column(table.as_deref(), name)?,
        Expression::Variable(name) => {
            state.session(scope.session)?.variables.get(name).cloned().unwrap_or(Value::Null)
        }
        Expression::System(name) => {
            let name = name.rsplit('.').next().unwrap_or_default();
            let value = state.settings.get(name).map_or("", String::as_str);
            match value {
                "ON" => Value::signed(1),
                "OFF" | "" => Value::signed(0),
                text => Value::Text(text.as_bytes().to_vec()),
            }
        }
        Expression::Star => Value::signed(1),
        Expression::Not(inner) => {
            let value = worth(inner)?;
            if value.is_null() { Value::Null } else { Value::truth(!value.is_true()) }
        }
        Expression::IsNull(inner) => Value::truth(worth(inner)?.is_null()),
        Expression::In(wanted, list) => {
            let wanted = worth(wanted)?;
            for one in list {
                if wanted.compare(&worth(one)?).is_some_and(std::cmp::Ordering::is_eq) {
                    return Ok(Value::truth(true));
                }
            }
            Value::truth(false)
        }
        Expression::Between(value, from, to) => {
            let (value, from, to) = (worth(value)?, worth(from)?, worth(to)?);
            let is_within = value.compare(&from).is_some_and(std::cmp::Ordering::is_ge)
                && value.compare(&to).is_some_and(std::cmp::Ordering::is_le);
            Value::truth(is_within)
        }
        Expression::Inserted(name) => {
            let inserted = scope.inserted.as_ref().and_then(|row| row.column(name));
            inserted.ok_or_else(|| Failure::new(1054, &format!("Unknown column '{name}'")))?
        }
        Expression::Select(select) => {
            let rows = run(state, scope, select)?;
            rows.into_iter().next().and_then(|row| row.into_iter().next()).unwrap_or(Value::Null)
        }
        Expression::Binary("AND", one, other) => {
            Value::truth(worth(one)?.is_true() && worth(other)?.is_true())
        }
        Expression::Binary("OR", one, other) => {
            Value::truth(worth(one)?.is_true() || worth(other)?.is_true())
        }
        Expression::Binary(sign, one, other) => {
            let (one, other) = (worth(one)?, worth(other)?);
            binary(sign, &one, &other)?
        }
        Expression::Call(name, arguments) => call(state, scope, name, arguments)?,
    })
}

fn binary(sign: &str, one: &Value, other: &Value) -> Result<Value, Failure> {
    let Some(order) = one.compare(other) else { return Ok(Value::Null) };
    let is = match sign {
        "=" => Some(order.is_eq()),
        "<>" => Some(order.is_ne()),
        "<" => Some(order.is_lt()),
        ">" => Some(order.is_gt()),
        "<=" => Some(order.is_le()),
        ">=" => Some(order.is_ge()),
        _ => None,
    };
    if let Some(is) = is {
        return Ok(Value::truth(is));
    }
    let (Some(left), Some(right)) = (one.number(), other.number()) else { return Ok(Value::Null) };
    let result = match sign {
        "+" => left.checked_add(right),
        "-" => left.checked_sub(right),
        _ => left.checked_mul(right),
    };
    Value::checked(result, one.is_unsigned() || other.is_unsigned())
}

fn call(state: &mut State, scope: &Scope, name: &str, arguments: &[Expression]) -> Result<Value, Failure> {
    let mut argument = |n: usize| match arguments.get(n) {
        Some(expression) => evaluate(state, scope, expression),
        None => Err(Failure::new(1582, &format!("Incorrect parameter count in the call to '{name}'"))),
    };
    match name {
        "IF" => {
            let holds = argument(0)?.is_true();
            argument(if holds { 1 } else { 2 })
        }
        "IFNULL" | "COALESCE" => {
            for n in 0..arguments.len() {
                let value = argument(n)?;
                if !value.is_null() {
                    return Ok(value);
                }
            }
            Ok(Value::Null)
        }
        "GREATEST" | "LEAST" => {
            let mut best = argument(0)?;
            for n in 1..arguments.len() {
                let value = argument(n)?;
                let Some(order) = value.compare(&best) else { return Ok(Value::Null) };
                if order
                    == (if name == "GREATEST" {
                        std::cmp::Ordering::Greater
                    } else {
                        std::cmp::Ordering::Less
                    })
                {
                    best = value;
                }
            }
            Ok(best)
        }
        "CONCAT" => {
            let mut joined = Vec::new();
            for n in 0..arguments.len() {
                let Some(text) = argument(n)?.text() else { return Ok(Value::Null) };
                joined.extend(text);
            }
            Ok(Value::Text(joined))
        }
        // Statements only use one and infinity.
        "EXP" => match argument(0)?.number() {
            Some(0) => Ok(Value::signed(1)),
            _ => Err(Failure::new(1690, "DOUBLE value is out of range in 'exp(1000)'")),
        },
        "UTC_TIMESTAMP" => Ok(Value::signed(scope.time.into())),
        "SYSDATE" => Ok(Value::signed(scope.now.into())),
        // Statements only ask for microseconds since 1970, and a time is stored as such.
        "TIMESTAMPDIFF" => argument(2),
        "SLEEP" => Ok(Value::signed(0)),
        "DATABASE" => Ok(Value::Text(b"lockkeeper".to_vec())),
        "UUID_SHORT" => {
            state.next_number += 1;
            Ok(Value::unsigned(state.next_number))
        }
        "LAST_INSERT_ID" => {
            if !arguments.is_empty() {
                let value = argument(0)?.number().unwrap_or_default() as u64;
                state.session(scope.session)?.last_insert_id = value;
            }
            Ok(Value::unsigned(state.session(scope.session)?.last_insert_id))
        }
        "ROW_COUNT" => Ok(Value::signed(state.session(scope.session)?.row_count.into())),
        "GET_LOCK" => {
            let name = lock_name(&argument(0)?);
            let owner = state.names.entry(name).or_insert((scope.session, 0));
            let is_own = owner.0 == scope.session;
            owner.1 += u32::from(is_own);
            Ok(Value::truth(is_own))
        }
        "RELEASE_LOCK" => {
            let name = lock_name(&argument(0)?);
            let Some(owner) = state.names.get_mut(&name) else { return Ok(Value::Null) };
            if owner.0 != scope.session {
                return Ok(Value::truth(false));
            }
            owner.1 -= 1;
            if owner.1 == 0 {
                state.names.remove(&name);
            }
            Ok(Value::truth(true))
        }
        _ => Err(Failure::syntax(&format!("the function {name}"))),
    }
}

fn lock_name(value: &Value) -> String {
    String::from_utf8_lossy(&value.text().unwrap_or_default()).to_lowercase()
}

/// The result of a SELECT without locks.
pub fn run(state: &mut State, scope: &Scope, select: &Select) -> Result<Vec<Vec<Value>>, Failure> {
    let mut rows = match &select.from {
        None => vec![Vec::new()],
        Some(table) => named(state, scope, table, select.condition.as_ref())?,
    };
    if let Some(join) = &select.join {
        rows = joined(state, scope, rows, join)?;
    }
    let mut found = Vec::new();
    for row in rows {
        if holds(state, &scope.with(row.clone()), select.condition.as_ref())? {
            found.push(row);
        }
    }
    let mut results = project(state, scope, select, found)?;
    if let Some(more) = &select.more {
        results.extend(run(state, scope, more)?);
    }
    Ok(results)
}

/// The items of a SELECT, for each of the matching rows, or for all of them together.
pub fn project(
    state: &mut State,
    scope: &Scope,
    select: &Select,
    mut rows: Vec<Vec<Named>>,
) -> Result<Vec<Vec<Value>>, Failure> {
    if select.items.iter().any(is_aggregate) {
        let items = select.items.iter().map(|item| {
            let item = aggregated(state, scope, item, &rows)?;
            evaluate(state, scope, &item)
        });
        return Ok(vec![items.collect::<Result<_, _>>()?]);
    }
    rows.truncate(limit(state, scope, select)?);
    let mut results = Vec::new();
    for row in rows {
        let scope = scope.with(row);
        results
            .push(select.items.iter().map(|item| evaluate(state, &scope, item)).collect::<Result<_, _>>()?);
    }
    Ok(results)
}

/// The largest number of rows that a SELECT asks for.
pub fn limit(state: &mut State, scope: &Scope, select: &Select) -> Result<usize, Failure> {
    let Some(limit) = &select.limit else { return Ok(usize::MAX) };
    let limit = evaluate(state, scope, limit)?.number().and_then(|limit| usize::try_from(limit).ok());
    limit.ok_or_else(|| Failure::syntax("a limit that is no number"))
}

fn is_aggregate(expression: &Expression) -> bool {
    match expression {
        Expression::Call(name, arguments) => {
            matches!(&**name, "SUM" | "COUNT" | "MAX") || arguments.iter().any(is_aggregate)
        }
        Expression::Binary(_, one, other) => is_aggregate(one) || is_aggregate(other),
        _ => false,
    }
}

/// The expression with its sums and counts replaced by values.
fn aggregated(
    state: &mut State,
    scope: &Scope,
    expression: &Expression,
    rows: &[Vec<Named>],
) -> Result<Expression, Failure> {
    let Expression::Call(name, arguments) = expression else { return Ok(expression.clone()) };
    if !matches!(&**name, "SUM" | "COUNT" | "MAX") {
        let arguments = arguments.iter().map(|argument| aggregated(state, scope, argument, rows));
        return Ok(Expression::Call(name.clone(), arguments.collect::<Result<_, _>>()?));
    }
    let mut values = Vec::new();
    for row in rows {
        let value = evaluate(state, &scope.with(row.clone()), &arguments[0])?;
        values.extend(value.number());
    }
    let worth = match &**name {
        "COUNT" => Value::signed(values.len() as i128),
        _ if values.is_empty() => Value::Null,
        "SUM" => Value::signed(values.iter().sum()),
        _ => Value::Number { value: values.into_iter().max().unwrap_or_default(), unsigned: true },
    };
    Ok(Expression::Literal(worth))
}

/// Whether a condition holds; no condition always holds.
pub fn holds(state: &mut State, scope: &Scope, condition: Option<&Expression>) -> Result<bool, Failure> {
    condition.map_or(Ok(true), |condition| Ok(evaluate(state, scope, condition)?.is_true()))
}

fn named(
    state: &mut State,
    scope: &Scope,
    table: &TableName,
    condition: Option<&Expression>,
) -> Result<Vec<Vec<Named>>, Failure> {
    if table.name == "information_schema.tables" {
        return Ok(tables(state));
    }
    let index = state.table(&table.name)?;
    let definition = state.tables[index].definition.clone();
    let keys = candidates(state, scope, index, condition)?;
    let rows = keys.into_iter().filter_map(|key| state.visible(&(index, key), scope.session));
    let named =
        |row| vec![Named { alias: table.alias.clone(), definition: definition.clone(), row: Some(row) }];
    Ok(rows.map(named).collect())
}

/// The tables in `information_schema`.
fn tables(state: &State) -> Vec<Vec<Named>> {
    let column =
        |name: &str| super::parse::ColumnType { name: name.to_owned(), is_number: false, nullable: false };
    let columns = vec![column("table_schema"), column("table_name")];
    let definition = Arc::new(Definition { name: "tables".into(), columns });
    let row = |name: &str| {
        let row = Arc::new(vec![Value::Text(b"lockkeeper".to_vec()), Value::Text(name.as_bytes().to_vec())]);
        vec![Named { alias: definition.name.clone(), definition: definition.clone(), row: Some(row) }]
    };
    state.tables.iter().map(|table| row(&table.definition.name)).collect()
}

fn joined(
    state: &mut State,
    scope: &Scope,
    rows: Vec<Vec<Named>>,
    join: &Join,
) -> Result<Vec<Vec<Named>>, Failure> {
    let others = named(state, scope, &join.table, None)?;
    let definition = state.tables[state.table(&join.table.name)?].definition.clone();
    let mut found = Vec::new();
    for row in rows {
        let mut is_alone = true;
        for other in &others {
            let both = [row.clone(), other.clone()].concat();
            let matches = match &join.on {
                Some(on) => evaluate(state, &scope.with(both.clone()), on)?.is_true(),
                None => primary_key(&row[0]) == primary_key(&other[0]),
            };
            if matches {
                is_alone = false;
                found.push(both);
            }
        }
        if is_alone && join.left {
            let none = Named { alias: join.table.alias.clone(), definition: definition.clone(), row: None };
            found.push([row, vec![none]].concat());
        }
    }
    Ok(found)
}

fn primary_key(named: &Named) -> Option<PrimaryKey> {
    named.row.as_ref().map(|row| row[0].primary_key())
}

/// The primary keys that can match the condition, as far as the condition alone tells, in order.
pub fn candidates(
    state: &mut State,
    scope: &Scope,
    table: usize,
    condition: Option<&Expression>,
) -> Result<Vec<PrimaryKey>, Failure> {
    let key = state.tables[table].definition.columns[0].name.clone();
    let is_key =
        |expression: &Expression| matches!(expression, Expression::Column { name, .. } if *name == key);
    let (mut from, mut to) = (Bound::Unbounded, Bound::Unbounded);
    let mut parts: Vec<&Expression> = condition.into_iter().collect();
    while let Some(part) = parts.pop() {
        match part {
            Expression::Binary("AND", one, other) => parts.extend([&**one, &**other]),
            Expression::Binary(sign, one, other) if is_key(one) && is_constant(other) => {
                let bound = evaluate(state, scope, other)?.primary_key();
                match *sign {
                    "=" => return Ok(vec![bound]),
                    ">" => from = Bound::Excluded(bound),
                    ">=" => from = Bound::Included(bound),
                    "<" => to = Bound::Excluded(bound),
                    "<=" => to = Bound::Included(bound),
                    _ => {}
                }
            }
            Expression::In(one, list) if is_key(one) => {
                let keys = list.iter().map(|one| Ok(evaluate(state, scope, one)?.primary_key()));
                let mut keys = keys.collect::<Result<Vec<_>, Failure>>()?;
                keys.sort_unstable();
                keys.dedup();
                return Ok(keys);
            }
            _ => {}
        }
    }
    Ok(state.keys(table, (from, to)))
}

fn is_constant(expression: &Expression) -> bool {
    matches!(expression, Expression::Literal(_) | Expression::Parameter(_))
}

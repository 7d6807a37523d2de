//! Parses words into statements: the part of MySQL's language that this program uses. Everything else is an error.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use super::Failure;
use super::text::{self, Shape, Word};
use super::value::Value;

/// An expression.
#[derive(Clone, Debug)]
pub enum Expression {
    Literal(Value),
    /// The parameter with this index.
    Parameter(usize),
    Column {
        table: Option<String>,
        name: String,
    },
    Variable(String),
    System(String),
    /// A function call; the name is in capitals.
    Call(String, Vec<Expression>),
    /// The argument of `COUNT(*)`.
    Star,
    Binary(&'static str, Box<Expression>, Box<Expression>),
    Not(Box<Expression>),
    IsNull(Box<Expression>),
    In(Box<Expression>, Vec<Expression>),
    Between(Box<Expression>, Box<Expression>, Box<Expression>),
    /// The value of this column in the row that an INSERT wants to add.
    Inserted(String),
    Select(Box<Select>),
}

/// The strength of a row lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strength {
    Shared,
    Exclusive,
}

/// What a SELECT does if a row is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    UntilFree,
    /// `NOWAIT`.
    Not,
    /// `SKIP LOCKED`.
    SkipLocked,
}

/// A table, with its alias.
#[derive(Clone, Debug)]
pub struct TableName {
    pub name: String,
    pub alias: Arc<str>,
}

/// A joined table.
#[derive(Clone, Debug)]
pub struct Join {
    pub left: bool,
    pub table: TableName,
    /// The condition after `ON`; `None` if the tables share their primary key.
    pub on: Option<Expression>,
}

/// A SELECT.
#[derive(Clone, Debug)]
pub struct Select {
    pub items: Vec<Expression>,
    pub from: Option<TableName>,
    pub join: Option<Join>,
    pub condition: Option<Expression>,
    pub limit: Option<Expression>,
    pub lock: Option<(Strength, Wait)>,
    /// The next SELECT of a `UNION ALL`.
    pub more: Option<Box<Select>>,
}

/// The rows of an INSERT.
#[derive(Clone, Debug)]
pub enum Rows {
    Values(Vec<Vec<Expression>>),
    Select(Box<Select>),
}

/// An INSERT.
#[derive(Clone, Debug)]
pub struct Insert {
    pub table: String,
    /// Empty for all columns.
    pub columns: Vec<String>,
    pub rows: Rows,
    pub ignore: bool,
    pub replace: bool,
    pub on_duplicate: Vec<(String, Expression)>,
}

/// A column of a new table.
#[derive(Clone, Debug)]
pub struct ColumnType {
    pub name: String,
    pub is_number: bool,
    pub nullable: bool,
}

/// A statement.
#[derive(Clone, Debug)]
pub enum Statement {
    Begin,
    Commit,
    Rollback,
    Select(Box<Select>),
    Insert(Insert),
    Update {
        table: String,
        assignments: Vec<(String, Expression)>,
        condition: Option<Expression>,
    },
    Delete {
        table: String,
        condition: Option<Expression>,
    },
    CreateTable {
        name: String,
        columns: Vec<ColumnType>,
    },
    CreateDatabase,
    /// `SET SESSION` with these variables. Settings that the server does not know have no effect.
    SetSession(Vec<(String, Expression)>),
    SetVariable(String, Expression),
    Do(Vec<Expression>),
    /// `SHOW GLOBAL VARIABLES` or `STATUS` for these names.
    Show {
        names: Vec<Expression>,
    },
}

/// The number of different texts that are remembered.
const REMEMBERED: usize = 10_000;

thread_local! {
    /// Parsed statements by their texts without values. Most packets differ from earlier ones only in values.
    static KNOWN: RefCell<HashMap<Vec<u8>, Arc<[Statement]>>> = RefCell::default();
}

/// The statements of a packet.
pub struct Packet {
    pub statements: Arc<[Statement]>,
    /// The values of the statements' parameters.
    pub values: Arc<[Value]>,
}

/// Parses a packet; `parameters` are the values of its question marks.
///
/// # Errors
/// If the text is none that this program sends.
pub fn packet(sql: &[u8], parameters: &[Value]) -> Result<Packet, Failure> {
    let Shape { text, values } = text::shape(sql, parameters)?;
    let values = values.into();
    if let Some(known) = KNOWN.with_borrow(|known| known.get(&text).cloned()) {
        return Ok(Packet { statements: known, values });
    }
    let parsed: Arc<[Statement]> = parse(&text)?.into();
    KNOWN.with_borrow_mut(|known| {
        if known.len() >= REMEMBERED {
            known.clear();
        }
        known.insert(text, parsed.clone());
    });
    Ok(Packet { statements: parsed, values })
}

fn parse(text: &[u8]) -> Result<Vec<Statement>, Failure> {
    let mut parser = Parser { words: text::words(text)?, at: 0 };
    let mut statements = Vec::new();
    loop {
        while parser.takes(";") {}
        if parser.at == parser.words.len() {
            return Ok(statements);
        }
        statements.push(parser.statement()?);
        if parser.at < parser.words.len() && !parser.is_next(";") {
            return Err(parser.unexpected());
        }
    }
}

struct Parser {
    words: Vec<Word>,
    at: usize,
}

type Parsed<T> = Result<T, Failure>;

impl Parser {
    fn unexpected(&self) -> Failure {
        let from = self.at.saturating_sub(6);
        let to = (self.at + 6).min(self.words.len());
        Failure::syntax(&format!("{:?} behind {:?}", &self.words[self.at..to], &self.words[from..self.at]))
    }

    fn next(&mut self) -> Parsed<Word> {
        let word = self.words.get(self.at).cloned().ok_or_else(|| self.unexpected())?;
        self.at += 1;
        Ok(word)
    }

    /// Whether the next word is this sign, or this keyword in any case.
    fn is_next(&self, wanted: &str) -> bool {
        self.is_at(0, wanted)
    }

    fn is_at(&self, ahead: usize, wanted: &str) -> bool {
        match self.words.get(self.at + ahead) {
            Some(Word::Sign(sign)) => *sign == wanted,
            Some(Word::Name(name)) => name.eq_ignore_ascii_case(wanted),
            _ => false,
        }
    }

    /// Takes these words, separated by spaces, if they are next.
    fn takes(&mut self, wanted: &str) -> bool {
        let found = wanted.split(' ').enumerate().all(|(n, wanted)| self.is_at(n, wanted));
        if found {
            self.at += wanted.split(' ').count();
        }
        found
    }

    fn expect(&mut self, wanted: &str) -> Parsed<()> {
        if self.takes(wanted) { Ok(()) } else { Err(self.unexpected()) }
    }

    fn name(&mut self) -> Parsed<String> {
        match self.next()? {
            Word::Name(name) => Ok(name),
            _ => {
                self.at -= 1;
                Err(self.unexpected())
            }
        }
    }

    fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
        let mut items = vec![item(self)?];
        while self.takes(",") {
            items.push(item(self)?);
        }
        Ok(items)
    }

    fn in_brackets<T>(&mut self, item: impl FnMut(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
        self.expect("(")?;
        let items = self.list(item)?;
        self.expect(")")?;
        Ok(items)
    }

    fn statement(&mut self) -> Parsed<Statement> {
        if self.takes("BEGIN") || self.takes("START TRANSACTION") {
            return Ok(Statement::Begin);
        }
        if self.takes("COMMIT") {
            return Ok(Statement::Commit);
        }
        if self.takes("ROLLBACK") {
            return Ok(Statement::Rollback);
        }
        if self.is_next("SELECT") {
            return Ok(Statement::Select(Box::new(self.select()?)));
        }
        if self.takes("INSERT") {
            let ignore = self.takes("IGNORE");
            return self.insert(ignore, false);
        }
        if self.takes("REPLACE") {
            return self.insert(false, true);
        }
        if self.takes("UPDATE") {
            let table = self.name()?;
            self.expect("SET")?;
            let assignments = self.list(Self::assignment)?;
            return Ok(Statement::Update { table, assignments, condition: self.condition()? });
        }
        if self.takes("DELETE FROM") {
            return Ok(Statement::Delete { table: self.name()?, condition: self.condition()? });
        }
        if self.takes("CREATE DATABASE IF NOT EXISTS") {
            self.name()?;
            return Ok(Statement::CreateDatabase);
        }
        if self.takes("CREATE TABLE IF NOT EXISTS") {
            return self.create();
        }
        if self.takes("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED") {
            return Ok(Statement::SetSession(Vec::new()));
        }
        if self.takes("SET SESSION") {
            return Ok(Statement::SetSession(self.list(Self::assignment)?));
        }
        if self.takes("SET") {
            let Word::Variable(name) = self.next()? else { return Err(self.unexpected()) };
            self.expect("=")?;
            return Ok(Statement::SetVariable(name, self.expression()?));
        }
        if self.takes("DO") {
            return Ok(Statement::Do(self.list(Self::expression)?));
        }
        if self.takes("SHOW GLOBAL VARIABLES WHERE Variable_name IN")
            || self.takes("SHOW GLOBAL STATUS WHERE Variable_name IN")
        {
            return Ok(Statement::Show { names: self.in_brackets(Self::term)? });
        }
        Err(self.unexpected())
    }

    fn assignment(&mut self) -> Parsed<(String, Expression)> {
        let name = self.name()?;
        self.expect("=")?;
        Ok((name, self.expression()?))
    }

    fn condition(&mut self) -> Parsed<Option<Expression>> {
        if self.takes("WHERE") { self.expression().map(Some) } else { Ok(None) }
    }

    fn table(&mut self) -> Parsed<TableName> {
        let mut name = self.name()?;
        if self.takes(".") {
            name = format!("{name}.{}", self.name()?);
        }
        // An alias is a single letter, and no keyword is.
        let alias = match self.words.get(self.at) {
            Some(Word::Name(alias)) if alias.len() == 1 => {
                self.at += 1;
                self.words[self.at - 1].clone()
            }
            _ => Word::Name(name.clone()),
        };
        let Word::Name(alias) = alias else { return Err(self.unexpected()) };
        self.takes("FORCE INDEX ( PRIMARY )");
        Ok(TableName { name, alias: alias.into() })
    }

    fn select(&mut self) -> Parsed<Select> {
        self.expect("SELECT")?;
        let items = self.list(|parser| {
            let item = parser.expression()?;
            if parser.takes("AS") {
                parser.name()?;
            }
            Ok(item)
        })?;
        let from = if self.takes("FROM") { Some(self.table()?) } else { None };
        let left = self.takes("LEFT JOIN");
        let join = if left || self.takes("JOIN") {
            let table = self.table()?;
            let on = match self.takes("ON") {
                true => Some(self.expression()?),
                false => {
                    self.expect("USING")?;
                    self.in_brackets(Self::name)?;
                    None
                }
            };
            Some(Join { left, table, on })
        } else {
            None
        };
        let condition = self.condition()?;
        if self.takes("ORDER BY") {
            // Rows come in the order of the primary key, and statements ask for no other order.
            self.name()?;
            if self.takes(".") {
                self.name()?;
            }
        }
        let limit = match self.takes("LIMIT") {
            true => Some(self.term()?),
            false => None,
        };
        let strength = if self.takes("FOR UPDATE") {
            Some(Strength::Exclusive)
        } else if self.takes("FOR SHARE") || self.takes("LOCK IN SHARE MODE") {
            Some(Strength::Shared)
        } else {
            None
        };
        let wait = if self.takes("NOWAIT") {
            Wait::Not
        } else if self.takes("SKIP LOCKED") {
            Wait::SkipLocked
        } else {
            Wait::UntilFree
        };
        let more = if self.takes("UNION ALL") { Some(Box::new(self.select()?)) } else { None };
        let lock = strength.map(|strength| (strength, wait));
        Ok(Select { items, from, join, condition, limit, lock, more })
    }

    fn insert(&mut self, ignore: bool, replace: bool) -> Parsed<Statement> {
        self.expect("INTO")?;
        let table = self.name()?;
        let columns = if self.is_next("(") { self.in_brackets(Self::name)? } else { Vec::new() };
        let rows = match self.takes("VALUES") {
            true => Rows::Values(self.list(|parser| parser.in_brackets(Self::expression))?),
            false => Rows::Select(Box::new(self.select()?)),
        };
        let on_duplicate = match self.takes("ON DUPLICATE KEY UPDATE") {
            true => self.list(Self::assignment)?,
            false => Vec::new(),
        };
        Ok(Statement::Insert(Insert { table, columns, rows, ignore, replace, on_duplicate }))
    }

    /// Parses CREATE TABLE. The first column is the primary key.
    fn create(&mut self) -> Parsed<Statement> {
        let name = self.name()?;
        let columns = self.in_brackets(|parser| {
            let name = parser.name()?;
            let kind = parser.name()?.to_ascii_uppercase();
            let is_number = kind.ends_with("INT");
            let mut nullable = true;
            while !parser.is_next(",") && !parser.is_next(")") {
                if parser.takes("(") {
                    parser.next()?;
                    parser.expect(")")?;
                } else if parser.takes("NOT NULL") {
                    nullable = false;
                } else {
                    parser.next()?;
                }
            }
            Ok(ColumnType { name, is_number, nullable })
        })?;
        while self.at < self.words.len() && !self.is_next(";") {
            self.at += 1;
        }
        Ok(Statement::CreateTable { name, columns })
    }

    fn expression(&mut self) -> Parsed<Expression> {
        self.binary(0)
    }

    fn binary(&mut self, level: usize) -> Parsed<Expression> {
        const LEVELS: [&[&str]; 2] = [&["OR"], &["AND"]];
        let Some(signs) = LEVELS.get(level) else { return self.comparison() };
        let mut left = self.binary(level + 1)?;
        while let Some(sign) = signs.iter().find(|sign| self.is_next(sign)) {
            self.at += 1;
            left = Expression::Binary(sign, Box::new(left), Box::new(self.binary(level + 1)?));
        }
        Ok(left)
    }

    fn comparison(&mut self) -> Parsed<Expression> {
        if self.takes("NOT") {
            return Ok(Expression::Not(Box::new(self.comparison()?)));
        }
        let left = self.sum()?;
        let boxed = |left| Box::new(left);
        for sign in ["=", "<>", "<=", ">=", "<", ">"] {
            if self.takes(sign) {
                return Ok(Expression::Binary(sign, boxed(left), Box::new(self.sum()?)));
            }
        }
        if self.takes("IS NOT NULL") {
            return Ok(Expression::Not(Box::new(Expression::IsNull(boxed(left)))));
        }
        if self.takes("IS NULL") {
            return Ok(Expression::IsNull(boxed(left)));
        }
        let negated = self.takes("NOT");
        let found = if self.takes("IN") {
            Expression::In(boxed(left), self.in_brackets(Self::expression)?)
        } else if self.takes("BETWEEN") {
            let from = self.sum()?;
            self.expect("AND")?;
            Expression::Between(boxed(left), Box::new(from), Box::new(self.sum()?))
        } else if negated {
            return Err(self.unexpected());
        } else {
            return Ok(left);
        };
        Ok(if negated { Expression::Not(Box::new(found)) } else { found })
    }

    fn sum(&mut self) -> Parsed<Expression> {
        let mut left = self.product()?;
        while let Some(sign) = ["+", "-"].into_iter().find(|sign| self.is_next(sign)) {
            self.at += 1;
            left = Expression::Binary(sign, Box::new(left), Box::new(self.product()?));
        }
        Ok(left)
    }

    fn product(&mut self) -> Parsed<Expression> {
        let mut left = self.term()?;
        while self.takes("*") {
            left = Expression::Binary("*", Box::new(left), Box::new(self.term()?));
        }
        Ok(left)
    }

    fn term(&mut self) -> Parsed<Expression> {
        if self.takes("(") {
            let inner = match self.is_next("SELECT") {
                true => Expression::Select(Box::new(self.select()?)),
                false => self.expression()?,
            };
            self.expect(")")?;
            return Ok(inner);
        }
        if self.takes("-") {
            let zero = Expression::Literal(Value::signed(0));
            return Ok(Expression::Binary("-", Box::new(zero), Box::new(self.term()?)));
        }
        if self.takes("NULL") {
            return Ok(Expression::Literal(Value::Null));
        }
        if self.takes("TRUE") {
            return Ok(Expression::Literal(Value::truth(true)));
        }
        // The server compares all text byte by byte.
        if self.takes("BINARY") {
            return self.term();
        }
        if self.takes("*") {
            return Ok(Expression::Star);
        }
        match self.next()? {
            Word::Variable(name) => Ok(Expression::Variable(name)),
            Word::System(name) => Ok(Expression::System(name)),
            Word::Parameter(n) => Ok(Expression::Parameter(n)),
            Word::Name(name) if self.takes("(") => {
                let arguments = match self.takes(")") {
                    true => return Ok(Expression::Call(name.to_ascii_uppercase(), Vec::new())),
                    false => self.list(Self::expression)?,
                };
                self.expect(")")?;
                let name = name.to_ascii_uppercase();
                if let ("VALUES", [Expression::Column { name, .. }]) = (&*name, &*arguments) {
                    return Ok(Expression::Inserted(name.clone()));
                }
                Ok(Expression::Call(name, arguments))
            }
            Word::Name(table) if self.takes(".") => {
                Ok(Expression::Column { table: Some(table), name: self.name()? })
            }
            Word::Name(name) => Ok(Expression::Column { table: None, name }),
            Word::Sign(_) => {
                self.at -= 1;
                Err(self.unexpected())
            }
        }
    }
}

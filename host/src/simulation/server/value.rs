//! Values, as columns and expressions have them.

use super::Failure;

/// A value of a column or an expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Null,
    /// `unsigned` as MySQL has it: what is made of an unsigned value is unsigned, and cannot be negative.
    Number {
        value: i128,
        unsigned: bool,
    },
    Text(Vec<u8>),
}

/// The value of a primary key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PrimaryKey {
    Number(i128),
    Text(Vec<u8>),
}

impl Value {
    pub fn signed(value: i128) -> Value {
        Value::Number { value, unsigned: false }
    }

    pub fn unsigned(value: u64) -> Value {
        Value::Number { value: value.into(), unsigned: true }
    }

    pub fn truth(value: bool) -> Value {
        Value::signed(value.into())
    }

    pub fn is_null(&self) -> bool {
        matches!(self, Value::Null)
    }

    /// As a condition: NULL is not true.
    pub fn is_true(&self) -> bool {
        self.number().is_some_and(|value| value != 0)
    }

    /// `None` where it is NULL. Text counts as the number that it begins with.
    pub fn number(&self) -> Option<i128> {
        match self {
            Value::Null => None,
            Value::Number { value, .. } => Some(*value),
            Value::Text(text) => {
                let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
                Some(
                    std::str::from_utf8(&text[..digits]).ok().and_then(|text| text.parse().ok()).unwrap_or(0),
                )
            }
        }
    }

    /// As it is sent to a client, or joined to other text; `None` where it is NULL.
    pub fn text(&self) -> Option<Vec<u8>> {
        match self {
            Value::Null => None,
            Value::Number { value, .. } => Some(value.to_string().into_bytes()),
            Value::Text(text) => Some(text.clone()),
        }
    }

    pub fn is_unsigned(&self) -> bool {
        matches!(self, Value::Number { unsigned: true, .. })
    }

    /// How it compares with another one; `None` where one of them is NULL.
    pub fn compare(&self, other: &Value) -> Option<std::cmp::Ordering> {
        match (self, other) {
            (Value::Text(one), Value::Text(other)) => Some(one.cmp(other)),
            _ => Some(self.number()?.cmp(&other.number()?)),
        }
    }

    pub fn primary_key(&self) -> PrimaryKey {
        match self {
            Value::Text(text) => PrimaryKey::Text(text.clone()),
            other => PrimaryKey::Number(other.number().unwrap_or_default()),
        }
    }

    /// The result of an addition, subtraction or multiplication: out of range where it is unsigned and negative, or
    /// longer than 64 bits.
    pub fn checked(value: Option<i128>, unsigned: bool) -> Result<Value, Failure> {
        let fits = |value: &i128| match unsigned {
            true => u64::try_from(*value).is_ok(),
            false => i64::try_from(*value).is_ok(),
        };
        match value.filter(fits) {
            Some(value) => Ok(Value::Number { value, unsigned }),
            None => Err(Failure::new(1690, "BIGINT value is out of range")),
        }
    }
}

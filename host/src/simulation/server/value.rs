//! Values of columns and expressions.

use super::Failure;

/// A value of a column or an expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Null,
    /// `unsigned` as in MySQL: the result of an operation with an unsigned operand is unsigned, and cannot be
    /// negative.
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
    /// A signed number.
    pub fn signed(value: i128) -> Value {
        Value::Number { value, unsigned: false }
    }

    /// An unsigned number.
    pub fn unsigned(value: u64) -> Value {
        Value::Number { value: value.into(), unsigned: true }
    }

    /// A truth value: 1 or 0.
    pub fn truth(value: bool) -> Value {
        Value::signed(value.into())
    }

    /// Whether the value is NULL.
    pub fn is_null(&self) -> bool {
        matches!(self, Value::Null)
    }

    /// The value as a condition: NULL is not true.
    pub fn is_true(&self) -> bool {
        self.number().is_some_and(|value| value != 0)
    }

    /// The value as a number; `None` for NULL. Text counts as the number that it begins with.
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

    /// The value as it is sent to a client or joined to other text; `None` for NULL.
    pub fn text(&self) -> Option<Vec<u8>> {
        match self {
            Value::Null => None,
            Value::Number { value, .. } => Some(value.to_string().into_bytes()),
            Value::Text(text) => Some(text.clone()),
        }
    }

    /// Whether the value is an unsigned number.
    pub fn is_unsigned(&self) -> bool {
        matches!(self, Value::Number { unsigned: true, .. })
    }

    /// Compares two values; `None` if one of them is NULL.
    pub fn compare(&self, other: &Value) -> Option<std::cmp::Ordering> {
        match (self, other) {
            (Value::Text(one), Value::Text(other)) => Some(one.cmp(other)),
            _ => Some(self.number()?.cmp(&other.number()?)),
        }
    }

    /// The value as a primary key.
    pub fn primary_key(&self) -> PrimaryKey {
        match self {
            Value::Text(text) => PrimaryKey::Text(text.clone()),
            other => PrimaryKey::Number(other.number().unwrap_or_default()),
        }
    }

    /// The result of an addition, subtraction or multiplication. An error if it is unsigned and negative, or longer
    /// than 64 bits.
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

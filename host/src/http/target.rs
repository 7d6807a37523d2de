//! The request target: paths and queries, percent-decoded.

use std::borrow::Cow;

use percent_encoding::percent_decode_str;

use super::problem::Problem;

/// Decodes `%xx`. `None` if an escape is invalid or the result is not UTF-8.
pub fn decode_path(text: &str) -> Option<String> {
    decode(text, false)
}

/// Decodes `%xx` and `+`, as in the query of a form. `None` if an escape is invalid or the result is not UTF-8.
pub fn decode_form(text: &str) -> Option<String> {
    decode(text, true)
}

/// The parameters of a query. Each must be known and given at most once.
#[derive(Debug)]
pub struct Query {
    pairs: Vec<(String, String)>,
}

impl Query {
    /// Refuses parameters that are not in `known`, are given twice, or have invalid escapes.
    pub fn parse(query: Option<&str>, known: &[&'static str]) -> Result<Query, Problem> {
        let mut pairs: Vec<(String, String)> = Vec::new();
        for part in query.unwrap_or_default().split('&').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let (Some(name), Some(value)) = (decode_form(name), decode_form(value)) else {
                return Err(Problem::invalid("query", format!("`{part}` is not percent-encoded UTF-8")));
            };
            if !known.contains(&name.as_str()) {
                let detail = format!("unknown query parameter; known are {}", known.join(", "));
                return Err(Problem::invalid(name, detail));
            }
            if pairs.iter().any(|(seen, _)| *seen == name) {
                return Err(Problem::invalid(name, "given twice"));
            }
            pairs.push((name, value));
        }
        Ok(Query { pairs })
    }

    /// The value of a parameter.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.pairs.iter().find(|(seen, _)| seen == name).map(|(_, value)| value.as_str())
    }

    /// The value of a parameter that must be a whole number from 1 to `max`.
    pub fn count(&self, name: &'static str, default: usize, max: usize) -> Result<usize, Problem> {
        let Some(text) = self.text(name) else { return Ok(default) };
        match text.parse() {
            Ok(count) if (1..=max).contains(&count) => Ok(count),
            _ => Err(Problem::invalid(name, format!("must be a whole number from 1 to {max}"))
                .with("bound", format!("1 to {max}"))),
        }
    }
}

fn decode(text: &str, plus_is_space: bool) -> Option<String> {
    let is_escape = |rest: &str| rest.bytes().take(2).filter(u8::is_ascii_hexdigit).count() == 2;
    if !text.split('%').skip(1).all(is_escape) {
        return None;
    }
    let text = if plus_is_space { Cow::Owned(text.replace('+', " ")) } else { Cow::Borrowed(text) };
    percent_decode_str(&text).decode_utf8().map(Cow::into_owned).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_decoded_and_broken_escapes_are_refused() {
        assert_eq!(decode_path("orders%2F42").as_deref(), Some("orders/42"));
        assert_eq!(decode_path("a+b").as_deref(), Some("a+b"));
        assert_eq!(decode_path("%C3%A9").as_deref(), Some("é"));
        for broken in ["%", "%4", "%zz", "%ff"] {
            assert_eq!(decode_path(broken), None, "{broken}");
        }
    }

    #[test]
    fn a_query_with_unknown_duplicate_or_invalid_parameters_is_refused() {
        let query = Query::parse(Some("prefix=a%20b&limit=5"), &["prefix", "limit"]).unwrap();
        assert_eq!(query.text("prefix"), Some("a b"));
        assert_eq!(query.count("limit", 100, 1000).unwrap(), 5);
        for bad in ["color=red", "limit=1&limit=2", "prefix=%f"] {
            assert!(Query::parse(Some(bad), &["prefix", "limit"]).is_err(), "{bad}");
        }
        for bad in ["limit=0", "limit=1001", "limit=x", "limit=", "limit=-1"] {
            let query = Query::parse(Some(bad), &["limit"]).unwrap();
            assert!(query.count("limit", 100, 1000).is_err(), "{bad}");
        }
    }
}

//! The paths of a front, with what each of them needs.

use hyper::Method;

use crate::config::Verb;
use crate::http::{Problem, Request, decode_path};

/// A path of a front, and the call that serves it.
#[derive(Clone, Copy, Debug)]
pub struct Route<Call> {
    /// The methods that the path takes.
    pub methods: Methods,
    /// The path. One segment may be `{name}`, for any segment; `{name...}` at the end is the rest of the path.
    pub path: &'static str,
    /// What serves the path.
    pub call: Call,
    /// What a client needs.
    pub needs: Needs,
    /// Whether the call counts for the limits of the principal. Calls that keep or give up what a client has do not.
    pub counts: bool,
}

/// What a client needs for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Nothing: nobody is asked for credentials.
    Nothing,
    /// Credentials alone: the call gives up what the client has.
    Credentials,
    /// The right to one of these, on some resource at least. The resource itself is checked where it is known.
    OneOf(&'static [Verb]),
}

/// The methods that a path takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Methods {
    /// `GET`, and `HEAD`.
    Get,
    /// `POST` alone.
    Post,
    /// `PUT` alone.
    Put,
    /// `DELETE` alone.
    Delete,
}

impl Methods {
    /// The value of the header `Allow`.
    pub fn allow(self) -> &'static str {
        match self {
            Methods::Get => "GET, HEAD",
            Methods::Post => "POST",
            Methods::Put => "PUT",
            Methods::Delete => "DELETE",
        }
    }

    fn takes(self, method: &Method) -> bool {
        match self {
            Methods::Get => method == Method::GET || method == Method::HEAD,
            Methods::Post => method == Method::POST,
            Methods::Put => method == Method::PUT,
            Methods::Delete => method == Method::DELETE,
        }
    }
}

/// The route of a request, and the decoded text in place of the path's `{name}`.
///
/// # Errors
/// 404 for a path that no route has, 405 for another method, 400 for a name that is not valid.
pub fn find<Call: Copy>(routes: &[Route<Call>], request: &Request) -> Result<(Route<Call>, String), Problem> {
    let path = request.uri().path();
    let mut allow = None;
    for route in routes {
        let Some((name, text)) = captured(route.path, path) else { continue };
        if !route.methods.takes(request.method()) {
            allow.get_or_insert(route.methods.allow());
            continue;
        }
        let text = decode_path(text)
            .ok_or_else(|| Problem::invalid(name, "the path is not percent-encoded UTF-8"))?;
        return Ok((*route, text));
    }
    Err(allow.map_or_else(|| Problem::not_found(path), Problem::method_not_allowed))
}

/// The name and the text of the pattern's capture, both empty if it has none; `None` if the path does not match.
fn captured<'p>(pattern: &'static str, path: &'p str) -> Option<(&'static str, &'p str)> {
    let Some((before, rest)) = pattern.split_once('{') else {
        return (pattern == path).then_some(("", ""));
    };
    let (name, after) = rest.split_once('}')?;
    let text = path.strip_prefix(before)?.strip_suffix(after)?;
    let (name, is_rest) = name.strip_suffix("...").map_or((name, false), |name| (name, true));
    (!text.is_empty() && (is_rest || !text.contains('/'))).then_some((name, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_capture_a_segment_or_the_rest() {
        assert_eq!(captured("/v1/locks", "/v1/locks"), Some(("", "")));
        assert_eq!(captured("/v1/locks", "/v1/locks/"), None);
        assert_eq!(captured("/v1/locks/{name...}", "/v1/locks/"), None);
        assert_eq!(captured("/v1/locks/{name...}", "/v1/locks/orders/42"), Some(("name", "orders/42")));
        assert_eq!(captured("/v1/policies/{name}", "/v1/policies/a"), Some(("name", "a")));
        assert_eq!(captured("/v1/policies/{name}", "/v1/policies/a/b"), None);
        assert_eq!(captured("/v1/policies/{name}/rollback", "/v1/policies/a/rollback"), Some(("name", "a")));
        assert_eq!(captured("/v1/policies/{name}/rollback", "/v1/policies//rollback"), None);
    }
}

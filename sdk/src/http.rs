//! Accessors for the guarded HTTP request that a policy sees, and requests for tests.

use crate::{HttpRequest, Label, Request, json_field};

impl HttpRequest {
    /// Makes a request from its first line: a method and a path, with an optional query.
    ///
    /// # Errors
    /// A sentence that says what is wrong with the line.
    pub fn parse(line: &str) -> Result<HttpRequest, String> {
        let (method, target) = line.split_once(' ').unwrap_or((line, ""));
        if method.is_empty() || !method.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
            return Err(format!("`{line}` does not begin with a method, as in `GET /orders/42`"));
        }
        if !target.starts_with('/') || target.contains(char::is_whitespace) {
            return Err(format!("`{line}` has no path behind its method, as in `GET /orders/42?all=1`"));
        }
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let broken = || format!("`{target}` is not UTF-8 behind its `%`s");
        let query = query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let text = |coded: &str| percent_decoded(&coded.replace('+', " "));
            Some(label(text(name)?, text(value)?))
        });
        Ok(HttpRequest {
            method: method.to_owned(),
            path: percent_decoded(path).ok_or_else(broken)?,
            captures: Vec::new(),
            query: query.collect::<Option<_>>().ok_or_else(broken)?,
            headers: Vec::new(),
            body: Vec::new(),
        })
    }

    /// The value of the header with this name, in any case, if the route shows that header. `None` if there are
    /// several such headers, because the application may use another one than the policy; `headers` has all of them.
    pub fn header(&self, name: &str) -> Option<&str> {
        only(&self.headers, |header| header.eq_ignore_ascii_case(name))
    }

    /// The value of `{name}` in the path pattern of the route.
    pub fn capture(&self, name: &str) -> Option<&str> {
        only(&self.captures, |capture| capture == name)
    }

    /// The value of the query parameter with this name. `None` if there are several, because the application may use
    /// another one than the policy; `query` has all of them.
    pub fn query(&self, name: &str) -> Option<&str> {
        only(&self.query, |parameter| parameter == name)
    }

    /// The field at `path` in the part of the body that the route shows; see [`json_field`].
    pub fn json(&self, path: &str) -> Option<String> {
        json_field(&self.body, path)
    }

    /// Whether the request has this method, in upper case.
    pub fn method_is(&self, method: &str) -> bool {
        self.method == method
    }

    /// Whether the method only reads: GET, HEAD or OPTIONS.
    pub fn is_safe(&self) -> bool {
        matches!(self.method.as_str(), "GET" | "HEAD" | "OPTIONS")
    }
}

/// Accessors for the HTTP request, if there is one. A request of the lock API has no headers, no captures and no
/// body.
impl Request {
    /// An exclusive request of a guarded route, for tests: `Request::http("POST /orders/42/pay?x=1")`. Its name is
    /// the path.
    ///
    /// # Panics
    /// If the line is not a method and a path.
    pub fn http(line: &str) -> Request {
        let http = HttpRequest::parse(line).unwrap_or_else(|wrong| panic!("{wrong}"));
        Request { name: http.path.clone(), http: Some(http), ..Request::new("") }
    }

    /// Adds a capture to a request from [`Request::http`].
    pub fn with_capture(self, name: impl Into<String>, value: impl Into<String>) -> Request {
        self.with_http(|http| http.captures.push(label(name.into(), value.into())))
    }

    /// Adds a header to a request from [`Request::http`].
    pub fn with_header(self, name: impl Into<String>, value: impl Into<String>) -> Request {
        self.with_http(|http| http.headers.push(label(name.into().to_ascii_lowercase(), value.into())))
    }

    /// Sets the body of a request from [`Request::http`].
    pub fn with_body(self, body: impl Into<Vec<u8>>) -> Request {
        self.with_http(|http| http.body = body.into())
    }

    /// See [`HttpRequest::header`].
    pub fn header(&self, name: &str) -> Option<&str> {
        self.http.as_ref()?.header(name)
    }

    /// See [`HttpRequest::capture`].
    pub fn capture(&self, name: &str) -> Option<&str> {
        self.http.as_ref()?.capture(name)
    }

    /// See [`HttpRequest::query`].
    pub fn query(&self, name: &str) -> Option<&str> {
        self.http.as_ref()?.query(name)
    }

    /// See [`HttpRequest::json`].
    pub fn json(&self, path: &str) -> Option<String> {
        self.http.as_ref()?.json(path)
    }

    /// See [`HttpRequest::method_is`]; false for a request of the lock API.
    pub fn method_is(&self, method: &str) -> bool {
        self.http.as_ref().is_some_and(|http| http.method_is(method))
    }

    /// See [`HttpRequest::is_safe`]; false for a request of the lock API.
    pub fn is_safe(&self) -> bool {
        self.http.as_ref().is_some_and(HttpRequest::is_safe)
    }

    fn with_http(mut self, change: impl FnOnce(&mut HttpRequest)) -> Request {
        let Some(http) = &mut self.http else { panic!("begin with Request::http") };
        change(http);
        self
    }
}

fn label(name: String, value: String) -> Label {
    Label { name, value }
}

/// The value of the only label whose name `is_meant` accepts.
fn only(labels: &[Label], is_meant: impl Fn(&str) -> bool) -> Option<&str> {
    let mut meant = labels.iter().filter(|label| is_meant(&label.name));
    let first = meant.next()?;
    meant.next().is_none().then_some(first.value.as_str())
}

/// Decodes percent-encoding. `None` if the result is not UTF-8. A `%` without two hex digits stands for itself.
fn percent_decoded(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let digits = part.get(..2).filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                bytes.extend_from_slice(&part.as_bytes()[2..]);
            }
            None => {
                bytes.push(b'%');
                bytes.extend_from_slice(part.as_bytes());
            }
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_line_is_read_as_a_server_reads_it() {
        let request = Request::http("POST /orders/caf%C3%A9/pay?x=1+2&y=a%26b&z&x=%2B");
        assert_eq!(request.name, "/orders/café/pay");
        let http = request.http.unwrap();
        assert_eq!((http.method.as_str(), http.path.as_str()), ("POST", "/orders/café/pay"));
        let query: Vec<_> = http.query.iter().map(|l| (l.name.as_str(), l.value.as_str())).collect();
        assert_eq!(query, [("x", "1 2"), ("y", "a&b"), ("z", ""), ("x", "+")]);
        for (line, words) in [
            ("", "does not begin with a method"),
            ("/orders/42", "does not begin with a method"),
            ("POST", "no path behind its method"),
            ("POST orders", "no path"),
            ("GET /a HTTP/1.1", "no path"),
            ("GET /a%ff", "UTF-8"),
            ("GET /a?b=%c3", "UTF-8"),
        ] {
            let wrong = HttpRequest::parse(line).unwrap_err();
            assert!(wrong.contains(words), "{line}: {wrong}");
        }
    }

    #[test]
    fn a_percent_sign_without_digits_stands_for_itself() {
        for (coded, plain) in
            [("/100%", "/100%"), ("/%4", "/%4"), ("/%+1", "/%+1"), ("/%%41é%C3%A9", "/%Aéé")]
        {
            assert_eq!(Request::http(&format!("GET {coded}")).name, plain);
        }
    }

    #[test]
    fn a_duplicate_header_or_parameter_has_no_value() {
        let request = Request::http("GET /a?x=1&y=2&x=1")
            .with_header("X-Tenant", "acme")
            .with_header("x-twice", "a")
            .with_header("X-Twice", "b")
            .with_capture("id", "42");
        assert_eq!((request.query("y"), request.query("x"), request.query("z")), (Some("2"), None, None));
        assert_eq!((request.header("x-TENANT"), request.header("x-twice")), (Some("acme"), None));
        assert_eq!((request.capture("id"), request.capture("ID")), (Some("42"), None));
        assert_eq!(request.http.unwrap().headers[0].name, "x-tenant");
    }

    #[test]
    fn methods_and_bodies_of_a_request_are_read() {
        assert!(["GET /", "HEAD /", "OPTIONS /"].iter().all(|line| Request::http(line).is_safe()));
        assert!(!["POST /", "get /", "DELETE /"].iter().any(|line| Request::http(line).is_safe()));
        let request = Request::http("PUT /").with_body(r#"{"id": 7, "cut"#);
        assert!(request.method_is("PUT") && !request.method_is("put"));
        assert_eq!(request.json("id").as_deref(), Some("7"));
    }

    #[test]
    fn a_request_of_the_lock_api_has_no_http_parts() {
        let request = Request::new("a");
        assert!(!request.is_safe() && !request.method_is("GET"));
        assert_eq!((request.header("a"), request.query("a"), request.capture("a")), (None, None, None));
        assert_eq!(request.json("a"), None);
    }
}

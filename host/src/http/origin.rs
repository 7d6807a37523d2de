//! Keeps web pages from using a browser to reach the API and the admin API.
//!
//! A browser sends simple requests to any address on behalf of any page, and it names the page in `Origin` and
//! `Sec-Fetch-Site`. A page whose own name was made to resolve to the proxy's address (DNS rebinding) counts as the
//! same origin for the browser, but its name stays in `Host`. An address in `Host` cannot be rebound.

use std::net::IpAddr;

use hyper::header::{HOST, HeaderValue, ORIGIN};

use super::body::Request;
use super::problem::{Kind, Problem};

const FETCH_SITE: &str = "sec-fetch-site";

/// Refuses a request whose host is not an address, `localhost` or one of `hosts`, and a request that a browser sends
/// for a web page of another origin.
///
/// # Errors
/// 421 for the host, 403 for the web page.
pub fn check(request: &Request, hosts: &[String]) -> Result<(), Problem> {
    let authority = request.uri().authority().map(|authority| authority.as_str());
    let named = request.headers().get_all(HOST).iter().map(text).chain(authority);
    for name in named {
        if !is_ours(host_of(name), hosts) {
            let detail = format!(
                "the proxy does not answer to the host {name}; use an address or localhost, or list the host in \
                 http.hosts of config.toml"
            );
            return Err(Problem::new(Kind::MISDIRECTED, detail));
        }
    }
    let own = request.headers().get(HOST).map(text).or(authority).unwrap_or_default();
    let is_own = |origin: &str| origin.split_once("://").is_some_and(|(_, host)| host == own);
    if let Some(origin) = request.headers().get_all(ORIGIN).iter().map(text).find(|origin| !is_own(origin)) {
        return Err(Problem::new(Kind::CROSS_SITE, format!("the request comes from a web page of {origin}")));
    }
    match request.headers().get(FETCH_SITE).map(text) {
        None | Some("none" | "same-origin") => Ok(()),
        Some(site) => {
            let detail = format!("a browser sent the request for a web page of another origin ({site})");
            Err(Problem::new(Kind::CROSS_SITE, detail))
        }
    }
}

/// The value as text. A value that is not text becomes a name that is never allowed.
fn text(value: &HeaderValue) -> &str {
    value.to_str().unwrap_or("an unreadable name")
}

/// The host without the port.
fn host_of(name: &str) -> &str {
    let end = match name.strip_prefix('[') {
        Some(rest) => rest.find(']').map_or(name.len(), |end| end + 2),
        None => name.find(':').unwrap_or(name.len()),
    };
    &name[..end]
}

fn is_ours(host: &str, hosts: &[String]) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    let host = host.strip_suffix('.').unwrap_or(host);
    address.is_ok()
        || host.eq_ignore_ascii_case("localhost")
        || hosts.iter().any(|ours| ours.eq_ignore_ascii_case(host))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ours(name: &str) -> bool {
        is_ours(host_of(name), &["locks.internal".to_owned()])
    }

    #[test]
    fn addresses_localhost_and_listed_hosts_are_accepted() {
        for name in
            ["127.0.0.1", "127.0.0.1:7070", "10.1.2.3:80", "[::1]", "[fe80::1]:7070", "localhost:7070"]
        {
            assert!(ours(name), "{name}");
        }
        for name in ["LOCALHOST", "localhost.:1", "locks.internal", "Locks.Internal:443"] {
            assert!(ours(name), "{name}");
        }
    }

    #[test]
    fn any_other_host_name_is_refused() {
        for name in
            ["evil.example", "127.0.0.1.evil.example:7070", "localhost.evil.example", "", ":80", "[", "[x]"]
        {
            assert!(!ours(name), "{name}");
        }
    }
}

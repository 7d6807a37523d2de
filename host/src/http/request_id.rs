//! The id of a request in answers and logs.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use hyper::header::{HeaderMap, HeaderName, HeaderValue};

use crate::random;

/// The header that carries the id.
pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

const MAX_BYTES: usize = 128;

/// The id of a request, as an extension of the request.
#[derive(Clone, Debug)]
pub struct RequestId(pub HeaderValue);

/// The client's id if it is valid (1 to 128 visible ASCII characters), otherwise a new id.
pub fn of(headers: &HeaderMap) -> HeaderValue {
    match headers.get(X_REQUEST_ID) {
        Some(id) if is_sane(id.as_bytes()) => id.clone(),
        _ => fresh(),
    }
}

/// A new id of 16 hexadecimal digits: a random number of this process and a counter.
pub fn fresh() -> HeaderValue {
    static PROCESS: OnceLock<u32> = OnceLock::new();
    static COUNT: AtomicU64 = AtomicU64::new(0);
    const HEX: &[u8; 16] = b"0123456789abcdef";

    let process = u64::from(*PROCESS.get_or_init(random::number));
    let id = (process << 32) | (COUNT.fetch_add(1, Relaxed) & 0xffff_ffff);
    let mut text = [0; 16];
    for (at, digit) in text.iter_mut().enumerate() {
        *digit = HEX[(id >> (60 - 4 * at)) as usize & 15];
    }
    HeaderValue::from_bytes(&text).unwrap_or_else(|_| HeaderValue::from_static("0"))
}

fn is_sane(id: &[u8]) -> bool {
    (1..=MAX_BYTES).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_request_id_is_used_only_if_it_is_well_formed() {
        let mut headers = HeaderMap::new();
        headers.insert(X_REQUEST_ID, HeaderValue::from_static("abc-1"));
        assert_eq!(of(&headers), "abc-1");
        for bad in ["", "with space", &"x".repeat(129)] {
            headers.insert(X_REQUEST_ID, HeaderValue::from_str(bad).unwrap());
            assert_eq!(of(&headers).len(), 16, "{bad:?}");
        }
        assert_ne!(fresh(), fresh());
    }
}

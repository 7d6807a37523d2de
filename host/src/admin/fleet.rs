//! The proxies of one store, as operators see them.

use super::Admin;
use crate::http::{self, Response};

/// `GET /v1/fleet`.
pub fn show(admin: &Admin) -> Response {
    http::json(&admin.fleet.status())
}

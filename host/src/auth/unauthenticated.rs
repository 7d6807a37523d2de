//! Why a client is not known. The client is told less than the operator.

use super::jwt::JwtFault;

/// Why the sender of a request is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unauthenticated {
    /// The request has no credentials.
    #[error("credentials are needed: a token as `Authorization: Bearer …`")]
    Missing,
    /// The credentials are those of nobody.
    #[error("the credentials are unknown")]
    Unknown,
    /// The user at the other end of the Unix socket is no principal.
    #[error("credentials are needed: the user {0} of this machine is no principal, and there is no token")]
    UnknownUser(u32),
    /// The JWT is not valid; see [`Unauthenticated::why`].
    #[error("the token is not valid")]
    Jwt(JwtFault),
    /// The token has ended.
    #[error("the token has ended")]
    Ended,
}

impl Unauthenticated {
    /// The reason, for operators. The client is told less.
    pub fn why(&self) -> String {
        match self {
            Unauthenticated::Jwt(fault) => fault.to_string(),
            other => other.to_string(),
        }
    }
}

impl From<JwtFault> for Unauthenticated {
    fn from(fault: JwtFault) -> Unauthenticated {
        match fault {
            JwtFault::Ended => Unauthenticated::Ended,
            other => Unauthenticated::Jwt(other),
        }
    }
}

//! Signed tokens (JWT, RFC 7519) of issuers whose public keys are in files.
//!
//! [`Issuers::verified`] checks the signature, which costs some 50 µs, and keeps what it has found. [`Issuers::principal`]
//! checks everything else, for each request, and again when the rules change: so a client whose key, issuer, audience or
//! subject is removed from the rules loses its rights at once.

use std::sync::Arc;

use jsonwebtoken::dangerous::insecure_decode;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::token::hex;
use crate::config::{AuthRules, JwtIssuer, JwtKey};
use crate::lock::maps::HashMap;
use crate::mutex::Mutex;

mod crypto;
#[cfg(test)]
mod tests;

/// No token is longer, in bytes.
const MAX_BYTES: usize = 8 * 1024;
/// How far the clocks of the issuer and of the proxy may be apart, in microseconds.
const LEEWAY_US: u64 = 10_000_000;
/// How many verified tokens are kept, in two parts: when the newer part is full, it replaces the older one.
const MAX_KEPT: usize = 4_096;
/// A longer `jti` is not the id of a credential in logs.
const MAX_ID: usize = 64;

/// Why a JWT identifies nobody. The client is not told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JwtFault {
    /// Too long.
    #[error("the JWT has more than {MAX_BYTES} bytes")]
    TooLong,
    /// No JWT, or without a claim that is needed.
    #[error("the token is not a JWT, or its header or claims cannot be read")]
    Unreadable,
    /// A header that must be understood (`crit`).
    #[error("the header of the JWT has the parameter `crit`, which the proxy does not support")]
    Critical,
    /// Nobody's token.
    #[error("no [[jwt]] has the issuer (`iss`) of the JWT")]
    Issuer,
    /// A token for somebody else.
    #[error("the audience (`aud`) of the JWT is not that of its issuer in [[jwt]]")]
    Audience,
    /// A weak or foreign algorithm.
    #[error("the algorithm (`alg`) of the JWT is not allowed for its issuer, or does not fit its key")]
    Algorithm,
    /// An unknown key.
    #[error("the key (`kid`) of the JWT is not in the JWKS file of its issuer")]
    Key,
    /// Altered, or signed by another key.
    #[error("the signature of the JWT does not match its key")]
    Signature,
    /// Without an end.
    #[error("the JWT has no expiry (`exp`), or the expiry is not a time")]
    NoEnd,
    /// Used too early.
    #[error("the JWT is not valid yet (`nbf`)")]
    Early,
    /// Used too late.
    #[error("the JWT has ended (`exp`)")]
    Ended,
    /// A client without a principal.
    #[error("no principal has the subject of the JWT")]
    Subject,
}

/// What a token says, after its signature was verified.
#[derive(Debug)]
pub(super) struct Claims {
    issuer: String,
    audience: Vec<String>,
    algorithm: Algorithm,
    key: Arc<JwtKey>,
    /// The name and the value of the claim that names the client.
    subject: (String, String),
    /// When it becomes valid, in microseconds since 1970.
    from_us: u64,
    /// When it ends, in microseconds since 1970.
    pub until_us: u64,
    /// Its id for logs: its `jti`, or the beginning of its SHA-256.
    pub id: String,
}

/// The issuers of a file, and the tokens that were verified under these rules.
#[derive(Debug, Default)]
pub(super) struct Issuers {
    issuers: Vec<Issuer>,
    kept: Mutex<Kept>,
}

/// Tokens that an issuer has signed, by their SHA-256. Those that nobody has used for long are forgotten first.
#[derive(Debug, Default)]
struct Kept {
    newer: HashMap<[u8; 32], Arc<Claims>>,
    older: HashMap<[u8; 32], Arc<Claims>>,
}

#[derive(Debug, PartialEq)]
struct Issuer {
    config: JwtIssuer,
    keys: Vec<(Arc<JwtKey>, Key)>,
    /// The principals, by their subjects.
    subjects: HashMap<String, usize>,
}

/// A key in the form that the library needs.
#[derive(Debug)]
struct Key(DecodingKey);

impl PartialEq for Key {
    fn eq(&self, _: &Key) -> bool {
        // It is beside the key of the file from which it was made.
        true
    }
}

impl PartialEq for Issuers {
    fn eq(&self, other: &Issuers) -> bool {
        self.issuers == other.issuers
    }
}

impl Issuers {
    pub fn new(file: &AuthRules) -> Issuers {
        crypto::install();
        let issuer = |config: &JwtIssuer| {
            let key =
                |key: &JwtKey| Some((Arc::new(key.clone()), Key(DecodingKey::from_jwk(&key.key).ok()?)));
            let principals = file.principals.iter().enumerate();
            let subjects =
                principals.flat_map(|(index, principal)| principal.jwt.iter().map(move |of| (of, index)));
            let own = subjects.filter(|(of, _)| of.issuer == config.issuer);
            Issuer {
                config: config.clone(),
                keys: config.keys.iter().filter_map(key).collect(),
                subjects: own.map(|(of, index)| (of.subject.clone(), index)).collect(),
            }
        };
        Issuers { issuers: file.jwt.iter().map(issuer).collect(), kept: Mutex::default() }
    }

    /// Whether no signed token counts.
    pub fn is_empty(&self) -> bool {
        self.issuers.is_empty()
    }

    /// The issuers, each with the principals of its subjects.
    pub fn each(&self) -> impl Iterator<Item = (&JwtIssuer, &HashMap<String, usize>)> {
        self.issuers.iter().map(|issuer| (&issuer.config, &issuer.subjects))
    }

    /// What a token says, if its issuer has signed it.
    pub fn verified(&self, token: &str) -> Result<Arc<Claims>, JwtFault> {
        if token.len() > MAX_BYTES {
            return Err(JwtFault::TooLong);
        }
        let digest: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        if let Some(claims) = self.kept(&digest) {
            return Ok(claims);
        }
        let claims = Arc::new(self.verify(token, &digest)?);
        self.kept.lock().insert(digest, claims.clone());
        Ok(claims)
    }

    fn verify(&self, token: &str, digest: &[u8; 32]) -> Result<Claims, JwtFault> {
        let header = decode_header(token).map_err(|_| JwtFault::Unreadable)?;
        if header.crit.is_some() {
            return Err(JwtFault::Critical);
        }
        // Not proved yet: it only says whose key proves it.
        let claims = insecure_decode::<Map<String, Value>>(token).map_err(|_| JwtFault::Unreadable)?.claims;
        let issuer = self.issuer(text(&claims, "iss").ok_or(JwtFault::Issuer)?)?;
        let (config, key) = issuer.key(header.kid.as_deref()).ok_or(JwtFault::Key)?;
        if !config.algorithms.contains(&header.alg) {
            return Err(JwtFault::Algorithm);
        }
        let claims = decode::<Map<String, Value>>(token, key, &signature_alone(header.alg));
        let claims = claims.map_err(|error| match error.kind() {
            ErrorKind::InvalidSignature => JwtFault::Signature,
            ErrorKind::InvalidAlgorithm => JwtFault::Algorithm,
            _ => JwtFault::Unreadable,
        });
        let claims = claims?.claims;
        let audience = match claims.get("aud") {
            Some(Value::String(one)) => vec![one.clone()],
            Some(Value::Array(several)) => {
                several.iter().filter_map(Value::as_str).map(str::to_owned).collect()
            }
            _ => Vec::new(),
        };
        let from_us = match claims.get("nbf") {
            None | Some(Value::Null) => 0,
            Some(from) => moment_us(from).ok_or(JwtFault::Early)?,
        };
        let name = issuer.config.claim.clone();
        let subject = text(&claims, &name).ok_or(JwtFault::Subject)?.to_owned();
        let id = text(&claims, "jti").filter(|id| (1..=MAX_ID).contains(&id.len()));
        Ok(Claims {
            issuer: issuer.config.issuer.clone(),
            audience,
            algorithm: header.alg,
            key: config.clone(),
            subject: (name, subject),
            from_us: from_us.saturating_sub(LEEWAY_US),
            until_us: claims.get("exp").and_then(moment_us).ok_or(JwtFault::NoEnd)?.saturating_add(LEEWAY_US),
            id: id.map_or_else(|| hex(&digest[..6]), str::to_owned),
        })
    }

    /// The principal of a token, as far as these rules accept it now.
    pub fn principal(&self, claims: &Claims, now_us: u64) -> Result<usize, JwtFault> {
        let issuer = self.issuer(&claims.issuer)?;
        let JwtIssuer { audience, claim, .. } = &issuer.config;
        if !audience.iter().any(|own| claims.audience.contains(own)) {
            return Err(JwtFault::Audience);
        }
        // The key may have been replaced by another one with its id, or may no longer be for the algorithm.
        let known = issuer.keys.iter().find(|(key, _)| key.id == claims.key.id && key.key == claims.key.key);
        let (key, _) = known.ok_or(JwtFault::Key)?;
        if !key.algorithms.contains(&claims.algorithm) {
            return Err(JwtFault::Algorithm);
        }
        if now_us < claims.from_us {
            return Err(JwtFault::Early);
        }
        if now_us >= claims.until_us {
            return Err(JwtFault::Ended);
        }
        let (name, subject) = &claims.subject;
        issuer.subjects.get(subject).filter(|_| name == claim).copied().ok_or(JwtFault::Subject)
    }

    fn issuer(&self, name: &str) -> Result<&Issuer, JwtFault> {
        self.issuers.iter().find(|issuer| issuer.config.issuer == name).ok_or(JwtFault::Issuer)
    }

    fn kept(&self, digest: &[u8; 32]) -> Option<Arc<Claims>> {
        let mut kept = self.kept.lock();
        if let Some(claims) = kept.newer.get(digest) {
            return Some(claims.clone());
        }
        let claims = kept.older.remove(digest)?;
        kept.insert(*digest, claims.clone());
        Some(claims)
    }
}

impl Kept {
    fn insert(&mut self, digest: [u8; 32], claims: Arc<Claims>) {
        if self.newer.len() >= MAX_KEPT / 2 {
            self.older = std::mem::take(&mut self.newer);
        }
        self.newer.insert(digest, claims);
    }
}

impl Issuer {
    /// The key with this id; without an id, the only key.
    fn key(&self, id: Option<&str>) -> Option<(&Arc<JwtKey>, &DecodingKey)> {
        let found = match (id, &self.keys[..]) {
            (None, [only]) => Some(only),
            (None, _) => None,
            (Some(id), keys) => keys.iter().find(|(key, _)| key.id.as_deref() == Some(id)),
        };
        found.map(|(key, Key(decoding))| (key, decoding))
    }
}

/// Lets the library check the signature, for one algorithm. It reads the clock of the system; [`Issuers::principal`] is
/// given the time, and checks the claims.
fn signature_alone(algorithm: Algorithm) -> Validation {
    let mut validation = Validation::new(algorithm);
    validation.required_spec_claims.clear();
    validation.validate_exp = false;
    validation.validate_aud = false;
    validation
}

fn text<'a>(claims: &'a Map<String, Value>, name: &str) -> Option<&'a str> {
    claims.get(name)?.as_str()
}

/// A time of a claim, which is a number of seconds since 1970 and may have a fraction, in microseconds.
fn moment_us(value: &Value) -> Option<u64> {
    let seconds = value.as_f64().filter(|seconds| seconds.is_finite() && *seconds >= 0.0)?;
    // Saturates.
    Some((seconds * 1e6) as u64)
}

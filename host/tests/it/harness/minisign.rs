//! Signs as minisign does. The tests of the library use this file, too.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use blake2b_simd::blake2b;
use ring::signature::{Ed25519KeyPair, KeyPair as _};

/// A key pair, and its id.
pub struct Signer(Ed25519KeyPair, [u8; 8]);

impl Signer {
    pub fn new(seed: u8) -> Signer {
        Signer(Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).unwrap(), [seed; 8])
    }

    /// The public key, as the second line of a file `minisign.pub` has it.
    pub fn key(&self) -> String {
        STANDARD.encode([b"Ed", &self.1[..], self.0.public_key().as_ref()].concat())
    }

    /// The content of a signature file.
    pub fn sign(&self, bytes: &[u8], trusted_comment: &str) -> String {
        let signature = self.0.sign(blake2b(bytes).as_bytes());
        let line = STANDARD.encode([b"ED", &self.1[..], signature.as_ref()].concat());
        let global = self.0.sign(&[signature.as_ref(), trusted_comment.as_bytes()].concat());
        let global = STANDARD.encode(global.as_ref());
        format!("untrusted comment: a test\n{line}\ntrusted comment: {trusted_comment}\n{global}\n")
    }
}

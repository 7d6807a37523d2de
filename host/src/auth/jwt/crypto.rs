//! Signatures by the library that TLS uses as well, so that the program has one such library.

use jsonwebtoken::crypto::{CryptoProvider, JwkUtils, JwtVerifier};
use jsonwebtoken::errors::{ErrorKind, Result};
use jsonwebtoken::signature::{Error, Verifier};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind};
use ring::signature::{
    self, RsaParameters, RsaPublicKeyComponents, UnparsedPublicKey, VerificationAlgorithm,
};

/// It signs nothing, and knows no algorithm whose key is a secret.
static RING: CryptoProvider = CryptoProvider {
    signer_factory: |_, _| Err(ErrorKind::InvalidAlgorithm.into()),
    verifier_factory: verifier,
    jwk_utils: JwkUtils::new_unimplemented(),
};

/// Makes the library use [`RING`] in this process.
pub fn install() {
    // It is there already, unless this is the first call.
    let _ = RING.install_default();
}

struct Verifying {
    algorithm: Algorithm,
    by: By,
    key: DecodingKey,
}

#[derive(Clone, Copy)]
enum By {
    Rsa(&'static RsaParameters),
    Point(&'static dyn VerificationAlgorithm),
}

fn verifier(algorithm: &Algorithm, key: &DecodingKey) -> Result<Box<dyn JwtVerifier>> {
    let by = match algorithm {
        Algorithm::RS256 => By::Rsa(&signature::RSA_PKCS1_2048_8192_SHA256),
        Algorithm::RS384 => By::Rsa(&signature::RSA_PKCS1_2048_8192_SHA384),
        Algorithm::RS512 => By::Rsa(&signature::RSA_PKCS1_2048_8192_SHA512),
        Algorithm::PS256 => By::Rsa(&signature::RSA_PSS_2048_8192_SHA256),
        Algorithm::PS384 => By::Rsa(&signature::RSA_PSS_2048_8192_SHA384),
        Algorithm::PS512 => By::Rsa(&signature::RSA_PSS_2048_8192_SHA512),
        Algorithm::ES256 => By::Point(&signature::ECDSA_P256_SHA256_FIXED),
        Algorithm::ES384 => By::Point(&signature::ECDSA_P384_SHA384_FIXED),
        Algorithm::EdDSA => By::Point(&signature::ED25519),
        _ => return Err(ErrorKind::InvalidAlgorithm.into()),
    };
    Ok(Box::new(Verifying { algorithm: *algorithm, by, key: key.clone() }))
}

impl JwtVerifier for Verifying {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}

impl Verifier<Vec<u8>> for Verifying {
    fn verify(&self, message: &[u8], signature: &Vec<u8>) -> std::result::Result<(), Error> {
        let verified = match (self.by, self.key.kind()) {
            (By::Rsa(parameters), DecodingKeyKind::RsaModulusExponent { n, e }) => {
                RsaPublicKeyComponents { n, e }.verify(parameters, message, signature)
            }
            (By::Point(algorithm), DecodingKeyKind::SecretOrDer(point)) => {
                UnparsedPublicKey::new(algorithm, point).verify(message, signature)
            }
            // The key is of another kind than the algorithm.
            (By::Rsa(_) | By::Point(_), _) => return Err(Error::new()),
        };
        verified.map_err(|_| Error::new())
    }
}

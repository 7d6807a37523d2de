//! Signatures of components.
//!
//! A signature is the text of a minisign signature file, in a custom section at the end of the component, so it goes wherever the
//! component goes: to all proxies, and into the store. What is signed are the bytes before these sections. The trusted comment
//! names the policy, so a component that was signed for one policy cannot replace another.

use std::collections::BTreeSet;

use minisign_verify::Signature;
use wasm_encoder::{ComponentSection as _, CustomSection};
use wasmparser::{BinaryReader, CustomSectionReader};

use super::Rejection;
use super::builtin::is_builtin;
use crate::config::PolicySigners;

/// The name of the custom sections.
const SECTION: &str = "lockkeeper-signature";
/// The most signatures of a component that are looked at.
const MOST: usize = 16;
/// The longest text of a signature.
const MAX_BYTES: usize = 4_096;
/// The magic number and the version.
const HEADER: usize = 8;
/// The id of custom sections.
const CUSTOM: u8 = 0;

/// A component without its signatures, and their texts.
pub struct Signed<'a> {
    /// What is signed.
    pub unsigned: &'a [u8],
    /// The texts of the signatures, in the order in which they were attached.
    pub signatures: Vec<&'a str>,
}

/// Why a signature cannot be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The text is not that of a signature file.
    #[error("this is not the signature file of minisign: {0}")]
    NotASignature(String),
    /// There are too many.
    #[error("the component has {MOST} signatures, which is the most")]
    TooMany,
    /// The signature does not name the policy.
    #[error("its trusted comment does not name a policy: sign with `minisign -S -t policy=NAME -m FILE`")]
    NoPolicy,
}

impl<'a> Signed<'a> {
    /// Splits a component. Bytes that are not WebAssembly have no signatures.
    pub fn of(component: &'a [u8]) -> Signed<'a> {
        Signed::read(component).unwrap_or(Signed { unsigned: component, signatures: Vec::new() })
    }

    fn read(component: &'a [u8]) -> wasmparser::Result<Signed<'a>> {
        let mut reader = BinaryReader::new(component, 0);
        reader.read_bytes(HEADER)?;
        let (mut unsigned, mut signatures) = (component.len(), Vec::new());
        while !reader.eof() {
            let begins = reader.original_position();
            let (id, content) = (reader.read_u8()?, reader.read_reader()?);
            match Some(content).filter(|_| id == CUSTOM).and_then(signature) {
                Some(text) => {
                    if signatures.is_empty() {
                        unsigned = begins;
                    }
                    signatures.push(text);
                }
                // Only the sections at the end count.
                None => (unsigned, signatures) = (component.len(), Vec::new()),
            }
        }
        Ok(Signed { unsigned: &component[..unsigned], signatures })
    }
}

/// The component with another signature, which is the text of a signature file.
///
/// # Errors
/// See [`AttachError`]. The signature itself is not verified: its key may be unknown here.
pub fn attach(component: &[u8], signature: &str) -> Result<Vec<u8>, AttachError> {
    let wrong = |error: &dyn std::fmt::Display| AttachError::NotASignature(error.to_string());
    if signature.len() > MAX_BYTES {
        return Err(wrong(&format!("it has more than {MAX_BYTES} bytes")));
    }
    let decoded = Signature::decode(signature).map_err(|error| wrong(&error))?;
    policy_of(&decoded).ok_or(AttachError::NoPolicy)?;
    if Signed::of(component).signatures.len() >= MOST {
        return Err(AttachError::TooMany);
    }
    let mut signed = component.to_vec();
    CustomSection { name: SECTION.into(), data: signature.as_bytes().into() }
        .append_to_component(&mut signed);
    Ok(signed)
}

/// Checks that as many of the signers as the policy demands have signed the component for it. The components of this program are as
/// trustworthy as the program.
pub(super) fn verify(policy: &str, component: &[u8], signers: &PolicySigners) -> Result<(), Rejection> {
    if signers.keys.is_empty() || is_builtin(component) {
        return Ok(());
    }
    let Signed { unsigned, signatures } = Signed::of(component);
    let mut valid = BTreeSet::new();
    for text in signatures.iter().take(MOST) {
        let Ok(signature) = Signature::decode(text) else { continue };
        if policy_of(&signature) != Some(policy) {
            continue;
        }
        let signed_by = |key: &minisign_verify::PublicKey| key.verify(unsigned, &signature, false).is_ok();
        valid.extend(signers.keys.iter().position(|signer| signed_by(&signer.key)));
    }
    if valid.len() >= signers.approvals {
        return Ok(());
    }
    Err(Rejection::NotSigned {
        policy: policy.to_owned(),
        signatures: signatures.len(),
        valid: valid.len(),
        approvals: signers.approvals,
    })
}

/// The policy that a trusted comment names, as `policy=NAME`.
fn policy_of(signature: &Signature) -> Option<&str> {
    signature.trusted_comment().split_whitespace().find_map(|word| word.strip_prefix("policy="))
}

/// The text of a signature, if the content is that of such a custom section.
fn signature(content: BinaryReader<'_>) -> Option<&str> {
    let section = CustomSectionReader::new(content).ok()?;
    let is_signature = section.name() == SECTION && section.data().len() <= MAX_BYTES;
    is_signature.then(|| std::str::from_utf8(section.data()).ok()).flatten()
}

#[cfg(test)]
#[path = "../../tests/it/harness/minisign.rs"]
mod minisign;

#[cfg(test)]
mod tests {
    use super::minisign::Signer;
    use super::*;

    fn signers(all: &[&Signer], approvals: usize) -> PolicySigners {
        let keys = all.iter().map(|signer| signer.key()).collect::<Vec<_>>();
        let keys = keys.iter().map(|key| crate::config::Signer::parse(key).unwrap());
        PolicySigners { keys: keys.collect(), approvals }
    }

    /// A component with a custom section of its own.
    fn component() -> Vec<u8> {
        wat::parse_str(r#"(component (core module) (@custom "more" "content"))"#).unwrap()
    }

    #[test]
    fn as_many_signers_as_the_policy_demands_must_have_signed_for_it() {
        let (component, [a, b, other]) = (component(), [1, 2, 3].map(Signer::new));
        let sign = |signer: &Signer, policy| signer.sign(&component, &format!("timestamp:1 policy={policy}"));
        let once = attach(&component, &sign(&a, "p")).unwrap();
        let [one, both] = [signers(&[&a, &b], 1), signers(&[&a, &b], 2)];
        assert_eq!(verify("p", &once, &one), Ok(()));
        let missing = |signatures, valid| {
            Err(Rejection::NotSigned { policy: "p".to_owned(), signatures, valid, approvals: 2 })
        };
        assert_eq!(verify("p", &once, &both), missing(1, 1));
        assert_eq!(verify("p", &component, &both), missing(0, 0));
        let twice = attach(&once, &sign(&a, "p")).unwrap();
        assert_eq!(verify("p", &twice, &both), missing(2, 1), "one signer counts once");
        let strange = attach(&once, &sign(&other, "p")).unwrap();
        assert_eq!(verify("p", &strange, &both), missing(2, 1));
        let elsewhere = attach(&once, &sign(&b, "q")).unwrap();
        assert_eq!(verify("p", &elsewhere, &both), missing(2, 1), "it was signed for another policy");
        let signed = attach(&once, &sign(&b, "p")).unwrap();
        assert_eq!(verify("p", &signed, &both), Ok(()));
        assert_eq!(Signed::of(&signed).unsigned, component);
        assert_eq!(verify("p", &component, &PolicySigners::default()), Ok(()), "nobody has to sign");
    }

    #[test]
    fn a_component_that_was_changed_is_not_signed() {
        let (component, a) = (component(), Signer::new(1));
        let signed = attach(&component, &a.sign(&component, "policy=p")).unwrap();
        let signers = signers(&[&a], 1);
        for at in [HEADER + 2, component.len() - 1, signed.len() - 3] {
            let mut changed = signed.clone();
            changed[at] ^= 1;
            assert!(verify("p", &changed, &signers).is_err(), "byte {at}");
        }
        // A section after the signature is not signed.
        let mut longer = signed.clone();
        longer.extend([0, 2, 1, b'x']);
        assert!(verify("p", &longer, &signers).is_err());
        assert!(verify("p", &signed[..signed.len() - 1], &signers).is_err());
        assert!(verify("p", b"", &signers).is_err());
    }

    #[test]
    fn only_signatures_that_name_a_policy_are_attached() {
        let (component, a) = (component(), Signer::new(1));
        let error = |text: &str| attach(&component, text).unwrap_err().to_string();
        assert!(error("x").starts_with("this is not the signature file of minisign"));
        assert!(error(&a.sign(&component, "timestamp:1")).contains("-t policy=NAME"));
        let text = a.sign(&component, "policy=p");
        let most = (0..MOST).fold(component.clone(), |component, _| attach(&component, &text).unwrap());
        assert!(matches!(attach(&most, &text), Err(AttachError::TooMany)));
    }
}

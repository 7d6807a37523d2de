//! Policies whose components must be signed.

use super::*;
use crate::harness::minisign::Signer;
use crate::policies::BAD;
use crate::policies::command_line::{ended, lockkeeper, text};

/// Writes the signature of the file for the policy into a file of this name beside it, and returns its path.
fn signed(signer: &Signer, file: &Path, policy: &str, name: &str) -> String {
    let comment = format!("timestamp:1764288000\tfile:policy.wasm\tpolicy={policy}");
    let to = file.with_file_name(name);
    std::fs::write(&to, signer.sign(&std::fs::read(file).unwrap(), &comment)).unwrap();
    to.display().to_string()
}

on_both! {
    async fn a_component_goes_live_if_enough_signers_have_signed_it_for_the_policy(kind: Kind) {
        let (dir, [a, b]) = (folder(), [1, 2].map(Signer::new));
        let file = dir.path().join("policy.wasm");
        std::fs::write(&file, &*RENAMED).unwrap();
        let by_a = signed(&a, &file, "default", "a.minisig");
        let by_b = signed(&b, &file, "default", "b.minisig");
        let for_other = signed(&b, &file, "other", "other.minisig");
        let signers = format!("signers = [\"{}\", \"{}\"]\napprovals = 2\n", a.key(), b.key());
        let mut fleet = Fleet { url: database(kind).await, proxies: Vec::new(), dirs: Vec::new() };
        // The components of the program itself need no signature.
        for _ in 0..2 {
            let sections = format!("[fleet]\nbeat_ms = {BEAT_MS}\n[policies.default]\npath = \"builtin:default\"\n{signers}");
            let settings = Settings { url: fleet.url.clone(), sections, ..Settings::default() };
            fleet.proxies.push(Proxy::with(settings).await);
        }
        fleet.until_members(2).await;
        let proxy = &fleet.proxies[0];
        let push = async |component: &[u8]| proxy.admin().send("PUT", "/v1/policies/default", component.to_vec()).await;
        let refused = push(&RENAMED).await;
        assert_eq!((refused.status, refused.slug()), (422, "refused"), "{}", refused.text);
        assert!(refused.text.contains("0 of the signers of `default` have signed") && refused.text.contains("2 must"), "{}", refused.text);
        let path = file.display().to_string();
        for (signatures, valid) in [(by_a.clone(), 1), (format!("{by_a},{for_other}"), 1), (format!("{by_a},{by_a}"), 1)] {
            let out = dir.path().join("signed.wasm").display().to_string();
            let ran = ended(lockkeeper(proxy, &["policy", "sign", &path, "--signature", &signatures, "-o", &out])).await;
            assert!(ran.status.success(), "{}", text(&ran.stderr));
            for call in ["", "/canary?share=5", "/shadow"] {
                let call = format!("/v1/policies/default{call}");
                let refused = proxy.admin().send("PUT", &call, std::fs::read(&out).unwrap()).await;
                assert_eq!(refused.status, 422, "{call}: {}", refused.text);
                assert!(refused.text.contains(&format!("{valid} of the signers")), "{}", refused.text);
            }
        }
        let signatures = format!("{by_a},{by_b}");
        let ran = ended(lockkeeper(proxy, &["policy", "sign", &path, "--signature", &signatures])).await;
        assert!(text(&ran.stdout).contains("has 2 signatures now"), "{}{}", text(&ran.stdout), text(&ran.stderr));
        let component = std::fs::read(&file).unwrap();
        let pushed = pushed(proxy, &component).await;
        fleet.until_settled(&[0, 1], &pushed["digest"]).await;
        assert_eq!(named(&fleet.proxies[1].client(), "a").await, json!(["x/a"]));
        // The signature of one component does not fit another.
        let length = RENAMED.len();
        let other = [&BAD[..], &component[length..]].concat();
        assert_eq!(push(&other).await.status, 422);
        let not = ended(lockkeeper(proxy, &["policy", "sign", &path, "--signature", &path])).await;
        assert_eq!(not.status.code(), Some(1), "{}", text(&not.stderr));
    }
}

//! `src/bindings/` is what wit-bindgen makes of `wit/policy.wit`.

use std::fs;
use std::path::Path;

use wit_bindgen_core::wit_parser::Resolve;
use wit_bindgen_core::{Files, WorldGenerator};
use wit_bindgen_rust::{Opts, WithOption};

/// Writes the bindings where this variable is set.
const BLESS: &str = "LOCKKEEPER_BLESS";

/// The hooks: each has a world of its own.
fn hooks(wit: &Path) -> Vec<String> {
    let mut resolve = Resolve::default();
    let (package, _) = resolve.push_dir(wit).expect("the WIT is valid");
    let worlds = resolve.packages[package].worlds.keys();
    worlds.filter_map(|world| world.strip_suffix("-hook")).map(str::to_owned).collect()
}

fn generated(wit: &Path, hook: &str) -> String {
    let mut resolve = Resolve::default();
    let (package, _) = resolve.push_dir(wit).expect("the WIT is valid");
    let world =
        resolve.select_world(&[package], Some(&format!("{hook}-hook"))).expect("each hook has a world");
    let mut options = Opts { pub_export_macro: true, format: true, ..Opts::default() };
    if hook != "settings" {
        options.additional_derive_attributes = vec!["PartialEq".to_owned()];
    }
    if !matches!(hook, "naming" | "reads" | "settings") {
        let types = WithOption::Path("crate::bindings::naming::lockkeeper::policy::types".to_owned());
        options.with = vec![("lockkeeper:policy/types@0.1.0".to_owned(), types)];
    }
    let mut files = Files::default();
    options.build().generate(&mut resolve, world, &mut files).expect("bindings");
    let (_, text) = files.iter().next().expect("one file");
    String::from_utf8(text.to_vec()).expect("Rust is UTF-8")
}

#[test]
fn the_bindings_match_the_wit() {
    let sdk = Path::new(env!("CARGO_MANIFEST_DIR"));
    for hook in hooks(&sdk.join("wit")) {
        let (path, text) = (sdk.join(format!("src/bindings/{hook}.rs")), generated(&sdk.join("wit"), &hook));
        if std::env::var_os(BLESS).is_some() {
            fs::write(&path, text).expect("the checkout can be written to");
        } else {
            let there = fs::read_to_string(&path).unwrap_or_default();
            assert!(there == text, "{} is out of date: run this test with {BLESS}=1", path.display());
        }
    }
}

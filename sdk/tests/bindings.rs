//! The bindings are what generators make of `wit/policy.wit`: `src/bindings/`, and those in the templates of new policies.

use std::fs;
use std::path::{Path, PathBuf};

use wit_bindgen_core::wit_parser::{Resolve, WorldId};
use wit_bindgen_core::{Files, WorldGenerator};
use wit_bindgen_rust::{Opts, WithOption};

#[path = "bindings/typescript.rs"]
mod typescript;

/// Writes the bindings where this variable is set.
const BLESS: &str = "LOCKKEEPER_BLESS";

fn sdk() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

/// The templates of `lockkeeper policy new`.
fn templates() -> PathBuf {
    sdk().join("../host/src/policy/scaffold")
}

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

/// The world of the templates.
fn template_world() -> (Resolve, WorldId) {
    let read = |path: PathBuf| fs::read_to_string(path).expect("it is in the checkout");
    let world = read(templates().join("world.wit.txt"));
    let (_package, world) = world.split_once(";\n").expect("it names the package");
    let text = read(sdk().join("wit/policy.wit")) + world;
    let mut resolve = Resolve::default();
    let package = resolve.push_str("policy.wit", &text).expect("the WIT is valid");
    let world = resolve.select_world(&[package], Some("this-policy")).expect("the template has a world");
    (resolve, world)
}

/// The bindings for C, by the names of their files.
fn generated_c() -> Vec<(String, String)> {
    let (mut resolve, world) = template_world();
    let rename_world = Some("policy".to_owned());
    let options =
        wit_bindgen_c::Opts { no_object_file: true, rename_world, ..wit_bindgen_c::Opts::default() };
    let mut files = Files::default();
    options.build().generate(&mut resolve, world, &mut files).expect("bindings");
    let text = |(name, text): (&str, &[u8])| {
        let text = String::from_utf8(text.to_vec()).expect("C is UTF-8");
        // `lockkeeper policy build` adds what the object file has.
        let (text, _) = text.split_once("// Ensure that the *_component_type.o").unwrap_or((&text, ""));
        (name.to_owned(), text.trim_end().to_owned() + "\n")
    };
    files.iter().map(text).collect()
}

/// Compares a file with what it has to be, or writes it.
fn is(path: &Path, text: &str) {
    if std::env::var_os(BLESS).is_some() {
        fs::write(path, text).expect("the checkout can be written to");
    } else {
        let there = fs::read_to_string(path).unwrap_or_default();
        assert!(there == text, "{} is out of date: run this test with {BLESS}=1", path.display());
    }
}

#[test]
fn the_bindings_match_the_wit() {
    for hook in hooks(&sdk().join("wit")) {
        is(&sdk().join(format!("src/bindings/{hook}.rs")), &generated(&sdk().join("wit"), &hook));
    }
}

#[test]
fn the_bindings_for_c_match_the_wit() {
    let files = generated_c();
    assert_eq!(files.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["policy.c", "policy.h"]);
    for (name, text) in files {
        is(&templates().join("c/bindings").join(name), &text);
    }
}

#[test]
fn the_types_for_typescript_match_the_wit() {
    let mut resolve = Resolve::default();
    let (package, _) = resolve.push_dir(sdk().join("wit")).expect("the WIT is valid");
    is(&templates().join("ts/lockkeeper.d.ts"), &typescript::types(&resolve, package));
}

//! A test that builds the default policy with cargo.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use lockkeeper_builder::{BuildError, build};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Copies the workspace, without build artifacts.
fn copy_tree(to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(root()).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name();
        if name == "target" || name.to_string_lossy().starts_with('.') {
            continue;
        }
        let copied = Command::new("cp").arg("-R").arg(entry.path()).arg(to).status().unwrap();
        assert!(copied.success(), "cannot copy {}", entry.path().display());
    }
}

#[test]
fn the_same_source_gives_the_same_bytes_in_any_folder() {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("elsewhere/deeper");
    copy_tree(&copy);
    let here = build(&root().join("policies/default"), None).unwrap();
    let there = build(&copy.join("policies/default"), None).unwrap();
    assert!(here.starts_with(b"\0asm\x0d\0\x01\0"), "not a component");
    assert!(here == there, "{} and {} bytes that differ", here.len(), there.len());
    let text = String::from_utf8_lossy(&here);
    assert!(!text.contains(root().to_str().unwrap()) && !text.contains("/home/"), "a path is left in it");
}

#[test]
fn a_folder_without_a_crate_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(build(dir.path(), None), Err(BuildError::NoCrate { .. })));
}

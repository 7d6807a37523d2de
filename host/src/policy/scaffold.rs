//! Writes a new policy: `lockkeeper policy new NAME --lang LANGUAGE`.
//!
//! The policy is the same in each language, and so is its scenario. Nothing that is written needs a checkout.

use std::io;
use std::path::{Path, PathBuf};

use super::form::WIT;

/// Paths in the folder of the policy, and what is in these files.
type Files = &'static [(&'static str, &'static str)];

const RUST: Files = &[
    ("Cargo.toml", include_str!("scaffold/rust/Cargo.toml.txt")),
    ("src/lib.rs", include_str!("scaffold/rust/lib.rs.txt")),
    ("manifest.json", include_str!("scaffold/rust/manifest.json.txt")),
    ("README.md", include_str!("scaffold/rust/README.md.txt")),
    (".gitignore", "target/\n*.wasm\n"),
];
const JS: Files = &[
    ("package.json", include_str!("scaffold/js/package.json.txt")),
    ("package-lock.json", include_str!("scaffold/js/package-lock.json.txt")),
    ("policy.js", include_str!("scaffold/js/policy.js.txt")),
    ("test/policy.test.js", JS_TEST),
    ("manifest.json", MANIFEST),
    ("README.md", include_str!("scaffold/js/README.md.txt")),
    ("wit/policy.wit", WIT),
    ("wit/world.wit", WORLD),
    (".gitignore", "node_modules/\n*.wasm\n"),
];
const TS: Files = &[
    ("package.json", include_str!("scaffold/ts/package.json.txt")),
    ("package-lock.json", include_str!("scaffold/ts/package-lock.json.txt")),
    ("tsconfig.json", include_str!("scaffold/ts/tsconfig.json.txt")),
    ("src/policy.ts", include_str!("scaffold/ts/policy.ts.txt")),
    ("src/lockkeeper.d.ts", include_str!("scaffold/ts/lockkeeper.d.ts")),
    ("test/policy.test.js", JS_TEST),
    ("manifest.json", MANIFEST),
    ("README.md", include_str!("scaffold/ts/README.md.txt")),
    ("wit/policy.wit", WIT),
    ("wit/world.wit", WORLD),
    (".gitignore", "node_modules/\nbuild/\n*.wasm\n"),
];
const C: Files = &[
    ("Makefile", include_str!("scaffold/c/Makefile.txt")),
    ("policy.c", include_str!("scaffold/c/policy.c.txt")),
    ("bindings/policy.c", include_str!("scaffold/c/bindings/policy.c")),
    ("bindings/policy.h", include_str!("scaffold/c/bindings/policy.h")),
    ("libc/libc.c", include_str!("scaffold/c/libc/libc.c.txt")),
    ("libc/stdlib.h", include_str!("scaffold/c/libc/stdlib.h.txt")),
    ("libc/string.h", include_str!("scaffold/c/libc/string.h.txt")),
    ("manifest.json", MANIFEST),
    ("README.md", include_str!("scaffold/c/README.md.txt")),
    ("wit/policy.wit", WIT),
    ("wit/world.wit", WORLD),
    (".gitignore", "*.wasm\n"),
];
const JS_TEST: &str = include_str!("scaffold/js/policy.test.js.txt");
const WORLD: &str = include_str!("scaffold/world.wit.txt");
const MANIFEST: &str = include_str!("scaffold/manifest.json.txt");
const SCENARIO: &str = include_str!("scaffold/scenario.toml.txt");
const SDK_CARGO_TOML: &str = include_str!("scaffold/rust/sdk.Cargo.toml.txt");
/// The files of the SDK, by their paths, and under `dependencies` those of its manifest.
const SDK: &[(&str, &str)] = &include!(concat!(env!("OUT_DIR"), "/sdk.rs"));
/// The folder of the SDK in a new crate.
const SDK_FOLDER: &str = "lockkeeper-sdk";

/// The language of a new policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Language {
    /// A crate with the SDK in it
    Rust,
    /// JavaScript, which QuickJS runs
    Js,
    /// TypeScript, which is compiled to JavaScript
    Ts,
    /// C without a C library, for clang
    C,
}

impl Language {
    fn files(self) -> Files {
        match self {
            Language::Rust => RUST,
            Language::Js => JS,
            Language::Ts => TS,
            Language::C => C,
        }
    }

    /// The commands that test and build the policy in its folder.
    pub fn build(self) -> &'static str {
        match self {
            Language::Rust => "cargo test && lockkeeper policy build",
            Language::Js | Language::Ts => "npm ci && npm test && npm run build",
            Language::C => "make",
        }
    }

    /// Where the test of JavaScript finds the policy.
    fn script(self) -> &'static str {
        if self == Language::Ts { "../build/policy.js" } else { "../policy.js" }
    }
}

/// Why there is no new policy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScaffoldError {
    /// The name is not allowed for a policy.
    #[error(
        "`{name}` cannot name a policy: it must begin with a letter and hold only a-z, 0-9, `-` and `_`, at most 64"
    )]
    Name {
        /// The refused name.
        name: String,
    },
    /// The folder of the new policy already exists.
    #[error("{} exists: name another folder, or remove it", .path.display())]
    Exists {
        /// The path of the folder.
        path: PathBuf,
    },
    /// A file of the policy cannot be written.
    #[error("cannot write {}: {source}", .path.display())]
    Write {
        /// The path of the file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// Writes a policy named `name` to the new folder `dir/name`, and returns that folder. It builds and passes its tests at once.
///
/// What it needs of this version lies in the folder, such as the SDK: neither a checkout nor a registry is needed for it.
///
/// # Errors
/// See [`ScaffoldError`]. Nothing that exists is overwritten.
pub fn scaffold(name: &str, language: Language, dir: &Path) -> Result<PathBuf, ScaffoldError> {
    if !is_name(name) {
        return Err(ScaffoldError::Name { name: name.to_owned() });
    }
    let root = dir.join(name);
    if root.exists() {
        return Err(ScaffoldError::Exists { path: root });
    }
    let fill = |text: &str| {
        let text = text.replace("{NAME}", name).replace("{TYPE}", &type_name(name));
        text.replace("{VERSION}", env!("CARGO_PKG_VERSION")).replace("{POLICY}", language.script())
    };
    for (path, text) in language.files() {
        write(&root.join(path), &fill(text))?;
    }
    write(&root.join("scenarios/tenants.toml"), SCENARIO)?;
    if language == Language::Rust {
        write_sdk(&root.join(SDK_FOLDER))?;
    }
    Ok(root)
}

fn is_name(name: &str) -> bool {
    name.len() <= 64
        && name.starts_with(|first: char| first.is_ascii_lowercase())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte))
}

/// `orders-by-tenant` is `OrdersByTenant`.
fn type_name(name: &str) -> String {
    let words = name.split(['-', '_']).map(|word| match word.split_at_checked(1) {
        Some((first, rest)) => first.to_uppercase() + rest,
        None => String::new(),
    });
    words.collect()
}

fn write_sdk(folder: &Path) -> Result<(), ScaffoldError> {
    let mut manifest = SDK_CARGO_TOML.replace("{VERSION}", env!("CARGO_PKG_VERSION"));
    for (path, text) in SDK {
        match *path {
            "dependencies" => manifest += text,
            path => write(&folder.join(path), text)?,
        }
    }
    write(&folder.join("Cargo.toml"), &manifest)
}

fn write(path: &Path, text: &str) -> Result<(), ScaffoldError> {
    let fail = |source| ScaffoldError::Write { path: path.to_owned(), source };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(fail)?;
    }
    std::fs::write(path, text).map_err(fail)
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    /// The texts of all files of a new policy.
    fn texts(folder: &Path) -> String {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        entries
            .map(|path| if path.is_dir() { texts(&path) } else { std::fs::read_to_string(path).unwrap() })
            .collect()
    }

    #[test]
    fn a_scaffolded_policy_has_its_name_everywhere_and_overwrites_nothing() {
        for language in Language::value_variants() {
            let dir = tempfile::tempdir().unwrap();
            let root = scaffold("orders-by-tenant", *language, dir.path()).unwrap();
            let text = texts(&root);
            assert!(text.contains("orders-by-tenant.wasm"), "{language:?}");
            for blank in ["{NAME}", "{TYPE}", "{VERSION}", "{POLICY}"] {
                assert!(!text.contains(blank), "{language:?}: {blank}");
            }
            let again = scaffold("orders-by-tenant", *language, dir.path());
            assert!(matches!(again, Err(ScaffoldError::Exists { .. })));
        }
    }

    #[test]
    fn a_scaffolded_crate_has_the_sdk_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = scaffold("orders-by-tenant", Language::Rust, dir.path()).unwrap();
        let manifest = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
        assert!(
            manifest.contains("name = \"orders-by-tenant\"") && manifest.contains("path = "),
            "{manifest}"
        );
        let lib = std::fs::read_to_string(root.join("src/lib.rs")).unwrap();
        assert!(lib.contains("export!(OrdersByTenant, reads)"));
    }

    #[test]
    fn names_that_cannot_be_crates_or_paths_are_refused() {
        for name in ["", "9a", "../x", "A", "a b"] {
            let refused = scaffold(name, Language::C, Path::new("."));
            assert!(matches!(refused, Err(ScaffoldError::Name { .. })), "{name}");
        }
    }
}

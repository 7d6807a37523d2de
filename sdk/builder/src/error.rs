use std::path::PathBuf;

use crate::TARGET;

/// The reason why no component was built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    #[error("there is no Cargo.toml in {}: name the folder of a policy crate", .dir.display())]
    NoCrate { dir: PathBuf },
    #[error("cannot run {program}: {source}; install Rust from https://rustup.rs")]
    Spawn { program: String, source: std::io::Error },
    #[error(
        "the compiler cannot build for WebAssembly: run `rustup target add {TARGET}`, or install the \
         standard library for {TARGET} with the package manager that installed rustc"
    )]
    TargetMissing,
    #[error("cargo cannot read {}: {detail}", .dir.display())]
    Metadata { dir: PathBuf, detail: String },
    #[error("the policy in {} does not compile", .dir.display())]
    Compile { dir: PathBuf },
    #[error(
        "the crate in {} makes no module: its Cargo.toml needs `[lib]` with `crate-type = [\"cdylib\", \"rlib\"]`",
        .dir.display()
    )]
    NoModule { dir: PathBuf },
    #[error("cannot read {}: {source}", .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error(
        "the module is not a policy: {detail}. It must call `lockkeeper_sdk::export!` and import nothing"
    )]
    Component { detail: String },
}

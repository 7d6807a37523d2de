//! A decision of a policy in another language: what `lockkeeper policy new` writes, built with its own commands.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Map;

use lockkeeper::config::Config;
use lockkeeper::policy::{Compiler, Engine, Generation, Language, load_file, scaffold};

/// The policy of the template of a language, built in a new folder.
pub fn policy(language: Language) -> Result<Arc<Generation>> {
    let dir = tempfile::tempdir()?;
    let root = scaffold("measured", language, dir.path())?;
    let program = Path::new(env!("CARGO_BIN_EXE_lockkeeper"));
    let beside = program.parent().context("it is in a folder")?.display().to_string();
    let path = std::env::var("PATH")?;
    let mut build = Command::new("sh");
    build.args(["-ec", language.build()]).current_dir(&root).env("PATH", format!("{beside}:{path}"));
    let output = build.output().context("cannot run sh")?;
    ensure!(output.status.success(), "{language:?}: {}", String::from_utf8_lossy(&output.stderr));
    let component = std::fs::read(root.join("measured.wasm"))?;
    let config = Config::default();
    let engine = Engine::new(&config.engine, Compiler::InProcess)?;
    let loaded = load_file("measured", &component, &Map::new(), &engine, &config.limits);
    Ok(Arc::new(loaded.map_err(|rejection| anyhow!("{language:?}: {rejection}"))?))
}

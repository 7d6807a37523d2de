//! The proxy of an example that tells a story, and the command line as an operator uses it.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use tokio::process::Command;

/// What came of a story: numbers with their names.
pub type Rows = Vec<(&'static str, u64)>;

/// A running proxy.
pub struct Scene {
    /// The address of the proxy's API.
    pub api: String,
    pub(crate) admin: String,
    pub(crate) program: PathBuf,
    pub(crate) folder: PathBuf,
}

impl Scene {
    /// Where the proxy has its files. Gone at the end.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Runs `lockkeeper` with these arguments. Returns its exit code and what it has printed on standard output; what it complains
    /// of is printed.
    pub async fn lockkeeper(&self, args: &[&str]) -> Result<(i32, String)> {
        let mut command = Command::new(&self.program);
        command.args(args).stdin(Stdio::null()).kill_on_drop(true);
        command.env("LOCKKEEPER_SERVER", &self.api).env("LOCKKEEPER_ADMIN", &self.admin);
        let output =
            command.output().await.with_context(|| format!("cannot start {}", self.program.display()))?;
        let code = output.status.code().context("the command was killed")?;
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        Ok((code, String::from_utf8_lossy(&output.stdout).into_owned()))
    }

    /// Builds the crate of a policy. Returns the file of the component.
    pub async fn build_policy(&self, dir: &Path) -> Result<String> {
        let name = dir.file_name().context("the policy has no folder")?;
        let file = self.folder.join(name).with_extension("wasm").display().to_string();
        let (code, told) =
            self.lockkeeper(&["policy", "build", &dir.display().to_string(), "--output", &file]).await?;
        if code != 0 {
            bail!("{} cannot be built: {told}", dir.display());
        }
        Ok(file)
    }
}

/// The numbers of a story.
pub fn json(name: &str, server: &str, rows: &Rows) -> Value {
    let numbers: Map<String, Value> =
        rows.iter().map(|(what, number)| ((*what).to_owned(), json!(number))).collect();
    json!({"example": name, "server": server, "numbers": numbers})
}

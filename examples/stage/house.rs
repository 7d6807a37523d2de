//! The proxy of an example, and the server beneath it.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use tempfile::TempDir;

use crate::Args;
use crate::scene::Scene;
use crate::serving::{Guards, Serving};

/// A running `lockkeeper serve`. Its data are gone when it is closed.
pub struct House {
    /// The address of the proxy's API.
    pub proxy: String,
    /// What the server calls itself.
    pub server: String,
    /// A server's URL without a database.
    base: String,
    /// What the names of all databases begin with.
    prefix: String,
    /// The server's data go with the folder.
    is_private: bool,
    program: PathBuf,
    serving: Serving,
    folder: Folder,
}

/// Where the private server has its data. Gone when it is dropped.
struct Folder(TempDir);

impl House {
    pub async fn open(name: &str, settings: &str, args: &Args) -> Result<House> {
        let exe = std::env::current_exe()?;
        let beside = exe.parent().context("this program is in no folder")?;
        let program = args.lockkeeper.clone().unwrap_or_else(|| beside.join("lockkeeper"));
        if !program.is_file() {
            bail!("there is no {}: `cargo xtask example {name}` builds it first", program.display());
        }
        if let Some(url) = &args.url {
            version(&with_database(url, "")).await.context("the server of --url")?;
        }
        let prefix = format!("example_{}_{}", name.replace('-', "_"), std::process::id());
        // Beside the program is a real disk.
        let folder = Folder(tempfile::Builder::new().prefix(&format!("{prefix}-")).tempdir_in(beside)?);
        let dir = folder.0.path();
        let url = args.url.as_ref().map(|url| with_database(url, &format!("{prefix}_locks")));
        let config = dir.join("config.toml");
        fs::write(&config, config_toml(url.as_deref().unwrap_or("managed"), &args.server, settings))?;

        let serving = Serving::start(&program, &config, &dir.join("log"), &[]).await?;
        let base = match (&args.url, &serving.socket) {
            (Some(url), _) => with_database(url, ""),
            (None, Some(socket)) => format!("mysql://root@localhost/?socket={socket}"),
            (None, None) => bail!("the proxy does not say where its server is"),
        };
        let server = version(&base).await?;
        let (proxy, is_private) = (serving.api.clone(), args.url.is_none());
        Ok(House { proxy, server, base, prefix, is_private, program, serving, folder })
    }

    /// Makes a database: its URL.
    pub async fn database(&self, phase: &str) -> Result<String> {
        let name = format!("{}_{phase}", self.prefix);
        let mut conn = Conn::from_url(&self.base).await?;
        conn.query_drop(format!("CREATE DATABASE {name}")).await?;
        Ok(with_database(&self.base, &name))
    }

    /// The proxy, for an example that tells a story.
    pub fn scene(&self) -> Scene {
        let (api, admin) = (self.proxy.clone(), self.serving.admin.clone());
        Scene { api, admin, program: self.program.clone(), folder: self.folder.0.path().to_owned() }
    }

    /// What a guard is started with.
    pub fn guards(&self) -> Guards {
        let store = with_database(&self.base, &format!("{}_guard", self.prefix));
        Guards { program: self.program.clone(), folder: self.folder.0.path().to_owned(), store }
    }

    /// Drops what was made on the server, and stops the proxy; which stops its private server.
    pub async fn close(self) {
        if !self.is_private
            && let Err(error) = self.drop_databases().await
        {
            eprintln!("the databases {}_* may be left: {error:#}", self.prefix);
        }
        self.serving.stop().await;
    }

    async fn drop_databases(&self) -> Result<()> {
        let mut conn = Conn::from_url(&self.base).await?;
        for phase in ["without", "with", "locks", "guard"] {
            conn.query_drop(format!("DROP DATABASE IF EXISTS {}_{phase}", self.prefix)).await?;
        }
        Ok(())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Where the proxy was killed, its server still writes for a moment.
        for _ in 0..100 {
            if fs::remove_dir_all(self.0.path()).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn config_toml(url: &str, server: &str, settings: &str) -> String {
    format!(
        "[store]\nurl = \"{url}\"\n\
         [store.managed]\nserver = \"{server}\"\ndata_dir = \"data\"\n\
         [api]\nlisten = \"127.0.0.1:0\"\n\
         [admin]\nlisten = \"127.0.0.1:0\"\n\
         [log]\nformat = \"json\"\n\
         [policies.default]\npath = \"builtin:default\"\n\
         [policies.default.settings]\n{settings}\n"
    )
}

async fn version(base: &str) -> Result<String> {
    let mut conn = Conn::from_url(base).await?;
    let version: Option<String> = conn.query_first("SELECT VERSION()").await?;
    let version = version.unwrap_or_default();
    let kind = if version.contains("MariaDB") { "MariaDB" } else { "MySQL" };
    Ok(format!("{kind} {}", version.split('-').next().unwrap_or_default()))
}

/// The same server, and another database on it.
fn with_database(url: &str, name: &str) -> String {
    let (server, options) = url.split_once('?').unwrap_or((url, ""));
    let host_ends = server.find("://").and_then(|at| Some(at + 3 + server[at + 3..].find('/')?));
    let host = &server[..host_ends.unwrap_or(server.len())];
    let mark = if options.is_empty() { "" } else { "?" };
    format!("{host}/{name}{mark}{options}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_database_of_a_url_is_replaced() {
        for (url, expected) in [
            ("mysql://a:b@db:3306", "mysql://a:b@db:3306/x"),
            ("mysql://a:b@db:3306/", "mysql://a:b@db:3306/x"),
            ("mysql://root@localhost/y?socket=/a/b", "mysql://root@localhost/x?socket=/a/b"),
        ] {
            assert_eq!(with_database(url, "x"), expected);
        }
    }
}

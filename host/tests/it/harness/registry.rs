//! A registry of container images, which keeps what is published in a folder.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use tempfile::TempDir;

const NAME: &str = "docker-registry";

/// A registry. Dropping this ends it.
pub struct Registry {
    child: Child,
    /// Its host and port.
    pub address: String,
    dir: TempDir,
}

impl Registry {
    /// Starts a registry on an address of this machine. `more`: the rest of the section `http` of its configuration, and further
    /// sections.
    pub fn start(host: &str, more: &str) -> Registry {
        let dir = tempfile::tempdir().unwrap();
        let (data, config, log) =
            (dir.path().join("data"), dir.path().join("config.yml"), dir.path().join("log"));
        let text = format!(
            "version: 0.1\nlog:\n  level: info\nstorage:\n  filesystem:\n    rootdirectory: {}\n\
             http:\n  addr: {host}:0\n{more}",
            data.display()
        );
        std::fs::write(&config, text).unwrap();
        let mut command = Command::new(program());
        command.arg("serve").arg(&config).env("OTEL_TRACES_EXPORTER", "none");
        let output = File::create(&log).unwrap();
        let child = command.stdout(output.try_clone().unwrap()).stderr(output).spawn();
        let mut child = child.unwrap_or_else(|error| panic!("{NAME} does not start: {error}"));
        let began = std::time::Instant::now();
        loop {
            let lines = BufReader::new(File::open(&log).unwrap()).lines().map_while(Result::ok);
            let mut ports = lines.filter_map(|line| {
                let after = line.split_once("listening on ")?.1;
                let end = after.find(|c: char| !(c.is_ascii_digit() || ".:".contains(c)))?;
                Some(after[..end].to_owned())
            });
            if let Some(address) = ports.next() {
                return Registry { child, address, dir };
            }
            if child.try_wait().unwrap().is_some() || began.elapsed().as_secs() > 30 {
                drop(child.kill());
                panic!("{NAME} does not listen: {}", std::fs::read_to_string(&log).unwrap());
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    /// Changes the content of the blob with this digest, behind the registry's back.
    pub fn damage(&self, digest: &str) {
        let hex = digest.strip_prefix("sha256:").expect("a digest");
        let blobs = self.dir.path().join("data/docker/registry/v2/blobs/sha256");
        let file = blobs.join(&hex[..2]).join(hex).join("data");
        let mut content = std::fs::read(&file).unwrap();
        let last = content.last_mut().unwrap();
        *last = last.wrapping_add(1);
        std::fs::write(&file, content).unwrap();
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// The program: that of PATH, or what `cargo xtask servers` fetched into the target directory of this test.
fn program() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let exe = std::env::current_exe().unwrap();
    let target = exe.ancestors().skip(1).find(|dir| dir.join("CACHEDIR.TAG").is_file());
    let fetched = target.map(|target| target.join("servers/registry/bin"));
    let mut folders = std::env::split_paths(&path).chain(fetched);
    let is_there = |folder: PathBuf| Some(folder.join(NAME)).filter(|file: &PathBuf| Path::is_file(file));
    folders.find_map(is_there).unwrap_or_else(|| {
        panic!("there is no {NAME}; install it, or run `cargo xtask servers --only registry`")
    })
}

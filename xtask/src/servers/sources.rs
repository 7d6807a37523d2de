//! What the machine is, and where its apt gets packages: both formats of apt's source lists.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::Kind;
use crate::paths::find_program;

const DEBIAN_KEYRINGS: [&str; 2] =
    ["/usr/share/keyrings/debian-archive-keyring.gpg", "/usr/share/keyrings/debian-archive-keyring.pgp"];

/// One entry of apt's source lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub uris: Vec<String>,
    pub suites: Vec<String>,
    pub components: Vec<String>,
    /// As apt takes it: a path, a fingerprint, or an embedded key. None: apt's trusted keys.
    pub signed_by: Option<String>,
}

/// The machine as far as apt is concerned.
pub struct Machine {
    /// `ID` of os-release: `debian`, `ubuntu`.
    id: String,
    /// `VERSION_CODENAME` of os-release; empty where a rolling system has none.
    codename: String,
    sources: Vec<Source>,
}

impl Machine {
    pub fn detect() -> Result<Machine> {
        for tool in ["apt-get", "dpkg-deb"] {
            if find_program(tool).is_none() {
                bail!("this machine has no {tool}: the servers are unpacked from Debian's packages");
            }
        }
        let os = fs::read_to_string("/etc/os-release").context("cannot read /etc/os-release")?;
        let field = |name: &str| {
            let value = os.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            value.unwrap_or_default().trim_matches('"').to_owned()
        };
        let (id, codename) = (field("ID"), field("VERSION_CODENAME"));
        Ok(Machine { id, codename, sources: read_all(Path::new("/etc/apt"))? })
    }

    /// Where the packages of a program are.
    pub fn sources(&self, kind: Kind) -> Result<Vec<Source>> {
        match kind {
            Kind::Mysql | Kind::MariadbNext => Ok(vec![self.sid()?]),
            Kind::Mariadb | Kind::Galera | Kind::Faketime | Kind::Nginx | Kind::Redis | Kind::Registry => {
                self.own()
            }
        }
    }

    /// The machine's own suite, with its updates and security fixes.
    fn own(&self) -> Result<Vec<Source>> {
        let own = |suite: &String| self.is_own(suite);
        let mut found: Vec<Source> = self.sources.clone();
        for source in &mut found {
            source.suites.retain(own);
        }
        found.retain(|source| !source.suites.is_empty());
        if found.is_empty() {
            bail!("/etc/apt names no source for this machine's own suite ({})", self.codename);
        }
        Ok(found)
    }

    fn is_own(&self, suite: &str) -> bool {
        let base = suite.split('/').next().unwrap_or(suite);
        let base = base.strip_suffix("-security").or(base.strip_suffix("-updates")).unwrap_or(base);
        let rolling = ["stable", "testing", "sid", "unstable"];
        base == self.codename || (self.id == "debian" && rolling.contains(&base))
    }

    /// Debian's sid, on the mirror that the machine uses. `XTASK_DEBIAN_MIRROR` chooses another.
    fn sid(&self) -> Result<Source> {
        let Some(keyring) = DEBIAN_KEYRINGS.into_iter().find(|path| Path::new(path).is_file()) else {
            bail!(
                "Debian's keys are missing, so its packages cannot be verified: install debian-archive-keyring"
            );
        };
        let uri = match std::env::var("XTASK_DEBIAN_MIRROR") {
            Ok(uri) => uri,
            Err(_) if self.id == "debian" => self.mirror()?,
            Err(_) => bail!("this machine is no Debian: name a mirror of Debian in XTASK_DEBIAN_MIRROR"),
        };
        Ok(Source {
            uris: vec![uri],
            suites: vec!["sid".into()],
            components: vec!["main".into()],
            signed_by: Some(keyring.into()),
        })
    }

    /// The first mirror of the main archive: security fixes have an archive of their own.
    fn mirror(&self) -> Result<String> {
        let own = self.own()?;
        let main = own.iter().find(|source| source.suites.iter().any(|suite| !suite.contains("-security")));
        let uri = main.and_then(|source| source.uris.first());
        Ok(uri.context("/etc/apt names no mirror of Debian's main archive")?.clone())
    }
}

impl Source {
    /// As a stanza of a `.sources` file.
    pub fn stanza(&self) -> String {
        let mut text =
            format!("Types: deb\nURIs: {}\nSuites: {}\n", self.uris.join(" "), self.suites.join(" "));
        if !self.components.is_empty() {
            text += &format!("Components: {}\n", self.components.join(" "));
        }
        if let Some(signed_by) = &self.signed_by {
            text += &format!("Signed-By: {signed_by}\n");
        }
        text + "\n"
    }
}

fn read_all(etc: &Path) -> Result<Vec<Source>> {
    let mut files: Vec<PathBuf> = vec![etc.join("sources.list")];
    if let Ok(entries) = fs::read_dir(etc.join("sources.list.d")) {
        let mut parts: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        parts.sort();
        files.extend(parts);
    }
    let mut sources = Vec::new();
    for file in files.iter().filter(|file| file.is_file()) {
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("list") => sources.extend(text.lines().filter_map(one_line)),
            Some("sources") => sources.extend(deb822(&text)),
            _ => {}
        }
    }
    Ok(sources)
}

/// `deb [signed-by=/path arch=amd64] http://mirror/debian bookworm main contrib`
fn one_line(line: &str) -> Option<Source> {
    let line = line.split('#').next()?.trim();
    let mut rest = line.strip_prefix("deb")?.strip_prefix([' ', '\t'])?.trim();
    let mut signed_by = None;
    if let Some(options) = rest.strip_prefix('[') {
        let (options, after) = options.split_once(']')?;
        signed_by = options.split_whitespace().find_map(|option| option.strip_prefix("signed-by="));
        rest = after.trim();
    }
    let mut words = rest.split_whitespace().map(str::to_owned);
    let (uri, suite) = (words.next()?, words.next()?);
    usable(Source {
        uris: vec![uri],
        suites: vec![suite],
        components: words.collect(),
        signed_by: signed_by.map(str::to_owned),
    })
}

/// Stanzas of `Field: value` lines, divided by empty lines; a line that begins with a space goes on
/// with the field before it.
fn deb822(text: &str) -> Vec<Source> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    lines.split(|line| line.trim().is_empty()).filter_map(stanza).collect()
}

fn stanza(lines: &[&str]) -> Option<Source> {
    let mut fields: Vec<(String, String)> = Vec::new();
    for line in lines {
        if line.starts_with([' ', '\t']) {
            let (_, value) = fields.last_mut()?;
            *value += &format!("\n{line}");
        } else {
            let (name, value) = line.split_once(':')?;
            fields.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    let field = |name: &str| fields.iter().find(|(other, _)| other == name).map(|(_, value)| value.clone());
    let words = |name: &str| -> Vec<String> {
        field(name).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
    };
    if field("enabled").is_some_and(|enabled| enabled.eq_ignore_ascii_case("no")) {
        return None;
    }
    let source = Source {
        uris: words("uris"),
        suites: words("suites"),
        components: words("components"),
        signed_by: field("signed-by"),
    };
    words("types").iter().any(|kind| kind == "deb").then_some(source).and_then(usable)
}

/// Without what cannot be fetched from at any time.
fn usable(mut source: Source) -> Option<Source> {
    source.uris.retain(|uri| !uri.starts_with("cdrom:"));
    (!source.uris.is_empty() && !source.suites.is_empty()).then_some(source)
}

#[cfg(test)]
mod tests;

//! Compiled components on disk, so that a proxy that starts need not compile them again.
//!
//! An artifact is machine code, so a forged one would run in the proxy. The folder and its files must belong to the user of
//! this process, and nobody else may be able to write to them. Anything else is not loaded. Then a digest tells a file that
//! is cut short or damaged. Files are found by what their artifact depends on: the component, the compiler and its settings,
//! and the limits that the component was checked with.

use std::fs::File;
use std::hash::{Hash, Hasher};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, CWD, FileType, Mode, OFlags, Stat, Timespec, Timestamps};
use sha2::{Digest as _, Sha256};

use crate::config::EngineLimits;
use crate::mutex::Mutex;

/// What a file begins with. The digest of the rest follows, and then its length in bytes.
const MAGIC: &[u8; 16] = b"lockkeeper-code1";
const HEADER: usize = MAGIC.len() + 32 + 8;
/// The end of the name of a file, and of one that is being written.
const SUFFIX: &str = ".artifact";
const UNFINISHED: &str = ".unfinished";
/// Write permissions of the group and of others.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// A folder of artifacts.
pub(super) struct Artifacts {
    dir: PathBuf,
    /// The most bytes that the files may have together.
    max_bytes: u64,
    /// The user that the folder and the files must belong to.
    user: u32,
    /// Held while files are written and removed.
    writing: Mutex<()>,
}

/// What an artifact depends on, as the name of its file.
pub(super) struct Name(String);

impl Name {
    pub(super) fn of(component: &[u8], engine: &wasmtime::Engine, limits: &EngineLimits) -> Name {
        let mut digest = Hashed(Sha256::new());
        digest.0.update(Sha256::digest(component));
        // The version of wasmtime, its settings, and the processor.
        engine.precompile_compatibility_hash().hash(&mut digest);
        (limits.max_component_bytes, limits.memory_bytes).hash(&mut digest);
        let hex: String = digest.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Name(hex + SUFFIX)
    }
}

/// Feeds a digest with what is hashed.
struct Hashed(Sha256);

impl Hasher for Hashed {
    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn finish(&self) -> u64 {
        unreachable!("the digest is taken instead")
    }
}

impl Artifacts {
    /// The folder of the settings, if there is one.
    pub(super) fn of(limits: &EngineLimits) -> Option<Artifacts> {
        let dir = limits.cache_dir.clone()?;
        let user = rustix::process::geteuid().as_raw();
        Some(Artifacts { dir, max_bytes: limits.cache_bytes, user, writing: Mutex::default() })
    }

    /// The artifact of this name. `None` if there is none, or none that can be trusted, which is logged.
    pub(super) fn read(&self, name: &Name) -> Option<Vec<u8>> {
        let read = self.folder().and_then(|folder| self.trusted(&folder, name));
        match read {
            Ok(artifact) => Some(artifact),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                let file = self.dir.join(&name.0);
                tracing::warn!(file = %file.display(), %error, "a compiled policy is not used; it is compiled again");
                None
            }
        }
    }

    /// Keeps an artifact, in place of the one that has the name, and removes those that were not used for the longest time. A
    /// failure is logged: the artifact is in use, and compiled again after the next start.
    pub(super) fn write(&self, name: &Name, artifact: &[u8]) {
        let _writing = self.writing.lock();
        if (HEADER + artifact.len()) as u64 > self.max_bytes {
            let (bytes, max) = (HEADER + artifact.len(), self.max_bytes);
            tracing::warn!(
                bytes,
                max,
                "a compiled policy is not kept: it is larger than `engine.cache_bytes`"
            );
            return;
        }
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir);
        let kept = made.and_then(|()| {
            let folder = self.folder()?;
            put(&folder, name, artifact)?;
            self.evict(&folder, name)
        });
        if let Err(error) = kept {
            tracing::warn!(dir = %self.dir.display(), %error, "a compiled policy is not kept");
        }
    }

    /// Opens the folder, which only this user may be able to write to.
    fn folder(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
        let folder = fs::openat(CWD, &self.dir, flags, Mode::empty())?;
        self.trust("the folder", &fs::fstat(&folder)?)?;
        Ok(folder)
    }

    fn trusted(&self, folder: &OwnedFd, name: &Name) -> io::Result<Vec<u8>> {
        // Without waiting for the writer of a pipe.
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::RDONLY | OFlags::CLOEXEC;
        let mut file = File::from(fs::openat(folder, &*name.0, flags, Mode::empty())?);
        let stat = fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(io::Error::other("it is not a regular file"));
        }
        self.trust("it", &stat)?;
        let length = u64::try_from(stat.st_size).unwrap_or(0);
        if length > self.max_bytes {
            return Err(io::Error::other(format!("it has {length} bytes, more than `engine.cache_bytes`")));
        }
        let mut bytes = Vec::new();
        // What is checked is what is used, even if the file changes meanwhile.
        (&mut file).take(length).read_to_end(&mut bytes)?;
        let artifact = checked(bytes)?;
        // The time of the last use, for the eviction.
        let now = Timespec { tv_sec: 0, tv_nsec: fs::UTIME_NOW };
        let _ = fs::futimens(&file, &Timestamps { last_access: now, last_modification: now });
        Ok(artifact)
    }

    fn trust(&self, what: &str, stat: &Stat) -> io::Result<()> {
        let (owner, user, mode) = (stat.st_uid, self.user, stat.st_mode & 0o7777);
        if owner != user {
            return Err(io::Error::other(format!("{what} belongs to user {owner}, and not to user {user}")));
        }
        if mode & WRITABLE_BY_OTHERS != 0 {
            return Err(io::Error::other(format!("others may write to {what}: its mode is {mode:03o}")));
        }
        Ok(())
    }

    /// Removes the files that were not used for the longest time, until the rest is within the limit.
    fn evict(&self, folder: &OwnedFd, newest: &Name) -> io::Result<()> {
        let mut files = Vec::new();
        for entry in fs::Dir::read_from(folder)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            if !(name.ends_with(SUFFIX) || name.ends_with(UNFINISHED)) {
                continue;
            }
            match fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => files.push((stat.st_mtime, stat.st_mtime_nsec, name.to_owned(), stat.st_size)),
                // Another proxy has removed it.
                Err(rustix::io::Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        files.sort();
        let mut bytes: u64 = files.iter().map(|(.., size)| u64::try_from(*size).unwrap_or(0)).sum();
        for (.., name, size) in files.iter().filter(|(_, _, name, _)| *name != newest.0) {
            if bytes <= self.max_bytes {
                break;
            }
            let _ = fs::unlinkat(folder, name.as_str(), AtFlags::empty());
            bytes = bytes.saturating_sub(u64::try_from(*size).unwrap_or(0));
        }
        Ok(())
    }
}

/// Writes a file, which appears as a whole or not at all.
fn put(folder: &OwnedFd, name: &Name, artifact: &[u8]) -> io::Result<()> {
    let unfinished = format!("{}.{}{UNFINISHED}", name.0, std::process::id());
    // Left by a process that was killed and had the same number.
    let _ = fs::unlinkat(folder, &*unfinished, AtFlags::empty());
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::WRONLY | OFlags::CLOEXEC;
    let mut file = File::from(fs::openat(folder, &*unfinished, flags, Mode::RUSR | Mode::WUSR)?);
    let written = [&MAGIC[..], &Sha256::digest(artifact), &(artifact.len() as u64).to_le_bytes(), artifact]
        .into_iter()
        .try_for_each(|part| file.write_all(part));
    let placed = written.and_then(|()| Ok(fs::renameat(folder, &*unfinished, folder, &*name.0)?));
    placed.inspect_err(|_| {
        let _ = fs::unlinkat(folder, &*unfinished, AtFlags::empty());
    })
}

/// The artifact of a whole file.
fn checked(mut bytes: Vec<u8>) -> io::Result<Vec<u8>> {
    let damaged = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let header = bytes.get(..HEADER).ok_or_else(|| damaged("it is cut short"))?;
    let (magic, rest) = header.split_at(MAGIC.len());
    let (digest, length) = rest.split_at(32);
    let (digest, length) = (digest.to_vec(), length.to_vec());
    if magic != MAGIC {
        return Err(damaged("it is of another kind"));
    }
    let artifact = bytes.split_off(HEADER);
    if length != (artifact.len() as u64).to_le_bytes() {
        return Err(damaged("its length is not the one that it had when it was written"));
    }
    if digest[..] != Sha256::digest(&artifact)[..] {
        return Err(damaged("it has changed since it was written"));
    }
    Ok(artifact)
}

/// The folder, for messages.
impl std::fmt::Debug for Artifacts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Path::fmt(&self.dir, f)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    struct Cache {
        artifacts: Artifacts,
        _dir: tempfile::TempDir,
    }

    fn cache(max_bytes: u64) -> Cache {
        let dir = tempfile::tempdir().unwrap();
        let limits = EngineLimits {
            cache_dir: Some(dir.path().join("cache")),
            cache_bytes: max_bytes,
            ..EngineLimits::default()
        };
        Cache { artifacts: Artifacts::of(&limits).unwrap(), _dir: dir }
    }

    fn name(text: &str) -> Name {
        Name(format!("{text}{SUFFIX}"))
    }

    impl Cache {
        fn read(&self, text: &str) -> Option<Vec<u8>> {
            self.artifacts.read(&name(text))
        }

        fn path(&self, text: &str) -> PathBuf {
            self.artifacts.dir.join(name(text).0)
        }

        fn set_mode(path: &Path, mode: u32) {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
    }

    #[test]
    fn an_artifact_is_read_as_it_was_written_by_its_owner_alone() {
        let cache = cache(1 << 20);
        assert_eq!(cache.read("a"), None);
        cache.artifacts.write(&name("a"), b"code");
        assert_eq!(cache.read("a").unwrap(), b"code");
        assert_eq!(cache.read("b"), None);
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&cache.artifacts.dir), mode(&cache.path("a"))), (0o700, 0o600));
        cache.artifacts.write(&name("a"), b"newer");
        assert_eq!(cache.read("a").unwrap(), b"newer");
    }

    #[test]
    fn a_damaged_file_is_not_loaded_and_is_replaced() {
        let cache = cache(1 << 20);
        cache.artifacts.write(&name("a"), b"some code");
        let path = cache.path("a");
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[at] ^= 1;
            std::fs::write(&path, flipped).unwrap();
            assert_eq!(cache.read("a"), None, "byte {at} is flipped");
            std::fs::write(&path, &whole[..at]).unwrap();
            assert_eq!(cache.read("a"), None, "cut at {at}");
        }
        std::fs::write(&path, [&whole[..], b"more"].concat()).unwrap();
        assert_eq!(cache.read("a"), None);
        cache.artifacts.write(&name("a"), b"some code");
        assert_eq!(cache.read("a").unwrap(), b"some code");
    }

    #[test]
    fn a_file_that_others_may_have_written_is_not_loaded() {
        let mut cache = cache(1 << 20);
        cache.artifacts.write(&name("a"), b"code");
        let path = cache.path("a");
        for mode in [0o620, 0o602, 0o666] {
            Cache::set_mode(&path, mode);
            assert_eq!(cache.read("a"), None, "{mode:o}");
        }
        Cache::set_mode(&path, 0o644);
        assert_eq!(cache.read("a").unwrap(), b"code", "others may read it");
        for mode in [0o720, 0o702] {
            Cache::set_mode(&cache.artifacts.dir, mode);
            assert_eq!(cache.read("a"), None, "the folder: {mode:o}");
            cache.artifacts.write(&name("b"), b"code");
            assert!(!cache.path("b").exists(), "nothing is kept there either");
        }
        Cache::set_mode(&cache.artifacts.dir, 0o700);
        // As if all of it belonged to somebody else.
        cache.artifacts.user += 1;
        assert_eq!(cache.read("a"), None);
    }

    #[test]
    fn links_and_other_things_than_files_are_not_followed() {
        let cache = cache(1 << 20);
        cache.artifacts.write(&name("a"), b"code");
        symlink(cache.path("a"), cache.path("link")).unwrap();
        assert_eq!(cache.read("link"), None);
        std::fs::create_dir(cache.path("folder")).unwrap();
        assert_eq!(cache.read("folder"), None);
        let fifo = std::process::Command::new("mkfifo").arg(cache.path("pipe")).status().unwrap();
        assert!(fifo.success());
        assert_eq!(cache.read("pipe"), None);
        // A link in place of an artifact is replaced, and what it points to is not written to.
        cache.artifacts.write(&name("link"), b"other");
        assert_eq!(
            (cache.read("link").unwrap(), cache.read("a").unwrap()),
            (b"other".to_vec(), b"code".to_vec())
        );
        // The folder itself.
        let real = cache.artifacts.dir.with_file_name("real");
        std::fs::rename(&cache.artifacts.dir, &real).unwrap();
        symlink(&real, &cache.artifacts.dir).unwrap();
        assert_eq!(cache.read("a"), None);
    }

    #[test]
    fn what_was_not_used_for_the_longest_time_is_removed_first() {
        let size = (HEADER + 100) as u64;
        let cache = cache(3 * size);
        let used = |text: &str, second: i64| {
            let file = File::open(cache.path(text)).unwrap();
            let at = Timespec { tv_sec: second, tv_nsec: 0 };
            fs::futimens(&file, &Timestamps { last_access: at, last_modification: at }).unwrap();
        };
        for (second, text) in ["a", "b", "c"].into_iter().enumerate() {
            cache.artifacts.write(&name(text), &[0; 100]);
            used(text, second as i64);
        }
        assert!(cache.read("a").is_some(), "it is used again");
        cache.artifacts.write(&name("d"), &[0; 100]);
        let there = ["a", "b", "c", "d"].map(|text| cache.read(text).is_some());
        assert_eq!(there, [true, false, true, true]);
        cache.artifacts.write(&name("e"), &[0; 1_000]);
        assert_eq!(cache.read("e"), None, "it alone is larger than the limit");
        assert!(cache.read("d").is_some(), "and nothing was removed for it");
    }

    #[test]
    fn an_artifact_is_not_found_under_other_settings() {
        let engine = |fuel: bool| wasmtime::Engine::new(super::super::settings().consume_fuel(fuel)).unwrap();
        let limits = EngineLimits::default();
        let name = |component: &[u8], fuel: bool, limits: &EngineLimits| {
            Name::of(component, &engine(fuel), limits).0
        };
        let one = name(b"a", true, &limits);
        assert_eq!(one, name(b"a", true, &limits));
        assert_ne!(one, name(b"b", true, &limits));
        assert_ne!(one, name(b"a", false, &limits));
        let smaller = EngineLimits { memory_bytes: 65_536, ..limits };
        assert_ne!(one, name(b"a", true, &smaller), "the component was not checked with this limit");
    }
}

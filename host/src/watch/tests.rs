//! Files that change under the proxy.

use std::time::Duration;

use super::*;

fn watched(path: &Path) -> (Watcher, Changes) {
    watch(BTreeMap::from([("a".to_owned(), path.to_owned())]), 1_000).unwrap()
}

fn temporary() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    (dir, path)
}

async fn change(changes: &mut Changes) -> Option<Vec<u8>> {
    let change = tokio::time::timeout(Duration::from_secs(10), changes.recv()).await;
    let (name, bytes) = change.expect("no change was told").unwrap();
    assert_eq!(name, "a");
    bytes
}

/// The next contents, after the file may have been missing.
async fn next(changes: &mut Changes) -> Vec<u8> {
    loop {
        if let Some(bytes) = change(changes).await {
            return bytes;
        }
    }
}

#[tokio::test]
async fn a_file_that_is_gone_is_reported_once_and_again_when_it_is_back() {
    let (_dir, path) = temporary();
    std::fs::write(&path, "one").unwrap();
    let (_watcher, mut changes) = watched(&path);
    assert_eq!(change(&mut changes).await.as_deref(), Some(b"one".as_slice()));
    std::fs::remove_file(&path).unwrap();
    assert_eq!(change(&mut changes).await, None);
    std::fs::write(&path, "one").unwrap();
    assert_eq!(change(&mut changes).await.as_deref(), Some(b"one".as_slice()));
}

#[tokio::test]
async fn the_same_contents_are_reported_again_if_asked_for() {
    let (_dir, path) = temporary();
    std::fs::write(&path, "one").unwrap();
    let (watcher, mut changes) = watched(&path);
    assert_eq!(next(&mut changes).await, b"one");
    watcher.look_again();
    assert_eq!(next(&mut changes).await, b"one");
}

#[tokio::test]
async fn each_content_of_a_file_is_reported_once() {
    let (_dir, path) = temporary();
    std::fs::write(&path, "one").unwrap();
    let (_watcher, mut changes) = watched(&path);
    assert_eq!(next(&mut changes).await, b"one");
    std::fs::write(&path, "one").unwrap();
    std::fs::write(path.with_extension("other"), "noise").unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "two").unwrap();
    assert_eq!(next(&mut changes).await, b"two");
    let quiet = tokio::time::timeout(Duration::from_millis(500), changes.recv()).await;
    assert!(quiet.is_err(), "{quiet:?}");
}

#[tokio::test]
async fn a_moved_symbolic_link_is_reported_as_a_change() {
    let (dir, path) = temporary();
    // As a ConfigMap is mounted: the file is a link through `..data`, which is moved.
    for (folder, text) in [("v1", "one"), ("v2", "two")] {
        std::fs::create_dir(dir.path().join(folder)).unwrap();
        std::fs::write(dir.path().join(folder).join("policy.wasm"), text).unwrap();
    }
    let link = |to: &str, from: &Path| std::os::unix::fs::symlink(to, from).unwrap();
    link("v1", &dir.path().join("..data"));
    link("..data/policy.wasm", &path);
    let (_watcher, mut changes) = watched(&path);
    assert_eq!(next(&mut changes).await, b"one");
    link("v2", &dir.path().join("..tmp"));
    std::fs::rename(dir.path().join("..tmp"), dir.path().join("..data")).unwrap();
    assert_eq!(next(&mut changes).await, b"two");
}

#[tokio::test]
async fn a_file_written_in_pieces_is_finally_reported_whole() {
    use std::io::Write as _;
    let (_dir, path) = temporary();
    let (_watcher, mut changes) = watched(&path);
    let mut file = File::create(&path).unwrap();
    let whole = "0123456789".repeat(8);
    for piece in whole.as_bytes().chunks(10) {
        file.write_all(piece).unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The poll may catch it half-written; what counts is that the whole one comes last.
    while next(&mut changes).await != whole.as_bytes() {}
}

#[tokio::test]
async fn a_file_over_the_limit_is_not_read_whole() {
    let (_dir, path) = temporary();
    std::fs::write(&path, vec![0; 5_000]).unwrap();
    let (_watcher, mut changes) = watched(&path);
    assert_eq!(next(&mut changes).await.len(), 1_001);
}

/// As where a log is written beside the file.
#[tokio::test]
async fn constant_writes_to_other_files_do_not_delay_a_change() {
    let (_dir, path) = temporary();
    std::fs::write(&path, "one").unwrap();
    let (_watcher, mut changes) = watched(&path);
    assert_eq!(next(&mut changes).await, b"one");
    let log = path.with_extension("log");
    let noise = tokio::spawn(async move {
        loop {
            std::fs::write(&log, "x").unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    std::fs::write(&path, "two").unwrap();
    assert_eq!(next(&mut changes).await, b"two");
    noise.abort();
}

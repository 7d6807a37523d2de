//! `lockkeeper policy publish` and `policy pull`: components in a real registry.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};

use lockkeeper::policy::Digest;
use rcgen::SanType;
use serde_json::{Value, json};

use super::command_line::text;
use super::*;
use crate::auth::authority::Authority;
use crate::harness::lockkeeper;
use crate::harness::registry::Registry;

/// `open sesame`, for the user `ali`.
const USERS: &str = "ali:$2y$04$4nqLyDsHYT8T86iQjiwwXuxNH.sSxlETY/r6t5zshoKXtqgtVeREm\n";
/// The name and the password, as `docker login` stores them.
const LOGIN: &str = "YWxpOm9wZW4gc2VzYW1l";

/// A folder with components and the credentials of a user, in which the command line runs.
struct Files(TempDir);

impl Files {
    fn new() -> Files {
        let dir = folder();
        for name in ["default", "fair-groups"] {
            let component = lockkeeper::policy::builtin(name).expect("a component");
            std::fs::write(dir.path().join(name).with_extension("wasm"), component).unwrap();
        }
        Files(dir)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = lockkeeper();
        command.current_dir(self.0.path()).env("DOCKER_CONFIG", self.0.path()).arg("policy").args(args);
        // A proxy that is not there: this machine is asked without it.
        command.env("HTTP_PROXY", "http://127.0.0.1:1").env("NO_PROXY", "127.0.0.2");
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("it starts")
    }

    fn json(&self, args: &[&str]) -> Value {
        let output = self.run(&[args, &["--json"]].concat());
        assert!(output.status.success(), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    fn fails(&self, args: &[&str], code: i32, why: &str) {
        is_refused(&self.run(args), code, why);
    }

    fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.0.path().join(name)).unwrap()
    }

    fn exists(&self, name: &str) -> bool {
        self.0.path().join(name).exists()
    }
}

fn is_refused(output: &Output, code: i32, why: &str) {
    let told = text(&output.stderr);
    assert!(
        output.status.code() == Some(code) && told.contains(why),
        "{:?}, not {why}: {told}",
        output.status
    );
}

#[test]
fn a_published_component_is_pulled_as_it_was() {
    let (registry, files) = (Registry::start("127.0.0.1", ""), Files::new());
    let name = format!("{}/policies/fair", registry.address);
    // The version is that of the manifest.
    let published = files.json(&["publish", "fair-groups.wasm", &name]);
    let component = files.read("fair-groups.wasm");
    assert_eq!(published["digest"], json!(Digest::of(&component).to_string()));
    let tagged = format!("{name}:{}", env!("CARGO_PKG_VERSION"));
    let pulled = files.json(&["pull", &tagged]);
    assert_eq!((&pulled["digest"], &pulled["file"]), (&published["digest"], &json!("fair.wasm")));
    assert_eq!(files.read("fair.wasm"), component);
    assert_eq!(pulled["reference"], published["reference"]);
    let again = files.json(&["publish", "fair-groups.wasm", &tagged]);
    assert_eq!(again["reference"], published["reference"], "the same component is the same artifact");
    // Another component gets the version: the digest still stands for the first one.
    let other = files.json(&["publish", "default.wasm", &tagged]);
    assert_ne!(other["reference"], published["reference"]);
    assert_eq!(files.json(&["pull", &tagged])["digest"], other["digest"]);
    let pinned = published["reference"].as_str().unwrap();
    files.json(&["pull", pinned, "--output", "first.wasm"]);
    assert_eq!(files.read("first.wasm"), component);
    // What the manifest says is shown by registries.
    let reference = pinned.split_once('@').unwrap().1;
    let artifact = get(&registry, &format!("/v2/policies/fair/manifests/{reference}"));
    assert_eq!(artifact["annotations"]["org.opencontainers.image.title"], "fair-groups");
    assert_eq!(artifact["layers"][0]["mediaType"], "application/wasm");
    assert_eq!(artifact["mediaType"], "application/vnd.oci.image.manifest.v1+json");
    let config = artifact["config"]["digest"].as_str().unwrap();
    let config = get(&registry, &format!("/v2/policies/fair/blobs/{config}"));
    assert_eq!(config["layerDigests"], json!([published["digest"]]));
    assert!(
        config["component"]["exports"].to_string().contains("lockkeeper:policy/naming@0.1.0"),
        "{config}"
    );
}

#[test]
fn what_is_no_promised_component_is_not_pulled() {
    let (registry, files) = (Registry::start("127.0.0.1", ""), Files::new());
    let reference = format!("{}/policies/fair:1.0.0", registry.address);
    let published = files.json(&["publish", "fair-groups.wasm", &reference]);
    registry.damage(published["digest"].as_str().unwrap());
    files.fails(&["pull", &reference], 6, "is not what the registry has promised");
    assert!(!files.exists("fair.wasm"));
    files.fails(&["pull", &format!("{}/policies/fair:2.0.0", registry.address)], 1, "has no");
    let pinned = published["reference"].as_str().unwrap();
    registry.damage(pinned.split_once('@').unwrap().1);
    assert!(!files.run(&["pull", pinned]).status.success(), "the artifact is another one");
    assert!(!files.exists("fair.wasm"));
    // Images of containers.
    let index =
        json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []});
    let kind = "Content-Type: application/vnd.oci.image.index.v1+json\r\n";
    let (head, _) = ask(&registry, "PUT", "/v2/images/x/manifests/all", kind, index.to_string().as_bytes());
    assert!(head.contains(" 201 "), "{head}");
    files.fails(&["pull", &format!("{}/images/x:all", registry.address)], 6, "an index of images");
    let layer = push(&registry, b"a layer");
    let manifest = |layers: Value| {
        json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": layers,
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "size": 7, "digest": layer},
        })
    };
    let of = |kind: &str, size: u64| json!({"mediaType": kind, "size": size, "digest": layer});
    let tar = "application/vnd.oci.image.layer.v1.tar";
    let cases = [
        (json!([of(tar, 7)]), "its layer is application/vnd.oci.image.layer.v1.tar"),
        (json!([of("application/wasm", 7), of("application/wasm", 7)]), "it has 2 layers"),
        (json!([of("application/wasm", 3)]), "more bytes than announced"),
        (json!([of("application/wasm", 7)]), "this is not a component"),
        (json!([of("application/wasm", 100 << 20)]), "67108864 are allowed"),
    ];
    for (n, (layers, why)) in cases.into_iter().enumerate() {
        let body = manifest(layers).to_string();
        let kind = "Content-Type: application/vnd.oci.image.manifest.v1+json\r\n";
        let (head, _) = ask(&registry, "PUT", &format!("/v2/images/x/manifests/{n}"), kind, body.as_bytes());
        assert!(head.contains(" 201 "), "{head}");
        files.fails(&["pull", &format!("{}/images/x:{n}", registry.address)], 6, why);
        assert!(!files.exists("x.wasm"));
    }
}

#[test]
fn a_registry_with_users_needs_the_stored_credentials() {
    let files = Files::new();
    let users = files.0.path().join("users");
    std::fs::write(&users, USERS).unwrap();
    let auth = format!("auth:\n  htpasswd:\n    realm: policies\n    path: {}\n", users.display());
    let registry = Registry::start("127.0.0.1", &auth);
    let reference = format!("{}/policies/fair:1.0.0", registry.address);
    let publish = ["publish", "fair-groups.wasm", &reference];
    files.fails(&publish, 6, &format!("docker login {}", registry.address));
    let store = |login: &str| {
        let config = json!({"auths": {registry.address.as_str(): {"auth": login}}});
        std::fs::write(files.0.path().join("config.json"), config.to_string()).unwrap();
    };
    store("YWxpOndyb25n");
    files.fails(&publish, 6, &format!("docker login {}", registry.address));
    store(LOGIN);
    files.json(&publish);
    files.json(&["pull", &reference]);
    std::fs::write(files.0.path().join("config.json"), "{").unwrap();
    files.fails(&["pull", &reference], 1, "the credentials of");
}

#[test]
fn a_program_that_keeps_no_credentials_for_a_registry_is_no_hindrance() {
    let (registry, files) = (Registry::start("127.0.0.1", ""), Files::new());
    let reference = format!("{}/policies/fair:1.0.0", registry.address);
    std::fs::write(files.0.path().join("config.json"), r#"{"credsStore": "test"}"#).unwrap();
    let program = files.0.path().join("docker-credential-test");
    let publish = |script: &str| {
        std::fs::write(&program, format!("#!/bin/sh\ncat > /dev/null\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let path = format!("{}:{}", files.0.path().display(), std::env::var("PATH").unwrap());
        files.command(&["publish", "fair-groups.wasm", &reference]).env("PATH", path).output().unwrap()
    };
    is_refused(&publish("echo the keychain is locked; exit 1"), 1, "the keychain is locked");
    let published = publish("echo credentials not found in native keychain; exit 1");
    assert!(published.status.success(), "{}", text(&published.stderr));
}

#[test]
fn the_certificate_of_a_registry_is_verified() {
    let (files, authority) = (Files::new(), Authority::new());
    // Connections to localhost are not encrypted, so the registry has another address.
    let host = "127.0.0.2";
    let (certificate, key) = authority.signs(vec![SanType::IpAddress(host.parse().unwrap())], 1);
    for (name, pem) in [("cert.pem", &certificate), ("key.pem", &key), ("ca.pem", &authority.pem)] {
        std::fs::write(files.0.path().join(name), pem).unwrap();
    }
    let path = |name: &str| files.0.path().join(name).display().to_string();
    let tls = format!("  tls:\n    certificate: {}\n    key: {}\n", path("cert.pem"), path("key.pem"));
    let registry = Registry::start(host, &tls);
    let reference = format!("{}/policies/fair:1.0.0", registry.address);
    let publish = ["publish", "fair-groups.wasm", &reference];
    files.fails(&publish, 5, "certificate");
    let trusting = files.command(&publish).env("SSL_CERT_FILE", path("ca.pem")).output().unwrap();
    assert!(trusting.status.success(), "{}", text(&trusting.stderr));
    files.fails(&[&publish[..], &["--plain-http"]].concat(), 1, "HTTPS");
}

#[test]
fn a_reference_names_its_registry_and_its_version() {
    let files = Files::new();
    for (reference, why) in [
        ("tenants:1.0.0", "must begin with a registry"),
        ("acme/tenants:1.0.0", "must begin with a registry"),
        ("127.0.0.1:1/tenants", "must have a version or a digest"),
        ("127.0.0.1:1/Tenants:1", "in lower case"),
    ] {
        files.fails(&["pull", reference], 2, why);
    }
    let digest = format!("127.0.0.1:1/tenants@sha256:{}", "0".repeat(64));
    files.fails(&["publish", "default.wasm", &digest], 2, "published by a version");
    // Nothing listens there.
    files.fails(&["pull", "127.0.0.1:1/tenants:1"], 5, "127.0.0.1:1 cannot be asked");
    files.fails(&["publish", "config.json", "127.0.0.1:1/tenants:1"], 1, "cannot read");
    std::fs::write(files.0.path().join("text.wasm"), "text").unwrap();
    files.fails(&["publish", "text.wasm", "127.0.0.1:1/tenants:1"], 6, "this is not a component");
    std::fs::write(files.0.path().join("bare.wasm"), b"\0asm\x0d\0\x01\0").unwrap();
    files.fails(&["publish", "bare.wasm", "127.0.0.1:1/tenants"], 2, "has no manifest, so name a version");
    std::fs::write(files.0.path().join("manifest.json"), r#"{"name": "tenants", "version": "1.0.0+build"}"#)
        .unwrap();
    std::fs::write(files.0.path().join("renamed.wasm"), &*RENAMED).unwrap();
    files.json(&["annotate", "renamed.wasm"]);
    files.fails(&["publish", "renamed.wasm", "127.0.0.1:1/tenants"], 2, "1.0.0+build, cannot be a tag");
}

/// Asks the registry; the head of the answer, and its body.
fn ask(registry: &Registry, method: &str, path: &str, headers: &str, body: &[u8]) -> (String, Vec<u8>) {
    let mut stream = TcpStream::connect(&registry.address).unwrap();
    let (host, length) = (&registry.address, body.len());
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{headers}Content-Length: {length}\r\n\r\n"
    );
    stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").expect("the end of the head");
    (String::from_utf8_lossy(&answer[..end]).into_owned(), answer[end + 4..].to_vec())
}

fn get(registry: &Registry, path: &str) -> Value {
    let accept = "Accept: application/vnd.oci.image.manifest.v1+json\r\n";
    let (head, body) = ask(registry, "GET", path, accept, b"");
    assert!(head.contains(" 200 "), "{head}");
    serde_json::from_slice(&body).expect("JSON")
}

/// Puts content into the registry; its digest.
fn push(registry: &Registry, content: &[u8]) -> String {
    let (head, _) = ask(registry, "POST", "/v2/images/x/blobs/uploads/", "", b"");
    let line = head.lines().find_map(|line| line.strip_prefix("Location: ")).expect("a location");
    let location = line.split_once(&registry.address).expect("an address of the registry").1;
    let digest = Digest::of(content).to_string();
    let kind = "Content-Type: application/octet-stream\r\n";
    let (head, _) = ask(registry, "PUT", &format!("{location}&digest={digest}"), kind, content);
    assert!(head.contains(" 201 "), "{head}");
    digest
}

//! Compilation: in a child process that is killed at its limits, one component at a time.

use std::fs;
use std::ops::RangeInclusive;

use rustix::process::Signal;

use super::*;
use crate::harness::{fresh, lockkeeper, signal};

/// A policy that takes the compiler seconds and gigabytes: beside the policy `default` there is a module with a function in
/// which 64,000 jumps to one place each bring other values of 400 variables.
static BOMB: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let (jumps, variables) = (64_000, 400);
    let mut text = format!("(module (func (result i32) (local{}) block\n", " i32".repeat(variables));
    for jump in 0..jumps {
        let at = jump % variables;
        text += &format!("local.get {at} i32.const 1 i32.add local.tee {at} br_if 0\n");
    }
    text += "end local.get 0\n";
    text.extend((1..variables).map(|at| format!("local.get {at} i32.xor\n")));
    text += "))";
    let module = wat::parse_str(text).expect("well-formed");
    let section = module_section(&module);
    [default_policy(), &section].concat()
});

/// The section of a component that has a module.
fn module_section(module: &[u8]) -> Vec<u8> {
    let mut section = vec![1];
    let mut left = module.len();
    while left >= 0x80 {
        section.push(left as u8 | 0x80);
        left >>= 7;
    }
    section.push(left as u8);
    [&section, module].concat()
}

/// A proxy with a second policy, `other`, and these limits on the compilation.
async fn limited(time_s: u32, memory_bytes: u64) -> Deployment {
    let more = format!(
        "[engine]\ncompile_time_s = {time_s}\ncompile_memory_bytes = {memory_bytes}\n\
         [policies.other]\npath = \"builtin:default\"\n"
    );
    LazyLock::force(&BOMB);
    Deployment::with(Kind::Mysql, &RENAMED, &more).await
}

const PLENTY: u64 = 8 << 30;

/// The children of a process, including those that have ended and were not waited for.
fn children(parent: u32) -> Vec<u32> {
    let processes = fs::read_dir("/proc").expect("/proc").flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_string_lossy().parse().ok());
    pids.filter(|pid| stat(*pid).is_some_and(|(_, of)| of == parent)).collect()
}

/// The state of a process, and its parent.
fn stat(pid: u32) -> Option<(String, u32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.to_owned(), fields.next()?.parse().ok()?))
}

/// Whether the process has ended, even if nobody has waited for it.
fn has_ended(pid: u32) -> bool {
    stat(pid).is_none_or(|(state, _)| state == "Z")
}

/// Waits for the process that compiles.
async fn compiler(proxy: &Proxy) -> u32 {
    eventually("a component is being compiled", async || !children(proxy.pid()).is_empty()).await;
    children(proxy.pid())[0]
}

fn pushing(deployment: &Deployment, name: &str, component: &[u8]) -> JoinHandle<Response> {
    let (admin, path) = (deployment.proxy.admin(), format!("/v1/policies/{name}"));
    let component = component.to_vec();
    tokio::spawn(async move { admin.send("PUT", &path, component).await })
}

/// Pushes the component, which has to be refused with a reason that contains these words, within a time in seconds.
/// Meanwhile a client takes locks; none of them may take long.
async fn refused_while_locks_are_taken(
    deployment: &Deployment,
    words: &[&str],
    seconds: RangeInclusive<u64>,
) {
    let proxy = &deployment.proxy;
    let (client, memory, begin) = (proxy.client(), proxy.memory(), Instant::now());
    let push = pushing(deployment, "default", &BOMB);
    let (mut cycles, mut longest) = (0, Duration::ZERO);
    while !push.is_finished() {
        let asked = Instant::now();
        let lease = client.lease(&fresh("meanwhile"), 5_000).await;
        released(&client, &lease).await;
        (cycles, longest) = (cycles + 1, longest.max(asked.elapsed()));
    }
    let (answer, took) = (push.await.unwrap(), begin.elapsed());
    assert_eq!((answer.status, answer.slug()), (422, "refused"), "{}", answer.text);
    let why = answer.json["detail"].as_str().unwrap();
    assert!(words.iter().all(|word| why.contains(word)), "{why}");
    assert!(seconds.contains(&took.as_secs()), "{took:?}");
    // While the processors are busy with other work, a cycle may take seconds.
    assert!(cycles >= 10, "{cycles} cycles, the longest {longest:?}");
    eprintln!("{cycles} cycles while a component was compiled, the longest {longest:?}");
    assert_eq!(children(proxy.pid()), Vec::<u32>::new(), "the compiler is gone");
    let grown = proxy.memory().saturating_sub(memory);
    assert!(grown < 64 << 20, "the proxy has grown by {grown} bytes");
    assert_eq!(deployment.status().await["last_error"], why);
    // The compiler takes the next component.
    deployment.push(&variant(&RENAMED, 1)).await;
}

async fn compilations(deployment: &Deployment, outcome: &str) -> f64 {
    let label = format!("outcome=\"{outcome}\"");
    deployment.proxy.metric("lockkeeper_policy_compilations_total", &[&label]).await
}

#[test]
fn a_component_that_takes_too_long_to_compile_is_refused_and_locks_are_granted_meanwhile() {
    crate::harness::run(async {
        let deployment = limited(2, PLENTY).await;
        let words = ["the 2 s", "engine.compile_time_s"];
        refused_while_locks_are_taken(&deployment, &words, 2..=40).await;
        assert_eq!(compilations(&deployment, "compile_time").await, 1.0);
        assert_eq!(compilations(&deployment, "compiled").await, 2.0, "at the start, and the last push");
        assert_eq!(deployment.proxy.metric("lockkeeper_policy_compile_seconds_count", &[]).await, 3.0);
    });
}

#[test]
fn a_component_that_needs_too_much_memory_to_compile_is_refused_and_locks_are_granted_meanwhile() {
    crate::harness::run(async {
        let deployment = limited(600, 128 << 20).await;
        let words = ["134217728 bytes", "engine.compile_memory_bytes"];
        refused_while_locks_are_taken(&deployment, &words, 0..=60).await;
        assert_eq!(compilations(&deployment, "compile_memory").await, 1.0);
    });
}

#[test]
fn a_file_that_takes_too_long_to_compile_keeps_the_old_policy() {
    crate::harness::run(async {
        let deployment = limited(2, PLENTY).await;
        deployment.deploy(&BOMB);
        let why = async || deployment.status().await["last_error"].as_str().unwrap_or_default().to_owned();
        eventually("the file is refused", async || why().await.contains("engine.compile_time_s")).await;
        assert_eq!(deployment.status().await["generation"], 1);
    });
}

#[test]
fn components_are_compiled_one_after_the_other_and_few_wait() {
    crate::harness::run(async {
        let deployment = limited(2, PLENTY).await;
        let mut pushes = vec![pushing(&deployment, "default", &BOMB)];
        compiler(&deployment.proxy).await;
        // Four wait.
        pushes.extend((0..5).map(|number| pushing(&deployment, "other", &variant(&RENAMED, number))));
        let mut most = 0;
        while !pushes.iter().all(JoinHandle::is_finished) {
            most = most.max(children(deployment.proxy.pid()).len());
            pause_ms(5).await;
        }
        assert_eq!(most, 1, "the most processes that compiled at once");
        let mut answers = Vec::new();
        for push in pushes {
            answers.push(push.await.unwrap());
        }
        assert_eq!(answers.remove(0).status, 422, "it is the one that takes too long");
        let (overloaded, others): (Vec<_>, Vec<_>) =
            answers.into_iter().partition(|answer| answer.slug() == "overloaded");
        let [overloaded] = &overloaded[..] else { panic!("{} found no place to wait", overloaded.len()) };
        assert_eq!(overloaded.status, 503);
        assert!(overloaded.text.contains("another policy is being compiled"), "{}", overloaded.text);
        // Those that were compiled at once compete to go live.
        assert!(others.iter().all(|answer| [200, 409].contains(&answer.status)));
        assert_eq!(compilations(&deployment, "busy").await, 1.0);
        assert_eq!(compilations(&deployment, "compiled").await, 1.0 + 4.0, "at the start, and then");
    });
}

#[test]
fn a_component_that_is_pushed_twice_at_once_is_compiled_once() {
    crate::harness::run(async {
        let deployment = limited(10, PLENTY).await;
        let before = compilations(&deployment, "compiled").await;
        let component = variant(&RENAMED, 7);
        let pushes = ["default", "other"].map(|name| pushing(&deployment, name, &component));
        for push in pushes {
            let answer = push.await.unwrap();
            assert_eq!(answer.status, 200, "{}", answer.text);
        }
        assert_eq!(compilations(&deployment, "compiled").await, before + 1.0);
    });
}

#[test]
fn a_killed_proxy_leaves_no_process_that_compiles() {
    crate::harness::run(async {
        let mut deployment = limited(60, PLENTY).await;
        let push = pushing(&deployment, "default", &BOMB);
        let compiler = compiler(&deployment.proxy).await;
        pause_ms(300).await;
        assert!(!has_ended(compiler), "it compiles");
        deployment.proxy.kill();
        let killed = Instant::now();
        eventually("the compiler ends", async || has_ended(compiler)).await;
        assert!(killed.elapsed() < Duration::from_secs(1), "{:?}", killed.elapsed());
        push.abort();
    });
}

#[test]
fn a_stopped_proxy_does_not_wait_for_the_compiler() {
    crate::harness::run(async {
        let mut deployment = limited(60, PLENTY).await;
        let push = pushing(&deployment, "default", &BOMB);
        let compiler = compiler(&deployment.proxy).await;
        let stopped = Instant::now();
        deployment.proxy.signal(Signal::TERM);
        push.abort();
        assert_eq!(deployment.proxy.ended().await, Some(0));
        assert!(stopped.elapsed() < Duration::from_secs(20), "{:?}", stopped.elapsed());
        eventually("the compiler ends", async || has_ended(compiler)).await;
    });
}

#[test]
fn a_killed_compiler_is_reported_and_the_next_component_is_compiled() {
    crate::harness::run(async {
        let deployment = limited(60, PLENTY).await;
        let push = pushing(&deployment, "default", &BOMB);
        let compiler = compiler(&deployment.proxy).await;
        pause_ms(300).await;
        signal(compiler, Signal::KILL);
        let answer = push.await.unwrap();
        assert_eq!((answer.status, answer.slug()), (422, "refused"), "{}", answer.text);
        assert!(answer.text.contains("has ended too early (signal: 9"), "{}", answer.text);
        assert_eq!(compilations(&deployment, "crashed").await, 1.0);
        deployment.push(&variant(&RENAMED, 1)).await;
    });
}

#[test]
fn policy_check_has_the_limits_of_a_proxy() {
    let dir = folder();
    let file = dir.path().join("bomb.wasm");
    fs::write(&file, &*BOMB).unwrap();
    let out = lockkeeper().args(["policy", "check"]).arg(&file).output().unwrap();
    let error = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(6), "{error}");
    assert!(error.contains("`engine.compile_"), "{error}");
}

#[test]
fn a_component_that_was_compiled_before_is_loaded_from_the_cache() {
    crate::harness::run(async {
        let (url, dir) = (database(Kind::Mysql).await, folder());
        deploy(dir.path(), &RENAMED);
        let cache = dir.path().join("cache");
        let more = format!("[engine]\ncache_dir = \"{}\"\n", cache.display());
        // How often the policy was compiled and loaded from the cache, in a proxy that starts and decides.
        let counts = async || {
            let proxy = start(&url, dir.path(), &more).await;
            let lease = proxy.client().lease(&fresh("cached"), 5_000).await;
            assert!(keys(&lease)[0].starts_with("x/"), "{lease}");
            released(&proxy.client(), &lease).await;
            let count = async |outcome: &str| {
                let label = format!("outcome=\"{outcome}\"");
                proxy.metric("lockkeeper_policy_compilations_total", &[&label]).await
            };
            (count("compiled").await, count("from_cache").await)
        };
        assert_eq!(counts().await, (1.0, 0.0));
        assert_eq!(counts().await, (0.0, 1.0));
        let files: Vec<_> = fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path()).collect();
        let [file] = &files[..] else { panic!("{files:?}") };
        let mut damaged = fs::read(file).unwrap();
        let middle = damaged.len() / 2;
        damaged[middle] ^= 1;
        fs::write(file, damaged).unwrap();
        assert_eq!(counts().await, (1.0, 0.0), "a damaged file is not loaded");
        assert_eq!(counts().await, (0.0, 1.0), "it was replaced");
    });
}

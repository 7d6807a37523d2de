//! Core modules that become components, and what their imports and memories do in a call.

use super::*;

/// A module with these imports and parts, and what a policy needs: the hook `naming`, whose plan is made by this code. It ends with the
/// address of the answer; 64 has that of a refusal, whose reason is the 8 bytes at 16.
fn module(imports: &str, parts: &str, plan: &str) -> Vec<u8> {
    let text = format!(
        r#"(module
            {imports}
            (memory $main (export "memory") 1)
            {parts}
            (global $next (mut i32) (i32.const 1024))
            (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32)
                (local.set 0 (global.get $next))
                (global.set $next
                    (i32.add (global.get $next) (i32.and (i32.add (local.get 3) (i32.const 7)) (i32.const -8))))
                (local.get 0))
            (func $say (param $at i32) (param $letter i32)
                (i32.store8 (i32.add (i32.const 16) (local.get $at)) (i32.add (i32.const 65) (local.get $letter))))
            (func (export "lockkeeper:policy/naming@0.1.0#plan") (param i32) (result i32)
                {plan}
                (i32.const 64))
            (data (i32.const 16) "--------")
            (data (i32.const 64) "\01\00\00\00\10\00\00\00\08\00\00\00"))"#
    );
    wat::parse_str(text).unwrap()
}

fn refused(module: &[u8], words: &[&str]) {
    let sentence = encode(module).unwrap_err().to_string();
    for word in words {
        assert!(sentence.contains(word), "`{word}` is not in: {sentence}");
    }
}

/// What the policy says to a request.
fn says(module: &[u8]) -> Result<String, PlanError> {
    let component = encode(module).unwrap();
    let policy = load_file("module", &component, &Map::new(), &ENGINE, &Limits::default()).unwrap();
    match policy.plan(&request("orders/42")) {
        Err(PlanError::Refused { reason }) => Ok(reason),
        Err(fault) => Err(fault),
        Ok(plan) => panic!("{plan:?}"),
    }
}

#[test]
fn a_module_becomes_a_component_with_the_hooks_that_it_exports() {
    form::check(&encode(&module("", "", "")).unwrap(), &EngineLimits::default()).unwrap();
    let reads = r#"(func (export "lockkeeper:policy/reads@0.1.0#plan-reads") (param i32 i32) (result i32) (i32.const 128))"#;
    let both = encode(&module("", reads, "")).unwrap();
    let has = |name: &[u8]| both.windows(name.len()).any(|part| part == name);
    assert!(has(b"lockkeeper:policy/reads@0.1.0") && has(b"lockkeeper:policy/naming@0.1.0"));
    assert!(!has(b"lockkeeper:policy/fairness@0.1.0"));
    assert_eq!(says(&module("", "", "")).unwrap(), "--------");
}

#[test]
fn what_a_module_lacks_is_named() {
    refused(b"<html>", &["not a WebAssembly module"]);
    refused(b"\0asm", &["not a WebAssembly module"]);
    refused(&encode(&module("", "", "")).unwrap(), &["component already", "policy check"]);
    let wat = |text: &str| wat::parse_str(text).unwrap();
    refused(&wat("(module)"), &["`lockkeeper:policy/naming@0.1.0#plan`", "exports nothing"]);
    let plan =
        r#"(func (export "lockkeeper:policy/naming@0.1.0#plan") (param i32) (result i32) (i32.const 0))"#;
    refused(&wat(&format!("(module {plan})")), &["`memory`", "naming"]);
    refused(&wat(&format!("(module {plan} (memory (export \"memory\") 1))")), &["`cabi_realloc`"]);
    refused(&module("", r#"(func (export "_start"))"#, ""), &["`_start`", "reactor"]);
    let unknown = r#"(func (export "lockkeeper:policy/naming@0.2.0#plan"))"#;
    refused(&module("", unknown, ""), &["naming@0.2.0", "naming@0.1.0#plan", "reads@0.1.0#plan-reads"]);
    let other_type =
        r#"(func (export "lockkeeper:policy/reads@0.1.0#plan-reads") (result i32) (i32.const 0))"#;
    refused(&module("", other_type, ""), &["does not fit", "plan-reads"]);
}

#[test]
fn imports_that_nothing_provides_are_named() {
    refused(
        &module(r#"(import "env" "getenv" (func (param i32) (result i32)))"#, "", ""),
        &["`getenv`", "`env`"],
    );
    let odd = r#"(import "wasi_snapshot_preview1" "odd" (func (result f32)))"#;
    refused(&module(odd, "", ""), &["`odd`", "`wasi_snapshot_preview1`"]);
    refused(&module(r#"(import "env" "memory" (memory 1))"#, "", ""), &["`memory`", "`env`"]);
}

#[test]
fn functions_of_wasi_find_nothing_and_nothing_that_changes() {
    let import = |name: &str, params: &str| {
        format!(r#"(import "wasi_snapshot_preview1" "{name}" (func ${name} (param {params}) (result i32)))"#)
    };
    let imports = [
        import("clock_time_get", "i32 i64 i32"),
        import("random_get", "i32 i32"),
        import("fd_prestat_get", "i32 i32"),
        import("environ_sizes_get", "i32 i32"),
        import("environ_get", "i32 i32"),
    ];
    // 8 and 52 are "bad file descriptor" and "no such function"; an answer of 0 is an A.
    let plan = r#"
        (call $say (i32.const 0) (call $clock_time_get (i32.const 0) (i64.const 1) (i32.const 512)))
        (call $say (i32.const 1) (i32.load (i32.const 512)))
        (call $say (i32.const 2) (call $random_get (i32.const 512) (i32.const 8)))
        (call $say (i32.const 3) (i32.load (i32.const 512)))
        (call $say (i32.const 4) (call $fd_prestat_get (i32.const 3) (i32.const 512)))
        (i32.store (i32.const 512) (i32.const 7))
        (call $say (i32.const 5) (call $environ_sizes_get (i32.const 512) (i32.const 516)))
        (call $say (i32.const 6) (i32.load (i32.const 512)))
        (call $say (i32.const 7) (call $environ_get (i32.const 512) (i32.const 516)))"#;
    assert_eq!(says(&module(&imports.concat(), "", plan)).unwrap(), "uAuAIAAA");
}

#[test]
fn a_module_that_ends_its_program_has_a_fault() {
    let import = r#"(import "wasi_snapshot_preview1" "proc_exit" (func $proc_exit (param i32)))"#;
    let long_names = r#"(if (i32.gt_u (i32.load (i32.add (local.get 0) (i32.const 12))) (i32.const 100))
        (then (call $proc_exit (i32.const 0))))"#;
    let component = encode(&module(import, "", long_names)).unwrap();
    let policy = load_file("module", &component, &Map::new(), &ENGINE, &Limits::default()).unwrap();
    assert!(matches!(policy.plan(&request("a")), Err(PlanError::Refused { .. })));
    let Err(PlanError::Fault(fault)) = policy.plan(&request(&"a".repeat(101))) else { panic!("it goes on") };
    assert_eq!(fault.kind, FaultKind::Trap);
}

#[test]
fn the_memories_of_a_call_share_its_limit() {
    assert_eq!(EngineLimits::default().memory_bytes, 256 * 65_536);
    let memories = "(memory $other 1) (memory $full 1 1)";
    let grow = |at: usize, memory: &str, pages: usize| {
        // A if it grows, B if not.
        format!(
            "(call $say (i32.const {at}) (i32.eq (memory.grow ${memory} (i32.const {pages})) (i32.const -1)))"
        )
    };
    let plan = [
        // More than its own maximum: it does not count.
        grow(0, "full", 100),
        grow(1, "full", 100),
        grow(2, "other", 199),
        // There are 202 pages, and 256 are allowed.
        grow(3, "main", 55),
        grow(4, "main", 54),
        grow(5, "other", 1),
        grow(6, "main", 1),
        grow(7, "main", 0),
    ];
    assert_eq!(says(&module("", memories, &plan.concat())).unwrap(), "BBABABBA");
    let fault = format!("{} (unreachable)", plan[2..4].concat());
    let component = encode(&module("", memories, &fault)).unwrap();
    let refused = load_file("module", &component, &Map::new(), &ENGINE, &Limits::default()).map(|_| ());
    let Err(Rejection::SelfTest { fault, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(fault.kind, FaultKind::Memory);
}

#[test]
fn the_tables_of_a_call_share_their_limit() {
    let tables = "(table $one 5000 funcref) (table $two 5000 funcref)";
    let grow =
        "(call $say (i32.const 0) (i32.eq (table.grow $one (ref.null func) (i32.const 1)) (i32.const -1)))";
    assert_eq!(says(&module("", tables, grow)).unwrap(), "B-------");
    let smaller = tables.replacen("5000", "4999", 1);
    assert_eq!(says(&module("", &smaller, grow)).unwrap(), "A-------");
}

//! Checks of a component that do not run it.

use wasmparser::{Parser, Payload};
use wit_component::DecodedWasm;
use wit_parser::{Resolve, WorldId, WorldItem, WorldKey};

use super::{Hook, Rejection};
use crate::config::EngineLimits;

const WIT: &str = include_str!("../../../sdk/wit/policy.wit");
const PAGE_BYTES: u64 = 65_536;

/// Checks size, kind, memories, imports and exports.
pub fn check(component: &[u8], limits: &EngineLimits) -> Result<(), Rejection> {
    let (bytes, max) = (component.len(), limits.max_component_bytes);
    if bytes > max {
        return Err(Rejection::TooLarge { max });
    }
    kind(component)?;
    let broken = |detail: String| Rejection::Broken { detail };
    memories(component, limits)?;
    let decoded = wit_component::decode(component).map_err(|error| broken(format!("{error:#}")))?;
    let DecodedWasm::Component(resolve, world) = decoded else {
        return Err(broken("it holds interfaces and no code".to_owned()));
    };
    imports(&resolve, world)?;
    exports(component, &resolve, world)
}

fn kind(bytes: &[u8]) -> Result<(), Rejection> {
    let Some(version) = bytes.strip_prefix(b"\0asm").and_then(|rest| rest.get(..4)) else {
        let start = String::from_utf8_lossy(&bytes[..bytes.len().min(4)]).into_owned();
        return Err(Rejection::NotWasm { start: format!("{start:?}") });
    };
    // The second half is the layer: 0 is a module, 1 a component.
    if version[2..] == [0, 0] { Err(Rejection::CoreModule) } else { Ok(()) }
}

/// Checks the memories, because the pool would refuse them with a less helpful message. Their initial sizes count.
fn memories(component: &[u8], limits: &EngineLimits) -> Result<(), Rejection> {
    let mut memories = 0;
    for payload in Parser::new(0).parse_all(component) {
        let payload = payload.map_err(|error| Rejection::Broken { detail: error.to_string() })?;
        let Payload::MemorySection(section) = payload else { continue };
        for memory in section {
            let memory = memory.map_err(|error| Rejection::Broken { detail: error.to_string() })?;
            let page = memory.page_size_log2.map_or(PAGE_BYTES, |log2| 1 << log2.min(16));
            let bytes = memory.initial.saturating_mul(page);
            if bytes > limits.memory_bytes as u64 {
                return Err(Rejection::TooMuchMemory { bytes, max: limits.memory_bytes });
            }
            memories += 1;
        }
    }
    if memories > 1 { Err(Rejection::Memories { memories }) } else { Ok(()) }
}

fn imports(resolve: &Resolve, world: WorldId) -> Result<(), Rejection> {
    for (key, item) in &resolve.worlds[world].imports {
        // Types cannot be called.
        let harmless = match item {
            WorldItem::Interface { id, .. } => resolve.interfaces[*id].functions.is_empty(),
            WorldItem::Type { .. } => true,
            WorldItem::Function(_) => false,
        };
        if harmless {
            continue;
        }
        let import = name(resolve, key);
        return Err(if import.starts_with("wasi:") {
            Rejection::Wasi { import }
        } else {
            Rejection::Import { import }
        });
    }
    Ok(())
}

fn exports(component: &[u8], resolve: &Resolve, world: WorldId) -> Result<(), Rejection> {
    let exported: Vec<String> = resolve.worlds[world].exports.keys().map(|key| name(resolve, key)).collect();
    let has = |interface: &str| {
        // 0.1.1 may add items to 0.1.0 that old proxies need not know.
        let prefix = format!("lockkeeper:policy/{interface}@0.1.");
        exported.iter().any(|export| export.starts_with(&prefix))
    };
    if !has("naming") {
        let exports = if exported.is_empty() { "nothing".to_owned() } else { exported.join(", ") };
        return Err(Rejection::WrongWorld { exports });
    }
    let interfaces = Hook::ALL.into_iter().map(|hook| hook.definition().interface);
    interfaces.filter(|interface| has(interface)).try_for_each(|interface| types(component, interface))
}

/// Checks that the exported `interface` has the functions and records that the proxy knows.
fn types(component: &[u8], interface: &str) -> Result<(), Rejection> {
    let broken = |error: &dyn std::fmt::Display| Rejection::Broken { detail: error.to_string() };
    let mut ours = Resolve::default();
    let package = ours.push_str("policy.wit", WIT).map_err(|error| broken(&error))?;
    // The whole world without the other hooks, because a policy need not export them.
    let world = ours.select_world(&[package], Some("policy")).map_err(|error| broken(&error))?;
    let ours_too = ours.clone();
    let wanted = format!("lockkeeper:policy/{interface}@");
    ours.worlds[world].exports.retain(|key, _| name(&ours_too, key).starts_with(&wanted));
    wit_component::targets(&ours, world, component).map_err(|error| Rejection::WrongTypes {
        interface: interface.to_owned(),
        detail: error.root_cause().to_string(),
    })
}

fn name(resolve: &Resolve, key: &WorldKey) -> String {
    resolve.name_world_key(key)
}

//! Checks of a component that do not run it.

use wasmparser::{Instance, Parser, Payload};
use wit_component::DecodedWasm;
use wit_parser::{Resolve, WorldId, WorldItem, WorldKey};

use super::budget::{MAX_CORE_INSTANCES, MAX_MEMORIES, MAX_TABLES};
use super::{Hook, Rejection};
use crate::config::EngineLimits;

pub(super) const WIT: &str = include_str!("../../../sdk/wit/policy.wit");
const PAGE_BYTES: u64 = 65_536;

/// Checks size, kind, core modules, memories, tables, imports and exports.
pub fn check(component: &[u8], limits: &EngineLimits) -> Result<(), Rejection> {
    let (bytes, max) = (component.len(), limits.max_component_bytes);
    if bytes > max {
        return Err(Rejection::TooLarge { max });
    }
    kind(component)?;
    let broken = |detail: String| Rejection::Broken { detail };
    Parts::of(component)?.check(limits)?;
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

/// What the pool of instances has to provide for a component.
#[derive(Default)]
struct Parts {
    core_instances: u32,
    memories: u32,
    tables: u32,
    /// The initial sizes of all memories together.
    memory_bytes: u64,
}

impl Parts {
    fn of(component: &[u8]) -> Result<Parts, Rejection> {
        let mut parts = Parts::default();
        for payload in Parser::new(0).parse_all(component) {
            payload
                .and_then(|payload| parts.add(payload))
                .map_err(|error| Rejection::Broken { detail: error.to_string() })?;
        }
        Ok(parts)
    }

    fn add(&mut self, payload: Payload<'_>) -> wasmparser::Result<()> {
        match payload {
            Payload::MemorySection(section) => {
                for memory in section {
                    let memory = memory?;
                    let page = memory.page_size_log2.map_or(PAGE_BYTES, |log2| 1 << log2.min(16));
                    let bytes = memory.initial.saturating_mul(page);
                    self.memory_bytes = self.memory_bytes.saturating_add(bytes);
                    self.memories += 1;
                }
            }
            Payload::TableSection(section) => self.tables = self.tables.saturating_add(section.count()),
            Payload::InstanceSection(section) => {
                for instance in section {
                    self.core_instances += u32::from(matches!(instance?, Instance::Instantiate { .. }));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Compares the parts with the limits, because the pool would refuse them with a less helpful message. The pool counts the
    /// memories and tables of a module once for each of its instances, and so do the limits of a call.
    fn check(&self, limits: &EngineLimits) -> Result<(), Rejection> {
        let counts = [
            ("core instances", self.core_instances, MAX_CORE_INSTANCES),
            ("memories", self.memories, MAX_MEMORIES),
            ("tables", self.tables, MAX_TABLES),
        ];
        for (what, count, max) in counts {
            if count > max {
                return Err(Rejection::TooMany { what: what.to_owned(), count, max });
            }
        }
        if self.memory_bytes > limits.memory_bytes as u64 {
            return Err(Rejection::TooMuchMemory { bytes: self.memory_bytes, max: limits.memory_bytes });
        }
        Ok(())
    }
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
    let (ours, world) =
        world(|ours| ours == interface).map_err(|error| Rejection::Broken { detail: error.to_string() })?;
    wit_component::targets(&ours, world, component).map_err(|error| Rejection::WrongTypes {
        interface: interface.to_owned(),
        detail: error.root_cause().to_string(),
    })
}

/// The interface of policies, and its world with the hooks whose interfaces are wanted. A policy need not export all.
pub(super) fn world(is_wanted: impl Fn(&str) -> bool) -> anyhow::Result<(Resolve, WorldId)> {
    let mut ours = Resolve::default();
    let package = ours.push_str("policy.wit", WIT)?;
    let world = ours.select_world(&[package], Some("policy"))?;
    let of = |key: &WorldKey| match key {
        WorldKey::Name(name) => name.clone(),
        WorldKey::Interface(id) => ours.interfaces[*id].name.clone().unwrap_or_default(),
    };
    let mut exports = ours.worlds[world].exports.clone();
    exports.retain(|key, _| is_wanted(&of(key)));
    ours.worlds[world].exports = exports;
    Ok((ours, world))
}

fn name(resolve: &Resolve, key: &WorldKey) -> String {
    resolve.name_world_key(key)
}

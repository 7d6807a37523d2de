//! Makes a component of a core module that any language's compiler has made: `lockkeeper policy build MODULE.wasm`.
//!
//! The module exports the hooks by the names of the component model's canonical ABI, as the bindings of wit-bindgen do. A
//! policy has no system to call. So imports of WASI get stubs: nothing is there, and each call says so, the same way each time.

use std::borrow::Cow;

use wasm_encoder as enc;
use wasmparser::{CompositeInnerType, ExternalKind, FuncType, Parser, Payload, TypeRef, ValType};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};

use super::{Hook, form};

/// The interface of WASI that modules import functions of. Components of later versions are refused by their checks.
const WASI: &str = "wasi_snapshot_preview1";
/// Answers of WASI functions: of a descriptor that is not open, and of a function that does not exist.
const EBADF: i32 = 8;
const ENOSYS: i32 = 52;
/// What the canonical ABI needs of a module beside its hooks.
const MEMORY: &str = "memory";
const REALLOC: &str = "cabi_realloc";

/// Why a core module cannot become a component.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// The file is no core module.
    #[error("this is not a WebAssembly module: {detail}")]
    NotAModule {
        /// The error of the parser.
        detail: String,
    },
    /// The file is a component already.
    #[error("this is a component already: check it with `lockkeeper policy check`")]
    Component,
    /// An import is neither WASI nor anything else that a policy may use.
    #[error(
        "the module imports `{name}` of `{module}`, which nothing provides: a policy decides from its arguments alone; link the function into the module, or remove its use"
    )]
    Import {
        /// The module that is imported from.
        module: String,
        /// The name of the import.
        name: String,
    },
    /// The module is a program with a `main`.
    #[error(
        "the module is a program that runs once (it exports `_start`): link it as a library, for clang with `-mexec-model=reactor`, or with `-nostdlib -Wl,--no-entry`"
    )]
    Program,
    /// The module lacks an export.
    #[error("the module does not export `{name}`, {why}; it exports {exports}")]
    Missing {
        /// The name of the export.
        name: String,
        /// What the export is for.
        why: &'static str,
        /// The names of its exports, or `nothing`.
        exports: String,
    },
    /// The module exports a function of the policy interface that the interface does not have.
    #[error(
        "the module exports `{name}`, which this version does not know; the functions of a policy are {known}"
    )]
    UnknownExport {
        /// The name of the export.
        name: String,
        /// The names of all hooks.
        known: String,
    },
    /// The functions of the module do not have the types of the interface.
    #[error("the module does not fit the interface of policies: {detail}")]
    Unfit {
        /// The error of the encoder.
        detail: String,
    },
}

/// Makes a component of a core module. WASI functions that the module imports are stubbed.
///
/// # Errors
/// Why the module cannot be a policy, with the name of the import or export.
pub fn encode(module: &[u8]) -> Result<Vec<u8>, EncodeError> {
    let shape = Shape::of(module)?;
    let stubs = shape.stubs()?;
    let hooks = shape.hooks()?;
    let unfit = |error: anyhow::Error| EncodeError::Unfit { detail: format!("{error:#}") };
    let mut module = Cow::Borrowed(module);
    if !shape.typed {
        let (resolve, world) = form::world(|interface| hooks.contains(&interface)).map_err(unfit)?;
        embed_component_metadata(module.to_mut(), &resolve, world, StringEncoding::UTF8).map_err(unfit)?;
    }
    let mut encoder = ComponentEncoder::default().validate(true).module(&module).map_err(unfit)?;
    if let Some(stubs) = stubs {
        encoder = encoder.adapter(WASI, &stubs).map_err(unfit)?;
    }
    encoder.encode().map_err(unfit)
}

/// The imports and exports of a core module.
#[derive(Default)]
struct Shape {
    imports: Vec<Import>,
    /// The names of exported functions, and of other exports.
    functions: Vec<String>,
    others: Vec<String>,
    /// Whether the module says which component it is to become, as the object files of wit-bindgen make it.
    typed: bool,
}

struct Import {
    module: String,
    name: String,
    /// The type, if it is a function.
    function: Option<FuncType>,
}

impl Shape {
    fn of(module: &[u8]) -> Result<Shape, EncodeError> {
        if !module.starts_with(b"\0asm") {
            return Err(EncodeError::NotAModule { detail: "it does not begin with `\\0asm`".to_owned() });
        }
        if Parser::is_component(module) {
            return Err(EncodeError::Component);
        }
        Shape::read(module).map_err(|error| EncodeError::NotAModule { detail: error.to_string() })
    }

    fn read(module: &[u8]) -> wasmparser::Result<Shape> {
        let mut shape = Shape::default();
        let mut types = Vec::new();
        for payload in Parser::new(0).parse_all(module) {
            match payload? {
                Payload::TypeSection(section) => {
                    for group in section {
                        types.extend(group?.into_types().map(|ty| match ty.composite_type.inner {
                            CompositeInnerType::Func(function) => Some(function),
                            _ => None,
                        }));
                    }
                }
                Payload::ImportSection(section) => {
                    for import in section.into_imports() {
                        let import = import?;
                        let function = match import.ty {
                            TypeRef::Func(at) | TypeRef::FuncExact(at) => {
                                types.get(at as usize).cloned().flatten()
                            }
                            _ => None,
                        };
                        let (module, name) = (import.module.to_owned(), import.name.to_owned());
                        shape.imports.push(Import { module, name, function });
                    }
                }
                Payload::ExportSection(section) => {
                    for export in section {
                        let export = export?;
                        let names = match export.kind {
                            ExternalKind::Func | ExternalKind::FuncExact => &mut shape.functions,
                            _ => &mut shape.others,
                        };
                        names.push(export.name.to_owned());
                    }
                }
                Payload::CustomSection(section) => {
                    shape.typed |= section.name().starts_with("component-type");
                }
                _ => {}
            }
        }
        Ok(shape)
    }

    /// The interfaces of the hooks that the module exports.
    fn hooks(&self) -> Result<Vec<&'static str>, EncodeError> {
        let exported = |name: &String| self.functions.contains(name);
        if exported(&"_start".to_owned()) {
            return Err(EncodeError::Program);
        }
        let known: Vec<(&str, String)> =
            Hook::ALL.into_iter().map(|hook| (hook.definition().interface, export(hook))).collect();
        let of_policy = |name: &&String| name.starts_with("lockkeeper:policy/");
        if let Some(name) = self
            .functions
            .iter()
            .filter(of_policy)
            .find(|name| !known.iter().any(|(_, known)| known == *name))
        {
            let known: Vec<String> = known.into_iter().map(|(_, name)| format!("`{name}`")).collect();
            return Err(EncodeError::UnknownExport { name: name.clone(), known: known.join(", ") });
        }
        let plan = export(Hook::Plan);
        if !exported(&plan) {
            return Err(self.missing(&plan, "the function that makes a plan"));
        }
        if !self.others.iter().any(|name| name == MEMORY) {
            return Err(self.missing(MEMORY, "in which the arguments of a call are"));
        }
        if !exported(&REALLOC.to_owned()) {
            return Err(self.missing(REALLOC, "which allocates the arguments of a call"));
        }
        Ok(known.into_iter().filter(|(_, name)| exported(name)).map(|(interface, _)| interface).collect())
    }

    fn missing(&self, name: &str, why: &'static str) -> EncodeError {
        let exports: Vec<String> =
            self.functions.iter().chain(&self.others).map(|name| format!("`{name}`")).collect();
        let exports = if exports.is_empty() { "nothing".to_owned() } else { exports.join(", ") };
        EncodeError::Missing { name: name.to_owned(), why, exports }
    }

    /// A module with a stub for each import of WASI, if there are any.
    fn stubs(&self) -> Result<Option<Vec<u8>>, EncodeError> {
        let mut stubs = Stubs::default();
        for Import { module, name, function } in &self.imports {
            let added = module == WASI && function.as_ref().is_some_and(|ty| stubs.add(name, ty));
            if !added {
                return Err(EncodeError::Import { module: module.clone(), name: name.clone() });
            }
        }
        Ok((stubs.count > 0).then(|| stubs.finish()))
    }
}

/// The name under which a core module exports a hook.
fn export(hook: Hook) -> String {
    let definition = hook.definition();
    format!("{}#{}", definition.export(), definition.function)
}

/// A core module with functions of WASI in a world where there is nothing: no arguments, no variables, no files, no clock, and
/// no random numbers. wit-component links it to the memory of the policy's module.
#[derive(Default)]
struct Stubs {
    types: enc::TypeSection,
    functions: enc::FunctionSection,
    exports: enc::ExportSection,
    code: enc::CodeSection,
    count: u32,
}

impl Stubs {
    /// Adds a function. `false` if WASI has no function of this type.
    fn add(&mut self, name: &str, ty: &FuncType) -> bool {
        let value = |ty: &ValType| match ty {
            ValType::I32 => Some(enc::ValType::I32),
            ValType::I64 => Some(enc::ValType::I64),
            _ => None,
        };
        let Some(params) = ty.params().iter().map(value).collect::<Option<Vec<_>>>() else { return false };
        let Some(results) = ty.results().iter().map(value).collect::<Option<Vec<_>>>() else { return false };
        let mut body = enc::Function::new([]);
        let mut code = body.instructions();
        match (name, &params[..], &results[..]) {
            // It ends the program, so the call of the policy ends.
            ("proc_exit", _, []) => {
                code.unreachable();
            }
            (
                "args_sizes_get" | "environ_sizes_get",
                [enc::ValType::I32, enc::ValType::I32],
                [enc::ValType::I32],
            ) => {
                let word = enc::MemArg { offset: 0, align: 2, memory_index: 0 };
                code.local_get(0).i32_const(0).i32_store(word);
                code.local_get(1).i32_const(0).i32_store(word);
                code.i32_const(0);
            }
            ("args_get" | "environ_get" | "sched_yield", _, [enc::ValType::I32]) => {
                code.i32_const(0);
            }
            // wasi-libc ends the program if the first of these does not say that there is no such descriptor.
            (name, _, [enc::ValType::I32]) if name.starts_with("fd_") => {
                code.i32_const(EBADF);
            }
            (_, _, [enc::ValType::I32]) => {
                code.i32_const(ENOSYS);
            }
            _ => return false,
        }
        code.end();
        self.types.ty().function(params, results);
        self.functions.function(self.count);
        self.exports.export(name, enc::ExportKind::Func, self.count);
        self.code.function(&body);
        self.count += 1;
        true
    }

    fn finish(self) -> Vec<u8> {
        let mut imports = enc::ImportSection::new();
        let memory = enc::MemoryType {
            minimum: 0,
            maximum: None,
            memory64: false,
            shared: false,
            page_size_log2: None,
        };
        imports.import("env", MEMORY, memory);
        let mut module = enc::Module::new();
        module
            .section(&self.types)
            .section(&imports)
            .section(&self.functions)
            .section(&self.exports)
            .section(&self.code);
        module.finish()
    }
}

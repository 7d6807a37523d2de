//! Types for TypeScript, as componentize-qjs represents the types of a WIT package in JavaScript.

use std::fmt::Write as _;

use wit_bindgen_core::wit_parser::{
    Docs, Function, Interface, PackageId, Resolve, Type, TypeDefKind, TypeId, TypeOwner,
};

/// The types of all interfaces: a namespace for each. Those with functions have an interface `Hook`.
pub fn types(resolve: &Resolve, package: PackageId) -> String {
    let mut text = "// Generated from wit/policy.wit.\n".to_owned();
    for (name, id) in &resolve.packages[package].interfaces {
        let interface = &resolve.interfaces[*id];
        documented(&mut text, "\n", "", &interface.docs);
        _ = writeln!(text, "export namespace {} {{", camel(name));
        for (name, id) in &interface.types {
            defined(&mut text, resolve, name, *id);
        }
        hook(&mut text, resolve, interface);
        text += "}\n";
    }
    text
}

fn defined(text: &mut String, resolve: &Resolve, name: &str, id: TypeId) {
    let definition = &resolve.types[id];
    let name = pascal(name);
    // A type of another interface.
    if let TypeDefKind::Type(Type::Id(of)) = &definition.kind {
        _ = writeln!(text, "  type {name} = {};", named(resolve, *of, true));
        return;
    }
    documented(text, "", "  ", &definition.docs);
    match &definition.kind {
        TypeDefKind::Record(record) => {
            _ = writeln!(text, "  interface {name} {{");
            for field in &record.fields {
                documented(text, "", "    ", &field.docs);
                let optional = if is_option(resolve, &field.ty) { "?" } else { "" };
                _ = writeln!(text, "    {}{optional}: {};", camel(&field.name), of(resolve, &field.ty));
            }
            *text += "  }\n";
        }
        TypeDefKind::Variant(variant) => {
            let case = |name: &str, ty: Option<&Type>| match ty {
                None => format!("{{ tag: \"{name}\" }}"),
                Some(ty) => format!("{{ tag: \"{name}\"; val: {} }}", of(resolve, ty)),
            };
            let cases: Vec<String> =
                variant.cases.iter().map(|one| case(&one.name, one.ty.as_ref())).collect();
            _ = writeln!(text, "  type {name} = {};", cases.join(" | "));
        }
        TypeDefKind::Enum(choices) => {
            let cases: Vec<String> = choices.cases.iter().map(|case| format!("\"{}\"", case.name)).collect();
            _ = writeln!(text, "  type {name} = {};", cases.join(" | "));
        }
        other => panic!("{name} is a {}", other.as_str()),
    }
}

fn hook(text: &mut String, resolve: &Resolve, interface: &Interface) {
    if interface.functions.is_empty() {
        return;
    }
    *text += "  interface Hook {\n";
    for (name, function) in &interface.functions {
        documented(text, "", "    ", &function.docs);
        let param = |(name, ty): (&str, &Type)| format!("{}: {}", camel(name), of(resolve, ty));
        let params: Vec<String> =
            function.params.iter().map(|param_of| param((param_of.name.as_str(), &param_of.ty))).collect();
        _ = writeln!(text, "    {}({}): {};", camel(name), params.join(", "), result(resolve, function));
    }
    *text += "  }\n";
}

/// What a function returns. It throws what its result has as the error.
fn result(resolve: &Resolve, function: &Function) -> String {
    let Some(ty) = &function.result else { return "void".to_owned() };
    if let Type::Id(id) = ty
        && let TypeDefKind::Result(result) = &resolve.types[*id].kind
    {
        return result.ok.as_ref().map_or("void".to_owned(), |ok| of(resolve, ok));
    }
    of(resolve, ty)
}

fn of(resolve: &Resolve, ty: &Type) -> String {
    match ty {
        Type::Bool => "boolean".to_owned(),
        Type::U8 | Type::U16 | Type::U32 | Type::S32 => "number".to_owned(),
        Type::String => "string".to_owned(),
        Type::Id(id) => match &resolve.types[*id].kind {
            TypeDefKind::List(Type::U8) => "Uint8Array".to_owned(),
            TypeDefKind::List(item) => format!("{}[]", of(resolve, item)),
            TypeDefKind::Option(some) => format!("{} | undefined", of(resolve, some)),
            _ => named(resolve, *id, false),
        },
        other => panic!("{other:?} has no type here yet"),
    }
}

fn is_option(resolve: &Resolve, ty: &Type) -> bool {
    matches!(ty, Type::Id(id) if matches!(resolve.types[*id].kind, TypeDefKind::Option(_)))
}

fn named(resolve: &Resolve, id: TypeId, with_namespace: bool) -> String {
    let definition = &resolve.types[id];
    let name = pascal(definition.name.as_deref().expect("it has a name"));
    match definition.owner {
        TypeOwner::Interface(owner) if with_namespace => {
            let owner = resolve.interfaces[owner].name.as_deref().expect("it has a name");
            format!("{}.{name}", camel(owner))
        }
        _ => name,
    }
}

fn documented(text: &mut String, before: &str, indent: &str, docs: &Docs) {
    *text += before;
    let Some(docs) = &docs.contents else { return };
    let lines: Vec<&str> = docs.lines().map(str::trim).collect();
    match lines[..] {
        [line] => _ = writeln!(text, "{indent}/** {line} */"),
        _ => {
            _ = writeln!(text, "{indent}/**");
            for line in lines {
                _ = writeln!(text, "{}", format!("{indent} * {line}").trim_end());
            }
            _ = writeln!(text, "{indent} */");
        }
    }
}

/// `lock-at-least` is `lockAtLeast`.
fn camel(name: &str) -> String {
    let name = pascal(name);
    let (first, rest) = name.split_at(1);
    first.to_lowercase() + rest
}

fn pascal(name: &str) -> String {
    name.split('-').map(|word| word[..1].to_uppercase() + &word[1..]).collect()
}

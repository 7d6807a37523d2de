use std::sync::OnceLock;

use lockkeeper_builder::Named;

use super::manifest::Manifest;

/// The components that were made.
static COMPONENTS: [OnceLock<Vec<u8>>; 3] = [const { OnceLock::new() }; 3];

/// The component of a policy that the binary carries, by the name behind `builtin:`. The binary carries the core module. The
/// component is made when it is first asked for.
///
/// # Panics
/// If the module is not a policy, or its manifest is invalid. Both are fixed when this crate is built.
pub fn builtin(name: &str) -> Option<&'static [u8]> {
    macro_rules! shipped {
        ($at:literal, $name:literal) => {
            (
                $at,
                include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".wasm")) as &[u8],
                include_str!(concat!("../../../policies/", $name, "/manifest.json")),
            )
        };
    }
    let (at, module, manifest) = match name {
        "default" => shipped!(0, "default"),
        "fair-groups" => shipped!(1, "fair-groups"),
        "backoff" => shipped!(2, "backoff"),
        _ => return None,
    };
    let component = || {
        let component = lockkeeper_builder::component(module).expect("the shipped policies are policies");
        let of = Named { name: name.to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() };
        let manifest = Manifest::written(manifest, Some(&of)).expect("the shipped policies have manifests");
        manifest.annotate(&component).expect("a new component has no manifest")
    };
    Some(COMPONENTS[at].get_or_init(component))
}

/// Whether [`builtin`] has made this component.
pub(super) fn is_builtin(component: &[u8]) -> bool {
    COMPONENTS.iter().filter_map(OnceLock::get).any(|own| own == component)
}

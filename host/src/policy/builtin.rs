use std::sync::OnceLock;

/// The components that were made.
static COMPONENTS: [OnceLock<Vec<u8>>; 3] = [const { OnceLock::new() }; 3];

/// The component of a policy that the binary carries, by the name behind `builtin:`. The binary carries the core module. The
/// component is made when it is first asked for.
///
/// # Panics
/// Where the module is not a policy: the build of this crate has made it.
pub fn builtin(name: &str) -> Option<&'static [u8]> {
    let (at, module): (usize, &[u8]) = match name {
        "default" => (0, include_bytes!(concat!(env!("OUT_DIR"), "/default.wasm"))),
        "fair-groups" => (1, include_bytes!(concat!(env!("OUT_DIR"), "/fair-groups.wasm"))),
        "backoff" => (2, include_bytes!(concat!(env!("OUT_DIR"), "/backoff.wasm"))),
        _ => return None,
    };
    let component = || lockkeeper_builder::component(module).expect("the shipped policies are policies");
    Some(COMPONENTS[at].get_or_init(component))
}

/// Whether [`builtin`] has made this component.
pub(super) fn is_builtin(component: &[u8]) -> bool {
    COMPONENTS.iter().filter_map(OnceLock::get).any(|own| own == component)
}

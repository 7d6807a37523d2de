/// The component of a policy that is built into the binary; `name` is the part after `builtin:`.
pub fn builtin(name: &str) -> Option<&'static [u8]> {
    match name {
        "default" => Some(include_bytes!(concat!(env!("OUT_DIR"), "/default.wasm"))),
        "fair-groups" => Some(include_bytes!(concat!(env!("OUT_DIR"), "/fair-groups.wasm"))),
        "backoff" => Some(include_bytes!(concat!(env!("OUT_DIR"), "/backoff.wasm"))),
        _ => None,
    }
}

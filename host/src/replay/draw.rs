//! Choices that look random and are the same in each run.

/// One of the values, chosen by the number `n`: any of them, and the same one in each run. `None` if there are none.
pub fn drawn<T>(values: &[T], n: u64) -> Option<&T> {
    let mixed = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    values.get(mixed as usize % values.len().max(1))
}

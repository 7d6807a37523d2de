//! Moments on the proxy's clock and on the store's clock. The two types cannot be compared with each other.

/// A moment on the proxy's own clock, in microseconds since the machine started. This clock keeps running while
/// the machine is suspended, and nobody can set it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(pub u64);

/// A moment on the store's clock, in microseconds since 1970 (UTC).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerTime(pub u64);

macro_rules! moment {
    ($name:ident) => {
        impl $name {
            /// The moment `ms` milliseconds later; the largest moment on overflow.
            pub fn plus_ms(self, ms: u32) -> $name {
                $name(self.0.saturating_add(u64::from(ms) * 1_000))
            }

            /// The moment `us` microseconds later; the largest moment on overflow.
            pub fn plus_us(self, us: u64) -> $name {
                $name(self.0.saturating_add(us))
            }

            /// Microseconds from `earlier` to this moment; 0 if this moment is not later.
            pub fn us_since(self, earlier: $name) -> u64 {
                self.0.saturating_sub(earlier.0)
            }

            /// Whole milliseconds from `earlier` to this moment; 0 if this moment is not later.
            pub fn ms_since(self, earlier: $name) -> u32 {
                u32::try_from(self.us_since(earlier) / 1_000).unwrap_or(u32::MAX)
            }
        }
    };
}
moment!(Instant);
moment!(ServerTime);

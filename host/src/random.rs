//! The only source of random numbers: a simulation gives them from its seed.

use rand::Rng;
use rand::distr::uniform::{SampleRange, SampleUniform};
use rand::distr::{Distribution, StandardUniform};

/// Any number, each with the same probability.
pub fn number<T>() -> T
where
    StandardUniform: Distribution<T>,
{
    #[cfg(any(test, feature = "simulation"))]
    if seeded::is_begun() {
        return seeded::with(|seeded| seeded.random());
    }
    rand::random()
}

/// A number of the range, each with the same probability.
pub fn within<T: SampleUniform>(range: impl SampleRange<T>) -> T {
    #[cfg(any(test, feature = "simulation"))]
    if seeded::is_begun() {
        return seeded::with(|seeded| seeded.random_range(range));
    }
    rand::rng().random_range(range)
}

/// Random numbers of the current thread that a seed decides.
#[cfg(any(test, feature = "simulation"))]
pub mod seeded {
    use std::cell::RefCell;

    use rand::SeedableRng;
    use rand::rngs::StdRng;

    thread_local! {
        static SEEDED: RefCell<Option<StdRng>> = const { RefCell::new(None) };
    }

    pub fn begin(seed: u64) {
        SEEDED.set(Some(StdRng::seed_from_u64(seed)));
    }

    pub fn end() {
        SEEDED.set(None);
    }

    pub(super) fn is_begun() -> bool {
        SEEDED.with_borrow(Option::is_some)
    }

    /// # Panics
    /// Where none has begun.
    pub(super) fn with<T>(take: impl FnOnce(&mut StdRng) -> T) -> T {
        SEEDED.with_borrow_mut(|seeded| take(seeded.as_mut().expect("it has begun")))
    }
}

//! The only source of random numbers. In a simulation they follow from its seed.

use rand::Rng;
use rand::distr::uniform::{SampleRange, SampleUniform};
use rand::distr::{Distribution, StandardUniform};

/// A random number of the whole range of its type, uniformly distributed.
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

/// A random number of `range`, uniformly distributed.
///
/// # Panics
/// If the range is empty.
pub fn within<T: SampleUniform>(range: impl SampleRange<T>) -> T {
    #[cfg(any(test, feature = "simulation"))]
    if seeded::is_begun() {
        return seeded::with(|seeded| seeded.random_range(range));
    }
    rand::rng().random_range(range)
}

/// The random numbers of the current thread, if they follow from a seed.
#[cfg(any(test, feature = "simulation"))]
pub mod seeded {
    use std::cell::RefCell;

    use rand::SeedableRng;
    use rand::rngs::StdRng;

    thread_local! {
        static SEEDED: RefCell<Option<StdRng>> = const { RefCell::new(None) };
    }

    /// From now on the random numbers of this thread follow from `seed`.
    pub fn begin(seed: u64) {
        SEEDED.set(Some(StdRng::seed_from_u64(seed)));
    }

    /// Ends the seeded random numbers of this thread.
    pub fn end() {
        SEEDED.set(None);
    }

    pub(super) fn is_begun() -> bool {
        SEEDED.with_borrow(Option::is_some)
    }

    /// # Panics
    /// If no seed was set.
    pub(super) fn with<T>(take: impl FnOnce(&mut StdRng) -> T) -> T {
        SEEDED.with_borrow_mut(|seeded| take(seeded.as_mut().expect("it has begun")))
    }
}

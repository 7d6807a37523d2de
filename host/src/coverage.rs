//! Counts the branches that the search has to take. Nothing is counted outside a simulation.

macro_rules! branches {
    ($($branch:ident $name:literal)*) => {
        /// A branch of the program that the search must not miss.
        #[derive(Clone, Copy)]
        pub enum Branch { $(#[doc = $name] $branch),* }

        impl Branch {
            /// All branches.
            pub const ALL: &[Branch] = &[$(Branch::$branch),*];

            /// What happens there.
            pub fn name(self) -> &'static str {
                match self { $(Branch::$branch => $name),* }
            }
        }
    };
}

branches! {
    CanaryBegins "canary: a version decides for a share of the keys"
    CanaryEnds "canary: it is rolled back"
    Relapses "fleet: a version is rolled back by itself"
    CanaryDecides "canary: it decides about a request"
    FastWritten "fast path: rows are written at once"
    FastUnseen "fast path: a row that is not remembered is taken for a new one"
    FastTold "fast path: what was done is told from memory"
    FastMissed "fast path: the row is another one than the remembered one"
    FastUnknown "fast path: not taken: a row is not remembered"
    FastMoves "fast path: not taken: a row may change by itself"
    FastStale "fast path: not taken: the clock was last read too long ago, or the last try failed"
    BatchBroken "lanes: a batch whose answer was lost is asked again"
    BatchApart "lanes: a batch that fails is run again in parts"
    BatchGivenUp "lanes: claims are given up while the proxy is no member"
    RowsDeleted "clean-up: rows are deleted"
    ClockForward "clock: a step forward is noticed"
    ClockBack "clock: a step back is noticed"
    ClockDoubt "clock: a lease is not taken over while its end is in doubt"
    OtherServer "fail-over: another server is used"
    EpochRaised "fail-over: the epoch is raised, and grants wait for the leases of the other server"
    TokensRaised "fail-over: tokens go on above what another server may have given"
    OutOfSight "fail-over: a server is not used while it was out of sight"
    Founds "fleet: a proxy records its own policies"
    Joins "fleet: a proxy that has just started joins"
    JoinsAgain "fleet: a proxy joins again"
    CountedAsGone "fleet: a proxy hears that it was counted as gone"
    CountsAsGone "fleet: a proxy counts another one as gone"
    Acknowledged "fleet: a change is acknowledged"
    HeldUp "fleet: a change waits for leases"
    Settled "fleet: a change that all have acknowledged goes live"
    CalledOff "fleet: a change is called off"
    RulesDiffer "fleet: the rules of a proxy are not those of its store"
    NamesRecorded "fleet: a proxy records that all leases have their keys"
    StartsNamed "fleet: a proxy that has just started need not read the leases"
    RulesRecorded "fleet: a proxy records its rules"
    ParkedNames "sessions: a session with named locks is parked"
    ParkedRows "sessions: a session with row locks is parked"
    NamesLost "sessions: a session with named locks is lost"
    RowsLost "sessions: a session with row locks is lost"
    NotAMember "sessions: leases end with a membership"
    GuardsAsked "sessions: the guards of a claim are asked whether they live"
    FirstRefuses "quorum: the first member's refusal is the answer"
    OthersAsked "quorum: the other members are asked"
    FirstIsSlow "quorum: the first member is not waited for any longer"
    Undone "quorum: a refused claim is taken back where it may have been granted"
    Lifted "quorum: members are lifted to the highest token"
    LiftedLate "quorum: a member that answers late is lifted, too"
    PermitsTaken "quorum: more permits were granted than there are, and a claim gives its own back"
    ShadowBlocks "policies: a waiter asks for the old keys of a lease, too"
    PolicyBlocks "policies: a claim waits for a lease whose new keys are not known"
    ShadowOver "policies: the last lease of old keys ends"
    WaiterMoves "policies: a waiter gets the keys of another policy"
    Delegated "delegations: a key is delegated"
    DelegationDecides "delegations: operations are decided in memory"
    DelegationExtended "delegations: one is extended"
    DelegationRestored "delegations: a record goes back to the store"
    DelegationLost "delegations: one had ended when its record was to go back"
    DelegationElsewhere "delegations: another proxy is asked for a key"
    DelegationUndone "delegations: one whose answer was lost is undone"
}

#[cfg(any(test, feature = "simulation"))]
mod counted {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::Branch;

    static TIMES: [AtomicU64; Branch::ALL.len()] = [const { AtomicU64::new(0) }; Branch::ALL.len()];

    /// The branch is taken.
    pub fn reached(branch: Branch) {
        TIMES[branch as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// How often each branch was taken in this process.
    pub fn times() -> impl Iterator<Item = (Branch, u64)> {
        Branch::ALL.iter().map(|branch| (*branch, TIMES[*branch as usize].load(Ordering::Relaxed)))
    }
}

#[cfg(any(test, feature = "simulation"))]
pub use counted::{reached, times};

/// Outside a simulation, nothing is counted.
#[cfg(not(any(test, feature = "simulation")))]
pub fn reached(_branch: Branch) {}

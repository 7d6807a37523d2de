//! Conditions about when a statement is applied. Every server has to meet them, the simulated one too. They test
//! the store itself, because a proxy would undo late statements, and has its own bounds in front of those of the
//! store.

mod database;
mod sessions;
mod statements;

pub use database::{Database, Stranger, ask, granted, open};
pub use sessions::*;
pub use statements::*;

/// Calls the macro `of_each` with the names of all conditions. Those in `alone` come first; they are the ones
/// that need a server of their own.
#[macro_export]
macro_rules! conditions {
    ($of_each:ident $($alone:ident)*) => {
        $of_each! {
            $($alone)*
            a_slow_transaction_applies_nothing_late
            a_slow_transaction_writes_nothing_after_the_membership_of_its_proxy
            a_cached_row_that_was_deleted_is_read_again
            a_row_that_was_deleted_and_recreated_does_not_match_its_cached_copy
            clean_up_cannot_run_between_the_read_of_the_floor_and_a_new_row
            slow_inserts_apply_nothing_late
            a_claim_that_waits_for_a_row_lock_is_not_applied_late
            a_batch_wider_than_a_prepared_statement_is_written_whole
            a_locked_row_delays_only_its_own_key
            a_group_that_timed_out_in_the_queue_of_its_lane_was_not_sent
            the_number_of_queued_operations_is_bounded
            a_server_whose_record_names_another_server_is_not_used_further
            session_locks_end_when_the_record_names_another_server
            an_ended_lease_is_not_renewed_while_leases_of_another_server_may_run
            a_lease_is_not_extended_while_another_server_may_be_in_use
            tokens_of_sessions_and_leases_are_not_ahead_of_the_clock
            no_operation_succeeds_after_the_membership_of_a_proxy_has_ended
            an_operation_that_waited_for_a_membership_is_not_written
            session_locks_end_with_the_membership_of_their_proxy
            a_joining_shared_lock_has_a_token_above_an_earlier_lease
            an_exclusive_lock_is_not_granted_under_a_shared_lock_of_its_row
            a_group_counts_as_sent_although_only_its_first_claim_was_sent
            tables_of_a_later_version_are_not_used
        }
    };
}

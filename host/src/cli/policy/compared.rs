//! How the plans of two policies differ, for people.

use crate::cli::output;
use crate::replay::{PairText, PlanDiff};

/// The longest value of a plan that is shown.
const SHOWN: usize = 48;

/// Prints which resources no longer exclude each other. `overlaps`: how many of their leases were held together in a run,
/// with examples.
pub fn exclusion(diff: &PlanDiff, overlaps: Option<(u64, &[[String; 2]])>) {
    let at_least = if diff.is_partial { "at least " } else { "" };
    output::line("\nEXCLUSION");
    output::line(&format!(
        "pairs of resources that no longer exclude each other: {at_least}{}",
        diff.lost_exclusion
    ));
    if let Some((count, _)) = overlaps {
        output::line(&format!("times that two of their leases were held together: {count}"));
    }
    pairs(&diff.lost_examples);
    for [one, other] in overlaps.iter().flat_map(|(_, examples)| examples.iter().take(3)) {
        output::line(&format!("  held together: {one} and {other}"));
    }
    output::line(&format!(
        "pairs that exclude each other only under the candidate: {at_least}{}",
        diff.new_exclusion
    ));
    pairs(&diff.new_examples[..diff.new_examples.len().min(3)]);
}

/// Prints which parts of the plans differ.
pub fn plans(diff: &PlanDiff) {
    output::line("\nPLANS");
    output::line(&format!(
        "{} of {} requests have another plan; {} are newly refused, {} no longer",
        diff.changed_plans, diff.requests, diff.newly_refused, diff.no_longer_refused
    ));
    if diff.not_compared > 0 {
        output::line(&format!("not compared, because a policy failed: {}", diff.not_compared));
    }
    let rows: Vec<Vec<String>> = diff
        .changes
        .iter()
        .map(|change| {
            let [name, was, is] =
                change.examples.first().cloned().unwrap_or_default().map(|text| short(&text));
            vec![change.field.clone(), change.requests.to_string(), name, was, is]
        })
        .collect();
    if !rows.is_empty() {
        output::table(&["PART", "REQUESTS", "FOR EXAMPLE", "BEFORE", "CANDIDATE"], &rows);
    }
}

fn pairs(pairs: &[PairText]) {
    for PairText { requests: [one, other], before, after } in pairs {
        output::line(&format!("  {one} and {other}"));
        output::line(&format!("    before:    {} and {}", before[0], before[1]));
        output::line(&format!("    candidate: {} and {}", after[0], after[1]));
    }
}

/// A text that fits into a table.
pub fn short(text: &str) -> String {
    let shown: String = text.chars().take(SHOWN).collect();
    if shown.len() < text.len() { format!("{shown}…") } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(short(&"ä".repeat(SHOWN)), "ä".repeat(SHOWN));
        assert_eq!(short(&"ä".repeat(SHOWN + 1)), "ä".repeat(SHOWN) + "…");
    }
}

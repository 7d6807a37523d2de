//! Times as text.

/// Formats microseconds since 1970 as RFC 3339 in UTC, with milliseconds.
pub fn rfc3339(us: u64) -> String {
    format!("{}.{:03}Z", to_the_second(us), us / 1_000 % 1_000)
}

/// As [`rfc3339`], with microseconds.
pub fn rfc3339_us(us: u64) -> String {
    format!("{}.{:06}Z", to_the_second(us), us % 1_000_000)
}

fn to_the_second(us: u64) -> String {
    let seconds = us / 1_000_000;
    let (year, month, day) = civil(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}")
}

/// Year, month and day of a day since 1970, by Howard Hinnant's `civil_from_days`: years begin in March, so the leap
/// day is their last day.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let era = days / 146_097;
    let of_era = days % 146_097;
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_in_rfc_3339() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(rfc3339(951_782_400_000_000), "2000-02-29T00:00:00.000Z");
        assert_eq!(rfc3339(1_709_251_199_123_456), "2024-02-29T23:59:59.123Z");
        assert_eq!(rfc3339_us(1_709_251_199_123_456), "2024-02-29T23:59:59.123456Z");
        assert_eq!(rfc3339(4_102_444_800_000_000), "2100-01-01T00:00:00.000Z");
    }
}

//! Kinds of values that several sections have.

use std::net::SocketAddr;
use std::path::PathBuf;

use toml::value::{Datetime, Offset};

use super::fault::Location;
use super::reader::resolve;

/// The longest duration that any key accepts, in milliseconds.
pub const MAX_DURATION_MS: u64 = 3_600_000;

const MAX_NAME: usize = 64;
/// The rule for names of policies, stores and applications, for error messages.
pub const NAME_RULE: &str = "a name must have 1 to 64 characters, each one of a-z, 0-9, - and _";

/// Whether a name keeps [`NAME_RULE`].
pub fn is_plain_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    (1..=MAX_NAME).contains(&name.len()) && name.chars().all(is_plain)
}

/// Parses an address with a port.
pub fn address(text: &str, _place: &Location) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| format!("`{text}` is not an address; must be like 127.0.0.1:7070 or [::1]:7070"))
}

/// The path of a file that exists.
pub fn file(text: &str, place: &Location) -> Result<PathBuf, String> {
    let path = resolve(text, place);
    if path.is_file() { Ok(path) } else { Err(format!("there is no file {}", path.display())) }
}

/// A date, or a time with its offset, as microseconds since 1970. A date is its first moment in UTC.
pub fn moment(text: &str, _place: &Location) -> Result<u64, String> {
    let wrong =
        || format!("is `{text}`; must be a date or a time, such as 2027-01-31 or 2027-01-31T12:00:00Z");
    let given: Datetime = text.parse().map_err(|_| wrong())?;
    let date = given.date.filter(|date| date.year >= 1970).ok_or_else(wrong)?;
    let offset_minutes = match (given.time, given.offset) {
        (None, None) | (Some(_), Some(Offset::Z)) => 0,
        (Some(_), Some(Offset::Custom { minutes })) => i64::from(minutes),
        _ => return Err(wrong()),
    };
    let (hour, minute, second) =
        given.time.map_or((0, 0, 0), |time| (time.hour, time.minute, time.second.unwrap_or(0)));
    let days = days(u64::from(date.year), u64::from(date.month), u64::from(date.day));
    let minutes = (days * 24 + u64::from(hour)) * 60 + u64::from(minute);
    let minutes = u64::try_from(minutes.cast_signed() - offset_minutes).map_err(|_| wrong())?;
    Ok((minutes * 60 + u64::from(second)) * 1_000_000)
}

/// The days from 1970 to a date, by Howard Hinnant's `days_from_civil`: years begin in March, so the leap day is their
/// last day.
fn days(year: u64, month: u64, day: u64) -> u64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year / 400, year % 400);
    let of_year = (153 * (if month > 2 { month - 3 } else { month + 9 }) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// The names of headers, in lower case.
pub fn header_names(texts: &[&str]) -> Result<Vec<String>, String> {
    let name = |text: &&str| match hyper::header::HeaderName::from_bytes(text.as_bytes()) {
        Ok(name) => Ok(name.as_str().to_owned()),
        Err(_) => Err(format!("`{text}` is not the name of a header")),
    };
    texts.iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn dates_and_times_are_read() {
        let read = |text| moment(text, &Location::File(PathBuf::new()));
        assert_eq!(read("1970-01-01"), Ok(0));
        assert_eq!(read("2000-02-29"), Ok(951_782_400_000_000));
        assert_eq!(read("2024-02-29T23:59:59Z"), Ok(1_709_251_199_000_000));
        assert_eq!(read("2024-03-01T00:59:59+01:00"), Ok(1_709_251_199_000_000));
        assert_eq!(read("2100-01-01"), Ok(4_102_444_800_000_000));
        for wrong in ["", "2027", "2027-02-30", "2027-01-01T00:00:00", "12:00:00", "1969-12-31"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}

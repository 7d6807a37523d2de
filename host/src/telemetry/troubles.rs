//! What is wrong now, although locks are granted: `/ready` warns of it, and a metric shows it.

use std::collections::BTreeMap;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::metric::register;
use crate::mutex::Mutex;

/// What something can be wrong with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// The configuration file has changed, and is not used.
    Configuration,
    /// The file of principals has changed, and is not used.
    Principals,
    /// Certificates have changed, and are not used.
    Certificates,
    /// Operators' actions cannot be recorded.
    AuditLog,
    /// Refusals cannot be recorded.
    AuditLogOfRefusals,
    /// Requests cannot be recorded.
    Recording,
}

const SUBJECTS: [Subject; 6] = [
    Subject::Configuration,
    Subject::Principals,
    Subject::Certificates,
    Subject::AuditLog,
    Subject::AuditLogOfRefusals,
    Subject::Recording,
];

impl Subject {
    fn as_str(self) -> &'static str {
        match self {
            Subject::Configuration => "configuration",
            Subject::Principals => "principals",
            Subject::Certificates => "certificates",
            Subject::AuditLog => "audit_log",
            Subject::AuditLogOfRefusals => "audit_log_of_refusals",
            Subject::Recording => "recording",
        }
    }
}

/// What is wrong now, by subject.
pub struct Troubles {
    now: Mutex<BTreeMap<Subject, String>>,
    gauge: Family<About, Gauge>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct About {
    about: &'static str,
}

impl Troubles {
    pub(super) fn register(registry: &mut Registry) -> Troubles {
        let help = "Whether something is wrong with a subject, so that /ready warns of it";
        let troubles =
            Troubles { now: Mutex::default(), gauge: register(registry, "trouble", help, Family::default()) };
        SUBJECTS.into_iter().for_each(|subject| troubles.note(subject, None));
        troubles
    }

    /// Notes what is wrong with a subject, in a sentence without secrets; `None`: nothing is wrong.
    pub fn note(&self, subject: Subject, what: Option<String>) {
        let mut now = self.now.lock();
        self.gauge.get_or_create(&About { about: subject.as_str() }).set(what.is_some().into());
        match what {
            Some(what) => now.insert(subject, what),
            None => now.remove(&subject),
        };
    }

    /// What is wrong now, one sentence for each subject.
    pub fn now(&self) -> Vec<String> {
        self.now.lock().values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, assert_has};
    use super::*;

    #[test]
    fn every_metric_has_its_documented_name() {
        let metrics = Metrics::default();
        metrics.troubles.note(Subject::Principals, Some("the file is gone".to_owned()));
        assert_eq!(metrics.troubles.now(), ["the file is gone"]);
        let lines =
            ["lockkeeper_trouble{about=\"principals\"} 1", "lockkeeper_trouble{about=\"audit_log\"} 0"];
        assert_has(&metrics, &lines);
        metrics.troubles.note(Subject::Principals, None);
        assert_eq!(metrics.troubles.now(), [""; 0]);
        assert_has(&metrics, &["lockkeeper_trouble{about=\"principals\"} 0"]);
    }
}

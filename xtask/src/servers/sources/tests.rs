use super::{Machine, deb822, one_line};

fn machine(id: &str, codename: &str, text: &str) -> Machine {
    Machine { id: id.into(), codename: codename.into(), sources: deb822(text) }
}

#[test]
fn one_line_entries_are_parsed() {
    let source = one_line("deb [arch=amd64 signed-by=/k.gpg] http://m/debian bookworm main contrib # why");
    let source = source.expect("an entry");
    assert_eq!(source.uris, ["http://m/debian"]);
    assert_eq!(source.suites, ["bookworm"]);
    assert_eq!(source.components, ["main", "contrib"]);
    assert_eq!(source.signed_by.as_deref(), Some("/k.gpg"));

    assert_eq!(one_line("deb-src http://m/debian bookworm main"), None);
    assert_eq!(one_line("# deb http://m/debian bookworm main"), None);
    assert_eq!(one_line("deb cdrom:[Debian 12]/ bookworm main"), None);
    assert_eq!(one_line(""), None);
}

#[test]
fn stanzas_are_parsed_and_disabled_stanzas_are_skipped() {
    let text = "# first\nTypes: deb deb-src\nURIs: http://m/debian\nSuites: trixie\n trixie-updates\n\
                Components: main\nSigned-By:\n -----BEGIN\n .\n key\n\n\
                Types: deb\nEnabled: no\nURIs: http://n/\nSuites: trixie\nComponents: main\n";
    let sources = deb822(text);
    assert_eq!(sources.len(), 1);
    assert_eq!(sources[0].suites, ["trixie", "trixie-updates"]);
    assert_eq!(sources[0].signed_by.as_deref(), Some("\n -----BEGIN\n .\n key"));
    assert_eq!(deb822(&sources[0].stanza()), sources);
}

#[test]
fn foreign_suites_are_left_out_and_the_mirror_is_not_the_security_mirror() {
    let text = "Types: deb\nURIs: http://m/debian-security\nSuites: bookworm-security\nComponents: main\n\n\
                Types: deb\nURIs: http://other/apt\nSuites: nodistro\nComponents: main\n\n\
                Types: deb\nURIs: http://m/debian\nSuites: bookworm bookworm-backports\nComponents: main\n";
    let debian = machine("debian", "bookworm", text);
    let own = debian.own().expect("sources");
    let suites: Vec<_> = own.iter().flat_map(|source| &source.suites).collect();
    assert_eq!(suites, ["bookworm-security", "bookworm"]);
    assert_eq!(debian.mirror().expect("a mirror"), "http://m/debian");
    assert!(machine("debian", "forky", text).own().is_err());
}

//! TLS: the proxy's certificate, the certificates of clients, and what a listener beyond this machine needs.

use std::time::Duration;

use rcgen::SanType;

use super::authority::{Authority, localhost};
use super::*;

fn spiffe(name: &str) -> Vec<SanType> {
    vec![SanType::URI(name.try_into().unwrap())]
}

/// A proxy whose APIs have TLS, with the files of its clients.
struct Encrypted {
    secured: Secured,
    authority: Authority,
}

impl Encrypted {
    async fn start(kind: Kind) -> Encrypted {
        let authority = Authority::new();
        let dir = folder();
        let put = |name: &str, text: &str| {
            let path = dir.path().join(name);
            write(&path, text);
            path.display().to_string()
        };
        let (cert, key) = authority.signs(localhost(), 1);
        let (cert, key) = (put("cert.pem", &cert), put("key.pem", &key));
        let (ca, crl) = (put("ca.pem", &authority.pem), put("crl.pem", &authority.revokes(9)));
        let tls = format!("{{ cert = \"{cert}\", key = \"{key}\", client_ca = \"{ca}\", crl = \"{crl}\" }}");
        let tokens = Tokens::new();
        let billing = "name = \"billing\"\n";
        let certificates = "certificates = [\"spiffe://test/billing\", \"spiffe://test/revoked\"]\n";
        write(
            &dir.path().join("auth.toml"),
            &tokens.to_toml().replace(billing, &format!("{billing}{certificates}")),
        );
        let auth = dir.path().join("auth.toml").display().to_string();
        let settings = Settings {
            url: database(kind).await,
            api: format!("tls = {tls}"),
            sections: format!("[auth]\nfile = \"{auth}\"\n"),
            ..Settings::default()
        };
        let proxy = Proxy::with(settings.clone()).await;
        proxy.until_ready().await;
        Encrypted { secured: Secured { proxy, settings, folder: dir, tokens }, authority }
    }

    fn path(&self, name: &str) -> String {
        self.secured.folder.path().join(name).display().to_string()
    }

    /// The files of a client with a certificate.
    fn client(&self, names: Vec<SanType>, serial: u64) -> [String; 2] {
        let (cert, key) = self.authority.signs(names, serial);
        let path = self.path(&format!("client-{serial}.pem"));
        write(Path::new(&path), &(cert + &key));
        ["--cert-file".to_owned(), path]
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = lockkeeper();
        command.args(args);
        command.env("LOCKKEEPER_SERVER", format!("https://{}", self.secured.proxy.api_address()));
        command
    }

    async fn run(&self, args: &[&str]) -> (Option<i32>, String) {
        output(self.command(args)).await
    }
}

on_both! {
    async fn a_client_verifies_the_proxy_and_proves_itself_by_its_certificate(kind: Kind) {
        let proxy = Encrypted::start(kind).await;
        let ca = proxy.path("ca.pem");
        let (code, said) = proxy.run(&["ls"]).await;
        assert_ne!(code, Some(0), "the proxy's authority is not known: {said}");
        let (code, said) = proxy.run(&["ls", "--ca-file", &ca]).await;
        assert_eq!(code, Some(6), "nobody has proved who they are: {said}");
        let [option, file] = proxy.client(spiffe("spiffe://test/billing"), 2);
        let (code, said) = proxy.run(&["acquire", "orders/1", "--ca-file", &ca, &option, &file]).await;
        assert_eq!(code, Some(0), "{said}");
        let (code, said) = proxy.run(&["acquire", "invoices/1", "--ca-file", &ca, &option, &file]).await;
        assert_eq!(code, Some(6), "{said}");
        let [option, file] = proxy.client(spiffe("spiffe://test/nobody"), 3);
        let (code, said) = proxy.run(&["ls", "--ca-file", &ca, &option, &file]).await;
        assert_eq!(code, Some(6), "no principal has this name: {said}");
        // A token counts more than the certificate.
        let token = proxy.path("token");
        write(Path::new(&token), &proxy.secured.tokens.operator.token);
        let (code, said) =
            proxy.run(&["acquire", "invoices/1", "--ca-file", &ca, &option, &file, "--credentials-file", &token]).await;
        assert_eq!(code, Some(0), "{said}");
    }

    async fn a_revoked_certificate_and_one_of_another_authority_are_refused(kind: Kind) {
        let proxy = Encrypted::start(kind).await;
        let ca = proxy.path("ca.pem");
        let [option, file] = proxy.client(spiffe("spiffe://test/revoked"), 9);
        let (code, said) = proxy.run(&["ls", "--ca-file", &ca, &option, &file]).await;
        assert_eq!(code, Some(5), "{said}");
        let (cert, key) = Authority::new().signs(spiffe("spiffe://test/billing"), 2);
        let stranger = proxy.path("stranger.pem");
        write(Path::new(&stranger), &(cert + &key));
        let (code, said) = proxy.run(&["ls", "--ca-file", &ca, "--cert-file", &stranger]).await;
        assert_eq!(code, Some(5), "{said}");
        let plain = proxy.secured.proxy.client().try_send("GET", "/v1/locks", "").await;
        assert!(plain.is_none_or(|answer| answer.status >= 400), "it answers without TLS");
    }

    async fn changed_certificates_are_used_for_new_connections(kind: Kind) {
        let proxy = Encrypted::start(kind).await;
        let [option, file] = proxy.client(spiffe("spiffe://test/billing"), 2);
        let next = Authority::new();
        let (cert, key) = next.signs(localhost(), 1);
        write(Path::new(&proxy.path("next.pem")), &next.pem);
        write(Path::new(&proxy.path("key.pem")), &key);
        write(Path::new(&proxy.path("cert.pem")), &cert);
        let (old, new) = (proxy.path("ca.pem"), proxy.path("next.pem"));
        eventually("the new certificate is used", async || {
            proxy.run(&["ls", "--ca-file", &new, &option, &file]).await.0 == Some(0)
        })
        .await;
        assert_ne!(proxy.run(&["ls", "--ca-file", &old, &option, &file]).await.0, Some(0));

        // A certificate that cannot be used is reported, and the one before stays.
        let cert = std::fs::read_to_string(proxy.path("cert.pem")).unwrap();
        let warns = async || {
            let ready = proxy.secured.proxy.admin().get("/ready").await;
            assert_eq!(ready.status, 200);
            ready.text.contains("changed certificates are not used")
        };
        write(Path::new(&proxy.path("cert.pem")), "nonsense");
        eventually("the fault is reported", warns).await;
        assert_eq!(trouble(&proxy.secured, "certificates").await, 1.0);
        assert_eq!(proxy.run(&["ls", "--ca-file", &new, &option, &file]).await.0, Some(0));
        write(Path::new(&proxy.path("cert.pem")), &cert);
        eventually("the fault is gone", async || !warns().await).await;
        assert_eq!(trouble(&proxy.secured, "certificates").await, 0.0);
    }

    /// The client would renew its lease over the open connection for ever.
    async fn a_connection_ends_when_the_certificate_of_its_client_is_revoked(kind: Kind) {
        let proxy = Encrypted::start(kind).await;
        let (ca, started) = (proxy.path("ca.pem"), proxy.path("started"));
        let [option, file] = proxy.client(spiffe("spiffe://test/billing"), 2);
        let run = ["run", "orders/1", "--ttl", "3s", "--ca-file", &ca, &option, &file, "--"];
        let mut command = proxy.command(&run);
        command.args(["sh", "-c", &format!("touch {started}; exec sleep 600")]);
        let mut child = command.spawn().unwrap();
        eventually("the command runs", async || Path::new(&started).exists()).await;
        write(Path::new(&proxy.path("crl.pem")), &proxy.authority.revokes(1_000));
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(child.try_wait().unwrap(), None, "a list that does not name the certificate ends nothing");
        write(Path::new(&proxy.path("crl.pem")), &proxy.authority.revokes(2));
        eventually("the command is stopped", async || child.try_wait().unwrap().is_some()).await;
        assert_eq!(child.wait().unwrap().code(), Some(114));
    }
}

/// A listener that other machines can reach.
#[test]
fn a_proxy_beyond_this_machine_needs_credentials_and_encryption() {
    let dir = folder();
    write(&dir.path().join("auth.toml"), "[[principal]]\nname = \"a\"\n");
    let check = |config: &str| {
        std::fs::write(dir.path().join("config.toml"), config).unwrap();
        ending(lockkeeper().args(["serve", "--check"]).current_dir(dir.path()).output().unwrap())
    };
    for section in ["api", "admin"] {
        let listen = format!("[{section}]\nlisten = \"0.0.0.0:9\"\n");
        let (code, said) = check(&listen);
        assert!(code == Some(2) && said.contains("set auth.file"), "{said}");
        let (code, said) = check(&format!("{listen}[auth]\nfile = \"auth.toml\"\n"));
        assert!(code == Some(2) && said.contains("set tls"), "{said}");
        let (code, said) = check(&format!("{listen}allow_plaintext = true\n[auth]\nfile = \"auth.toml\"\n"));
        assert_eq!(code, Some(0), "{said}");
        let (code, said) = check(&format!("{listen}[auth]\nallow_anonymous = true\n"));
        assert_eq!(code, Some(0), "{said}");
    }
}

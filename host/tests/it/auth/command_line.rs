//! Credentials on the command line.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::time::Duration;

use super::*;

fn credentials(secured: &Secured, token: &str, mode: u32) -> PathBuf {
    let path = secured.folder.path().join("token");
    std::fs::write(&path, format!("{token}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    path
}

async fn run_as(secured: &Secured, args: &[&str], credentials: Option<&Path>) -> (Option<i32>, String) {
    let mut command = lockkeeper();
    command.args(args);
    command.env("LOCKKEEPER_SERVER", format!("http://{}", secured.proxy.api_address()));
    command.env("LOCKKEEPER_ADMIN", format!("http://{}", secured.proxy.admin_address()));
    if let Some(file) = credentials {
        command.env("LOCKKEEPER_CREDENTIALS_FILE", file);
    }
    output(command).await
}

on_both! {
    async fn commands_send_the_token_in_their_credentials_file(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let (code, said) = run_as(&secured, &["ls"], None).await;
        assert_eq!(code, Some(6), "{said}");
        assert!(said.contains("--credentials-file"), "{said}");
        let file = credentials(&secured, &secured.tokens.billing.token, 0o600);
        let run = ["run", "orders/1", "--", "env"];
        let (code, said) = run_as(&secured, &run, Some(&file)).await;
        assert_eq!(code, Some(0), "{said}");
        assert!(!said.contains(&secured.tokens.billing.token), "the command's environment has the token: {said}");
        let (code, said) = run_as(&secured, &["acquire", "invoices/1"], Some(&file)).await;
        assert_eq!(code, Some(6), "{said}");
        assert_eq!(run_as(&secured, &["fleet"], Some(&file)).await.0, Some(6));
        let operator = credentials(&secured, &secured.tokens.operator.token, 0o600);
        let (code, said) = run_as(&secured, &["fleet"], Some(&operator)).await;
        assert_eq!(code, Some(0), "{said}");
    }

    /// The token is replaced in both files, as README.md describes it, and the first one then ends.
    async fn a_running_command_goes_on_with_the_next_token(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let file = credentials(&secured, &secured.tokens.billing.token, 0o600);
        let mut command = lockkeeper();
        command.args(["run", "--ttl", "2s", "orders/1", "--", "sh", "-c", "echo begun; cat; echo ended"]);
        command.env("LOCKKEEPER_SERVER", format!("http://{}", secured.proxy.api_address()));
        command.env("LOCKKEEPER_CREDENTIALS_FILE", &file);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut running = command.spawn().unwrap();
        let mut said = BufReader::new(running.stdout.take().unwrap());
        let said = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            said.read_line(&mut line).unwrap();
            assert_eq!(line, "begun\n");
            said
        });
        let mut said = said.await.unwrap();

        let (next, text) = (new_token(), secured.tokens.to_toml());
        let old = format!("id = \"{}\", sha256 = \"{}\"", secured.tokens.billing.id, secured.tokens.billing.sha256);
        assert!(text.contains(&old));
        let both = format!("{old} }}, {{ id = \"{}\", sha256 = \"{}\"", next.id, next.sha256);
        write(&secured.file(), &text.replace(&old, &both));
        let client = secured.client(&next);
        eventually("the next token is known", async || client.get("/v1/locks").await.status == 200).await;
        credentials(&secured, &next.token, 0o600);
        let new = format!("id = \"{}\", sha256 = \"{}\"", next.id, next.sha256);
        write(&secured.file(), &text.replace(&old, &new));
        eventually("the first token is unknown", async || {
            secured.billing().get("/v1/locks").await.status == 401
        })
        .await;
        // Longer than the lease: it is renewed with the next token, and only so.
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(client.acquire(json!({"resource": "orders/1"})).await.status, 409, "the lock is held");
        drop(running.stdin.take());
        let ended = tokio::task::spawn_blocking(move || {
            let mut rest = String::new();
            said.read_to_string(&mut rest).unwrap();
            (rest, running.wait_with_output().unwrap())
        });
        let (rest, ended) = ended.await.unwrap();
        assert_eq!((rest.as_str(), ended.status.code()), ("ended\n", Some(0)), "{ended:?}");
        assert_eq!(client.acquire(json!({"resource": "orders/1"})).await.status, 200, "it was released");
    }

    async fn an_operator_takes_a_lock_away(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let lease = secured.billing().lease("orders/1", 60_000).await;
        let file = credentials(&secured, &secured.tokens.billing.token, 0o600);
        let (code, said) = run_as(&secured, &["force", "orders/1"], Some(&file)).await;
        assert!(code == Some(6) && said.contains("force"), "{said}");
        assert_eq!(secured.billing().renew(&lease).await.status, 200);
        let file = credentials(&secured, &secured.tokens.operator.token, 0o600);
        let (code, said) = run_as(&secured, &["force", "orders/1"], Some(&file)).await;
        assert_eq!((code, said.as_str()), (Some(0), "orders/1 was taken from its holder\n"));
        assert_eq!(secured.billing().renew(&lease).await.status, 410);
        let (code, said) = run_as(&secured, &["force", "orders/1"], Some(&file)).await;
        assert_eq!((code, said.as_str()), (Some(0), "orders/1 had no holder\n"));
        for _ in 0..2 {
            let shared = json!({"resource": "orders/a b", "mode": "shared", "ttl_ms": 60_000});
            assert_eq!(secured.billing().acquire(shared).await.status, 200);
        }
        let (code, said) = run_as(&secured, &["force", "orders/a b", "--json"], Some(&file)).await;
        let taken: Value = serde_json::from_str(&said).expect("JSON");
        assert_eq!((code, taken), (Some(0), json!({"key": "orders/a b", "holders": 2})));
        let (code, said) = run_as(&secured, &["force", "--help"], None).await;
        assert!(code == Some(0) && said.contains("lockkeeper force orders/42"), "{said}");
    }

    /// Nobody answers there: the warning comes before.
    async fn a_token_that_is_sent_unencrypted_causes_a_warning(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let file = credentials(&secured, &secured.tokens.billing.token, 0o600);
        let port = secured.proxy.api_address().port();
        let warned = async |host: &str, more: &[&str], file: Option<&Path>| {
            let server = format!("http://{host}:{port}");
            let args = [&["ls", "--server", &server], more].concat();
            run_as(&secured, &args, file).await.1.contains("unencrypted")
        };
        // 0.0.0.0 leads to this machine, but the command line does not count it as loopback.
        assert!(warned("0.0.0.0", &[], Some(&file)).await);
        assert!(!warned("0.0.0.0", &["--allow-plaintext"], Some(&file)).await);
        assert!(!warned("0.0.0.0", &[], None).await, "there is no token");
        assert!(!warned("127.0.0.1", &[], Some(&file)).await);
    }

    async fn a_credentials_file_that_others_can_read_is_refused(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let file = credentials(&secured, &secured.tokens.billing.token, 0o644);
        let (code, said) = run_as(&secured, &["ls"], Some(&file)).await;
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("chmod 600"), "{said}");
        let file = credentials(&secured, "", 0o600);
        assert_eq!(run_as(&secured, &["ls"], Some(&file)).await.0, Some(2));
    }

    async fn a_new_token_works_with_its_printed_line(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let (code, printed) = run_as(&secured, &["token", "new"], None).await;
        assert_eq!(code, Some(0), "{printed}");
        let token = printed.lines().find(|line| line.starts_with("lk_")).unwrap();
        let line = printed.lines().find(|line| line.starts_with("tokens = ")).unwrap();
        let principal = format!("[[principal]]\nname = \"new\"\nroles = [\"orders\"]\n{line}\n");
        write(&secured.file(), &(principal + &secured.tokens.to_toml()));
        let client = secured.proxy.client().with_token(token);
        eventually("the token is known", async || client.get("/v1/locks").await.status == 200).await;
    }
}

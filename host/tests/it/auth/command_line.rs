//! Credentials on the command line.

use super::*;

fn credentials(secured: &Secured, token: &str, mode: u32) -> PathBuf {
    let path = secured.folder.path().join("token");
    std::fs::write(&path, format!("{token}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    path
}

async fn output(secured: &Secured, args: &[&str], credentials: Option<&Path>) -> (Option<i32>, String) {
    let mut command = lockkeeper();
    command.args(args);
    command.env("LOCKKEEPER_SERVER", format!("http://{}", secured.proxy.api_address()));
    command.env("LOCKKEEPER_ADMIN", format!("http://{}", secured.proxy.admin_address()));
    if let Some(file) = credentials {
        command.env("LOCKKEEPER_CREDENTIALS_FILE", file);
    }
    let ended = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    let text = String::from_utf8_lossy(&ended.stdout).into_owned() + &String::from_utf8_lossy(&ended.stderr);
    (ended.status.code(), text)
}

on_both! {
    async fn commands_send_the_token_in_their_credentials_file(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let (code, said) = output(&secured, &["ls"], None).await;
        assert_eq!(code, Some(6), "{said}");
        assert!(said.contains("--credentials-file"), "{said}");
        let file = credentials(&secured, &secured.tokens.billing.token, 0o600);
        let run = ["run", "orders/1", "--", "env"];
        let (code, said) = output(&secured, &run, Some(&file)).await;
        assert_eq!(code, Some(0), "{said}");
        assert!(!said.contains(&secured.tokens.billing.token), "the command's environment has the token: {said}");
        let (code, said) = output(&secured, &["acquire", "invoices/1"], Some(&file)).await;
        assert_eq!(code, Some(6), "{said}");
        assert_eq!(output(&secured, &["fleet"], Some(&file)).await.0, Some(6));
        let operator = credentials(&secured, &secured.tokens.operator.token, 0o600);
        let (code, said) = output(&secured, &["fleet"], Some(&operator)).await;
        assert_eq!(code, Some(0), "{said}");
    }

    async fn a_credentials_file_that_others_can_read_is_refused(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let file = credentials(&secured, &secured.tokens.billing.token, 0o644);
        let (code, said) = output(&secured, &["ls"], Some(&file)).await;
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("chmod 600"), "{said}");
        let file = credentials(&secured, "", 0o600);
        assert_eq!(output(&secured, &["ls"], Some(&file)).await.0, Some(2));
    }

    async fn a_new_token_works_with_its_printed_line(kind: Kind) {
        let secured = Secured::start(kind, "").await;
        let (code, printed) = output(&secured, &["token", "new"], None).await;
        assert_eq!(code, Some(0), "{printed}");
        let token = printed.lines().find(|line| line.starts_with("lk_")).unwrap();
        let line = printed.lines().find(|line| line.starts_with("tokens = ")).unwrap();
        let principal = format!("[[principal]]\nname = \"new\"\nroles = [\"orders\"]\n{line}\n");
        write(&secured.file(), &(principal + &secured.tokens.to_toml()));
        let client = secured.proxy.client().with_token(token);
        eventually("the token is known", async || client.get("/v1/locks").await.status == 200).await;
    }
}

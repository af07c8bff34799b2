//! Builds the page of `sparse24-web`: one HTML file that holds its style, its scripts and the wasm,
//! so that it also opens without a server.

use std::{
    fs,
    process::{Command, ExitCode},
};

use base64::{Engine, engine::general_purpose::STANDARD};

use crate::{Result, output, root};

const TARGET: &str = "wasm32-unknown-unknown";
/// Bytes that a reader of the page downloads at most, compressed.
const MOST: usize = 1_500_000;

pub(crate) fn build() -> Result<ExitCode> {
    let root = root()?;
    // Before the long build.
    for tool in ["wasm-bindgen", "gzip"] {
        output(Command::new(tool).arg("--version"), root).map_err(|error| {
            let readme = "crates/sparse24-web/README.md";
            format!("{error}; the page needs gzip, and wasm-bindgen as {readme} says")
        })?;
    }
    let (built, out) = (root.join("target").join(TARGET).join("release"), root.join("target/web"));
    let build = ["build", "--release", "--package", "sparse24-web", "--lib", "--target", TARGET];
    output(Command::new("cargo").args(build), root)?;
    let bind = ["--target", "no-modules", "--no-typescript", "--out-name", "page", "--out-dir"];
    let wasm = built.join("sparse24_web.wasm");
    output(Command::new("wasm-bindgen").args(bind).arg(&out).arg(wasm), root)?;
    let read = |name: &str| fs::read_to_string(root.join("crates/sparse24-web/page").join(name));
    let wasm = fs::read(out.join("page_bg.wasm"))?;
    let script = format!(
        "{}\nconst WASM = \"{}\";\n{}",
        fs::read_to_string(out.join("page.js"))?,
        STANDARD.encode(&wasm),
        read("page.js")?
    );
    let page = read("page.html")?
        .replace("/*style*/", &read("page.css")?)
        .replace("/*script*/", &script.replace("</script", "<\\/script"));
    let path = out.join("index.html");
    fs::write(&path, page)?;
    let bound = out.join("page_bg.wasm");
    let zipped = Command::new("gzip").args(["-9", "-c"]).arg(bound).output()?;
    if !zipped.status.success() {
        return Err(format!("gzip: {}", zipped.status).into());
    }
    let compressed = zipped.stdout.len();
    println!("{}: {} bytes of wasm, {compressed} compressed", path.display(), wasm.len());
    if compressed > MOST {
        return Err(
            format!("compressed wasm has {compressed} bytes, expected at most {MOST}").into()
        );
    }
    Ok(ExitCode::SUCCESS)
}

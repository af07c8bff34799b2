//! The page against the command: the same recipe, data and first masks.

use std::{
    env,
    ffi::OsString,
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    slice::from_ref,
    sync::{Arc, Condvar, Mutex},
    thread,
    time::Duration,
};

use sparse24_run::{
    config::preset::PRESETS,
    data::{Corpus, Dataset, Draw, Tokenizer, VALIDATION_FRACTION},
};
use sparse24_train::{
    backend::{
        Arithmetic, Backend, BackendSettings,
        cpu::CpuBackend,
        wgpu::{WgpuBackend, adapters},
    },
    objective::{Batch, Objective},
    trainer::Trainer,
};
use sparse24_web::{Text, hash, packed, recipe};

const SEED: u64 = 1337;

/// How long a page may take.
const LIMIT: Duration = Duration::from_secs(900);

#[test]
fn recipe_and_data_are_the_commands() {
    let config = PRESETS[0].config();
    assert_eq!(config.preset, "quickstart");
    assert_eq!(recipe(SEED), config.recipe(256).unwrap());
    let corpus = Corpus::embedded();
    let data = Dataset::from_corpus(&corpus, Tokenizer::Byte, VALIDATION_FRACTION).unwrap();
    let (mut batch, mut inputs, mut targets) = (Batch::default(), Vec::new(), Vec::new());
    for step in [1, 2, 1500] {
        Text::new(SEED).fill(step, 0, &mut batch).unwrap();
        let draw = Draw { seed: SEED, step, micro_step: 0, sequences: 12, context: 64 };
        data.batch(draw, &mut inputs, &mut targets).unwrap();
        assert_eq!((&batch.tokens, &batch.targets), (&inputs, &targets), "step {step}");
    }
}

fn cpu() -> Box<dyn Backend> {
    Box::new(CpuBackend::new(Arithmetic::F32))
}

/// The masks of step 0, as the page saves them.
fn first_masks(backend: Box<dyn Backend>) -> Vec<u8> {
    let mut trainer = Trainer::new(backend, recipe(SEED)).unwrap();
    let states = trainer.parameter_states().unwrap();
    packed(states.iter().filter_map(|state| state.mask.as_ref()))
}

#[test]
fn the_hash_is_the_commands() {
    // The test of `sparse24 eval` expects the same hash.
    let first = "9ca03c96ec17c8d48f717325c0c1959db6ece445af7f052e39adaa4fb0d88da3";
    assert_eq!(hash(&first_masks(cpu())), first);
    if adapters().is_empty() && env::var_os("SPARSE24_REQUIRE_WGPU").is_none() {
        println!("skipped: there is no GPU adapter");
        return;
    }
    let backend = WgpuBackend::open(BackendSettings::default()).unwrap();
    assert_eq!(hash(&first_masks(Box::new(backend))), first);
}

/// `cargo xtask web && cargo test --release -p sparse24-web -- --ignored --nocapture`. Screenshots
/// are written to the folder `SPARSE24_PICTURES`, after as many steps as `SPARSE24_STEPS`.
#[test]
#[ignore = "needs Chromium and the built page"]
fn the_page_trains_in_a_browser() {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let runs = |name: &&str| Command::new(name).arg("--version").output().is_ok();
    let browser = names.into_iter().find(runs).expect("Chromium is on the path");
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/web/index.html");
    let page = fs::read_to_string(page).expect("`cargo xtask web` built the page");
    let dump = OsString::from("--dump-dom");
    let older = page.replace("<main>", "<main><script>delete Navigator.prototype.gpu</script>");
    for (page, query, expected) in [
        (&page, "stop=0", "The address has stop=0, which is not a number of steps."),
        (&older, "stop=1", "WebGPU is not available here."),
        (&page, "seed=-1", "The address has seed=-1, which is not an integer"),
    ] {
        let (document, console) = visit(browser, page, query, 1, from_ref(&dump));
        assert!(part(&document, "problem").starts_with(expected), "{document}");
        assert_eq!((part(&document, "run"), console.lines().count()), ("Start", 1), "{console}");
    }
    let (document, console) = visit(browser, &page, "stop=10", 20, from_ref(&dump));
    assert_eq!(console, "");
    let losses: Vec<f64> =
        part(&document, "record").split(' ').map(|loss| loss.parse().unwrap()).collect();
    println!("{}\nlosses {losses:?}", part(&document, "device"));
    assert!(losses.len() >= 20, "{losses:?}");
    // ln 256 = 5.55 is the loss of a uniform guess.
    assert!((5.3..5.8).contains(&losses[0]) && losses[19] <= losses[0] - 0.4, "{losses:?}");
    let masks = first_masks(cpu());
    assert_eq!(part(&document, "first"), hash(&masks));
    assert_eq!(part(&document, "saved"), masks.len().to_string());
    let flips: f64 = part(&document, "flip").parse().expect("steps 10 and 20 sample it");
    let (drawn, _script) = document.split_once("</main>").unwrap();
    assert!(0.0 < flips && flips < 1.0 && drawn.matches("<polyline").count() == 2, "{drawn}");
    // A lost device costs the steps since the last pause.
    let (lost, _) = visit(browser, &page, "stop=2&lose=3", 4, &[dump]);
    let told = part(&lost, "told");
    assert!(told.contains("the GPU was lost") && told.contains("state of step 2 "), "{told}");
    assert!(part(&document, "record").starts_with(part(&lost, "record")), "{lost}");

    let Some(pictures) = env::var_os("SPARSE24_PICTURES").map(PathBuf::from) else { return };
    let steps = env::var("SPARSE24_STEPS").map_or(20, |steps| steps.parse().unwrap());
    let names = ["wide", "narrow"];
    for (name, scheme) in names.into_iter().flat_map(|name| [(name, "light"), (name, "dark")]) {
        let width = if name == "wide" { 1280 } else { 390 };
        let mut picture = OsString::from("--screenshot=");
        picture.push(pictures.join(format!("web-{name}-{scheme}.png")));
        // Blink: 0 is dark, 1 is light.
        let scheme = u8::from(scheme == "light");
        let scheme = format!("--blink-settings=preferredColorScheme={scheme}");
        let size = format!("--window-size={width},1800");
        let query = format!("stop={}", steps / 2);
        let arguments = [picture, scheme.into(), size.into()];
        let (_, console) = visit(browser, &page, &query, steps, &arguments);
        assert_eq!(console, "");
    }
}

/// The text of the element with this id in a dumped document.
fn part<'a>(document: &'a str, id: &str) -> &'a str {
    let (_, rest) = document.split_once(&format!("id=\"{id}\"")).expect(id);
    let (_, rest) = rest.split_once('>').expect(id);
    rest.split('<').next().expect(id)
}

/// Loads the page in a browser with software WebGPU. Returns the browser's output and its console
/// once the page has trained this many steps or reports a problem: until then, the server holds
/// back an image, so the page does not finish loading. Where the page pauses by itself, the masks
/// are saved and the run is resumed; then it is paused by its button. After the step `lose` of the
/// query the device is destroyed, and the run is resumed.
fn visit(
    browser: &str,
    page: &str,
    query: &str,
    steps: u32,
    arguments: &[OsString],
) -> (String, String) {
    let watch = "<img src=\"/hold\" alt=\"\" hidden><script>
        const create = URL.createObjectURL;
        let saved;
        URL.createObjectURL = (blob) => {
            saved = blob.size;
            return create(blob);
        };
        const add = (id, text) => {
            const record = document.createElement('p');
            [record.hidden, record.id, record.textContent] = [true, id, text];
            document.body.append(record);
        };
        let device, told = '', lose = Number(asked.get('lose') ?? Infinity);
        const request = GPUAdapter.prototype.requestDevice;
        GPUAdapter.prototype.requestDevice = async function (...descriptor) {
            return device = await request.apply(this, descriptor);
        };
        const wait = setInterval(() => {
            const button = part('run').textContent, failed = !part('problem').hidden;
            if (running && losses.length >= lose) {
                lose = Infinity;
                device.destroy();
            }
            if (failed && button === 'Resume' && !told) {
                told = part('problem').textContent;
                part('run').click();
                return;
            }
            if (button === 'Pause' && running && losses.length >= STEPS) part('run').click();
            if (button === 'Resume' && losses.length < STEPS) {
                part('download').click();
                part('run').click();
            } else if (button === 'Resume' || failed) {
                clearInterval(wait);
                if (failed) console.error(part('problem').textContent);
                add('record', losses.map((point) => point[1]).join(' '));
                add('saved', saved);
                add('told', told);
                fetch('/done');
            }
        }, 100);
        </script></body>";
    let page = page.replace("</body>", &watch.replace("STEPS", &steps.to_string()));
    // The page itself may ask for nothing.
    let page = page.replace("img-src data:", "img-src data: 'self'; connect-src 'self'");
    let page = Arc::new(page);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/?{query}", listener.local_addr().unwrap());
    let done = Arc::new((Mutex::new(false), Condvar::new()));
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (page, done) = (Arc::clone(&page), Arc::clone(&done));
            thread::spawn(move || answer(stream.unwrap(), &page, &done));
        }
    });
    let profile = tempfile::tempdir().unwrap();
    let mut user = OsString::from("--user-data-dir=");
    user.push(profile.path());
    let always = "--headless=new --no-sandbox --enable-unsafe-webgpu \
        --use-webgpu-adapter=swiftshader --enable-features=Vulkan --use-vulkan=swiftshader \
        --ignore-gpu-blocklist --enable-unsafe-swiftshader --disable-background-networking \
        --disable-component-update --disable-sync --no-first-run --hide-scrollbars \
        --enable-logging=stderr --v=0";
    let mut command = Command::new(browser);
    command.args(always.split_whitespace()).arg(user).args(arguments).arg(address);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let console = String::from_utf8_lossy(&output.stderr);
    let console: Vec<_> = console.lines().filter(|line| line.contains(":CONSOLE:")).collect();
    (String::from_utf8_lossy(&output.stdout).into_owned(), console.join("\n"))
}

/// Answers one request of the browser.
fn answer(mut stream: TcpStream, page: &str, (done, changed): &(Mutex<bool>, Condvar)) {
    let mut request = String::new();
    if BufReader::new(&stream).read_line(&mut request).is_err() {
        return;
    }
    let body = match request.split(' ').nth(1) {
        Some("/done") => {
            *done.lock().unwrap() = true;
            changed.notify_all();
            ""
        }
        Some("/hold") => {
            drop(changed.wait_timeout_while(done.lock().unwrap(), LIMIT, |done| !*done).unwrap());
            "<svg xmlns=\"http://www.w3.org/2000/svg\"/>"
        }
        _ => page,
    };
    let kind = if body.starts_with("<svg") { "image/svg+xml" } else { "text/html" };
    let length = body.len();
    // A browser that has gone needs no answer.
    let _ = write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{body}"
    );
}

//! Refusals of `sparse24 train` and `estimate`, and of wrong commands.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Child, Stdio},
    thread,
    time::Duration,
};

use crate::support::{Place, TINY, is_like, sentence};

/// The tests of `sparse24_run::data` have every reason.
#[test]
fn unusable_data_is_refused() {
    let place = Place::new();
    place.write("empty", "");
    place.write("one", "x");
    place.write("short", "the quick brown");
    place.write("shorter", "the quick brow");
    place.folder("mixed/folder");
    place.write("mixed/b", b"to\x89PNG");
    place.write("spaces", " \n");
    for (data, pattern) in [
        ("nowhere", "nowhere: does not exist"),
        ("empty", "empty: *holds no text"),
        ("spaces", "spaces: *holds no text"),
        ("mixed/folder", "folder: *holds no text"),
        ("one", "one: *1 characters*0.1"),
        ("short --set model.sequence_length=64", "short: *13 tokens*64*65"),
        ("shorter --set data.validation_share=0.07", "shorter: *1 tokens*validation*2"),
        ("mixed", "mixed/b: *UTF-8*0x89*offset 2"),
    ] {
        let line = format!("train {TINY} --set data.tokenizer=byte --data {data} --out new");
        place.refuses(&line, 3, pattern);
    }
    let line = format!("estimate {TINY} --data mixed");
    place.refuses(&line, 3, "mixed/b: *UTF-8");
}

#[test]
fn unusable_shards_are_refused() {
    let place = Place::new();
    place.answer("prepare --data text --tokenizer char --out prepared");
    let train = format!("train {TINY} --data prepared --out new");
    let whole = place.bytes("prepared/train.bin");
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    for (bytes, pattern) in [
        (whole[..whole.len() - 2].to_vec(), "3600 tokens*7328*7326*2 bytes"),
        (flipped(130), "checksum*offset 128"),
        (flipped(131), "token *position 1*27"),
    ] {
        place.write("prepared/train.bin", bytes);
        place.refuses(&train, 3, &format!("prepared/train.bin: *{pattern}"));
    }
    place.write("prepared/train.bin", &whole);
    let line = format!("train {TINY} --set data.tokenizer=byte --data prepared --out new");
    place.refuses(&line, 2, "data.tokenizer: *`byte`*prepared*`char`");
    place.remove("prepared/tokenizer.json");
    place.refuses(&train, 3, "prepared/train.bin: *tokenizer.json");
    place.write("prepared/train_val_1.bin", &whole);
    place.refuses(&train, 3, "train_val_1.bin: *both train and val");

    let ids = [7_u16, 255, 300, 1].map(u16::to_le_bytes).concat();
    place.write("foreign/train.bin", ids);
    place.write("foreign/val.bin", [1, 0]);
    let line = format!("train {TINY} --set data.tokenizer=byte --data foreign --out new");
    place.refuses(&line, 3, "foreign/train.bin: *token 300*position 2*256*gpt2");
}

#[test]
fn a_run_directory_must_be_new_or_empty() {
    let place = Place::trained("");
    place.write("mine/thesis.tex", "years of work");
    for (out, code, pattern) in [
        ("run", 3, "run: *empty run directory*resume"),
        ("mine", 3, "mine: *\"thesis.tex\"*empty run directory"),
        ("text", 3, "text: is a file"),
        ("text/run", 4, "cannot create text/run: *os error"),
        ("/proc/run", 4, "cannot create /proc/run: *os error"),
    ] {
        place.refuses(&format!("train {TINY} --out {out}"), code, pattern);
    }
    place.folder("empty");
    place.train("empty", "");
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("nowhere", place.path("dangling")).unwrap();
        let (_, err) = place.exits(&format!("train {TINY} --out dangling"), 3);
        assert!(err.starts_with("error: dangling: is a broken symbolic link"), "{err}");
    }
}

#[test]
fn two_processes_never_write_one_run() {
    let place = Place::trained("");
    // A step of minutes; the given weights are saved before it.
    let slow = "--set batch.gradient_accumulation_steps=1000000";
    let line = format!("train {TINY} {slow} --init-from run --out next");
    let mut first = place.command(&line).stderr(Stdio::piped()).spawn().unwrap();
    let mut notes = BufReader::new(first.stderr.take().unwrap());
    notes.read_line(&mut String::new()).unwrap();
    let second = place.command("resume next").output().unwrap();
    assert_eq!(second.status.code(), Some(4));
    let error = sentence(&second);
    assert!(is_like(&error, &format!("next: *in use*{}", first.id())), "{error}");
    place.remove("next/lock");
    let third = sentence(&place.command("resume next").output().unwrap());
    assert!(!cfg!(unix) || is_like(&third, "next: *in use*"), "a lock is deleted: {third}");
    place.answer("eval next");
    first.kill().unwrap();
    first.wait().unwrap();
    place.edit("next/config.toml", "_steps = 1000000", "_steps = 1");
    place.answer("resume next --allow batch");
    // Two first starts: the slower one finds the lock, or what the other has written by then.
    let line = format!("train {TINY} {slow} --out both --resume-or-start");
    let start = || place.command(&line).stderr(Stdio::piped()).spawn().unwrap();
    let mut both = vec![start(), start()];
    let slower = loop {
        let has_ended = |child: &mut Child| child.try_wait().unwrap().is_some();
        if let Some(at) = both.iter_mut().position(has_ended) {
            break both.swap_remove(at).wait_with_output().unwrap();
        }
        thread::sleep(Duration::from_millis(1));
    };
    both[0].kill().unwrap();
    both[0].wait().unwrap();
    let said = String::from_utf8(slower.stderr).unwrap();
    let is_told = ["in use by", "another process has started"].iter().any(|of| said.contains(of));
    assert!(slower.status.code() == Some(4) && said.contains("both: ") && is_told, "{said}");
}

/// No adapter can bind more than 4 GiB, because kernels count the bytes of a binding in 32 bits.
#[cfg(feature = "wgpu")]
#[test]
fn an_estimate_refuses_what_an_adapter_cannot_bind() {
    let place = Place::new();
    let line = |more: &str| format!("estimate {TINY} --backend wgpu --set {more}");
    if place.notes(&line("seed=7")).contains("no GPU adapter was found") {
        assert!(std::env::var_os("SPARSE24_REQUIRE_WGPU").is_none(), "there is no adapter");
        return;
    }
    for (more, code, pattern) in [
        ("batch.size=16777216", 2, "batch.size: *tensors of at most*wgpu"),
        ("model.d_model=65536 --set model.heads=512", 2, "model.d_model: *tensors of at most"),
        ("backend.gpu=99", 6, "no GPU adapter 99"),
    ] {
        place.refuses(&line(more), code, pattern);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_model_beyond_the_memory_is_refused() {
    let place = Place::new();
    for setting in ["model.d_model", "batch.size"] {
        let line = format!("train {TINY} --set {setting}=16777216 --out new");
        place.refuses(&line, 2, "model: *this machine has * MiB*batch.size");
    }
    // A job of Slurm with less, and not enough for the checkpoints.
    let settings = "--set model.d_model=1024 --set model.heads=8 --set model.d_ff=1024";
    let in_job = |line: &str| {
        let mut command = place.command(&format!("{line} {TINY} {settings}"));
        command.env("SLURM_MEM_PER_NODE", "100");
        command
    };
    let allows = "SLURM_MEM_PER_NODE allows 100 MiB of this machine's * MiB";
    let refused = format!("model: needs * MiB of memory, {allows}*batch.size");
    place.refuses_command(in_job("train --out new"), 2, &refused);
    // There is enough for one, but not for two.
    let two = "--set model.d_model=64 --set model.d_ff=256 --set batch.replicas=2 \
        --set batch.gradient_accumulation_steps=2";
    for (launch, code) in [("", 0), ("launch -n 2 -- ", 2)] {
        let mut command = place.command(&format!("{launch}train {TINY} {two} --out of-{code}"));
        let output = command.env("SLURM_MEM_PER_NODE", "8").output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let each = "MiB of memory for each of this machine's 2 ranks, SLURM*allows 8 MiB";
        assert_eq!((output.status.code(), is_like(&said, each)), (Some(code), code > 0), "{said}");
    }
    for (line, pattern) in [
        ("estimate", "*\nmain memory *100.0 MiB available*too little: the run needs *"),
        ("estimate --backend cuda", "*too little: the run needs *"),
    ] {
        let answer = String::from_utf8(in_job(line).output().unwrap().stdout).unwrap();
        assert!(is_like(&answer, pattern) && is_like(&answer, allows), "{line}: {answer}");
    }
    let mut doctor = place.command("doctor");
    let answer = doctor.env("SLURM_MEM_PER_NODE", "100").output().unwrap().stdout;
    let answer = String::from_utf8(answer).unwrap();
    assert!(is_like(&answer, &format!("memory *100 MiB available; {allows}")), "{answer}");
}

#[test]
fn plans_that_cannot_be_replayed_are_refused() {
    let place = Place::trained("");
    assert!(!place.has("run/plans.json"), "nothing is timed on a CPU");
    place.write("none", "{}");
    place.train("new", "--plans none");
    place.folder("folder");
    let gpu = r#"{"device": "NVIDIA Z1 (sm_999)", "gemm wgrad 8x8x8 strides 8, 8, 8": "0"}"#;
    place.write("gpu", gpu);
    for (plans, pattern) in [
        ("nowhere", "nowhere: does not exist*plans.json"),
        ("folder", "folder/plans.json: does not exist"),
        ("run", "run: *without plans.json*leave out --plans"),
        ("text", "text: "),
        ("gpu", "gpu: *\"device\""),
    ] {
        place.refuses(&format!("train {TINY} --plans {plans} --out other"), 3, pattern);
    }
    place.write("run/plans.json", gpu);
    place.refuses("resume run", 3, "run/plans.json: *\"device\"");
}

/// A command under a limit of its address space, in KiB.
#[cfg(target_os = "linux")]
fn limited(place: &Place, kib: u64, line: &str) -> std::process::Command {
    let script = format!("ulimit -v {kib} && exec \"$0\" {line}");
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_sparse24")]).current_dir(place.path(""));
    command
}

#[cfg(target_os = "linux")]
#[test]
fn threads_that_cannot_be_started_are_refused() {
    let place = Place::new();
    // The address space has space for one stack of this size and everything else, not for two.
    let line = format!("train {TINY} --set backend.threads=4096 --out new");
    let mut command = limited(&place, 2_000_000, &line);
    command.env("RUST_MIN_STACK", "1000000000");
    place.refuses_command(command, 4, "backend.threads: *64");
}

/// Threads reserve much address space, little of which is ever memory.
#[cfg(target_os = "linux")]
#[test]
fn too_little_address_space_is_refused() {
    let place = Place::new();
    let command = |line: &str| limited(&place, 200_000, line);
    let train = "train --set backend.threads=2 --steps 2 --set optimizer.warmup_steps=0 --out new";
    place.refuses_command(command(train), 2, "needs*`ulimit -v`*lower backend.threads");
    let output = command("estimate").env("RAYON_NUM_THREADS", "2").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("too little: the run needs"), "{text}");
    // A rank has more threads.
    let ranks = format!("launch -n 2 -- train {TINY} --set batch.gradient_accumulation_steps=2");
    for kib in (200_000..700_000).step_by(50_000) {
        let mut command = limited(&place, kib, &format!("{ranks} --out of-{kib}"));
        let std::process::Output { status, stderr, .. } = command.output().unwrap();
        let said = String::from_utf8(stderr).unwrap();
        let is_clear = [Some(0), Some(2), Some(4)].contains(&status.code());
        assert!(is_clear && !said.contains("allocation"), "{kib}: {said}");
    }
}

#[test]
#[cfg(unix)]
fn a_data_path_that_is_not_utf8_is_refused() {
    use std::os::unix::ffi::OsStrExt;
    let place = Place::new();
    let name = std::ffi::OsStr::from_bytes(b"na\xffme.txt");
    fs::copy(place.path("text"), place.path("").join(name)).unwrap();
    let mut command = place.command("config --data");
    command.arg(name);
    place.refuses_command(command, 2, "--data *UTF-8");
}

#[test]
fn a_preset_for_a_large_corpus_is_not_trained_on_the_embedded_text() {
    let place = Place::new();
    for preset in ["gpt2-124m", "gpt2-1558m"] {
        for more in ["", "--set data.path= --steps 3 --out new"] {
            let pattern = format!("data.path: *\"{preset}\"*--data");
            place.refuses(&format!("train --preset {preset} {more}"), 2, &pattern);
        }
    }
    place.json("estimate --preset gpt2-124m --json");
    place.train("run", "--preset gpt2-124m --set batch.gradient_accumulation_steps=1");
}

/// Each shell has its completions, and each command its page.
#[test]
fn the_command_describes_itself() {
    let place = Place::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        assert!(place.answer(&format!("completions {shell}")).contains("lambda-search"), "{shell}");
    }
    place.answer("man pages");
    assert!(place.read("pages/sparse24-train.1").contains("checkpoint"), "no page of train");
    place.refuses("man text", 4, "cannot write to text: ");
}

/// Errors of the argument parser become one sentence too.
#[test]
fn a_wrong_command_line_is_refused() {
    let place = Place::new();
    for (line, pattern) in [
        ("trian", "'trian'*; tip: *'train'"),
        ("resume", "<RUN>"),
        ("presets more", "'more'"),
        ("verify text --include (", "--include*unclosed group"),
    ] {
        place.refuses(line, 2, &format!("{pattern}*; see --help"));
    }
    let (code, _, err) = place.run("");
    assert_eq!(code, Some(2), "without a command, the help is printed as an error");
    assert!(err.contains("Usage: sparse24"), "{err}");
}

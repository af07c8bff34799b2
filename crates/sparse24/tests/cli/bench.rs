//! `sparse24 bench`, as far as it needs no GPU: what it would run, and how it refuses.

use crate::support::Place;

#[test]
#[cfg(feature = "cuda")]
fn cases_are_listed_without_a_gpu() {
    let place = Place::new();
    let cases = place.json("bench --list --json");
    let cases = cases.as_array().unwrap();
    let named: Vec<[&str; 2]> = cases
        .iter()
        .map(|case| ["kernel", "shape"].map(|key| case[key].as_str().unwrap()))
        .collect();
    assert_eq!(
        named.len(),
        named.iter().collect::<std::collections::HashSet<_>>().len(),
        "a case stands once"
    );
    // The goals' two shapes, and a product of each size.
    for case in [
        ["mask_search_f32", "16384x4096"],
        ["compress_weight", "5120x1280"],
        ["mvue_exact", "16384x4096"],
        ["adamw_step", "GPT-2 124M"],
        ["spmm24_transposed", "3072x16384x768"],
        ["spmm24_transposed", "6400x16384x1600"],
        ["spmm24", "16384x4096x16384"],
        ["linear_forward", "16384x6144x2048"],
    ] {
        assert!(named.contains(&case), "{case:?} is missing");
    }
    let lines = place.answer("bench --list");
    assert_eq!(lines.lines().count(), named.len());
    let told = |line: &str, [kernel, shape]: &[&str; 2]| {
        line.starts_with(&format!("{kernel} ")) && line.ends_with(&format!(" {shape}"))
    };
    assert!(lines.lines().zip(&named).all(|(line, case)| told(line, case)), "{lines}");
}

#[test]
#[cfg(feature = "cuda")]
fn kernels_and_sizes_select() {
    let place = Place::new();
    let kernels = |line: &str| -> Vec<String> {
        let cases = place.json(&format!("bench --list --json {line}"));
        cases
            .as_array()
            .unwrap()
            .iter()
            .map(|case| format!("{} {}", case["kernel"], case["shape"]).replace('"', ""))
            .collect()
    };
    assert_eq!(
        kernels("--kernel ^geglu --size gpt2-124m"),
        ["geglu_forward 16384x3072", "geglu_backward 16384x3072"]
    );
    assert_eq!(
        kernels("--kernel ^geglu_f --kernel flip --size 5120x1280"),
        ["flip_count 5120x1280", "geglu_forward 5120x1280"]
    );
    assert_eq!(
        kernels("--kernel norm_f --size 768 --size gpt2-124m --size 128"),
        ["norm_forward 16384x768", "norm_forward 16384x128"]
    );
    assert!(
        kernels("--size 5120x1280").iter().all(|case| case.ends_with(" 5120x1280")),
        "only what has that shape"
    );
    assert_eq!(kernels("--kernel nothing"), [""; 0]);
    assert_eq!(place.answer("bench --list --kernel nothing"), "");
}

#[test]
#[cfg(feature = "cuda")]
fn what_cannot_be_measured_is_refused() {
    let place = Place::new();
    place.refuses(
        "bench --kernel nothing",
        2,
        "--kernel: no name of a kernel in * cases has a match of `nothing`; --list names them",
    );
    place.refuses(
        "bench --size 100",
        2,
        "invalid value '100' for '--size <SIZE>': expected gpt2-124m, * or ROWSxCOLUMNS *; --help tells all",
    );
    place.refuses(
        "bench --kernel (",
        2,
        "invalid value '(' for '--kernel <REGEX>': * unclosed group; --help tells all",
    );
    place.refuses(
        "bench --method fst",
        2,
        "the following required arguments were not provided: --step <PRESET>; --help tells all",
    );
    place.refuses(
        "bench --step gpt2-124m --list",
        2,
        "the argument '--step <PRESET>' cannot be used with '--list'; --help tells all",
    );
    place.refuses(
        "bench --step gpt2-125m",
        2,
        "preset: \"gpt2-125m\" is not known; did you mean \"gpt2-124m\"? *",
    );
    place.refuses(
        "bench --step gpt2-124m --method stee",
        2,
        "method.name: \"stee\" is not known; did you mean \"ste\"? *",
    );
    place.refuses(
        "bench --step gpt2-124m --set model.layer=1",
        2,
        "model: \"layer\" is not known; did you mean \"layers\"? *",
    );
}

#[test]
#[cfg(feature = "cuda")]
fn without_a_gpu_a_sentence_says_what_is_missing() {
    let place = Place::new();
    for line in [
        "bench",
        "bench --json --quick",
        "bench --step gpt2-124m",
        "bench --kernel flip --size 128",
    ] {
        let mut command = place.command(line);
        // Of a machine that has one, too.
        command.env("CUDA_VISIBLE_DEVICES", "");
        place.refuses_command(command, 6, "the*");
    }
}

#[test]
#[cfg(not(feature = "cuda"))]
fn a_build_without_gpus_says_so() {
    let place = Place::new();
    let message = "bench times the kernels of GPUs, and this build is without the feature `cuda`: build with it";
    place.refuses("bench", 2, message);
    place.refuses("bench --list --size 4096", 2, message);
}

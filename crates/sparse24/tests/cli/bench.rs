//! `sparse24 bench` without a GPU: its list of cases and its refusals.

use crate::support::Place;

/// The listed cases as `kernel shape`.
#[cfg(feature = "cuda")]
fn cases(place: &Place, line: &str) -> Vec<String> {
    let cases = place.json(&format!("bench --list --json {line}"));
    let case = |case: &serde_json::Value| {
        ["kernel", "shape"].map(|key| case[key].as_str().unwrap()).join(" ")
    };
    cases.as_array().unwrap().iter().map(case).collect()
}

#[test]
#[cfg(feature = "cuda")]
fn cases_are_listed_without_a_gpu() {
    let place = Place::new();
    let listed = cases(&place, "");
    let unique: std::collections::HashSet<_> = listed.iter().collect();
    assert_eq!(listed.len(), unique.len(), "a case is listed twice");
    for case in [
        "mask_search_f32 16384x4096",
        "compress_weight 5120x1280",
        "mvue_exact 16384x4096",
        "adamw_step 3072x768",
        "spmm24_transposed 3072x16384x768",
        "spmm24_transposed 6400x16384x1600",
        "spmm24 16384x4096x16384",
    ] {
        assert!(listed.iter().any(|listed| listed == case), "{case} is missing");
    }
    let lines = place.answer("bench --list");
    let lines = lines.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    assert!(lines.eq(listed));
}

#[test]
#[cfg(feature = "cuda")]
fn kernels_and_sizes_select() {
    let place = Place::new();
    for (line, expected) in [
        (
            "--kernel ^geglu --size gpt2-124m",
            &[
                "geglu_forward 16384x3072",
                "geglu_backward 16384x3072",
                "geglu_backward_compress 16384x3072",
            ][..],
        ),
        (
            "--kernel ^geglu_f --kernel column --size 5120x1280",
            &["column_mask_search_f32 5120x1280", "geglu_forward 5120x1280"],
        ),
        (
            "--kernel norm_f --size 768 --size gpt2-124m --size 128",
            &["norm_forward 16384x768", "norm_forward 16384x128"],
        ),
    ] {
        assert_eq!(cases(&place, line), expected, "{line}");
    }
    assert!(cases(&place, "--size 5120x1280").iter().all(|case| case.ends_with(" 5120x1280")));
}

#[test]
#[cfg(feature = "cuda")]
fn wrong_arguments_and_settings_are_refused() {
    let place = Place::new();
    for (line, pattern) in [
        ("--kernel nothing", "--kernel*nothing*--list"),
        ("--kernel nothing --list", "--kernel*nothing*--list"),
        ("--size 100", "100*--size*gpt2-124m*ROWSxCOLUMNS"),
        ("--kernel (", "--kernel*unclosed group"),
        ("--method fst", "--step"),
        ("--step gpt2-124m --list", "--step*--list"),
        ("--step gpt2-125m", "gpt2-125m*did you mean \"gpt2-124m\""),
        ("--step gpt2-124m --method stee", "method.name*stee*did you mean \"ste\""),
    ] {
        place.refuses(&format!("bench {line}"), 2, pattern);
    }
}

#[test]
#[cfg(feature = "cuda")]
fn without_a_gpu_the_missing_part_is_named() {
    let place = Place::new();
    for line in ["", "--json --quick", "--step gpt2-124m", "--kernel dropout --size 128"] {
        let mut command = place.command(&format!("bench {line}"));
        command.env("CUDA_VISIBLE_DEVICES", "");
        place.refuses_command(command, 6, "the");
    }
}

#[test]
#[cfg(not(feature = "cuda"))]
fn a_build_without_gpu_support_refuses() {
    let place = Place::new();
    for line in ["bench", "bench --list --size 4096"] {
        place.refuses(line, 2, "feature `cuda`");
    }
}

//! A report as text, at most 100 columns wide.

use std::fmt::Write;

use sparse24_cuda::bench::{Known, Machine, Measured, Outcome, Peer, Reading, Record, Report};

/// What it ran on, a line a case, and what the columns mean.
pub(super) fn of(report: &Report) -> String {
    let mut text = String::new();
    head(&mut text, &report.machine, &report.cases);
    let columns = ["kernel", "shape", "median", "p10-p90 us", "rate", "floor", "peer"];
    let [kernel, shape, median, spread, rate, floor, peer] = columns;
    line(
        &mut text,
        format_args!(
            "{kernel:<26} {shape:<16} {median:>7} {spread:>11} {rate:>12} {floor:>5}  {peer}"
        ),
    );
    for record in &report.cases {
        row(&mut text, record);
    }
    text.push('\n');
    legend(&mut text, report);
    for block in &report.blocks {
        let peers = block
            .peers
            .iter()
            .map(|(name, ms)| format!(", {name} {ms:.3} ({:.3})", ms / block.sparse24));
        let peers: String = peers.collect();
        line(
            &mut text,
            format_args!(
                "six products of a block, d = {}: {:.3} ms{peers}",
                block.width, block.sparse24
            ),
        );
    }
    text
}

/// A case in a few words.
pub(super) fn brief(record: &Record) -> String {
    let Record { kernel, shape, outcome } = record;
    match outcome {
        Outcome::Measured(measured) => {
            format!("{kernel} {shape}: {} us, {}", us(measured.us.median), rate(measured))
        }
        Outcome::Failed { difference } => format!("{kernel} {shape}: FAILED: {difference}"),
        Outcome::Unmeasured { reason } => format!("{kernel} {shape}: {reason}"),
    }
}

fn line(text: &mut String, line: std::fmt::Arguments<'_>) {
    writeln!(text, "{}", line.to_string().trim_end()).expect("a string takes any text");
}

fn head(text: &mut String, machine: &Machine, cases: &[Record]) {
    let Machine {
        gpu, capability: [major, minor], multiprocessors, memory_mib, l2_mib, cuda, ..
    } = machine;
    line(
        text,
        format_args!(
            "{gpu}, compute capability {major}.{minor}, {multiprocessors} multiprocessors, {memory_mib} MiB, L2 {l2_mib} MiB"
        ),
    );
    let known = |known: &Known| match known {
        Known::Release(release) => release.clone(),
        Known::Problem(_) => "unknown".to_owned(),
    };
    let [driver, nvrtc, cublaslt, cusparselt] =
        [&machine.driver, &machine.nvrtc, &machine.cublaslt, &machine.cusparselt].map(known);
    line(
        text,
        format_args!(
            "driver {driver} (CUDA {}.{}), NVRTC {nvrtc}, cuBLASLt {cublaslt}, cuSPARSELt {cusparselt}",
            cuda[0], cuda[1]
        ),
    );
    for unknown in [&machine.driver, &machine.nvrtc, &machine.cublaslt, &machine.cusparselt] {
        if let Known::Problem(problem) = unknown {
            line(text, format_args!("{problem}"));
        }
    }
    if let (Some(before), Some(after)) = (machine.before, machine.after) {
        let during: Vec<Reading> =
            cases.iter().filter_map(|record| record.measured()?.reading).collect();
        let told = |name: &str, unit: &str, most: Option<u32>, of: fn(&Reading) -> Option<u32>| {
            let number = |value: Option<u32>| {
                value.map_or_else(|| "?".to_owned(), |value| value.to_string())
            };
            let values = || during.iter().filter_map(of);
            let range = values()
                .min()
                .zip(values().max())
                .map_or_else(|| "?".to_owned(), |(least, most)| format!("{least}-{most}"));
            let most = most.map_or_else(String::new, |most| format!(" of {most}"));
            format!(
                "{name} {} before, {range} during, {} after{most} {unit}",
                number(of(&before)),
                number(of(&after))
            )
        };
        line(
            text,
            format_args!("{}", told("clock", "MHz", machine.most_sm_mhz, |reading| reading.sm_mhz)),
        );
        let (power, heat) = (
            told("power", "W", machine.most_watts, |reading| reading.watts),
            told("chip", "degrees", None, |reading| reading.celsius),
        );
        line(text, format_args!("{power}; {heat}"));
    }
    text.push('\n');
}

fn row(text: &mut String, record: &Record) {
    let Record { kernel, shape, outcome } = record;
    let measured = match outcome {
        Outcome::Measured(measured) => measured,
        Outcome::Failed { difference } => {
            return line(text, format_args!("{kernel:<26} {shape:<16} FAILED: {difference}"));
        }
        Outcome::Unmeasured { reason } => {
            return line(text, format_args!("{kernel:<26} {shape:<16} not run: {reason}"));
        }
    };
    let floor = measured.over_floor.map_or_else(|| "?".to_owned(), |ratio| format!("{ratio:.2}"));
    let spread = format!("{}-{}", us(measured.us.p10), us(measured.us.p90));
    let peer = |peer: &Peer| format!("{} {:.2}", peer.name, peer.ratio);
    let mut peers = measured.peers.iter().map(peer);
    let (median, rate, first) =
        (us(measured.us.median), rate(measured), peers.next().unwrap_or_default());
    line(
        text,
        format_args!(
            "{kernel:<26} {shape:<16} {median:>7} {spread:>11} {rate:>12} {floor:>5}  {first}"
        ),
    );
    for peer in peers {
        line(text, format_args!("{:<85}{peer}", ""));
    }
    for refused in &measured.without {
        line(text, format_args!("  without a peer: {refused}"));
    }
}

fn legend(text: &mut String, report: &Report) {
    if let Some(copy) = report.copy_gb_s {
        line(
            text,
            format_args!(
                "floor: median over the time that what must be moved takes at the rate of a copy in this run,"
            ),
        );
        line(text, format_args!("       {copy:.0} GB/s read and written"));
    }
    if let Some(dense) = report.dense_tflop_s {
        line(
            text,
            format_args!(
                "       or, if longer, its products at cuBLASLt's rate at 8192x8192x8192 in this run, {dense:.0} TFLOP/s,"
            ),
        );
        line(
            text,
            format_args!(
                "       and at twice that for sparse products, whose FLOPs are those of the dense one"
            ),
        );
    }
    if report.cases.iter().filter_map(Record::measured).any(|measured| !measured.peers.is_empty()) {
        line(
            text,
            format_args!(
                "peer:  its median over the kernel's, in turns: above 1 the kernel is faster; a copy moves as much"
            ),
        );
    }
}

fn rate(measured: &Measured) -> String {
    match measured.tflop_s {
        Some(rate) => format!("{rate:.0} TFLOP/s"),
        None => format!("{:.0} GB/s", measured.gb_s),
    }
}

/// In five characters.
fn us(time: f64) -> String {
    if time < 100.0 {
        format!("{time:.2}")
    } else if time < 1000.0 {
        format!("{time:.1}")
    } else {
        format!("{time:.0}")
    }
}

#[cfg(test)]
mod tests {
    use sparse24_cuda::bench::{Block, Quantiles};

    use super::*;

    fn report() -> Report {
        let release = || Known::Release("13.0".into());
        let reading =
            Reading { sm_mhz: Some(1500), memory_mhz: Some(3201), watts: Some(690), celsius: None };
        let machine = Machine {
            gpu: "NVIDIA H200".into(),
            capability: [9, 0],
            multiprocessors: 132,
            memory_mib: 143_771,
            l2_mib: 50,
            driver: Known::Release("580.82.07".into()),
            cuda: [13, 0],
            nvrtc: release(),
            cublaslt: release(),
            cusparselt: Known::Problem("cuSPARSELt was not found".into()),
            most_sm_mhz: Some(1980),
            most_watts: Some(700),
            before: Some(Reading::default()),
            after: Some(reading),
        };
        let times = |median| Quantiles { median, p10: 0.99 * median, p90: 1.01 * median };
        let measured = |median, floor, tflop_s, peers: &[(&str, f64)]| Measured {
            verified: "all",
            us: times(median),
            gb_s: 4012.4,
            tflop_s,
            floor_us: Some(floor),
            floor_of: Some("bytes"),
            over_floor: Some(median / floor),
            peers: peers
                .iter()
                .map(|&(name, ratio)| Peer { name: name.into(), us: times(ratio * median), ratio })
                .collect(),
            without: Vec::new(),
            plans: Vec::new(),
            reading: Some(reading),
        };
        let record = |kernel, shape: &str, outcome| Record { kernel, shape: shape.into(), outcome };
        Report {
            machine,
            copy_gb_s: Some(4100.4),
            dense_tflop_s: Some(712.3),
            cases: vec![
                record(
                    "column_mask_search_bf16",
                    "16384x4096",
                    Outcome::Measured(measured(67.246, 100.0, None, &[("copy", 0.98)])),
                ),
                record(
                    "spmm24_transposed",
                    "16384x16384x4096",
                    Outcome::Measured(measured(
                        12_950.4,
                        5000.0,
                        Some(1234.0),
                        &[("cuSPARSELt", 1.026), ("cuBLASLt", 1.5)],
                    )),
                ),
                record(
                    "flip_count",
                    "8x8",
                    Outcome::Failed {
                        difference: "the count, element 0: found 3, expected 4".into(),
                    },
                ),
                record("dropout", "8x8", Outcome::Unmeasured { reason: "x needs 3 MiB".into() }),
            ],
            blocks: vec![Block {
                width: 768,
                sparse24: 0.505,
                peers: vec![("cuSPARSELt".into(), 0.579)],
            }],
        }
    }

    #[test]
    fn a_table_fits_and_says_all() {
        let text = of(&report());
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        for said in [
            "NVIDIA H200, compute capability 9.0, 132 multiprocessors, 143771 MiB, L2 50 MiB\n",
            "driver 580.82.07 (CUDA 13.0), NVRTC 13.0, cuBLASLt 13.0, cuSPARSELt unknown\ncuSPARSELt was not found\n",
            "clock ? before, 1500-1500 during, 1500 after of 1980 MHz\npower ? before, 690-690 during, 690 after of 700 W; chip ",
            "\ncolumn_mask_search_bf16    16384x4096         67.25 66.57-67.92    4012 GB/s  0.67  copy 0.98\n",
            "\nspmm24_transposed          16384x16384x4096   12950 12821-13080 1234 TFLOP/s  2.59  cuSPARSELt 1.03\n",
            "   cuBLASLt 1.50\n",
            "\nflip_count                 8x8              FAILED: the count, element 0: found 3, expected 4\n",
            "\ndropout                    8x8              not run: x needs 3 MiB\n",
            "       4100 GB/s read and written\n",
            " in this run, 712 TFLOP/s,\n",
            "six products of a block, d = 768: 0.505 ms, cuSPARSELt 0.579 (1.147)\n",
        ] {
            assert!(text.contains(said), "{said:?} is missing in\n{text}");
        }
    }

    #[test]
    fn times_keep_four_digits() {
        assert_eq!([3.456, 99.99, 123.45, 12_345.6].map(us), ["3.46", "99.99", "123.5", "12346"]);
    }
}

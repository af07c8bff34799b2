//! Formats a bench report as text, at most 100 columns wide.

use std::fmt::Write;

use sparse24_cuda::bench::{Known, Machine, Measured, Outcome, Peer, Reading, Record, Report};

/// Appends a formatted line without trailing spaces.
macro_rules! line {
    ($text:expr, $($argument:tt)*) => {
        writeln!($text, "{}", format!($($argument)*).trim_end()).expect("a string takes any text")
    };
}

/// The machine, one line per case, and a legend of the columns.
pub(super) fn format(report: &Report) -> String {
    let mut text = String::new();
    head(&mut text, &report.machine, &report.cases);
    line!(
        text,
        "kernel                     shape             median  p10-p90 us         rate floor  peer"
    );
    for record in &report.cases {
        row(&mut text, record);
    }
    text.push('\n');
    legend(&mut text, report);
    for block in &report.blocks {
        let peer =
            |(name, ms): &(String, f64)| format!(", {name} {ms:.3} ({:.3})", ms / block.sparse24);
        let peers: String = block.peers.iter().map(peer).collect();
        line!(
            text,
            "six products of a block, d = {}: {:.3} ms{peers}",
            block.width,
            block.sparse24
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

fn head(text: &mut String, machine: &Machine, cases: &[Record]) {
    let Machine { gpu, capability, multiprocessors, memory_mib, l2_mib, cuda, .. } = machine;
    let [major, minor] = capability;
    line!(
        text,
        "{gpu}, compute capability {major}.{minor}, {multiprocessors} multiprocessors, \
         {memory_mib} MiB, L2 {l2_mib} MiB"
    );
    let libraries = [&machine.driver, &machine.nvrtc, &machine.cublaslt, &machine.cusparselt];
    let [driver, nvrtc, cublaslt, cusparselt] = libraries.map(|known| match known {
        Known::Release(release) => release.as_str(),
        Known::Problem(_) => "unknown",
    });
    line!(
        text,
        "driver {driver} (CUDA {}.{}), NVRTC {nvrtc}, cuBLASLt {cublaslt}, cuSPARSELt {cusparselt}",
        cuda[0],
        cuda[1]
    );
    for library in libraries {
        if let Known::Problem(problem) = library {
            line!(text, "{problem}");
        }
    }
    if let (Some(before), Some(after)) = (machine.before, machine.after) {
        let during: Vec<Reading> =
            cases.iter().filter_map(|record| record.measured()?.reading).collect();
        let history =
            |name: &str, unit: &str, limit: Option<u32>, of: fn(&Reading) -> Option<u32>| {
                let number =
                    |value: Option<u32>| value.map_or("?".to_owned(), |value| value.to_string());
                let (before, after) = (number(of(&before)), number(of(&after)));
                let values = || during.iter().filter_map(of);
                let range = values().min().zip(values().max());
                let range = range.map_or("?".to_owned(), |(least, most)| format!("{least}-{most}"));
                let limit = limit.map_or_else(String::new, |limit| format!(" of {limit}"));
                format!("{name} {before} before, {range} during, {after} after{limit} {unit}")
            };
        line!(text, "{}", history("clock", "MHz", machine.most_sm_mhz, |reading| reading.sm_mhz));
        let power = history("power", "W", machine.most_watts, |reading| reading.watts);
        line!(text, "{power}; {}", history("chip", "degrees", None, |reading| reading.celsius));
    }
    text.push('\n');
}

fn row(text: &mut String, record: &Record) {
    let Record { kernel, shape, outcome } = record;
    let name = format!("{kernel:<26} {shape:<16}");
    let measured = match outcome {
        Outcome::Measured(measured) => measured,
        Outcome::Failed { difference } => return line!(text, "{name} FAILED: {difference}"),
        Outcome::Unmeasured { reason } => return line!(text, "{name} not run: {reason}"),
    };
    let floor = measured.over_floor.map_or_else(|| "?".to_owned(), |ratio| format!("{ratio:.2}"));
    let spread = format!("{}-{}", us(measured.us.p10), us(measured.us.p90));
    let mut peers =
        measured.peers.iter().map(|Peer { name, ratio, .. }| format!("{name} {ratio:.2}"));
    let (median, rate) = (us(measured.us.median), rate(measured));
    let first = peers.next().unwrap_or_default();
    line!(text, "{name} {median:>7} {spread:>11} {rate:>12} {floor:>5}  {first}");
    for peer in peers {
        line!(text, "{:<85}{peer}", "");
    }
    for refused in &measured.without {
        line!(text, "  peer not run: {refused}");
    }
}

fn legend(text: &mut String, report: &Report) {
    if let Some(copy) = report.copy_gb_s {
        line!(
            text,
            "floor: median over the time to move its bytes at the rate of a copy in this run,"
        );
        line!(text, "       {copy:.0} GB/s read and written");
    }
    if let Some(dense) = report.dense_tflop_s {
        line!(text, "       or, if longer, over the time of its products at cuBLASLt's rate for");
        line!(
            text,
            "       8192x8192x8192 in this run, {dense:.0} TFLOP/s, or twice that if they are"
        );
        line!(text, "       sparse (FLOPs are those of the dense product)");
    }
    if report.cases.iter().filter_map(Record::measured).any(|measured| !measured.peers.is_empty()) {
        line!(text, "peer:  its median over the kernel's (interleaved): above 1 the kernel wins;");
        line!(text, "       a copy moves the same number of bytes");
    }
}

fn rate(measured: &Measured) -> String {
    match measured.tflop_s {
        Some(rate) => format!("{rate:.0} TFLOP/s"),
        None => format!("{:.0} GB/s", measured.gb_s),
    }
}

/// Microseconds in at most five characters.
fn us(time: f64) -> String {
    let decimals = if time < 100.0 { 2 } else { usize::from(time < 1000.0) };
    format!("{time:.decimals$}")
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
        let copy = measured(67.246, 100.0, None, &[("copy", 0.98)]);
        let dense = [("cuSPARSELt", 1.026), ("cuBLASLt", 1.5)];
        let product = measured(12_950.4, 5000.0, Some(1234.0), &dense);
        let cases = [
            ("column_mask_search_bf16", "16384x4096", Outcome::Measured(copy)),
            ("spmm24_transposed", "16384x16384x4096", Outcome::Measured(product)),
            ("flip_count", "8x8", Outcome::Failed { difference: "found 3, expected 4".into() }),
            ("dropout", "8x8", Outcome::Unmeasured { reason: "x needs 3 MiB".into() }),
        ];
        let record = |(kernel, shape, outcome): (_, &str, _)| Record {
            kernel,
            shape: shape.into(),
            outcome,
        };
        let peers = vec![("cuSPARSELt".into(), 0.579)];
        Report {
            machine,
            copy_gb_s: Some(4100.4),
            dense_tflop_s: Some(712.3),
            cases: cases.into_iter().map(record).collect(),
            blocks: vec![Block { width: 768, sparse24: 0.505, peers }],
        }
    }

    #[test]
    fn a_table_is_complete_and_at_most_100_columns_wide() {
        let text = format(&report());
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        for part in [
            "NVIDIA H200, compute capability 9.0, 132 multiprocessors, 143771 MiB, L2 50 MiB\n",
            "driver 580.82.07 (CUDA 13.0), NVRTC 13.0, cuBLASLt 13.0, cuSPARSELt unknown\n",
            "\ncuSPARSELt was not found\n",
            "clock ? before, 1500-1500 during, 1500 after of 1980 MHz\n",
            "\npower ? before, 690-690 during, 690 after of 700 W; chip ",
            "\ncolumn_mask_search_bf16    16384x4096         67.25 66.57-67.92 ",
            "    4012 GB/s  0.67  copy 0.98\n",
            "\nspmm24_transposed          16384x16384x4096   12950 12821-13080 ",
            " 1234 TFLOP/s  2.59  cuSPARSELt 1.03\n",
            "   cuBLASLt 1.50\n",
            "\nflip_count                 8x8              FAILED: found 3, expected 4\n",
            "\ndropout                    8x8              not run: x needs 3 MiB\n",
            "       4100 GB/s read and written\n",
            " in this run, 712 TFLOP/s,",
            "six products of a block, d = 768: 0.505 ms, cuSPARSELt 0.579 (1.147)\n",
        ] {
            assert!(text.contains(part), "{part:?} is missing in\n{text}");
        }
    }

    #[test]
    fn times_keep_four_digits() {
        assert_eq!([3.456, 99.99, 123.45, 12_345.6].map(us), ["3.46", "99.99", "123.5", "12346"]);
    }
}

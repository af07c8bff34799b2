//! The results of a bench, for tables and JSON.

use serde::Serialize;

use super::{Machine, Quantiles, Rates, Reading, Work};

/// All results.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The GPU and its software.
    pub machine: Machine,
    /// Copy rate of this run in GB/s, from which floors are computed.
    pub copy_gb_s: Option<f64>,
    /// Rate of cuBLASLt in this run in TFLOP/s: 8192 x 8192 x 8192 in bf16.
    pub dense_tflop_s: Option<f64>,
    /// One record per case.
    pub cases: Vec<Record>,
    /// Totals of feed-forward blocks whose six products were all timed.
    pub blocks: Vec<Block>,
}

/// A case and its outcome.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Record {
    /// Name of the operation.
    pub kernel: &'static str,
    /// The shape as text.
    pub shape: String,
    /// The outcome.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// The outcome of a case.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// The result is correct, and was timed.
    Measured(Measured),
    /// The result is wrong.
    Failed {
        /// What, where, and the expected value.
        difference: String,
    },
    /// Memory or a library is missing, a kernel does not compile, or a library refuses.
    Unmeasured {
        /// The reason.
        reason: String,
    },
}

/// The time of a kernel.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measured {
    /// The verification that preceded the timing.
    pub verified: &'static str,
    /// Microseconds.
    pub us: Quantiles,
    /// GB/s of the bytes that must be moved.
    pub gb_s: f64,
    /// TFLOP/s of the dense product, for products.
    pub tflop_s: Option<f64>,
    /// Lower bound in microseconds, if known.
    pub floor_us: Option<f64>,
    /// The limiting resource: `bytes` or `products`.
    pub floor_of: Option<&'static str>,
    /// The median divided by the floor.
    pub over_floor: Option<f64>,
    /// Competitors, timed in turns with it.
    pub peers: Vec<Peer>,
    /// Competitors that refused, and why.
    pub without: Vec<String>,
    /// Quick times of all plans; the fastest was timed.
    pub plans: Vec<PlanTime>,
    /// Clocks and power while it ran.
    pub reading: Option<Reading>,
}

/// A competitor that does the same work.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Peer {
    /// Its name.
    pub name: String,
    /// Microseconds.
    pub us: Quantiles,
    /// Its median divided by the kernel's: above 1, the kernel is faster.
    pub ratio: f64,
}

/// A plan of a sparse product and its time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlanTime {
    /// Text of the [`Plan`](crate::spmm24::Plan).
    pub plan: String,
    /// Median microseconds of a few timings.
    pub us: f64,
}

/// The six products of a feed-forward block, forward, dgrad and wgrad of both layers: milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Block {
    /// d_model.
    pub width: usize,
    /// With this crate's kernels.
    pub sparse24: f64,
    /// With each competitor that has all six.
    pub peers: Vec<(String, f64)>,
}

impl Measured {
    /// From the names and times of the kernel and of its competitors.
    pub(super) fn new(
        work: &Work,
        floor: Option<(f64, &'static str)>,
        times: &[(String, Quantiles)],
    ) -> Self {
        let us = times[0].1;
        let peer = |(name, time): &(String, Quantiles)| Peer {
            name: name.clone(),
            us: *time,
            ratio: time.median / us.median,
        };
        Self {
            verified: "",
            us,
            gb_s: work.bytes / us.median / 1e3,
            tflop_s: (work.flops > 0.0).then(|| work.flops / us.median / 1e6),
            floor_us: floor.map(|(floor, _)| floor),
            floor_of: floor.map(|(_, of)| of),
            over_floor: floor.map(|(floor, _)| us.median / floor),
            peers: times[1..].iter().map(peer).collect(),
            without: Vec::new(),
            plans: Vec::new(),
            reading: None,
        }
    }
}

impl Record {
    /// The measurement, if there is one.
    #[must_use]
    pub const fn measured(&self) -> Option<&Measured> {
        match &self.outcome {
            Outcome::Measured(measured) => Some(measured),
            _ => None,
        }
    }
}

impl Report {
    pub(super) fn new(machine: Machine, rates: Rates, cases: Vec<Record>) -> Self {
        let blocks = cases.iter().filter_map(|record| block(record, &cases)).collect();
        Self {
            machine,
            copy_gb_s: rates.copy.map(|rate| rate / 1e9),
            dense_tflop_s: rates.dense.map(|rate| rate / 1e12),
            cases,
            blocks,
        }
    }
}

/// The block whose up layer's forward product is this case.
fn block(up: &Record, cases: &[Record]) -> Option<Block> {
    let lengths: Vec<usize> =
        up.shape.split('x').filter_map(|length| length.parse().ok()).collect();
    let &[hidden, tokens, width] = lengths.as_slice() else { return None };
    if up.kernel != "spmm24_transposed" || hidden != 4 * width {
        return None;
    }
    let time = |kernel: &str, [m, n, k]: [usize; 3]| {
        let shape = format!("{m}x{n}x{k}");
        cases.iter().find(|record| record.kernel == kernel && record.shape == shape)?.measured()
    };
    // One layer's forward product has the shape of the other's dgrad.
    let products = [
        (2.0, time("spmm24_transposed", [hidden, tokens, width])?),
        (2.0, time("spmm24_transposed", [width, tokens, hidden])?),
        (1.0, time("spmm24", [hidden, width, tokens])?),
        (1.0, time("spmm24", [width, hidden, tokens])?),
    ];
    let of_peer = |name: &str| {
        let times = products.iter().map(|(count, of)| {
            Some(count * of.peers.iter().find(|peer| peer.name == name)?.us.median)
        });
        Some((name.to_owned(), times.sum::<Option<f64>>()? / 1e3))
    };
    let peers = products[0].1.peers.iter().filter_map(|peer| of_peer(&peer.name)).collect();
    Some(Block {
        width,
        sparse24: products.iter().map(|(count, of)| count * of.us.median).sum::<f64>() / 1e3,
        peers,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kernel: &'static str, shape: &str, us: f64, peers: &[(&str, f64)]) -> Record {
        let work = Work { bytes: 1e6, flops: 1e9, speed: 2.0 };
        let quantiles = |us| Quantiles { median: us, p10: us, p90: us };
        let all = [("itself", us)].into_iter().chain(peers.iter().copied());
        let times: Vec<_> = all.map(|(name, us)| (name.to_owned(), quantiles(us))).collect();
        let outcome = Outcome::Measured(Measured::new(&work, Some((5.0, "bytes")), &times));
        Record { kernel, shape: shape.to_owned(), outcome }
    }

    #[test]
    fn a_time_becomes_rates_and_ratios() {
        let of = record("spmm24", "1x1x1", 10.0, &[("copy", 15.0)]);
        let measured = of.measured().expect("it has one");
        assert_eq!(
            (measured.gb_s, measured.tflop_s, measured.over_floor),
            (100.0, Some(100.0), Some(2.0))
        );
        assert_eq!((measured.peers[0].name.as_str(), measured.peers[0].ratio), ("copy", 1.5));
        let json = serde_json::to_value(&of).expect("plain values");
        assert_eq!((&json["outcome"], &json["us"]["median"]), (&"measured".into(), &10.0.into()));
        let failed = Record { outcome: Outcome::Failed { difference: "x".into() }, ..of };
        assert_eq!(serde_json::to_value(&failed).expect("plain values")["outcome"], "failed");
    }

    #[test]
    fn a_block_sums_its_six_products() {
        const BOTH: &[(&str, f64)] = &[("cuSPARSELt", 2e3), ("cuBLASLt", 3e3)];
        let mut cases = vec![
            record("spmm24_transposed", "3072x16384x768", 1e3, BOTH),
            record("spmm24_transposed", "768x16384x3072", 2e3, BOTH),
            record("spmm24", "3072x768x16384", 3e3, BOTH),
            record("spmm24", "768x3072x16384", 4e3, &BOTH[1..]),
        ];
        let blocks = |cases: &[Record]| {
            cases.iter().filter_map(|record| block(record, cases)).collect::<Vec<_>>()
        };
        assert_eq!(
            blocks(&cases),
            [Block { width: 768, sparse24: 13.0, peers: vec![("cuBLASLt".into(), 18.0)] }]
        );
        cases.pop();
        assert_eq!(blocks(&cases), []);
    }
}

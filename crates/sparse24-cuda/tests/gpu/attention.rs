//! Attention: what its values do not depend on, and its errors. The conformance suite checks the
//! values themselves.

use half::bf16;
use ndarray::Array2;
use sparse24_core::{
    op::{AttentionMask, AttentionShape, Dropout, StepState},
    philox::{Purpose, Site},
};
use sparse24_cuda::{
    Device,
    attention::{
        AttentionBackward, AttentionDropout, AttentionForward, attention_backward,
        attention_forward, backward_scratch,
    },
};

use crate::support::{Poisoned, gaussian, on_gpu, refused, upload};

const SITE: Site = Site::new(Purpose::Dropout, 5);
const STEP: StepState = StepState {
    seed: 0x0123_4567_89ab_cdef,
    step: 7,
    micro_step: 3,
    learning_rate: 0.0,
    bias_corrections: [0.0, 0.0],
    loss_scale: 1.0,
};

/// Operands on the host, with the values that the device holds.
struct Case {
    shape: AttentionShape,
    width: usize,
    dropped: Option<f32>,
    /// Visible keys of each sequence; all if absent.
    lengths: Option<Vec<u32>>,
    q: Array2<f32>,
    k: Array2<f32>,
    v: Array2<f32>,
    d_o: Array2<f32>,
}

/// o, lse, dq, dk and dv, with their names.
type Results = [(&'static str, Array2<f32>); 5];

impl Case {
    fn new(shape: AttentionShape, width: usize, dropped: Option<f32>) -> Self {
        let d = shape.heads * width;
        let random = |rows, seed| gaussian::<bf16>([rows, d], seed).mapv(f32::from);
        let [of_queries, of_keys] = [shape.batch * shape.queries, shape.batch * shape.keys];
        let (q, k, v, d_o) = (
            random(of_queries, 1) * 2.0,
            random(of_keys, 2),
            random(of_keys, 3),
            random(of_queries, 4),
        );
        Self { shape, width, dropped, lengths: None, q, k, v, d_o }
    }

    fn run(&self, device: &mut Device) -> Results {
        let shape @ AttentionShape { batch, heads, queries, keys, .. } = self.shape;
        let [of_queries, of_keys] =
            [queries, keys].map(|length| [batch * length, heads * self.width]);
        let [q, k, v, d_o] =
            [&self.q, &self.k, &self.v, &self.d_o].map(|x| upload(device, &x.mapv(bf16::from_f32)));
        device.set_step(&STEP).expect("set");
        let lse = Poisoned::<f32>::new(device, [batch * heads, queries]);
        let [o, dq, dk, dv] = [of_queries, of_queries, of_keys, of_keys]
            .map(|shape| Poisoned::<bf16>::new(device, shape));
        let kept = Poisoned::<u32>::new(device, [batch * heads, shape.tile_words()]);
        let dropout = self.dropped.map(|p| {
            let drawn = Dropout { p, site: SITE };
            AttentionDropout { drawn, kept: kept.matrix }
        });
        let lengths = self.lengths.as_ref().map(|lengths| {
            let to = device.alloc("lengths", [batch, 1]).expect("memory");
            device.upload(to, lengths).expect("uploaded");
            to
        });
        let forward =
            AttentionForward { shape, q, k, v, lengths, dropout, o: o.matrix, lse: lse.matrix };
        attention_forward(device, &forward).expect("queued");
        let scratch = Poisoned::<f32>::new(device, backward_scratch(shape));
        let [dq_to, dk_to, dv_to] = [&dq, &dk, &dv].map(|gradient| gradient.matrix);
        let backward = AttentionBackward {
            forward,
            d_o,
            dq: dq_to,
            dk: dk_to,
            dv: dv_to,
            scratch: scratch.matrix,
        };
        attention_backward(device, &backward).expect("queued");
        scratch.assert_guarded(device);
        kept.assert_guarded(device);
        let lse = Array2::from_shape_vec(lse.matrix.shape(), lse.read(device)).expect("the shape");
        let [o, dq, dk, dv] = [o, dq, dk, dv].map(|from| {
            let values = from.read(device).into_iter().map(f32::from).collect();
            Array2::from_shape_vec(from.matrix.shape(), values).expect("the shape")
        });
        [("o", o), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv)]
    }
}

fn assert_same_bits(found: &Results, expected: &Results) {
    for ((name, a), (_, b)) in found.iter().zip(expected) {
        assert!(a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}");
    }
}

const fn square(tokens: usize, mask: AttentionMask) -> AttentionShape {
    AttentionShape { batch: 2, heads: 3, queries: tokens, keys: tokens, mask }
}

/// Whatever padding keys hold reaches no result; a length of 0 leaves a sequence without keys, and
/// one beyond the keys means all of them.
#[test]
fn keys_beyond_a_length_are_not_seen() {
    on_gpu(|device| {
        for (queries, keys, lengths) in
            [(65, 65, [65, 1]), (7, 200, [129, 0]), (130, 64, [63, u32::MAX]), (64, 192, [64, 128])]
        {
            for width in [64, 80] {
                let shape = AttentionShape { queries, keys, ..square(0, AttentionMask::Full) };
                let mut case = Case::new(shape, width, None);
                case.lengths = Some(lengths.to_vec());
                let expected = case.run(device);
                for (sequence, &length) in lengths.iter().enumerate() {
                    for key in (length as usize).min(keys)..keys {
                        case.k.row_mut(sequence * keys + key).fill(f32::NAN);
                        case.v.row_mut(sequence * keys + key).fill(f32::NAN);
                    }
                }
                case.lengths = Some(lengths.map(|length| length.min(keys as u32)).to_vec());
                assert_same_bits(&case.run(device), &expected);
            }
        }
    });
}

/// Lengths of all keys change no bit, whatever the mask and dropout.
#[test]
fn full_lengths_change_no_bit() {
    on_gpu(|device| {
        for (mask, dropped, width) in [
            (AttentionMask::Causal, None, 64),
            (AttentionMask::Full, Some(0.2), 64),
            (AttentionMask::Causal, Some(0.2), 128),
            (AttentionMask::Causal, None, 128),
        ] {
            let mut case = Case::new(square(200, mask), width, dropped);
            let without = case.run(device);
            case.lengths = Some(vec![200; 2]);
            assert_same_bits(&case.run(device), &without);
        }
    });
}

#[test]
fn large_scores_do_not_overflow() {
    on_gpu(|device| {
        let mut case = Case::new(square(200, AttentionMask::Causal), 64, None);
        // Very large scores, with ties.
        case.q.fill(4.0);
        case.k.mapv_inplace(|k| if k > 0.8 { 8.0 } else { -8.0 });
        for (name, matrix) in case.run(device) {
            assert!(matrix.iter().all(|x| x.is_finite()), "{name}");
        }
    });
}

/// A NaN spoils its own head and row, and nothing else.
#[test]
fn a_nan_stays_in_its_head() {
    on_gpu(|device| {
        let shape = square(130, AttentionMask::Causal);
        let mut case = Case::new(shape, 64, None);
        // Sequence 0, query 70, head 1.
        case.q[[70, 64 + 3]] = f32::NAN;
        let [(_, o), _, _, (_, dk), _] = case.run(device);
        for ((row, column), x) in o.indexed_iter() {
            assert_eq!(x.is_nan(), row == 70 && column / 64 == 1, "o at {row}, {column}");
        }
        // dk sums over all queries, and 0 times NaN is NaN.
        for ((row, column), x) in dk.indexed_iter() {
            assert!(x.is_nan() || row > 70 || column / 64 != 1, "dk at {row}, {column} lost it");
            assert!(!x.is_nan() || row < 130 && column / 64 == 1, "dk at {row}, {column} is NaN");
        }
    });
}

#[test]
fn bad_operands_are_refused() {
    on_gpu(|device| {
        let shape = AttentionShape { batch: 1, heads: 2, ..square(8, AttentionMask::Causal) };
        let whole = device.alloc::<bf16>("qkv", [8, 48]).expect("memory");
        let [q, k, v] = [0, 16, 32].map(|first| whole.columns(first..first + 16));
        let (o, lse) = (
            device.alloc("o", [8, 16]).expect("memory"),
            device.alloc("lse", [2, 8]).expect("memory"),
        );
        let op = AttentionForward { shape, q, k, v, lengths: None, dropout: None, o, lse };
        attention_forward(device, &op).expect("fits");
        let mut refuse = |op: AttentionForward| refused(attention_forward(device, &op));
        assert_eq!(refuse(AttentionForward { o: q, ..op }), ("alias", "o"));
        assert_eq!(refuse(AttentionForward { k: whole, ..op }), ("shape", "k"));
        let shifted = whole.columns(4..20);
        assert_eq!(refuse(AttentionForward { v: shifted, ..op }), ("alignment", "v"));
        let thirds = AttentionShape { heads: 3, ..shape };
        assert_eq!(refuse(AttentionForward { shape: thirds, ..op }), ("shape", "q"));
        assert_eq!(refuse(AttentionForward { lse: lse.rows(0..1), ..op }), ("shape", "lse"));
        let scratch = device.alloc("scratch", backward_scratch(shape)).expect("memory");
        let gradients = device.alloc::<bf16>("gradients", [8, 48]).expect("memory");
        let [dq, dk, dv] = [0, 16, 32].map(|first| gradients.columns(first..first + 16));
        let op = AttentionBackward {
            forward: op,
            d_o: device.alloc("d_o", [8, 16]).expect("memory"),
            dq,
            dk,
            dv,
            scratch,
        };
        attention_backward(device, &op).expect("fits");
        let shared = AttentionBackward { dv: dk, ..op };
        assert_eq!(refused(attention_backward(device, &shared)), ("alias", "dv"));
    });
}

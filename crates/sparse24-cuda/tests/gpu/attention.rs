//! Attention, forward and backward.

use half::bf16;
use ndarray::{Array2, ArrayView2, s};
use sparse24_core::{
    op::{AttentionMask, AttentionShape, Dropout, StepState},
    philox::{Purpose, Site},
};
use sparse24_cpu::attention as cpu;
use sparse24_cuda::{
    Device, Error, Matrix,
    attention::{
        AttentionBackward, AttentionForward, attention_backward, attention_forward,
        backward_scratch,
    },
};

use crate::{
    support::{Poisoned, gaussian, on_gpu},
    tolerance::{self, AttentionHead},
};

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

/// The results of both passes.
struct Results {
    o: Array2<f32>,
    lse: Array2<f32>,
    dq: Array2<f32>,
    dk: Array2<f32>,
    dv: Array2<f32>,
}

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

    fn length(&self, sequence: usize) -> usize {
        let length = |lengths: &Vec<u32>| (lengths[sequence] as usize).min(self.shape.keys);
        self.lengths.as_ref().map_or(self.shape.keys, length)
    }

    fn on_cpu(&self) -> Results {
        // The device takes a length beyond the keys for all of them; the CPU refuses it.
        let shape = self.shape;
        let clamp =
            |lengths: &Vec<u32>| lengths.iter().map(|&l| l.min(shape.keys as u32)).collect();
        let lengths: Option<Vec<u32>> = self.lengths.as_ref().map(clamp);
        let lengths = lengths.as_deref();
        let AttentionShape { batch, heads, queries, .. } = shape;
        let rule = self.dropped.map(|p| Dropout { p, site: SITE });
        let dropout = rule.as_ref().map(|rule| (rule, STEP.stream(SITE)));
        let (mut o, mut lse) = (
            Array2::from_elem(self.q.dim(), f32::NAN),
            Array2::from_elem((batch * heads, queries), f32::NAN),
        );
        let (q, k, v) = (self.q.view(), self.k.view(), self.v.view());
        cpu::attention_forward(shape, q, k, v, lengths, o.view_mut(), lse.view_mut(), dropout)
            .expect("shapes fit");
        let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| Array2::from_elem(x.dim(), f32::NAN));
        let rounded = o.mapv(|o| f32::from(bf16::from_f32(o)));
        let d_o = self.d_o.view();
        cpu::attention_backward(
            shape,
            q,
            k,
            v,
            lengths,
            rounded.view(),
            lse.view(),
            d_o,
            dq.view_mut(),
            dk.view_mut(),
            dv.view_mut(),
            dropout,
        )
        .expect("shapes fit");
        Results { o, lse, dq, dk, dv }
    }

    /// The backward pass gets the CPU's o and lse, so that each pass has its own bound.
    fn on_gpu(&self, device: &mut Device, given: &Results) -> Results {
        let AttentionShape { batch, heads, queries, keys, .. } = self.shape;
        let d = heads * self.width;
        let q_rows = batch * queries;
        // Column ranges of one matrix, as in a layer, if the numbers of rows agree.
        let packed = queries == keys;
        let place = |device: &mut Device, x: [&Array2<f32>; 3]| -> [Matrix<bf16>; 3] {
            if packed {
                let whole = device.alloc("qkv", [q_rows, 3 * d]).expect("memory");
                let parts = [0, 1, 2].map(|i| whole.columns(i * d..(i + 1) * d));
                parts.into_iter().zip(x).for_each(|(to, x)| put(device, to, x.view()));
                parts
            } else {
                x.map(|x| {
                    let to = device.alloc("operand", [x.nrows(), d]).expect("memory");
                    put(device, to, x.view());
                    to
                })
            }
        };
        let [q, k, v] = place(device, [&self.q, &self.k, &self.v]);
        device.set_step(&STEP).expect("set");
        let (o, lse) = (
            Poisoned::<bf16>::new(device, [q_rows, d]),
            Poisoned::<f32>::new(device, [batch * heads, queries]),
        );
        let dropout = self.dropped.map(|p| Dropout { p, site: SITE });
        let lengths = self.lengths.as_ref().map(|lengths| {
            let to = device.alloc("lengths", [batch, 1]).expect("memory");
            device.upload(to, lengths).expect("uploaded");
            to
        });
        let forward = AttentionForward {
            shape: self.shape,
            q,
            k,
            v,
            lengths,
            dropout,
            o: o.matrix,
            lse: lse.matrix,
        };
        attention_forward(device, &forward).expect("queued");
        let results = (
            read(&o, device),
            Array2::from_shape_vec((batch * heads, queries), lse.read(device)).expect("the shape"),
        );

        let [given_o, d_o] = [&given.o, &self.d_o].map(|x| {
            let to = device.alloc("operand", [q_rows, d]).expect("memory");
            put(device, to, x.view());
            to
        });
        let given_lse = device.alloc("lse", [batch * heads, queries]).expect("memory");
        device.upload(given_lse, given.lse.as_slice().expect("row-major")).expect("uploaded");
        let scratch = Poisoned::<f32>::new(device, backward_scratch(self.shape));
        let gradients = if packed {
            vec![[q_rows, 3 * d]]
        } else {
            vec![[q_rows, d], [batch * keys, d], [batch * keys, d]]
        };
        let gradients: Vec<_> =
            gradients.into_iter().map(|shape| Poisoned::<bf16>::new(device, shape)).collect();
        let [dq, dk, dv] = [0, 1, 2].map(|i| {
            if packed {
                gradients[0].matrix.columns(i * d..(i + 1) * d)
            } else {
                gradients[i].matrix
            }
        });
        let forward = AttentionForward { o: given_o, lse: given_lse, ..forward };
        attention_backward(
            device,
            &AttentionBackward { forward, d_o, dq, dk, dv, scratch: scratch.matrix },
        )
        .expect("queued");
        scratch.assert_guarded(device);
        let whole: Vec<_> = gradients.iter().map(|gradients| read(gradients, device)).collect();
        let [dq, dk, dv] = [0, 1, 2].map(|i| {
            if packed {
                whole[0].slice(s![.., i * d..(i + 1) * d]).to_owned()
            } else {
                whole[i].clone()
            }
        });
        Results { o: results.0, lse: results.1, dq, dk, dv }
    }

    fn check(&self, device: &mut Device) {
        let expected = self.on_cpu();
        let found = self.on_gpu(device, &expected);
        let AttentionShape { batch, heads, queries, keys, mask } = self.shape;
        let what =
            format!("{:?}, heads {} wide, dropout {:?}", self.shape, self.width, self.dropped);
        let mut worst = [0.0_f32; 5];
        for task in 0..batch * heads {
            let length = self.length(task / heads);
            let visible = |query: usize, key: usize| {
                key < length && (mask == AttentionMask::Full || key + queries <= query + keys)
            };
            let columns = task % heads * self.width..(task % heads + 1) * self.width;
            let part = |x: &Array2<f32>, rows: usize| {
                x.slice(s![task / heads * rows..(task / heads + 1) * rows, columns.clone()])
                    .to_owned()
            };
            let [q, d_o, o] = [&self.q, &self.d_o, &expected.o].map(|x| part(x, queries));
            // Hidden keys hold NaNs, which would make the bounds NaN.
            let [k, v] = [&self.k, &self.v].map(|x| {
                let mut x = part(x, keys);
                x.slice_mut(s![length.., ..]).fill(0.0);
                x
            });
            let head = AttentionHead {
                q: q.view(),
                k: k.view(),
                v: v.view(),
                o: o.view(),
                d_o: d_o.view(),
                visible: &visible,
                dropped: self.dropped.unwrap_or(0.0),
            };
            let bounds = tolerance::attention(&head);
            for (i, (name, found, expected, bound, rows)) in [
                ("o", &found.o, &expected.o, &bounds.o, queries),
                ("dq", &found.dq, &expected.dq, &bounds.dq, queries),
                ("dk", &found.dk, &expected.dk, &bounds.dk, keys),
                ("dv", &found.dv, &expected.dv, &bounds.dv, keys),
            ]
            .into_iter()
            .enumerate()
            {
                let (found, expected) = (part(found, rows), part(expected, rows));
                for ((at, &found), (&expected, &bound)) in
                    found.indexed_iter().zip(expected.iter().zip(bound))
                {
                    assert!(
                        tolerance::rounded(found, expected, bound),
                        "{what}: {name} of task {task} at {at:?} is {found}, should be {expected} \
                         within {bound}"
                    );
                    worst[i] = worst[i].max(
                        (found - expected).abs()
                            / (bound + expected.abs() / 256.0).max(f32::MIN_POSITIVE),
                    );
                }
            }
            for (query, (&found, &expected)) in
                found.lse.row(task).iter().zip(expected.lse.row(task)).enumerate()
            {
                let close = found == expected || (found - expected).abs() <= bounds.lse;
                assert!(
                    close,
                    "{what}: lse of task {task}, query {query} is {found}, should be {expected} \
                     within {}",
                    bounds.lse
                );
                let ratio = (found - expected).abs() / bounds.lse;
                worst[4] = worst[4].max(if found == expected { 0.0 } else { ratio });
            }
        }
        println!("{what}: largest error by bound, o dq dk dv lse: {worst:.3?}");
    }
}

fn put(device: &mut Device, to: Matrix<bf16>, x: ArrayView2<'_, f32>) {
    let values: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
    device.upload(to, &values).expect("uploaded");
}

fn read(from: &Poisoned<bf16>, device: &mut Device) -> Array2<f32> {
    let values = from.read(device).into_iter().map(f32::from).collect();
    let [rows, columns] = from.matrix.shape();
    Array2::from_shape_vec((rows, columns), values).expect("the shape")
}

const fn square(tokens: usize, mask: AttentionMask) -> AttentionShape {
    AttentionShape { batch: 2, heads: 3, queries: tokens, keys: tokens, mask }
}

#[test]
fn results_are_within_their_bounds() {
    on_gpu(|device| {
        for tokens in [1, 7, 64, 65, 256, 1000, 1024] {
            for mask in [AttentionMask::Causal, AttentionMask::Full] {
                let shape = if tokens < 1000 {
                    square(tokens, mask)
                } else {
                    AttentionShape { batch: 1, heads: 2, ..square(tokens, mask) }
                };
                Case::new(shape, 64, None).check(device);
            }
            device.reset().expect("memory");
        }
    });
}

#[test]
fn numbers_of_queries_and_keys_may_differ() {
    on_gpu(|device| {
        let some = [(1, 300), (300, 1), (64, 192), (192, 64), (100, 333), (333, 100)];
        for (queries, keys) in some.into_iter().chain([(5, 0), (0, 5), (129, 128)]) {
            for mask in [AttentionMask::Causal, AttentionMask::Full] {
                Case::new(AttentionShape { queries, keys, ..square(0, mask) }, 64, None)
                    .check(device);
            }
        }
    });
}

/// Padding keys hold NaNs, which must not reach any result; a length of 0 leaves a sequence without
/// keys, and one beyond the keys means all of them.
#[test]
fn keys_beyond_a_length_are_not_seen() {
    on_gpu(|device| {
        for (queries, keys, lengths) in
            [(65, 65, [65, 1]), (7, 200, [129, 0]), (130, 64, [63, u32::MAX]), (64, 192, [64, 128])]
        {
            for width in [64, 80] {
                let shape = AttentionShape { queries, keys, ..square(0, AttentionMask::Full) };
                let mut case = Case::new(shape, width, None);
                for (sequence, &length) in lengths.iter().enumerate() {
                    for key in (length as usize).min(keys)..keys {
                        case.k.row_mut(sequence * keys + key).fill(f32::NAN);
                        case.v.row_mut(sequence * keys + key).fill(f32::NAN);
                    }
                }
                case.lengths = Some(lengths.to_vec());
                case.check(device);
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
            let given = case.on_cpu();
            let without = case.on_gpu(device, &given);
            case.lengths = Some(vec![200; 2]);
            let with = case.on_gpu(device, &given);
            for (name, a, b) in [
                ("o", &with.o, &without.o),
                ("lse", &with.lse, &without.lse),
                ("dq", &with.dq, &without.dq),
                ("dk", &with.dk, &without.dk),
                ("dv", &with.dv, &without.dv),
            ] {
                assert!(a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}");
            }
        }
    });
}

/// Cross-attention: dq, dk and dv in matrices of their own strides, dk and dv side by side.
#[test]
fn gradients_may_have_strides_of_their_own() {
    on_gpu(|device| {
        for (queries, keys) in [(70, 131), (131, 70)] {
            let shape = AttentionShape { queries, keys, ..square(0, AttentionMask::Full) };
            let case = Case::new(shape, 64, None);
            let given = case.on_cpu();
            let plain = case.on_gpu(device, &given);
            let d = shape.heads * case.width;
            let put_new = |device: &mut Device, x: &Array2<f32>| {
                let to = device.alloc("operand", [x.nrows(), d]).expect("memory");
                put(device, to, x.view());
                to
            };
            let [q, k, v, o, d_o] =
                [&case.q, &case.k, &case.v, &given.o, &case.d_o].map(|x| put_new(device, x));
            let lse = crate::support::upload(device, &given.lse);
            let of_q = Poisoned::<bf16>::new(device, [shape.batch * queries, d + 8]);
            let of_kv = Poisoned::<bf16>::new(device, [shape.batch * keys, 2 * d]);
            let scratch = Poisoned::<f32>::new(device, backward_scratch(shape));
            let forward = AttentionForward { shape, q, k, v, lengths: None, dropout: None, o, lse };
            let op = AttentionBackward {
                forward,
                d_o,
                dq: of_q.matrix.columns(0..d),
                dk: of_kv.matrix.columns(0..d),
                dv: of_kv.matrix.columns(d..2 * d),
                scratch: scratch.matrix,
            };
            attention_backward(device, &op).expect("queued");
            of_q.assert_guarded(device);
            of_kv.assert_guarded(device);
            for (name, matrix, expected) in
                [("dq", op.dq, &plain.dq), ("dk", op.dk, &plain.dk), ("dv", op.dv, &plain.dv)]
            {
                let found = device.download(matrix).expect("read");
                assert!(found.iter().map(|x| x.to_f32()).eq(expected.iter().copied()), "{name}");
            }
        }
    });
}

#[test]
fn all_head_widths_work() {
    on_gpu(|device| {
        for width in [8, 16, 32, 48, 72, 80, 96, 128] {
            for tokens in [65, 200] {
                Case::new(square(tokens, AttentionMask::Causal), width, None).check(device);
            }
        }
        Case::new(square(130, AttentionMask::Full), 128, Some(0.2)).check(device);
    });
}

#[test]
fn results_with_dropout_are_within_their_bounds() {
    on_gpu(|device| {
        for tokens in [1, 7, 64, 65, 256, 258] {
            for mask in [AttentionMask::Causal, AttentionMask::Full] {
                Case::new(square(tokens, mask), 64, Some(0.2)).check(device);
            }
        }
        Case::new(
            AttentionShape { queries: 70, keys: 131, ..square(0, AttentionMask::Causal) },
            64,
            Some(0.5),
        )
        .check(device);
    });
}

/// With equal scores and one-hot values, an output is 0 where its key was dropped; so is dv.
#[test]
fn dropped_elements_match_the_cpu() {
    on_gpu(|device| {
        for (queries, keys) in [(200, 64), (130, 61)] {
            let shape = AttentionShape { queries, keys, ..square(0, AttentionMask::Full) };
            let mut case = Case::new(shape, 64, Some(0.3));
            case.q.fill(0.0);
            case.v = Array2::from_shape_fn(case.v.dim(), |(row, column)| {
                f32::from(u8::from(row % keys == column % 64))
            });
            let expected = case.on_cpu();
            let found = case.on_gpu(device, &expected);
            assert!(
                expected.o.iter().zip(&found.o).all(|(e, f)| (*e == 0.0) == (*f == 0.0)),
                "{shape:?}: o"
            );
            for first in (0..queries).step_by(64) {
                case.d_o = Array2::from_shape_fn(case.d_o.dim(), |(row, column)| {
                    f32::from(u8::from(row % queries == first + column % 64))
                });
                let expected = case.on_cpu();
                let found = case.on_gpu(device, &expected);
                assert!(
                    expected.dv.iter().zip(&found.dv).all(|(e, f)| (*e == 0.0) == (*f == 0.0)),
                    "{shape:?}: dv from {first}"
                );
            }
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
        let expected = case.on_cpu();
        let found = case.on_gpu(device, &expected);
        for (name, of) in [
            ("o", &found.o),
            ("dq", &found.dq),
            ("dk", &found.dk),
            ("dv", &found.dv),
            ("lse", &found.lse),
        ] {
            assert!(of.iter().all(|x| x.is_finite()), "{name}");
        }
        case.check(device);
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
        let expected = Case::new(shape, 64, None).on_cpu();
        let found = case.on_gpu(device, &expected);
        for ((row, column), x) in found.o.indexed_iter() {
            assert_eq!(x.is_nan(), row == 70 && column / 64 == 1, "o at {row}, {column}");
        }
        // dk sums over all queries, and 0 times NaN is NaN.
        for ((row, column), x) in found.dk.indexed_iter() {
            assert!(x.is_nan() || row > 70 || column / 64 != 1, "dk at {row}, {column} lost it");
            assert!(!x.is_nan() || row < 130 && column / 64 == 1, "dk at {row}, {column} is NaN");
        }
    });
}

#[test]
fn two_runs_give_the_same_bits() {
    on_gpu(|device| {
        for dropped in [None, Some(0.2)] {
            let case = Case::new(
                AttentionShape { batch: 8, heads: 12, ..square(300, AttentionMask::Causal) },
                64,
                dropped,
            );
            let given = case.on_cpu();
            let [first, second] = [0, 1].map(|_| case.on_gpu(device, &given));
            for (name, a, b) in [
                ("o", &first.o, &second.o),
                ("lse", &first.lse, &second.lse),
                ("dq", &first.dq, &second.dq),
                ("dk", &first.dk, &second.dk),
                ("dv", &first.dv, &second.dv),
            ] {
                assert!(a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}");
            }
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
        let mut refused =
            |op: AttentionForward| attention_forward(device, &op).expect_err("does not fit");
        assert!(matches!(
            refused(AttentionForward { o: q, ..op }),
            Error::Alias { output: "o", .. }
        ));
        assert!(matches!(
            refused(AttentionForward { k: whole, ..op }),
            Error::Shape { operand: "k", .. }
        ));
        assert!(matches!(
            refused(AttentionForward { v: whole.columns(4..20), ..op }),
            Error::Alignment { operand: "v", .. }
        ));
        assert!(matches!(
            refused(AttentionForward { shape: AttentionShape { heads: 3, ..shape }, ..op }),
            Error::Shape { operand: "q", .. }
        ));
        assert!(matches!(
            refused(AttentionForward { shape: AttentionShape { heads: 4, ..shape }, lse, ..op }),
            Error::Shape { operand: "lse", .. }
        ));
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
        assert!(matches!(
            attention_backward(device, &shared).expect_err("shared"),
            Error::Alias { output: "dv", other: "dk", .. }
        ));
    });
}

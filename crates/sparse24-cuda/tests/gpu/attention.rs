//! attention.

use half::bf16;
use ndarray::{Array2, ArrayView2, s};
use sparse24_core::{
    op,
    philox::{Purpose, Site, Stream},
};
use sparse24_cpu::attention as cpu;
use sparse24_cuda::{
    Device, Error, Matrix, StepState,
    attention::{
        AttentionBackward, AttentionForward, AttentionMask, AttentionShape, attention_backward,
        attention_forward, backward_scratch,
    },
    dropout::Dropout,
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
    bias_correction1: 0.0,
    bias_correction2: 0.0,
};

/// Operands on the host, exactly as the device holds them.
struct Case {
    shape: AttentionShape,
    width: usize,
    dropped: Option<f32>,
    q: Array2<f32>,
    k: Array2<f32>,
    v: Array2<f32>,
    d_o: Array2<f32>,
}

/// What both sides compute.
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
        Self { shape, width, dropped, q, k, v, d_o }
    }

    fn on_cpu(&self) -> Results {
        let AttentionShape { batch, heads, queries, keys, mask } = self.shape;
        let mask = if mask == AttentionMask::Causal {
            op::AttentionMask::Causal
        } else {
            op::AttentionMask::Full
        };
        let shape = op::AttentionShape { batch, heads, queries, keys, mask };
        let rule = self.dropped.map(|p| op::Dropout { p, site: SITE });
        let stream = Stream::new(STEP.seed, SITE, STEP.micro_step, STEP.step);
        let dropout = rule.as_ref().map(|rule| (rule, stream));
        let (mut o, mut lse) = (
            Array2::from_elem(self.q.dim(), f32::NAN),
            Array2::from_elem((batch * heads, queries), f32::NAN),
        );
        let (q, k, v) = (self.q.view(), self.k.view(), self.v.view());
        cpu::attention_forward(shape, q, k, v, None, o.view_mut(), lse.view_mut(), dropout)
            .expect("shapes fit");
        let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| Array2::from_elem(x.dim(), f32::NAN));
        let rounded = o.mapv(|o| f32::from(bf16::from_f32(o)));
        let d_o = self.d_o.view();
        cpu::attention_backward(
            shape,
            q,
            k,
            v,
            None,
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

    /// With the backward given the CPU's o and lse, so that each half is held to its own bound.
    fn on_gpu(&self, device: &mut Device, given: &Results) -> Results {
        let AttentionShape { batch, heads, queries, keys, .. } = self.shape;
        let d = heads * self.width;
        let q_rows = batch * queries;
        // One matrix of three, as a layer has it, where there are as many rows of each.
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
        let forward =
            AttentionForward { shape: self.shape, q, k, v, dropout, o: o.matrix, lse: lse.matrix };
        attention_forward(device, &forward).expect("queued");
        let results = (
            read(&o, device),
            Array2::from_shape_vec((batch * heads, queries), lse.read(device)).expect("as many"),
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
        let dqkv = [0, 1, 2].map(|i| {
            if packed {
                gradients[0].matrix.columns(i * d..(i + 1) * d)
            } else {
                gradients[i].matrix
            }
        });
        let forward = AttentionForward { o: given_o, lse: given_lse, ..forward };
        attention_backward(
            device,
            &AttentionBackward { forward, d_o, dqkv, scratch: scratch.matrix },
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
        let visible =
            |query: usize, key: usize| mask == AttentionMask::Full || key + queries <= query + keys;
        let what =
            format!("{:?}, heads {} wide, dropout {:?}", self.shape, self.width, self.dropped);
        let mut worst = [0.0_f32; 5];
        for task in 0..batch * heads {
            let columns = task % heads * self.width..(task % heads + 1) * self.width;
            let part = |x: &Array2<f32>, rows: usize| {
                x.slice(s![task / heads * rows..(task / heads + 1) * rows, columns.clone()])
                    .to_owned()
            };
            let [q, d_o, o] = [&self.q, &self.d_o, &expected.o].map(|x| part(x, queries));
            let [k, v] = [&self.k, &self.v].map(|x| part(x, keys));
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
                        "{what}: {name} of task {task} at {at:?} is {found}, should be {expected} within {bound}"
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
                    "{what}: lse of task {task}, query {query} is {found}, should be {expected} within {}",
                    bounds.lse
                );
                worst[4] = worst[4].max(if found == expected {
                    0.0
                } else {
                    (found - expected).abs() / bounds.lse
                });
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
    Array2::from_shape_vec((rows, columns), values).expect("as many")
}

const fn square(tokens: usize, mask: AttentionMask) -> AttentionShape {
    AttentionShape { batch: 2, heads: 3, queries: tokens, keys: tokens, mask }
}

#[test]
fn results_are_the_cpus_within_the_bound() {
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
fn lengths_of_queries_and_keys_may_differ() {
    on_gpu(|device| {
        for (queries, keys) in [
            (1, 300),
            (300, 1),
            (64, 192),
            (192, 64),
            (100, 333),
            (333, 100),
            (5, 0),
            (0, 5),
            (129, 128),
        ] {
            for mask in [AttentionMask::Causal, AttentionMask::Full] {
                Case::new(AttentionShape { queries, keys, ..square(0, mask) }, 64, None)
                    .check(device);
            }
        }
    });
}

#[test]
fn heads_of_other_widths_are_served() {
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
fn dropout_keeps_the_cpus_bound() {
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

/// Equal scores and values of one column each: an output is 0 where its key was dropped, and the
/// same gradient shows it from the key's side.
#[test]
fn dropped_elements_are_the_cpus() {
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
        // One key far above all others, and ties at the top.
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

/// A NaN in one sequence's head stays there, and is not lost.
#[test]
fn a_nan_is_seen_where_it_belongs() {
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
        // Its own dk is a sum over all queries, and 0 times NaN is one.
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
fn operands_that_do_not_fit_are_refused() {
    on_gpu(|device| {
        let shape = AttentionShape { batch: 1, heads: 2, ..square(8, AttentionMask::Causal) };
        let whole = device.alloc::<bf16>("qkv", [8, 48]).expect("memory");
        let [q, k, v] = [0, 16, 32].map(|first| whole.columns(first..first + 16));
        let (o, lse) = (
            device.alloc("o", [8, 16]).expect("memory"),
            device.alloc("lse", [2, 8]).expect("memory"),
        );
        let op = AttentionForward { shape, q, k, v, dropout: None, o, lse };
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
        let dqkv = [0, 16, 32].map(|first| gradients.columns(first..first + 16));
        let op = AttentionBackward {
            forward: op,
            d_o: device.alloc("d_o", [8, 16]).expect("memory"),
            dqkv,
            scratch,
        };
        attention_backward(device, &op).expect("fits");
        let shared = AttentionBackward { dqkv: [dqkv[0], dqkv[1], dqkv[1]], ..op };
        assert!(matches!(
            attention_backward(device, &shared).expect_err("shared"),
            Error::Alias { output: "dv", other: "dk", .. }
        ));
    });
}

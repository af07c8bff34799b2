//! embed_forward, embed_backward.

use half::bf16;
use ndarray::Array2;
use sparse24_core::op::Accumulate;
use sparse24_core::philox::Philox4x32;
use sparse24_cpu::embedding as cpu;
use sparse24_cuda::{
    Device, Error, Matrix,
    embedding::{Embed, EmbedScratch, embed_backward, embed_forward},
};

use crate::{
    support::{Poisoned, affordable, gaussian, on_gpu, upload},
    tolerance::{assert_within, embedding_gradient},
};

/// Tokens, width, vocabulary, context: runs of one row, of many spans, of all rows; ragged spans
/// and sequences.
const SHAPES: [[usize; 4]; 9] = [
    [1, 4, 1, 8],
    [33, 4, 1, 8],
    [31, 64, 3, 7],
    [64, 768, 50257, 64],
    [1000, 1600, 40, 256],
    [5000, 132, 65, 1024],
    [2500, 64, 1, 100],
    [2049, 768, 300, 2049],
    [4096, 12, 50257, 512],
];

/// Small ids are frequent, as in text.
fn skewed(count: usize, vocabulary: usize) -> Vec<u32> {
    let philox = Philox4x32::new(5);
    let uniform = |i: usize| f64::from(philox.block([i as u32, 0, 0, 0])[0]) / f64::from(u32::MAX);
    (0..count)
        .map(|i| ((vocabulary as f64).powf(uniform(i)) as u32).min(vocabulary as u32 - 1))
        .collect()
}

fn tokens_on(device: &mut Device, tokens: &[u32]) -> Matrix<u32> {
    let on_device = device.alloc("tokens", [tokens.len(), 1]).expect("memory");
    device.upload(on_device, tokens).expect("uploaded");
    on_device
}

struct Gradient {
    op: Embed,
    scratch: EmbedScratch,
    guarded: (Poisoned<u32>, Poisoned<f32>),
}

fn gradient(
    device: &mut Device,
    tokens: &[u32],
    context: usize,
    dout: &Array2<bf16>,
    tables: [Matrix<f32>; 2],
) -> Gradient {
    let shape = [dout.nrows(), dout.ncols()];
    let order = Poisoned::new(device, EmbedScratch::order_shape(shape));
    let pieces = Poisoned::new(device, EmbedScratch::pieces_shape(shape));
    let [token_table, position_table] = tables;
    let (tokens, rows) = (tokens_on(device, tokens), upload(device, dout));
    let op = Embed { tokens, context, token_table, position_table: Some(position_table), rows };
    Gradient {
        op,
        scratch: EmbedScratch { order: order.matrix, pieces: pieces.matrix },
        guarded: (order, pieces),
    }
}

#[test]
fn gradients_are_within_their_bound() {
    on_gpu(|device| {
        // The sanitizer checks every word that is downloaded.
        for [p, c, vocabulary, context] in
            SHAPES.into_iter().filter(|[_, c, vocabulary, _]| affordable(vocabulary * c / 16))
        {
            let (tokens, dout) = (skewed(p, vocabulary), gaussian::<bf16>([p, c], 3));
            let held = [(vocabulary, 4), (context, 5)]
                .map(|(rows, seed)| gaussian::<f32>([rows, c], seed));
            let tables = held.each_ref().map(|held| {
                let table = Poisoned::<f32>::new(device, [held.nrows(), c]);
                device.upload(table.matrix, held.as_slice().expect("row-major")).expect("uploaded");
                table
            });
            let of = gradient(
                device,
                &tokens,
                context,
                &dout,
                tables.each_ref().map(|table| table.matrix),
            );
            embed_backward(device, &of.op, &of.scratch).expect("queued");
            of.guarded.0.assert_guarded(device);
            of.guarded.1.assert_guarded(device);
            let mut sorted: Vec<u32> = (0..p as u32).collect();
            sorted.sort_by_key(|&row| tokens[row as usize]);
            let order = of.scratch.order;
            let order = order.reshaped([1, order.elements()]).columns(0..p);
            assert_eq!(device.download(order).expect("read"), sorted, "{p} tokens: a stable sort");

            let mut expected = held.clone();
            let [of_tokens, of_positions] = &mut expected;
            let dout = dout.mapv(|x| x.to_f32());
            cpu::embed_backward(
                dout.view(),
                &tokens,
                context,
                of_tokens.view_mut(),
                Some(of_positions.view_mut()),
                Accumulate::Add,
            )
            .expect("fits");
            let targets: [&dyn Fn(usize) -> usize; 2] =
                [&|row| tokens[row] as usize, &|row| row % context];
            for i in 0..2 {
                let (mut magnitudes, mut counts) =
                    (held[i].mapv(|x| f64::from(x.abs())), vec![0; held[i].nrows()]);
                for (row, values) in dout.rows().into_iter().enumerate() {
                    counts[targets[i](row)] += 1;
                    magnitudes
                        .row_mut(targets[i](row))
                        .zip_mut_with(&values, |sum, x| *sum += f64::from(x.abs()));
                }
                let expected: Vec<f64> = expected[i].iter().map(|&x| x.into()).collect();
                assert_within(
                    &format!("{p} tokens of {c}, table {i}"),
                    tables[i].read(device),
                    &expected,
                    |at| {
                        let count = counts[at / c];
                        // A row without a token keeps its bits.
                        if count == 0 {
                            0.0
                        } else {
                            embedding_gradient(count, magnitudes[(at / c, at % c)])
                        }
                    },
                );
            }
        }
    });
}

#[test]
fn gradients_repeat_their_bits() {
    on_gpu(|device| {
        let vocabulary = if affordable(50257 * 384) { 50257 } else { 300 };
        let (tokens, dout) = (skewed(16384, vocabulary), gaussian::<bf16>([16384, 384], 3));
        let run = |device: &mut Device| {
            let tables = [vocabulary, 1024].map(|rows| Poisoned::<f32>::new(device, [rows, 384]));
            for table in &tables {
                device.fill_bytes(table.matrix, 0).expect("zeroed");
            }
            let of =
                gradient(device, &tokens, 1024, &dout, tables.each_ref().map(|table| table.matrix));
            embed_backward(device, &of.op, &of.scratch).expect("queued");
            tables.map(|table| table.read(device).into_iter().map(f32::to_bits).collect::<Vec<_>>())
        };
        let first = run(device);
        assert!((0..3).all(|_| run(device) == first));
    });
}

#[test]
fn tokens_outside_the_vocabulary_touch_no_table() {
    on_gpu(|device| {
        let tokens = [1, 5, u32::MAX, 0, 4];
        let table = upload(device, &Array2::from_elem([5, 8], 1.0));
        let out = Poisoned::<bf16>::new(device, [5, 8]);
        let op = Embed {
            tokens: tokens_on(device, &tokens),
            context: 5,
            token_table: table,
            position_table: None,
            rows: out.matrix,
        };
        embed_forward(device, &op).expect("queued");
        let out = out.read(device);
        assert_eq!(
            [0, 1, 2, 3, 4].map(|row| out[8 * row].is_nan()),
            [false, true, true, false, false]
        );
        let dout = Array2::from_elem([5, 8], bf16::ONE);
        let tables = [5, 5].map(|rows| Poisoned::<f32>::new(device, [rows, 8]));
        for table in &tables {
            device.upload(table.matrix, &[0.0; 40]).expect("uploaded");
        }
        let of = gradient(device, &tokens, 5, &dout, tables.each_ref().map(|table| table.matrix));
        embed_backward(device, &of.op, &of.scratch).expect("queued");
        let found = tables[0].read(device);
        assert_eq!([0, 1, 2, 3, 4].map(|row| found[8 * row]), [1.0, 1.0, 0.0, 0.0, 1.0]);
    });
}

#[test]
fn no_tokens_are_fine_and_bad_operands_are_refused() {
    on_gpu(|device| {
        let mut run = |p: usize, c: usize, context: usize, positions: usize| {
            let tables = [16, positions]
                .map(|rows| device.alloc::<f32>("table", [rows, c]).expect("memory"));
            let of = gradient(
                device,
                &vec![3; p],
                context,
                &Array2::from_elem([p, c], bf16::ONE),
                tables,
            );
            let rows = device.alloc("rows", [p, c]).expect("memory");
            embed_forward(device, &Embed { rows, ..of.op })
                .and_then(|()| embed_backward(device, &of.op, &of.scratch))
        };
        assert_eq!(run(0, 8, 4, 4), Ok(()));
        assert_eq!(run(2, 8, 4, 2), Ok(()), "no more positions than tokens are needed");
        assert!(matches!(run(3, 6, 4, 4), Err(Error::Shape { expected: [3, 8], .. })));
        assert!(matches!(
            run(3, 8, 4, 2),
            Err(Error::Shape { operand: "the position table", expected: [3, 8], .. })
        ));
        assert!(matches!(run(3, 8, 0, 4), Err(Error::OutOfRange { what: "the context", .. })));
    });
}

//! Embeddings: the order of their sums, and their errors. The conformance suite checks the values.

use half::bf16;
use ndarray::Array2;
use sparse24_core::philox::Philox4x32;
use sparse24_cuda::{
    Device, Matrix,
    embedding::{Embed, EmbedScratch, embed_backward, embed_forward},
};

use crate::support::{Poisoned, affordable, gaussian, on_gpu, refused, upload};

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
    let op = Embed {
        tokens,
        context,
        scale: 1.0,
        token_table,
        position_table: Some(position_table),
        rows,
    };
    Gradient {
        op,
        scratch: EmbedScratch { order: order.matrix, pieces: pieces.matrix },
        guarded: (order, pieces),
    }
}

/// Rows are sorted by token, stably, so sums have a fixed order: of one row, of many spans, of all
/// rows, and of ragged spans.
#[test]
fn rows_are_sorted_and_gradients_repeat_their_bits() {
    on_gpu(|device| {
        for [p, c, vocabulary] in
            [[1, 4, 1], [33, 4, 1], [5000, 132, 65], [2500, 64, 1], [16384, 384, 50257]]
                .into_iter()
                .filter(|[_, c, vocabulary]| affordable(vocabulary * c))
        {
            let (tokens, dout) = (skewed(p, vocabulary), gaussian::<bf16>([p, c], 3));
            let mut sorted: Vec<u32> = (0..p as u32).collect();
            sorted.sort_by_key(|&row| tokens[row as usize]);
            let run = |device: &mut Device| {
                let tables = [vocabulary, 1024].map(|rows| Poisoned::<f32>::new(device, [rows, c]));
                for table in &tables {
                    device.fill_bytes(table.matrix, 0).expect("zeroed");
                }
                let matrices = tables.each_ref().map(|table| table.matrix);
                let of = gradient(device, &tokens, 1024, &dout, matrices);
                embed_backward(device, &of.op, &of.scratch).expect("queued");
                of.guarded.0.assert_guarded(device);
                of.guarded.1.assert_guarded(device);
                let order = of.scratch.order;
                let order = order.reshaped([1, order.elements()]).columns(0..p);
                assert_eq!(device.download(order).expect("read"), sorted, "{p} tokens");
                tables.map(|table| {
                    table.read(device).into_iter().map(f32::to_bits).collect::<Vec<_>>()
                })
            };
            let first = run(device);
            assert!((0..2).all(|_| run(device) == first), "{p} tokens");
        }
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
            scale: 1.0,
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
        assert_eq!(refused(run(3, 6, 4, 4)), ("shape", "rows"));
        assert_eq!(refused(run(3, 8, 4, 2)), ("shape", "the position table"));
        assert_eq!(refused(run(3, 8, 0, 4)), ("range", "the context"));
    });
}

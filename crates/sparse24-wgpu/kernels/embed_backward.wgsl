// embed_backward: row id of dE += scale * the sum of the rows of the gradient whose token is id
// position_grad: row t of dP += the rows at position t
// in   tokens u32 [p], and their indices [p], sorted by token and then by index;
//      rows f32 [p,d]
// out  table f32 [V,d] or [at least length,d], added to
// pre  an invocation per column of each index in that order, or of each position
// acc  f32, in the order of the tokens
// ref  sparse24_cpu::embedding

struct Constants {
    tokens_offset: u32,
    order_offset: u32,
    rows_offset: u32,
    rows_stride: u32,
    table_offset: u32,
    table_stride: u32,
    columns: u32,
    tokens: u32,
    // V, or tokens per sequence.
    targets: u32,
    scale: f32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> ids: array<u32>;
@group(0) @binding(3) var<storage, read> rows: array<f32>;
@group(0) @binding(4) var<storage, read_write> table: array<f32>;

fn place(i: u32) -> u32 {
    return ids[c.order_offset + i];
}

fn token(i: u32) -> u32 {
    return ids[c.tokens_offset + place(i)];
}

@compute @workgroup_size(64)
fn embed_backward(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = flat(id, groups, 64u);
    let first = number / c.columns;
    let j = number % c.columns;
    if first >= c.tokens {
        return;
    }
    let mine = token(first);
    // The invocation of the first of equal tokens adds the rows of all of them.
    if mine >= c.targets || (first > 0u && token(max(first, 1u) - 1u) == mine) {
        return;
    }
    var sum = 0.0;
    for (var i = first; i < c.tokens; i += 1u) {
        if token(i) != mine {
            break;
        }
        sum += rows[c.rows_offset + place(i) * c.rows_stride + j];
    }
    table[c.table_offset + mine * c.table_stride + j] += c.scale * sum;
}

@compute @workgroup_size(64)
fn position_grad(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = flat(id, groups, 64u);
    let position = number / c.columns;
    let j = number % c.columns;
    if position >= c.targets || position >= c.tokens {
        return;
    }
    var sum = 0.0;
    for (var i = position; i < c.tokens; i += c.targets) {
        sum += rows[c.rows_offset + i * c.rows_stride + j];
    }
    table[c.table_offset + position * c.table_stride + j] += sum;
}

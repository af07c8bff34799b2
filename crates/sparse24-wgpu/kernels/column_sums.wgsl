// column_sums: out = the column sums of x, or out += them
// row_block_sums: the column sums of each block of 64 rows
// in   x f32 [p,n]
// out  out f32 [n], overwritten and never read, or added to; blocks f32 [ceil(p/64),n]
// pre  an invocation per sum
// acc  f32, rows in order
// ref  sparse24_cpu::bias

struct Constants {
    x_offset: u32,
    x_stride: u32,
    out_offset: u32,
    rows: u32,
    columns: u32,
    adds: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;

fn sum_of(first: u32, end: u32, column: u32) -> f32 {
    var sum = 0.0;
    for (var row = first; row < end; row += 1u) {
        sum += x[c.x_offset + row * c.x_stride + column];
    }
    return sum;
}

@compute @workgroup_size(64)
fn column_sums(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let j = flat(id, groups, 64u);
    if j >= c.columns {
        return;
    }
    let sum = sum_of(0u, c.rows, j);
    if c.adds != 0u {
        out[c.out_offset + j] += sum;
    } else {
        out[c.out_offset + j] = sum;
    }
}

@compute @workgroup_size(64)
fn row_block_sums(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = flat(id, groups, 64u);
    let first = 64u * (number / c.columns);
    if first < c.rows {
        out[c.out_offset + number] = sum_of(first, min(first + 64u, c.rows), number % c.columns);
    }
}

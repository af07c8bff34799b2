// gather_rows: row i of out = row rows[i] of x, or zeros if x has no such row
// scatter_rows: row rows[i] of out = row i of x; other rows keep their values
// in   x, bits [n,d]; rows u32: distinct row numbers; one that is `limit` or more has no row
// out  out, bits [m,d]
// ref  sparse24_cpu::rows, bit for bit

struct Constants {
    x_offset: u32,
    x_stride: u32,
    rows_offset: u32,
    out_offset: u32,
    out_stride: u32,
    columns: u32,
    elements: u32,
    limit: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> x: array<u32>;
@group(0) @binding(3) var<storage, read> rows: array<u32>;
@group(0) @binding(4) var<storage, read_write> out: array<u32>;

@compute @workgroup_size(64)
fn gather_rows(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = flat(id, groups, 64u);
    if number < c.elements {
        let i = number / c.columns;
        let j = number % c.columns;
        let row = rows[c.rows_offset + i];
        let value = x[c.x_offset + min(row, max(c.limit, 1u) - 1u) * c.x_stride + j];
        out[c.out_offset + i * c.out_stride + j] = select(0u, value, row < c.limit);
    }
}

@compute @workgroup_size(64)
fn scatter_rows(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = flat(id, groups, 64u);
    if number < c.elements {
        let i = number / c.columns;
        let j = number % c.columns;
        let row = rows[c.rows_offset + i];
        if row < c.limit {
            out[c.out_offset + row * c.out_stride + j] = x[c.x_offset + i * c.x_stride + j];
        }
    }
}

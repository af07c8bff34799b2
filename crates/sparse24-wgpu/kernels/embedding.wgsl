// embed_forward: row i of out = scale * row tokens[i] of E + row i mod length of P
// in   tokens u32 [p]; E f32 [V,d]; P f32 [at least length,d]
// out  rows f32 [p,d], overwritten; NaN for a token outside V
// acc  f32
// ref  sparse24_cpu::embedding

struct Constants {
    tokens_offset: u32,
    table_offset: u32,
    table_stride: u32,
    positions_offset: u32,
    positions_stride: u32,
    rows_offset: u32,
    rows_stride: u32,
    columns: u32,
    elements: u32,
    vocabulary: u32,
    length: u32,
    positioned: u32,
    scale: f32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> tokens: array<u32>;
@group(0) @binding(3) var<storage, read> table: array<f32>;
@group(0) @binding(4) var<storage, read> positions: array<f32>;
@group(0) @binding(5) var<storage, read_write> rows: array<u32>;

@compute @workgroup_size(64)
fn embed_forward(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = flat(id, groups, 64u);
    if number >= c.elements {
        return;
    }
    let i = number / c.columns;
    let j = number % c.columns;
    let token = tokens[c.tokens_offset + i];
    var bits = NAN;
    if token < c.vocabulary {
        var value = c.scale * table[c.table_offset + token * c.table_stride + j];
        if c.positioned != 0u {
            value += positions[c.positions_offset + i % c.length * c.positions_stride + j];
        }
        bits = bitcast<u32>(value);
    }
    rows[c.rows_offset + i * c.rows_stride + j] = bits;
}

// attention_delta: D = the sum of dO * O over the columns of a head, for every query
// in   dO, O f32 [batch*queries,heads*width]
// out  D f32 [batch*heads,queries], overwritten
// pre  an invocation per sum
// acc  f32, columns in order
// ref  sparse24_cpu::attention

struct Constants {
    do_offset: u32,
    do_stride: u32,
    o_offset: u32,
    o_stride: u32,
    heads: u32,
    queries: u32,
    width: u32,
    elements: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> d_o: array<f32>;
@group(0) @binding(3) var<storage, read> o: array<f32>;
@group(0) @binding(4) var<storage, read_write> delta: array<f32>;

@compute @workgroup_size(64)
fn attention_delta(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = flat(id, groups, 64u);
    if number >= c.elements {
        return;
    }
    let task = number / c.queries;
    let row = task / c.heads * c.queries + number % c.queries;
    let column = task % c.heads * c.width;
    var sum = 0.0;
    for (var j = column; j < column + c.width; j += 1u) {
        sum += d_o[c.do_offset + row * c.do_stride + j] * o[c.o_offset + row * c.o_stride + j];
    }
    delta[number] = sum;
}

// dropout: x = 0 where the uniform number is below p, else x / (1 - p)
// drop_sequences: the same, where every `together` elements share a uniform number
// in   x f32 [p,d], in place
// out  x
// pre  `least` is the least word >> 8 whose uniform number is not below p; d at most 2^32
// acc  the decision in u32: core's bits; one product
// ref  sparse24_core::op::Dropout
//
// An invocation of dropout takes the four elements of one Philox call.

struct Constants {
    offset: u32,
    stride: u32,
    columns: u32,
    elements: u32,
    site: u32,
    least: u32,
    scale: f32,
    together: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(64)
fn dropout(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let call = flat(id, groups, 64u);
    if call >= (c.elements + 3u) / 4u {
        return;
    }
    let words = philox(call, c.site);
    for (var i = 0u; i < 4u; i += 1u) {
        let element = 4u * call + i;
        if element < c.elements {
            let at = c.offset + element / c.columns * c.stride + element % c.columns;
            x[at] = select(0.0, x[at] * c.scale, (words[i] >> 8u) >= c.least);
        }
    }
}

@compute @workgroup_size(64)
fn drop_sequences(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let element = flat(id, groups, 64u);
    if element >= c.elements {
        return;
    }
    let draw = element / c.together;
    let word = philox(draw / 4u, c.site)[draw % 4u];
    let at = c.offset + element / c.columns * c.stride + element % c.columns;
    x[at] = select(0.0, x[at] * c.scale, (word >> 8u) >= c.least);
}

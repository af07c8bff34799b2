// add: out = x + delta, or out += delta if x is out
// in   x, delta f32 [p,d]
// out  out f32 [p,d]
// acc  one rounding
// ref  sparse24_backend::op::Add

struct Constants {
    delta_offset: u32,
    delta_stride: u32,
    out_offset: u32,
    out_stride: u32,
    columns: u32,
    elements: u32,
    x_offset: u32,
    x_stride: u32,
    in_place: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> delta: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn add(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = flat(id, groups, 64u);
    if i >= c.elements {
        return;
    }
    let row = i / c.columns;
    let column = i % c.columns;
    let to = c.out_offset + row * c.out_stride + column;
    let term = delta[c.delta_offset + row * c.delta_stride + column];
    if c.in_place != 0u {
        out[to] += term;
    } else {
        out[to] = x[c.x_offset + row * c.x_stride + column] + term;
    }
}

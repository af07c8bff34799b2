// scale: out = s x
// in   x f32 [n,d]; s f32 [1]
// out  out f32 [n,d], overwritten, never read
// acc  one product
// ref  sparse24_cpu::scale

struct Constants {
    x_offset: u32,
    x_stride: u32,
    factor_offset: u32,
    out_offset: u32,
    out_stride: u32,
    columns: u32,
    elements: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> factor: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn scale(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = flat(id, groups, 64u);
    if i < c.elements {
        let row = i / c.columns;
        let column = i % c.columns;
        let value = factor[c.factor_offset] * x[c.x_offset + row * c.x_stride + column];
        out[c.out_offset + row * c.out_stride + column] = value;
    }
}

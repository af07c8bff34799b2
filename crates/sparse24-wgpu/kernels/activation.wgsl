// activation_forward: H = act(Z); if gated, act(first half of a row) times the second half
// in   Z f32 [p,f] or [p,2f]
// out  H f32 [p,f], overwritten, never read
// acc  f32
// ref  sparse24_cpu::activation

struct Constants {
    z_offset: u32,
    z_stride: u32,
    h_offset: u32,
    h_stride: u32,
    columns: u32,
    elements: u32,
    activation: u32,
    gated: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> z: array<f32>;
@group(0) @binding(3) var<storage, read_write> h: array<f32>;

@compute @workgroup_size(64)
fn activation_forward(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let i = flat(id, groups, 64u);
    if i >= c.elements {
        return;
    }
    let at = c.z_offset + i / c.columns * c.z_stride + i % c.columns;
    var value = activated(c.activation, z[at]).value;
    if c.gated != 0u {
        value *= z[at + c.columns];
    }
    h[c.h_offset + i / c.columns * c.h_stride + i % c.columns] = value;
}

// activation_backward: dZ = dH act'(Z); if gated, dH b act'(a) and dH act(a) for the halves a and b
// in   dH f32 [p,f]; Z f32 [p,f] or [p,2f]
// out  dZ f32, the shape of Z, overwritten, never read
// acc  f32
// ref  sparse24_cpu::activation

struct Constants {
    dh_offset: u32,
    dh_stride: u32,
    z_offset: u32,
    z_stride: u32,
    dz_offset: u32,
    dz_stride: u32,
    columns: u32,
    elements: u32,
    activation: u32,
    gated: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> dh: array<f32>;
@group(0) @binding(3) var<storage, read> z: array<f32>;
@group(0) @binding(4) var<storage, read_write> dz: array<f32>;

@compute @workgroup_size(64)
fn activation_backward(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let i = flat(id, groups, 64u);
    if i >= c.elements {
        return;
    }
    let row = i / c.columns;
    let column = i % c.columns;
    let at = c.z_offset + row * c.z_stride + column;
    let to = c.dz_offset + row * c.dz_stride + column;
    let gradient = dh[c.dh_offset + row * c.dh_stride + column];
    let computed = activated(c.activation, z[at]);
    if c.gated != 0u {
        dz[to] = gradient * z[at + c.columns] * computed.slope;
        dz[to + c.columns] = gradient * computed.value;
    } else {
        dz[to] = gradient * computed.slope;
    }
}

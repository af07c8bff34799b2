// scale_grad: the sum of x * dout over every 4096 elements
// in   x, dout f32 [n,d]
// out  sums f32 [ceil(n d/4096)], overwritten
// pre  a workgroup per sum
// acc  f32: sums of every 64th element, then a tree
// ref  sparse24_cpu::scale

struct Constants {
    x_offset: u32,
    x_stride: u32,
    dout_offset: u32,
    dout_stride: u32,
    columns: u32,
    elements: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> dout: array<f32>;
@group(0) @binding(4) var<storage, read_write> sums: array<f32>;

@compute @workgroup_size(64)
fn scale_grad(
    @builtin(local_invocation_index) lane: u32,
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let block = flat(id, groups, 1u);
    if 4096u * block >= c.elements {
        return;
    }
    var sum = 0.0;
    for (var i = 4096u * block + lane; i < min(4096u * (block + 1u), c.elements); i += 64u) {
        let row = i / c.columns;
        let column = i % c.columns;
        sum += x[c.x_offset + row * c.x_stride + column] * dout[c.dout_offset + row * c.dout_stride
            + column];
    }
    let total = workgroup_sum(lane, sum);
    if lane == 0u {
        sums[block] = total;
    }
}

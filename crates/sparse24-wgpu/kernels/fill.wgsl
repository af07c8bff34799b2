// fill: every element = value
// out  to, bits [rows,columns], overwritten, never read
// acc  sets bits

struct Constants {
    to_offset: u32,
    to_stride: u32,
    columns: u32,
    elements: u32,
    value: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read_write> to: array<u32>;

@compute @workgroup_size(64)
fn fill(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = flat(id, groups, 64u);
    if i < c.elements {
        to[c.to_offset + i / c.columns * c.to_stride + i % c.columns] = c.value;
    }
}

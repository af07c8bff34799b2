// copy: to = source
// in   source, bits [rows,columns]
// out  to, bits [rows,columns], overwritten, never read
// acc  copies bits

struct Constants {
    to_offset: u32,
    to_stride: u32,
    columns: u32,
    elements: u32,
    from_offset: u32,
    from_stride: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> source: array<u32>;
@group(0) @binding(3) var<storage, read_write> to: array<u32>;

@compute @workgroup_size(64)
fn copy(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = flat(id, groups, 64u);
    if i < c.elements {
        let row = i / c.columns;
        let column = i % c.columns;
        to[c.to_offset + row * c.to_stride + column] = source[c.from_offset + row * c.from_stride
            + column];
    }
}

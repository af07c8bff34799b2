// compress_weight: S(W), dense with zeros; soft_threshold: the same with its kept values mapped
// in   w, the bits of f32 [r,q]; tiles [r/4,q/4], two per word
// out  S(W), the bits of f32 [r,q], contiguous, overwritten, never read
// pre  r and q multiples of 4
// acc  compress_weight copies bits; soft_threshold rounds |w| - t and its product with the scale,
//      t being the second-smallest magnitude of the group
// ref  sparse24_core::prune::masked, bit for bit; sparse24_core::prune::group

struct Constants {
    w_offset: u32,
    w_stride: u32,
    q: u32,
    groups: u32,
    scale: f32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> w: array<u32>;
@group(0) @binding(3) var<storage, read> tiles: array<u32>;
@group(0) @binding(4) var<storage, read_write> out: array<u32>;

struct Group {
    x: vec4<u32>,
    keeps: vec4<bool>,
}

fn load(group: u32) -> Group {
    let row = group / (c.q / 4u);
    let column = group % (c.q / 4u);
    let at = c.w_offset + row * c.w_stride + 4u * column;
    let tile = row / 4u * (c.q / 4u) + column;
    let bits = tile_bits(tiles[tile / 2u], tile) >> (4u * (row % 4u));
    return Group(
        vec4<u32>(w[at], w[at + 1u], w[at + 2u], w[at + 3u]),
        (vec4<u32>(bits) & vec4<u32>(1u, 2u, 4u, 8u)) != vec4<u32>(0u),
    );
}

fn store(group: u32, x: vec4<u32>) {
    out[4u * group] = x.x;
    out[4u * group + 1u] = x.y;
    out[4u * group + 2u] = x.z;
    out[4u * group + 3u] = x.w;
}

@compute @workgroup_size(64)
fn compress_weight(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = flat(id, groups, 64u);
    if number < c.groups {
        let group = load(number);
        store(number, select(vec4<u32>(0u), group.x, group.keeps));
    }
}

@compute @workgroup_size(64)
fn soft_threshold(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = flat(id, groups, 64u);
    if number >= c.groups {
        return;
    }
    let group = load(number);
    let a = group.x & vec4<u32>(0x7fffffffu);
    let low = min(a.xz, a.yw);
    let high = max(a.xz, a.yw);
    // The second-smallest: the larger of the lows, or the smaller of the highs if that is less.
    let threshold = min(max(low.x, low.y), min(high.x, high.y));
    let excess = bitcast<vec4<f32>>(a) - vec4<f32>(bitcast<f32>(threshold));
    let signs = group.x & vec4<u32>(0x80000000u);
    let value = bitcast<vec4<u32>>(excess * c.scale) & vec4<u32>(0x7fffffffu);
    // A NaN stays a NaN, and magnitudes below the threshold become zero.
    let nan = a > vec4<u32>(0x7f800000u);
    let mapped = select(select(vec4<u32>(0u), value, a >= vec4<u32>(threshold)), a, nan) | signs;
    store(number, select(vec4<u32>(0u), mapped, group.keeps));
}

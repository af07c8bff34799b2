// Shared by the attention kernels: geometry, visibility, dropout.
//
// A workgroup of 64 invocations takes 32 rows of one head, and 32 rows of the other operand at a
// time. An invocation computes the 4x4 scores of four rows of each. It holds the output of its four
// rows in registers: four of every 32 columns, of at most 128.

struct Constants {
    q_offset: u32,
    q_stride: u32,
    k_offset: u32,
    k_stride: u32,
    v_offset: u32,
    v_stride: u32,
    o_offset: u32,
    o_stride: u32,
    lse_offset: u32,
    lse_stride: u32,
    lengths_offset: u32,
    has_lengths: u32,
    heads: u32,
    queries: u32,
    keys: u32,
    width: u32,
    causal: u32,
    // Workgroups of all heads, and of one head.
    groups: u32,
    blocks: u32,
    scale: f32,
    drops: u32,
    site: u32,
    least: u32,
    kept_scale: f32,
    // The first row of the other operands, where a kernel takes several calls.
    first: u32,
    // Offsets and strides of the gradients.
    d_offset: u32,
    d_stride: u32,
    second_offset: u32,
    second_stride: u32,
    // Bit 0: whether to write the first gradient; bit 1: the second.
    writes: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> q: array<Part>;
@group(0) @binding(3) var<storage, read> k: array<Part>;
@group(0) @binding(4) var<storage, read> v: array<Part>;

// [32 rows of the other operand, 32 rows of the workgroup], stored as vec4s.
var<workgroup> first_tile: array<vec4<f32>, 256>;
var<workgroup> second_tile: array<vec4<f32>, 256>;

fn four(first: u32) -> vec4<u32> {
    return vec4<u32>(first, first + 1u, first + 2u, first + 3u);
}

// Number of keys of a sequence that are not padding.
fn unpadded(sequence: u32) -> u32 {
    return select(c.keys, min(lengths[c.lengths_offset + sequence], c.keys), c.has_lengths != 0u);
}

// Number of keys that a query sees, of the first `limit`.
fn visible(query: u32, limit: u32) -> u32 {
    let causal = max(query + 1u + c.keys, c.queries) - c.queries;
    return select(limit, min(limit, causal), c.causal != 0u);
}

// The dropout factor of a probability: 0 or 1 / (1 - p).
fn kept_one(element: u32) -> f32 {
    return select(0.0, c.kept_scale, (philox(element / 4u, c.site)[element % 4u] >> 8u) >= c.least);
}

// The dropout factors of the probabilities of a query and four keys.
fn kept(task: u32, query: u32, keys: vec4<u32>) -> vec4<f32> {
    if c.drops == 0u {
        return vec4<f32>(1.0);
    }
    let e = (task * c.queries + query) * c.keys + keys;
    return vec4<f32>(kept_one(e.x), kept_one(e.y), kept_one(e.z), kept_one(e.w));
}

fn exp_four(x: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(exp_of(x.x), exp_of(x.y), exp_of(x.z), exp_of(x.w));
}

// Four columns from j on, with zeros beyond the last column of the head.
fn inside(x: vec4<f32>, j: u32) -> vec4<f32> {
    if j + 4u <= c.width {
        return x;
    }
    return select(vec4<f32>(), x, four(j) < vec4<u32>(c.width));
}

// The parts that hold four consecutive elements.
fn parts_at(place: u32) -> vec4<u32> {
    return vec4<u32>(
        part_at(place), part_at(place + 1u), part_at(place + 2u), part_at(place + 3u),
    );
}

// Four columns from j on of a row of q, k or v.
fn q_four(place: u32, j: u32) -> vec4<f32> {
    let at = parts_at(place);
    return inside(joined(q[at.x], q[at.y], q[at.z], q[at.w]), j);
}

fn k_four(place: u32, j: u32) -> vec4<f32> {
    let at = parts_at(place);
    return inside(joined(k[at.x], k[at.y], k[at.z], k[at.w]), j);
}

fn v_four(place: u32, j: u32) -> vec4<f32> {
    let at = parts_at(place);
    return inside(joined(v[at.x], v[at.y], v[at.z], v[at.w]), j);
}

// j, or the last multiple of four that is a column if j is beyond it.
fn last_four(j: u32) -> u32 {
    return min(j, (c.width - 1u) / 4u * 4u);
}

// Four rows of each of four successive columns of `first_tile`.
fn weights_at(i: u32, rows: u32) -> mat4x4<f32> {
    let at = 8u * i + rows;
    return mat4x4<f32>(
        first_tile[at], first_tile[at + 8u], first_tile[at + 16u], first_tile[at + 24u],
    );
}

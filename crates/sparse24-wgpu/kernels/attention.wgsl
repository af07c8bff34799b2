// What the kernels of attention share: geometry, visibility, dropout.
//
// A workgroup of 256 has sixteen rows of one head, and sixteen of the other operand at a time.
// Columns of a row are in registers, every sixteenth in one invocation: at most 128.

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
    // Workgroups, and those of a head.
    groups: u32,
    blocks: u32,
    scale: f32,
    drops: u32,
    site: u32,
    least: u32,
    kept_scale: f32,
    // The places of the gradients.
    d_offset: u32,
    d_stride: u32,
    second_offset: u32,
    second_stride: u32,
    // Bit 0: the first gradient, bit 1: the second.
    writes: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;

var<workgroup> first_tile: array<f32, 256>;

// Keys that a query sees among `limit`.
fn visible(query: u32, limit: u32) -> u32 {
    let causal = max(query + 1u + c.keys, c.queries) - c.queries;
    return select(limit, min(limit, causal), c.causal != 0u);
}

// The factor of a probability.
fn kept(task: u32, query: u32, key: u32) -> f32 {
    if c.drops == 0u {
        return 1.0;
    }
    let element = (task * c.queries + query) * c.keys + key;
    return select(0.0, c.kept_scale, (philox(element / 4u, c.site)[element % 4u] >> 8u) >= c.least);
}

// attention_forward_software: attention_forward in one call per 32 keys
// in   q f32 [batch*queries,heads*32]; k, v f32 [batch*keys,heads*32]; lengths u32 [batch]
// out  o f32, the shape of q; lse, the bits of f32 [batch*heads,queries]: the first call overwrites
//      them, and later calls rescale and add to them
// pre  no dropout; queries and keys multiples of 32; offsets and strides multiples of 4;
//      at most 65535 workgroups
// acc  f32: keys in order, in blocks of 32
// ref  sparse24_cpu::attention

@group(0) @binding(5) var<storage, read> lengths: array<u32>;
@group(0) @binding(6) var<storage, read_write> o: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> lse: array<u32>;

// The score of a masked key, and the initial maximum: exp of their difference is 0.
const MASKED: f32 = -1e38;
const LEAST: f32 = -5e37;
const NONE: u32 = 0xff800000u;

// The scores of four keys.
fn score(i: u32, seen: u32, x: ptr<function, Row>) -> vec4<f32> {
    let keys = four(c.first + i) < vec4<u32>(seen);
    return select(vec4<f32>(MASKED), products(8u * i, x) * c.scale, keys);
}

fn put(place: u32, part: u32, keeps: f32, inverse: f32, sums: ptr<function, Row>) {
    let to = place / 4u + part;
    let before = select(o[to] * keeps, vec4<f32>(), vec4<bool>(c.first == 0u));
    o[to] = (before + (*sums)[part]) * inverse;
}

@compute @workgroup_size(32)
fn attention_forward_software(
    @builtin(local_invocation_index) t: u32,
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let at = place_of(flat(id, groups, 1u), t);
    stage_keys(t, at);
    let row = at.sequence * c.queries + at.number;
    var x = q_row(c.q_offset + row * c.q_stride + at.column);
    let seen = visible(at.number, unpadded(at.sequence));
    var p = Row(
        score(0u, seen, &x), score(4u, seen, &x), score(8u, seen, &x), score(12u, seen, &x),
        score(16u, seen, &x), score(20u, seen, &x), score(24u, seen, &x), score(28u, seen, &x),
    );
    let most = max(max(max(p[0], p[1]), max(p[2], p[3])), max(max(p[4], p[5]), max(p[6], p[7])));
    let to_lse = c.lse_offset + at.task * c.lse_stride + at.number;
    // Every query that sees a key sees the first.
    let begins = c.first == 0u || seen == 0u;
    let before = select(bitcast<f32>(lse[to_lse]), LEAST, begins);
    let next = max(max(before, LEAST), max(max(most.x, most.y), max(most.z, most.w)));
    let keeps = select(exp_of(before - next), 0.0, begins);
    var sums = Row();
    var total = vec4<f32>();
    add(0u, next, &p, &total, &sums);
    add(1u, next, &p, &total, &sums);
    add(2u, next, &p, &total, &sums);
    add(3u, next, &p, &total, &sums);
    add(4u, next, &p, &total, &sums);
    add(5u, next, &p, &total, &sums);
    add(6u, next, &p, &total, &sums);
    add(7u, next, &p, &total, &sums);
    let sum = keeps + ((total.x + total.y) + (total.z + total.w));
    let inverse = select(1.0 / sum, 0.0, seen == 0u);
    let place = c.o_offset + row * c.o_stride + at.column;
    put(place, 0u, keeps, inverse, &sums);
    put(place, 1u, keeps, inverse, &sums);
    put(place, 2u, keeps, inverse, &sums);
    put(place, 3u, keeps, inverse, &sums);
    put(place, 4u, keeps, inverse, &sums);
    put(place, 5u, keeps, inverse, &sums);
    put(place, 6u, keeps, inverse, &sums);
    put(place, 7u, keeps, inverse, &sums);
    lse[to_lse] = select(bitcast<u32>(next + log_of(max(sum, 1.0))), NONE, seen == 0u);
}

// Adds the values of four keys, weighted by the exponentials of their scores.
fn add(i: u32, next: f32, p: ptr<function, Row>, total: ptr<function, vec4<f32>>,
    sums: ptr<function, Row>) {
    let weights = exp_four((*p)[i] - next);
    *total += weights;
    add_rows(SECOND + 32u * i, weights, sums);
}

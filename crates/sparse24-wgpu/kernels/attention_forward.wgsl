// attention_forward: o = dropout(softmax(mask(q k^T * scale))) v of every sequence and head
// in   q f32 [batch*queries,heads*width]; k, v f32 [batch*keys,heads*width]; lengths u32 [batch]
// out  o f32, the shape of q; lse, the bits of f32 [batch*heads,queries]; overwritten
// pre  width at most 128; fewer than 2^32 probabilities
// acc  f32: keys in blocks of sixteen with a running maximum
// ref  sparse24_cpu::attention

@group(0) @binding(2) var<storage, read> q: array<f32>;
@group(0) @binding(3) var<storage, read> k: array<f32>;
@group(0) @binding(4) var<storage, read> v: array<f32>;
@group(0) @binding(5) var<storage, read> lengths: array<u32>;
@group(0) @binding(6) var<storage, read_write> o: array<f32>;
@group(0) @binding(7) var<storage, read_write> lse: array<u32>;

var<workgroup> second_tile: array<f32, 256>;

// Below every score.
const LEAST: f32 = -3e38;

@compute @workgroup_size(256)
fn attention_forward(
    @builtin(local_invocation_index) t: u32,
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let group = flat(id, groups, 1u);
    if group >= c.groups {
        return;
    }
    let task = group / c.blocks;
    let first_query = group % c.blocks * 16u;
    let sequence = task / c.heads;
    let column = task % c.heads * c.width;
    let i = t / 16u;
    let lane = t % 16u;
    let query = min(first_query + i, c.queries - 1u);
    let limit = select(c.keys, lengths[c.lengths_offset + sequence], c.has_lengths != 0u);
    let seen = visible(query, limit);
    let end = visible(min(first_query + 15u, c.queries - 1u), limit);
    let q_at = c.q_offset + (sequence * c.queries + query) * c.q_stride + column;
    let k_at = c.k_offset + sequence * c.keys * c.k_stride + column;
    let v_at = c.v_offset + sequence * c.keys * c.v_stride + column;
    var sums = array<f32, 8>();
    var maximum = LEAST;
    var sum = 0.0;
    for (var first = 0u; first < end; first += 16u) {
        let key = first + lane;
        let row = k_at + min(key, c.keys - 1u) * c.k_stride;
        var score = 0.0;
        for (var j = 0u; j < c.width; j += 1u) {
            score += q[q_at + j] * k[row + j];
        }
        score = select(LEAST, score * c.scale, key < seen);
        workgroupBarrier();
        first_tile[t] = score;
        workgroupBarrier();
        var next = maximum;
        for (var j = 0u; j < 16u; j += 1u) {
            next = max(next, first_tile[16u * i + j]);
        }
        let weight = select(0.0, exp_of(score - next), key < seen);
        workgroupBarrier();
        first_tile[t] = weight;
        second_tile[t] = weight * kept(task, query, key);
        workgroupBarrier();
        let shrink = exp_of(maximum - next);
        maximum = next;
        sum *= shrink;
        for (var j = 0u; j < 16u; j += 1u) {
            sum += first_tile[16u * i + j];
        }
        let rows = min(16u, end - first);
        for (var at = 0u; at < 8u; at += 1u) {
            let j = lane + 16u * at;
            if j < c.width {
                var value = sums[at] * shrink;
                for (var r = 0u; r < rows; r += 1u) {
                    value += second_tile[16u * i + r] * v[v_at + (first + r) * c.v_stride + j];
                }
                sums[at] = value;
            }
        }
    }
    if first_query + i >= c.queries {
        return;
    }
    let inverse = select(0.0, 1.0 / sum, seen > 0u);
    let to = c.o_offset + (sequence * c.queries + query) * c.o_stride + column;
    for (var at = 0u; at < 8u; at += 1u) {
        let j = lane + 16u * at;
        if j < c.width {
            o[to + j] = sums[at] * inverse;
        }
    }
    if lane == 0u {
        let log = bitcast<u32>(maximum + log_of(max(sum, 1.0)));
        lse[c.lse_offset + task * c.lse_stride + query] = select(0xff800000u, log, seen > 0u);
    }
}

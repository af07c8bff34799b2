// attention_dq: dq = dS k * scale; attention_dkv: dk = dS^T q * scale, dv = P^T dO
// in   q, k, v as in the forward pass; lse, D f32 [batch*heads,queries]; dO f32, the shape of q;
//      lengths u32 [batch]; `o_offset` and `o_stride` are those of dO
// out  dq, or dk and dv in one buffer, f32, overwritten; attention_dkv may write one of the two
// pre  width at most 128; fewer than 2^32 probabilities
// acc  f32: dP = dO v^T, dS = P (dropout(dP) - D), P from lse; rows in order
// ref  sparse24_cpu::attention

@group(0) @binding(2) var<storage, read> q: array<f32>;
@group(0) @binding(3) var<storage, read> k: array<f32>;
@group(0) @binding(4) var<storage, read> v: array<f32>;
@group(0) @binding(5) var<storage, read> lse: array<f32>;
@group(0) @binding(6) var<storage, read> d_o: array<f32>;
@group(0) @binding(7) var<storage, read> delta: array<f32>;
@group(0) @binding(8) var<storage, read> lengths: array<u32>;
@group(0) @binding(9) var<storage, read_write> gradient: array<f32>;

var<workgroup> second_tile: array<f32, 256>;

struct Pair {
    // The probability after dropout.
    p: f32,
    ds: f32,
}

// One query and key that sees it, by the places of their rows.
fn pair(task: u32, query: u32, key: u32, q_row: u32, k_row: u32, v_row: u32, do_row: u32) -> Pair {
    var score = 0.0;
    var dp = 0.0;
    for (var j = 0u; j < c.width; j += 1u) {
        score += q[q_row + j] * k[k_row + j];
        dp += d_o[do_row + j] * v[v_row + j];
    }
    let p = exp_of(score * c.scale - lse[c.lse_offset + task * c.lse_stride + query]);
    let factor = kept(task, query, key);
    return Pair(p * factor, p * (dp * factor - delta[task * c.queries + query]));
}

@compute @workgroup_size(256)
fn attention_dq(
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
    let row = sequence * c.queries + query;
    let k_at = c.k_offset + sequence * c.keys * c.k_stride + column;
    let v_at = c.v_offset + sequence * c.keys * c.v_stride + column;
    var sums = array<f32, 8>();
    for (var first = 0u; first < end; first += 16u) {
        let key = first + lane;
        var ds = 0.0;
        if key < seen {
            ds = pair(
                task, query, key,
                c.q_offset + row * c.q_stride + column,
                k_at + key * c.k_stride,
                v_at + key * c.v_stride,
                c.o_offset + row * c.o_stride + column,
            ).ds;
        }
        workgroupBarrier();
        first_tile[t] = ds;
        workgroupBarrier();
        let rows = min(16u, end - first);
        for (var at = 0u; at < 8u; at += 1u) {
            let j = lane + 16u * at;
            if j < c.width {
                var value = sums[at];
                for (var r = 0u; r < rows; r += 1u) {
                    value += first_tile[16u * i + r] * k[k_at + (first + r) * c.k_stride + j];
                }
                sums[at] = value;
            }
        }
    }
    if first_query + i >= c.queries {
        return;
    }
    for (var at = 0u; at < 8u; at += 1u) {
        let j = lane + 16u * at;
        if j < c.width {
            gradient[c.d_offset + row * c.d_stride + column + j] = sums[at] * c.scale;
        }
    }
}

@compute @workgroup_size(256)
fn attention_dkv(
    @builtin(local_invocation_index) t: u32,
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let group = flat(id, groups, 1u);
    if group >= c.groups {
        return;
    }
    let task = group / c.blocks;
    let first_key = group % c.blocks * 16u;
    let sequence = task / c.heads;
    let column = task % c.heads * c.width;
    let i = t / 16u;
    let lane = t % 16u;
    let key = min(first_key + i, c.keys - 1u);
    let limit = select(c.keys, lengths[c.lengths_offset + sequence], c.has_lengths != 0u);
    let row = sequence * c.keys + key;
    let q_at = c.q_offset + sequence * c.queries * c.q_stride + column;
    let do_at = c.o_offset + sequence * c.queries * c.o_stride + column;
    // The first query that sees the first key.
    let begin = select(0u, max(first_key + c.queries, c.keys) - c.keys, c.causal != 0u);
    let end = select(0u, c.queries, first_key < limit);
    var dk = array<f32, 8>();
    var dv = array<f32, 8>();
    for (var first = begin; first < end; first += 16u) {
        let query = first + lane;
        var computed = Pair(0.0, 0.0);
        if query < c.queries && key < visible(query, limit) {
            computed = pair(
                task, query, key,
                q_at + query * c.q_stride,
                c.k_offset + row * c.k_stride + column,
                c.v_offset + row * c.v_stride + column,
                do_at + query * c.o_stride,
            );
        }
        workgroupBarrier();
        first_tile[t] = computed.ds;
        second_tile[t] = computed.p;
        workgroupBarrier();
        let rows = min(16u, end - first);
        for (var at = 0u; at < 8u; at += 1u) {
            let j = lane + 16u * at;
            if j < c.width {
                var of_k = dk[at];
                var of_v = dv[at];
                for (var r = 0u; r < rows; r += 1u) {
                    of_k += first_tile[16u * i + r] * q[q_at + (first + r) * c.q_stride + j];
                    of_v += second_tile[16u * i + r] * d_o[do_at + (first + r) * c.o_stride + j];
                }
                dk[at] = of_k;
                dv[at] = of_v;
            }
        }
    }
    if first_key + i >= c.keys {
        return;
    }
    for (var at = 0u; at < 8u; at += 1u) {
        let j = lane + 16u * at;
        if j < c.width && (c.writes & 1u) != 0u {
            gradient[c.d_offset + row * c.d_stride + column + j] = dk[at] * c.scale;
        }
        if j < c.width && (c.writes & 2u) != 0u {
            gradient[c.second_offset + row * c.second_stride + column + j] = dv[at];
        }
    }
}

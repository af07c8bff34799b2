// attention_forward: o = dropout(softmax(mask(q k^T * scale))) v for every sequence and head
// in   q f32 [batch*queries,heads*width]; k, v f32 [batch*keys,heads*width]; lengths u32 [batch]
// out  o f32, the shape of q; lse, the bits of f32 [batch*heads,queries]; overwritten
// pre  width at most 128; fewer than 2^32 probabilities
// acc  f32: keys in blocks of 32 with a running maximum
// ref  sparse24_cpu::attention

@group(0) @binding(5) var<storage, read> lengths: array<u32>;
@group(0) @binding(6) var<storage, read_write> o: array<f32>;
@group(0) @binding(7) var<storage, read_write> lse: array<u32>;

// A number below every score, in the range of exp_of.
const LEAST: f32 = -1e38;

var<workgroup> partial: array<vec4<f32>, 64>;

// The maxima of four rows over the eight invocations that share them.
fn row_max(t: u32, x: vec4<f32>) -> vec4<f32> {
    workgroupBarrier();
    partial[t] = x;
    workgroupBarrier();
    var most = x;
    for (var i = 0u; i < 8u; i += 1u) {
        most = max(most, partial[(t & 56u) + i]);
    }
    return most;
}

fn row_sum(t: u32, x: vec4<f32>) -> vec4<f32> {
    workgroupBarrier();
    partial[t] = x;
    workgroupBarrier();
    var sum = vec4<f32>();
    for (var i = 0u; i < 8u; i += 1u) {
        sum += partial[(t & 56u) + i];
    }
    return sum;
}

fn largest(x: vec4<f32>) -> f32 {
    return max(max(x.x, x.y), max(x.z, x.w));
}

fn total(x: vec4<f32>) -> f32 {
    return (x.x + x.y) + (x.z + x.w);
}

@compute @workgroup_size(64)
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
    let first_query = group % c.blocks * 32u;
    let sequence = task / c.heads;
    let column = task % c.heads * c.width;
    let rows = t / 8u;
    let lane = t % 8u;
    let queries = min(four(first_query + 4u * rows), vec4<u32>(c.queries - 1u));
    let limit = unpadded(sequence);
    let seen = vec4<u32>(
        visible(queries.x, limit),
        visible(queries.y, limit),
        visible(queries.z, limit),
        visible(queries.w, limit),
    );
    let end = visible(min(first_query + 31u, c.queries - 1u), limit);
    let q_at = c.q_offset + (sequence * c.queries + queries) * c.q_stride + column;
    let k_at = c.k_offset + sequence * c.keys * c.k_stride + column;
    let v_at = c.v_offset + sequence * c.keys * c.v_stride + column;
    var sums = array<vec4<f32>, 16>();
    var maximum = vec4<f32>(LEAST);
    var sum = vec4<f32>();
    for (var first = 0u; first < end; first += 32u) {
        let keys = four(first + 4u * lane);
        let of_k = k_at + min(keys, vec4<u32>(c.keys - 1u)) * c.k_stride;
        var x = vec4<f32>();
        var y = vec4<f32>();
        var z = vec4<f32>();
        var w = vec4<f32>();
        for (var j = 0u; j < c.width; j += 4u) {
            let k_j = mat4x4<f32>(
                k_four(of_k.x + j, j),
                k_four(of_k.y + j, j),
                k_four(of_k.z + j, j),
                k_four(of_k.w + j, j),
            );
            x += q_four(q_at.x + j, j) * k_j;
            y += q_four(q_at.y + j, j) * k_j;
            z += q_four(q_at.z + j, j) * k_j;
            w += q_four(q_at.w + j, j) * k_j;
        }
        let least = vec4<f32>(LEAST);
        x = select(least, x * c.scale, keys < vec4<u32>(seen.x));
        y = select(least, y * c.scale, keys < vec4<u32>(seen.y));
        z = select(least, z * c.scale, keys < vec4<u32>(seen.z));
        w = select(least, w * c.scale, keys < vec4<u32>(seen.w));
        let most = vec4<f32>(largest(x), largest(y), largest(z), largest(w));
        let next = max(maximum, row_max(t, most));
        x = select(vec4<f32>(), exp_four(x - next.x), keys < vec4<u32>(seen.x));
        y = select(vec4<f32>(), exp_four(y - next.y), keys < vec4<u32>(seen.y));
        z = select(vec4<f32>(), exp_four(z - next.z), keys < vec4<u32>(seen.z));
        w = select(vec4<f32>(), exp_four(w - next.w), keys < vec4<u32>(seen.w));
        let shrink = exp_four(maximum - next);
        maximum = next;
        sum = sum * shrink + row_sum(t, vec4<f32>(total(x), total(y), total(z), total(w)));
        let weights = transpose(mat4x4<f32>(
            x * kept(task, queries.x, keys),
            y * kept(task, queries.y, keys),
            z * kept(task, queries.z, keys),
            w * kept(task, queries.w, keys),
        ));
        let to = 32u * lane + rows;
        first_tile[to] = weights[0];
        first_tile[to + 8u] = weights[1];
        first_tile[to + 16u] = weights[2];
        first_tile[to + 24u] = weights[3];
        workgroupBarrier();
        let count = min(32u, end - first);
        for (var at = 0u; 32u * at < c.width; at += 1u) {
            let j = last_four(32u * at + 4u * lane);
            x = sums[4u * at] * shrink.x;
            y = sums[4u * at + 1u] * shrink.y;
            z = sums[4u * at + 2u] * shrink.z;
            w = sums[4u * at + 3u] * shrink.w;
            for (var i = 0u; i < count; i += 4u) {
                let row = v_at + min(four(first + i), vec4<u32>(end - 1u)) * c.v_stride + j;
                let values = mat4x4<f32>(
                    v_four(row.x, j), v_four(row.y, j), v_four(row.z, j), v_four(row.w, j),
                );
                let weights = transpose(weights_at(i, rows));
                x += values * weights[0];
                y += values * weights[1];
                z += values * weights[2];
                w += values * weights[3];
            }
            sums[4u * at] = x;
            sums[4u * at + 1u] = y;
            sums[4u * at + 2u] = z;
            sums[4u * at + 3u] = w;
        }
    }
    for (var i = 0u; i < 4u; i += 1u) {
        let query = first_query + 4u * rows + i;
        if query >= c.queries {
            return;
        }
        let inverse = select(0.0, 1.0 / sum[i], seen[i] > 0u);
        let to = c.o_offset + (sequence * c.queries + query) * c.o_stride + column;
        for (var at = 0u; 32u * at < c.width; at += 1u) {
            let values = sums[4u * at + i] * inverse;
            let j = 32u * at + 4u * lane;
            for (var n = 0u; n < min(4u, max(c.width, j) - j); n += 1u) {
                o[to + j + n] = values[n];
            }
        }
        if lane == 0u {
            let log = bitcast<u32>(maximum[i] + log_of(max(sum[i], 1.0)));
            lse[c.lse_offset + task * c.lse_stride + query] =
                select(0xff800000u, log, seen[i] > 0u);
        }
    }
}

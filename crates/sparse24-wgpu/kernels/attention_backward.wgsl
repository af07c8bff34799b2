// attention_dq: dq = dS k * scale; attention_dkv: dk = dS^T q * scale, dv = P^T dO
// in   q, k, v as in the forward pass; lse, D f32 [batch*heads,queries]; dO f32, the shape of q;
//      lengths u32 [batch]; `o_offset` and `o_stride` are those of dO
// out  dq, or dk and dv in one buffer, f32, overwritten; attention_dkv may write one of the two
// pre  width at most 128; fewer than 2^32 probabilities
// acc  f32: dP = dO v^T, dS = P (dropout(dP) - D), P from lse; rows in order
// ref  sparse24_cpu::attention

@group(0) @binding(5) var<storage, read> lse: array<f32>;
@group(0) @binding(6) var<storage, read> d_o: array<Part>;
@group(0) @binding(7) var<storage, read> delta: array<f32>;
@group(0) @binding(8) var<storage, read> lengths: array<u32>;
@group(0) @binding(9) var<storage, read_write> gradient: array<f32>;

// Sixteen columns of 32 rows of each of q, k, dO and v.
var<workgroup> staged: array<vec4<f32>, 512>;
const OF_K: u32 = 128u;
const OF_O: u32 = 256u;
const OF_V: u32 = 384u;

// Index of part 0 to 3, four columns each, of a staged row. Eight rows that are four apart lie in
// different banks, and so do eight consecutive rows.
fn staged_at(row: u32, part: u32) -> u32 {
    return 32u * part + 8u * (row % 4u) + ((row / 4u) ^ (2u * (row % 4u)));
}

// Indices of the rows 4 * `rows` to 4 * `rows` + 3, in part 0.
fn staged_rows(rows: u32) -> vec4<u32> {
    return vec4<u32>(rows, 8u + (rows ^ 2u), 16u + (rows ^ 4u), 24u + (rows ^ 6u));
}

// Adds the products of four rows of each of two operands over four staged columns.
fn add_products(
    x: u32, x_rows: vec4<u32>, y: u32, y_rows: vec4<u32>, sums: ptr<function, mat4x4<f32>>,
) {
    let y_part = mat4x4<f32>(
        staged[y + y_rows.x], staged[y + y_rows.y], staged[y + y_rows.z], staged[y + y_rows.w],
    );
    (*sums)[0] += staged[x + x_rows.x] * y_part;
    (*sums)[1] += staged[x + x_rows.y] * y_part;
    (*sums)[2] += staged[x + x_rows.z] * y_part;
    (*sums)[3] += staged[x + x_rows.w] * y_part;
}

// Four columns from j on of a row of dO.
fn o_four(place: u32, j: u32) -> vec4<f32> {
    let at = parts_at(place);
    return inside(joined(d_o[at.x], d_o[at.y], d_o[at.z], d_o[at.w]), j);
}

// Columns are queries, rows are keys.
struct Scores {
    // The probabilities after dropout.
    p: mat4x4<f32>,
    ds: mat4x4<f32>,
}

// The probabilities of a query and four keys, and their gradients, from the scores and dP.
fn of_query(task: u32, query: u32, keys: vec4<u32>, limit: u32, s: vec4<f32>, dp: vec4<f32>)
    -> array<vec4<f32>, 2> {
    let row = min(query, c.queries - 1u);
    let seen = select(0u, visible(query, limit), query < c.queries);
    let log = lse[c.lse_offset + task * c.lse_stride + row];
    let p = select(vec4<f32>(), exp_four(s * c.scale - log), keys < vec4<u32>(seen));
    let factor = kept(task, query, keys);
    let ds = p * (dp * factor - delta[task * c.queries + row]);
    return array<vec4<f32>, 2>(p * factor, ds);
}

// Stages four columns, those of part n % 4 of the sixteen from j on, of query and key n / 4.
fn stage(n: u32, j: u32, task: u32, first_query: u32, first_key: u32) {
    let row = n / 4u;
    let at = j + 4u * (n % 4u);
    let column = task % c.heads * c.width + last_four(at);
    let sequence = task / c.heads;
    let query = sequence * c.queries + min(first_query + row, c.queries - 1u);
    let key = sequence * c.keys + min(first_key + row, c.keys - 1u);
    let to = staged_at(row, n % 4u);
    staged[to] = q_four(c.q_offset + column + query * c.q_stride, at);
    staged[OF_K + to] = k_four(c.k_offset + column + key * c.k_stride, at);
    staged[OF_O + to] = o_four(c.o_offset + column + query * c.o_stride, at);
    staged[OF_V + to] = v_four(c.v_offset + column + key * c.v_stride, at);
}

// The scores of four queries from 4 * query_rows on and four keys from 4 * key_rows on.
fn scores(
    t: u32, task: u32, first_query: u32, first_key: u32, query_rows: u32, key_rows: u32, limit: u32,
) -> Scores {
    let of_queries = staged_rows(query_rows);
    let of_keys = staged_rows(key_rows);
    var s = mat4x4<f32>();
    var dp = mat4x4<f32>();
    for (var j = 0u; j < c.width; j += 16u) {
        workgroupBarrier();
        stage(t, j, task, first_query, first_key);
        stage(t + 64u, j, task, first_query, first_key);
        workgroupBarrier();
        add_products(0u, of_queries, OF_K, of_keys, &s);
        add_products(OF_O, of_queries, OF_V, of_keys, &dp);
        add_products(32u, of_queries, OF_K + 32u, of_keys, &s);
        add_products(OF_O + 32u, of_queries, OF_V + 32u, of_keys, &dp);
        add_products(64u, of_queries, OF_K + 64u, of_keys, &s);
        add_products(OF_O + 64u, of_queries, OF_V + 64u, of_keys, &dp);
        add_products(96u, of_queries, OF_K + 96u, of_keys, &s);
        add_products(OF_O + 96u, of_queries, OF_V + 96u, of_keys, &dp);
    }
    let queries = four(first_query + 4u * query_rows);
    let keys = four(first_key + 4u * key_rows);
    let x = of_query(task, queries.x, keys, limit, s[0], dp[0]);
    let y = of_query(task, queries.y, keys, limit, s[1], dp[1]);
    let z = of_query(task, queries.z, keys, limit, s[2], dp[2]);
    let w = of_query(task, queries.w, keys, limit, s[3], dp[3]);
    return Scores(mat4x4<f32>(x[0], y[0], z[0], w[0]), mat4x4<f32>(x[1], y[1], z[1], w[1]));
}

@compute @workgroup_size(64)
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
    let first_query = group % c.blocks * 32u;
    let sequence = task / c.heads;
    let column = task % c.heads * c.width;
    let rows = t / 8u;
    let lane = t % 8u;
    let limit = unpadded(sequence);
    let end = visible(min(first_query + 31u, c.queries - 1u), limit);
    let k_at = c.k_offset + sequence * c.keys * c.k_stride + column;
    var sums = array<vec4<f32>, 16>();
    for (var first = 0u; first < end; first += 32u) {
        let ds = transpose(scores(t, task, first_query, first, rows, lane, limit).ds);
        let to = 32u * lane + rows;
        first_tile[to] = ds[0];
        first_tile[to + 8u] = ds[1];
        first_tile[to + 16u] = ds[2];
        first_tile[to + 24u] = ds[3];
        workgroupBarrier();
        let count = min(32u, end - first);
        for (var at = 0u; 32u * at < c.width; at += 1u) {
            let j = last_four(32u * at + 4u * lane);
            var x = sums[4u * at];
            var y = sums[4u * at + 1u];
            var z = sums[4u * at + 2u];
            var w = sums[4u * at + 3u];
            for (var i = 0u; i < count; i += 4u) {
                let row = k_at + min(four(first + i), vec4<u32>(end - 1u)) * c.k_stride + j;
                let values = mat4x4<f32>(
                    k_four(row.x, j), k_four(row.y, j), k_four(row.z, j), k_four(row.w, j),
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
        let to = c.d_offset + (sequence * c.queries + query) * c.d_stride + column;
        for (var at = 0u; 32u * at < c.width; at += 1u) {
            let values = sums[4u * at + i] * c.scale;
            let j = 32u * at + 4u * lane;
            for (var n = 0u; n < min(4u, max(c.width, j) - j); n += 1u) {
                gradient[to + j + n] = values[n];
            }
        }
    }
}

fn second_weights_at(i: u32, rows: u32) -> mat4x4<f32> {
    let at = 8u * i + rows;
    return mat4x4<f32>(
        second_tile[at], second_tile[at + 8u], second_tile[at + 16u], second_tile[at + 24u],
    );
}

@compute @workgroup_size(64)
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
    let first_key = group % c.blocks * 32u;
    let sequence = task / c.heads;
    let column = task % c.heads * c.width;
    let rows = t / 8u;
    let lane = t % 8u;
    let limit = unpadded(sequence);
    let q_at = c.q_offset + sequence * c.queries * c.q_stride + column;
    let do_at = c.o_offset + sequence * c.queries * c.o_stride + column;
    // The first query that sees the first key.
    let begin = select(0u, max(first_key + c.queries, c.keys) - c.keys, c.causal != 0u);
    let end = select(0u, c.queries, first_key < limit);
    var dk = array<vec4<f32>, 16>();
    var dv = array<vec4<f32>, 16>();
    for (var first = begin; first < end; first += 32u) {
        let computed = scores(t, task, first, first_key, lane, rows, limit);
        let to = 32u * lane + rows;
        first_tile[to] = computed.ds[0];
        first_tile[to + 8u] = computed.ds[1];
        first_tile[to + 16u] = computed.ds[2];
        first_tile[to + 24u] = computed.ds[3];
        second_tile[to] = computed.p[0];
        second_tile[to + 8u] = computed.p[1];
        second_tile[to + 16u] = computed.p[2];
        second_tile[to + 24u] = computed.p[3];
        workgroupBarrier();
        let count = min(32u, end - first);
        for (var at = 0u; 32u * at < c.width; at += 1u) {
            let j = last_four(32u * at + 4u * lane);
            var of_k = mat4x4<f32>(
                dk[4u * at], dk[4u * at + 1u], dk[4u * at + 2u], dk[4u * at + 3u],
            );
            var of_v = mat4x4<f32>(
                dv[4u * at], dv[4u * at + 1u], dv[4u * at + 2u], dv[4u * at + 3u],
            );
            for (var i = 0u; i < count; i += 4u) {
                let query = min(four(first + i), vec4<u32>(end - 1u));
                let of_q = q_at + query * c.q_stride + j;
                let of_o = do_at + query * c.o_stride + j;
                let q_i = mat4x4<f32>(
                    q_four(of_q.x, j), q_four(of_q.y, j), q_four(of_q.z, j), q_four(of_q.w, j),
                );
                let o_i = mat4x4<f32>(
                    o_four(of_o.x, j), o_four(of_o.y, j), o_four(of_o.z, j), o_four(of_o.w, j),
                );
                of_k += q_i * transpose(weights_at(i, rows));
                of_v += o_i * transpose(second_weights_at(i, rows));
            }
            for (var i = 0u; i < 4u; i += 1u) {
                dk[4u * at + i] = of_k[i];
                dv[4u * at + i] = of_v[i];
            }
        }
    }
    for (var i = 0u; i < 4u; i += 1u) {
        if first_key + 4u * rows + i >= c.keys {
            return;
        }
        let row = sequence * c.keys + first_key + 4u * rows + i;
        for (var at = 0u; 32u * at < c.width; at += 1u) {
            let of_k = dk[4u * at + i] * c.scale;
            let of_v = dv[4u * at + i];
            let j = 32u * at + 4u * lane;
            for (var n = 0u; n < min(4u, max(c.width, j) - j); n += 1u) {
                if (c.writes & 1u) != 0u {
                    gradient[c.d_offset + row * c.d_stride + column + j + n] = of_k[n];
                }
                if (c.writes & 2u) != 0u {
                    gradient[c.second_offset + row * c.second_stride + column + j + n] = of_v[n];
                }
            }
        }
    }
}

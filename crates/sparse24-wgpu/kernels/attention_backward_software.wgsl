// attention_dq_software, attention_dkv_software: the gradients of attention_backward.wgsl, in one
// call per 32 keys, or per 32 queries
// in   q, k, v, lse, D, dO and lengths as there
// out  dq, or dk and dv in one buffer, f32: the first call overwrites them, and the others add to
//      them; attention_dkv_software may write one of the two
// pre  no dropout; queries and keys multiples of 32; offsets and strides multiples of 4;
//      at most 65535 workgroups
// acc  f32: keys or queries in order, in blocks of 32
// ref  sparse24_cpu::attention

@group(0) @binding(5) var<storage, read> lse: array<f32>;
@group(0) @binding(6) var<storage, read> d_o: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read> delta: array<f32>;
@group(0) @binding(8) var<storage, read> lengths: array<u32>;
@group(0) @binding(9) var<storage, read_write> gradient: array<vec4<f32>>;

// Per query in workgroup memory.
var<workgroup> logs: array<f32, 32>;
var<workgroup> deltas: array<f32, 32>;

fn o_row(place: u32) -> Row {
    let i = place / 4u;
    return Row(
        d_o[i], d_o[i + 1u], d_o[i + 2u], d_o[i + 3u],
        d_o[i + 4u], d_o[i + 5u], d_o[i + 6u], d_o[i + 7u],
    );
}

fn put_part(at: u32, sum: vec4<f32>) {
    gradient[at] = select(gradient[at], vec4<f32>(), vec4<bool>(c.first == 0u)) + sum;
}

fn put(place: u32, factor: f32, sums: Row) {
    let at = place / 4u;
    put_part(at, factor * sums[0]);
    put_part(at + 1u, factor * sums[1]);
    put_part(at + 2u, factor * sums[2]);
    put_part(at + 3u, factor * sums[3]);
    put_part(at + 4u, factor * sums[4]);
    put_part(at + 5u, factor * sums[5]);
    put_part(at + 6u, factor * sums[6]);
    put_part(at + 7u, factor * sums[7]);
}

// A query row: visible keys, log-sum-exp, D, inputs and the sum of its gradients.
struct Query {
    seen: u32,
    log: f32,
    delta: f32,
    q: Row,
    d_o: Row,
    dq: Row,
}

// Adds the gradients of a query's scores for four keys.
fn add_keys(i: u32, x: ptr<function, Query>) {
    let keys = four(c.first + i) < vec4<u32>((*x).seen);
    var q = (*x).q;
    var d_o = (*x).d_o;
    var dq = (*x).dq;
    let s = products(8u * i, &q) * c.scale - (*x).log;
    let p = select(vec4<f32>(), exp_four(s), keys);
    let dp = products(SECOND + 8u * i, &d_o);
    add_rows(8u * i, p * (dp - (*x).delta), &dq);
    (*x).dq = dq;
}

@compute @workgroup_size(32)
fn attention_dq_software(
    @builtin(local_invocation_index) t: u32,
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let at = place_of(flat(id, groups, 1u), t);
    stage_keys(t, at);
    let row = at.sequence * c.queries + at.number;
    var x = Query(
        visible(at.number, unpadded(at.sequence)),
        lse[c.lse_offset + at.task * c.lse_stride + at.number],
        delta[at.task * c.queries + at.number],
        q_row(c.q_offset + row * c.q_stride + at.column),
        o_row(c.o_offset + row * c.o_stride + at.column),
        Row(),
    );
    add_keys(0u, &x);
    add_keys(4u, &x);
    add_keys(8u, &x);
    add_keys(12u, &x);
    add_keys(16u, &x);
    add_keys(20u, &x);
    add_keys(24u, &x);
    add_keys(28u, &x);
    put(c.d_offset + row * c.d_stride + at.column, c.scale, x.dq);
}

struct Key {
    number: u32,
    limit: u32,
    k: Row,
    v: Row,
    dk: Row,
    dv: Row,
}

// Adds what four queries contribute to a key's dk and dv.
fn add_queries(i: u32, x: ptr<function, Key>) {
    let queries = four(c.first + i);
    let limit = (*x).limit;
    let seen = vec4<u32>(
        visible(queries.x, limit),
        visible(queries.y, limit),
        visible(queries.z, limit),
        visible(queries.w, limit),
    );
    let log = vec4<f32>(logs[i], logs[i + 1u], logs[i + 2u], logs[i + 3u]);
    let of_delta = vec4<f32>(deltas[i], deltas[i + 1u], deltas[i + 2u], deltas[i + 3u]);
    var k = (*x).k;
    var v = (*x).v;
    var dk = (*x).dk;
    var dv = (*x).dv;
    let s = products(8u * i, &k) * c.scale - log;
    let p = select(vec4<f32>(), exp_four(s), vec4<u32>((*x).number) < seen);
    let dp = products(SECOND + 8u * i, &v);
    add_rows(8u * i, p * (dp - of_delta), &dk);
    add_rows(SECOND + 8u * i, p, &dv);
    (*x).dk = dk;
    (*x).dv = dv;
}

@compute @workgroup_size(32)
fn attention_dkv_software(
    @builtin(local_invocation_index) t: u32,
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let at = place_of(flat(id, groups, 1u), t);
    let query = at.sequence * c.queries + c.first + t;
    stage(8u * t, q_row(c.q_offset + query * c.q_stride + at.column), true);
    stage(SECOND + 8u * t, o_row(c.o_offset + query * c.o_stride + at.column), true);
    logs[t] = lse[c.lse_offset + at.task * c.lse_stride + c.first + t];
    deltas[t] = delta[at.task * c.queries + c.first + t];
    workgroupBarrier();
    let row = at.sequence * c.keys + at.number;
    var x = Key(
        at.number,
        unpadded(at.sequence),
        k_row(c.k_offset + row * c.k_stride + at.column),
        v_row(c.v_offset + row * c.v_stride + at.column),
        Row(),
        Row(),
    );
    add_queries(0u, &x);
    add_queries(4u, &x);
    add_queries(8u, &x);
    add_queries(12u, &x);
    add_queries(16u, &x);
    add_queries(20u, &x);
    add_queries(24u, &x);
    add_queries(28u, &x);
    if (c.writes & 1u) != 0u {
        put(c.d_offset + row * c.d_stride + at.column, c.scale, x.dk);
    }
    if (c.writes & 2u) != 0u {
        put(c.second_offset + row * c.second_stride + at.column, 1.0, x.dv);
    }
}

// Shared by the attention kernels for adapters that run on a CPU. They take heads of 32 columns.
//
// A workgroup of 32 invocations takes 32 rows of one head, an invocation each, and 32 rows of the
// other operands per call. Those are in workgroup memory, and are read at indices known when the
// kernel is compiled, for the reason that gemm_software.wgsl gives.

alias Row = array<vec4<f32>, 8>;

// Two tiles of [32 rows, 32 columns].
var<workgroup> tiles: array<vec4<f32>, 512>;
const SECOND: u32 = 256u;

fn q_row(place: u32) -> Row {
    let i = place / 4u;
    return Row(q[i], q[i + 1u], q[i + 2u], q[i + 3u], q[i + 4u], q[i + 5u], q[i + 6u], q[i + 7u]);
}

fn k_row(place: u32) -> Row {
    let i = place / 4u;
    return Row(k[i], k[i + 1u], k[i + 2u], k[i + 3u], k[i + 4u], k[i + 5u], k[i + 6u], k[i + 7u]);
}

fn v_row(place: u32) -> Row {
    let i = place / 4u;
    return Row(v[i], v[i + 1u], v[i + 2u], v[i + 3u], v[i + 4u], v[i + 5u], v[i + 6u], v[i + 7u]);
}

// Padding is staged as zeros, since zero times NaN is NaN.
fn stage(to: u32, x: Row, counts: bool) {
    let none = vec4<f32>();
    let is_row = vec4<bool>(counts);
    tiles[to] = select(none, x[0], is_row);
    tiles[to + 1u] = select(none, x[1], is_row);
    tiles[to + 2u] = select(none, x[2], is_row);
    tiles[to + 3u] = select(none, x[3], is_row);
    tiles[to + 4u] = select(none, x[4], is_row);
    tiles[to + 5u] = select(none, x[5], is_row);
    tiles[to + 6u] = select(none, x[6], is_row);
    tiles[to + 7u] = select(none, x[7], is_row);
}

// The row of an invocation.
struct Place {
    task: u32,
    sequence: u32,
    // Within the sequence.
    number: u32,
    // Its first column.
    column: u32,
}

fn place_of(group: u32, t: u32) -> Place {
    let task = group / c.blocks;
    return Place(task, task / c.heads, group % c.blocks * 32u + t, task % c.heads * 32u);
}

// Stages the keys and values of this call.
fn stage_keys(t: u32, place: Place) {
    let key = place.sequence * c.keys + c.first + t;
    let is_key = c.first + t < unpadded(place.sequence);
    stage(8u * t, k_row(c.k_offset + key * c.k_stride + place.column), is_key);
    stage(SECOND + 8u * t, v_row(c.v_offset + key * c.v_stride + place.column), is_key);
    workgroupBarrier();
}

fn part_products(at: u32, x: vec4<f32>) -> vec4<f32> {
    return x * mat4x4<f32>(tiles[at], tiles[at + 8u], tiles[at + 16u], tiles[at + 24u]);
}

// Dot products of a row with four rows in workgroup memory.
fn products(at: u32, x: ptr<function, Row>) -> vec4<f32> {
    var sums = part_products(at, (*x)[0]);
    sums += part_products(at + 1u, (*x)[1]);
    sums += part_products(at + 2u, (*x)[2]);
    sums += part_products(at + 3u, (*x)[3]);
    sums += part_products(at + 4u, (*x)[4]);
    sums += part_products(at + 5u, (*x)[5]);
    sums += part_products(at + 6u, (*x)[6]);
    return sums + part_products(at + 7u, (*x)[7]);
}

fn add_part(at: u32, part: u32, weights: vec4<f32>, sums: ptr<function, Row>) {
    let i = at + part;
    var sum = (*sums)[part];
    sum += weights.x * tiles[i];
    sum += weights.y * tiles[i + 8u];
    sum += weights.z * tiles[i + 16u];
    sum += weights.w * tiles[i + 24u];
    (*sums)[part] = sum;
}

// Adds four rows in workgroup memory, each times its weight.
fn add_rows(at: u32, weights: vec4<f32>, sums: ptr<function, Row>) {
    add_part(at, 0u, weights, sums);
    add_part(at, 1u, weights, sums);
    add_part(at, 2u, weights, sums);
    add_part(at, 3u, weights, sums);
    add_part(at, 4u, weights, sums);
    add_part(at, 5u, weights, sums);
    add_part(at, 6u, weights, sums);
    add_part(at, 7u, weights, sums);
}

// mask_search: the transposable mask of largest kept L1 norm
// row_mask_search, column_mask_search: the two largest magnitudes of every group
// in   w, the bits of f32 [r,q]
// out  tiles [r/4,q/4], two per word, overwritten, never read
// pre  r and q multiples of 4
// acc  u32, IEEE rounding, in core's order
// ref  sparse24_core::search::mask_search, bit for bit

struct Constants {
    w_offset: u32,
    w_stride: u32,
    // Number of tiles in a row, and in all.
    columns: u32,
    tiles: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> w: array<u32>;
@group(0) @binding(3) var<storage, read_write> tiles: array<u32>;

fn row(tile: u32, i: u32) -> vec4<u32> {
    let at = c.w_offset + (tile / c.columns * 4u + i) * c.w_stride + tile % c.columns * 4u;
    return vec4<u32>(w[at], w[at + 1u], w[at + 2u], w[at + 3u]);
}

// min(|w|, 2^124); a NaN counts as 2^124.
fn magnitudes(tile: u32, i: u32) -> vec4<u32> {
    return min(row(tile, i) & splat(MAGNITUDE), splat(251u << 23u));
}

struct Candidate {
    norm: u32,
    code: u32,
}

// The later candidate if its norm is strictly greater.
fn later(best: Candidate, norm: u32, code: u32) -> Candidate {
    if norm > best.norm {
        return Candidate(norm, code);
    }
    return best;
}

// The set of tb(x) (sparse24_core::search) from x_01, x_23 and x_02 + x_13.
fn set_of(x01: u32, x23: u32, across: u32, together: bool) -> u32 {
    return select((x01 >> 31u) | ((x23 >> 31u) << 1u), 4u | (across >> 31u), together);
}

// The two columns of a set.
fn columns_of(code: u32) -> u32 {
    let split = (1u << (code & 1u)) | (4u << ((code >> 1u) & 1u));
    return select(split, 3u << (2u * (code & 1u)), (code & 4u) != 0u);
}

// sparse24_core::search::CODES.
fn bits_of(code: u32) -> u32 {
    if code >= 112u {
        let a = columns_of(code - 112u);
        return (a * 0x11u) | ((a ^ 15u) * 0x1100u);
    }
    if code < 64u {
        let a = columns_of(code >> 3u);
        let b = columns_of(code & 7u);
        return a | ((a ^ 15u) << 4u) | (b << 8u) | ((b ^ 15u) << 12u);
    }
    // The pairs 01, 02, 03, 12, 13, 23 in two bits each, and the complement from the end.
    let pair = ((code - 64u) >> 3u) * 2u;
    let j = 1u << ((0x940u >> pair) & 3u);
    let k = 1u << ((0xfb9u >> pair) & 3u);
    let i = 1u << ((0x940u >> (10u - pair)) & 3u);
    let l = 1u << ((0xfb9u >> (10u - pair)) & 3u);
    let above = select(i, l, (code & 1u) != 0u);
    let upper = select(j, k, (code & 2u) != 0u);
    let lower = select(j, k, (code & 4u) != 0u);
    let below = above ^ i ^ l;
    return (above | upper) | ((above | (upper ^ j ^ k)) << 4u)
        | ((below | lower) << 8u) | ((below | (lower ^ j ^ k)) << 12u);
}

// sparse24_core::search::code.
fn transposable(tile: u32) -> u32 {
    let first = magnitudes(tile, 0u);
    let second = magnitudes(tile, 1u);
    let third = magnitudes(tile, 2u);
    let fourth = magnitudes(tile, 3u);
    let upper = soft_sub(first, second);
    let lower = soft_sub(third, fourth);
    let across = soft_sub(soft_add(first, second), soft_add(third, fourth));
    // Columns of the three, to subtract them together.
    let x0 = vec4<u32>(upper.x, lower.x, across.x, 0u);
    let x1 = vec4<u32>(upper.y, lower.y, across.y, 0u);
    let x2 = vec4<u32>(upper.z, lower.z, across.z, 0u);
    let x3 = vec4<u32>(upper.w, lower.w, across.w, 0u);
    let d01 = soft_sub(x0, x1);
    let d02 = soft_sub(x0, x2);
    let d03 = soft_sub(x0, x3);
    let d12 = soft_sub(x1, x2);
    let d13 = soft_sub(x1, x3);
    let d23 = soft_sub(x2, x3);

    let ups = vec4<u32>(d01.x, d02.x, d03.x, d12.x);
    let lows = vec4<u32>(d01.y, d02.y, d03.y, d12.y);
    let joint = vec4<u32>(d23.z, d13.z, d12.z, d03.z);
    let norms = soft_add(soft_add(soft_abs(ups), soft_abs(lows)), soft_abs(joint));
    let codes = vec4<u32>(64u, 72u, 80u, 88u)
        + (joint >> splat(31u)) + (ups >> splat(31u)) * 2u + (lows >> splat(31u)) * 4u;
    let last_ups = vec4<u32>(d13.x, d23.x, 0u, 0u);
    let last_lows = vec4<u32>(d13.y, d23.y, 0u, 0u);
    let last_joint = vec4<u32>(d02.z, d01.z, 0u, 0u);
    let last_norms = soft_add(soft_add(soft_abs(last_ups), soft_abs(last_lows)),
        soft_abs(last_joint));
    let last_codes = vec4<u32>(96u, 104u, 0u, 0u)
        + (last_joint >> splat(31u)) + (last_ups >> splat(31u)) * 2u + (last_lows >> splat(31u))
            * 4u;

    // tb of the three.
    let split = soft_add(soft_abs(d01), soft_abs(d23));
    let together = soft_add(d02, d13);
    let joins = soft_abs(together) > split;
    let top = max(soft_abs(together), split);
    let sets = vec3<u32>(
        set_of(d01.x, d23.x, together.x, joins.x),
        set_of(d01.y, d23.y, together.y, joins.y),
        set_of(d01.z, d23.z, together.z, joins.z),
    );
    let both = soft_add(splat(top.x), splat(top.y)).x;

    var best = Candidate(norms.x, codes.x);
    best = later(best, norms.y, codes.y);
    best = later(best, norms.z, codes.z);
    best = later(best, norms.w, codes.w);
    best = later(best, last_norms.x, last_codes.x);
    best = later(best, last_norms.y, last_codes.y);
    best = later(best, top.z, 112u + sets.z);
    best = later(best, both, 8u * sets.x + sets.y);
    return bits_of(best.code);
}

fn row_wise(tile: u32) -> u32 {
    return largest_two(row(tile, 0u)) | (largest_two(row(tile, 1u)) << 4u)
        | (largest_two(row(tile, 2u)) << 8u) | (largest_two(row(tile, 3u)) << 12u);
}

fn column_wise(tile: u32) -> u32 {
    let m = transpose_rows(row(tile, 0u), row(tile, 1u), row(tile, 2u), row(tile, 3u));
    return tile_transposed(
        largest_two(m[0]) | (largest_two(m[1]) << 4u) | (largest_two(m[2]) << 8u)
            | (largest_two(m[3]) << 12u),
    );
}

fn transpose_rows(a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32>) -> array<vec4<u32>, 4> {
    return array<vec4<u32>, 4>(
        vec4<u32>(a.x, b.x, c.x, d.x),
        vec4<u32>(a.y, b.y, c.y, d.y),
        vec4<u32>(a.z, b.z, c.z, d.z),
        vec4<u32>(a.w, b.w, c.w, d.w),
    );
}

@compute @workgroup_size(64)
fn mask_search(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let word = flat(id, groups, 64u);
    if 2u * word < c.tiles {
        var bits = transposable(2u * word);
        if 2u * word + 1u < c.tiles {
            bits |= transposable(2u * word + 1u) << 16u;
        }
        tiles[word] = bits;
    }
}

@compute @workgroup_size(64)
fn row_mask_search(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let word = flat(id, groups, 64u);
    if 2u * word < c.tiles {
        var bits = row_wise(2u * word);
        if 2u * word + 1u < c.tiles {
            bits |= row_wise(2u * word + 1u) << 16u;
        }
        tiles[word] = bits;
    }
}

@compute @workgroup_size(64)
fn column_mask_search(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let word = flat(id, groups, 64u);
    if 2u * word < c.tiles {
        var bits = column_wise(2u * word);
        if 2u * word + 1u < c.tiles {
            bits |= column_wise(2u * word + 1u) << 16u;
        }
        tiles[word] = bits;
    }
}

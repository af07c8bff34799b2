// mvue_compress: MVUE(dZ^T) by the exact estimator, as the dense [p,r] with zeros
// in   dZ, the bits of f32 [p,r]
// out  sampled dZ, the bits of f32 [p,r], contiguous, overwritten, never read
// pre  groups run along tokens; ceil(p/16) r < 2^32
// acc  u32, IEEE rounding, in core's order; an invocation takes the four groups of one Philox call
// ref  sparse24_core::mvue::compress, bit for bit

struct Constants {
    dz_offset: u32,
    dz_stride: u32,
    p: u32,
    r: u32,
    site: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> dz: array<u32>;
@group(0) @binding(3) var<storage, read_write> sampled: array<u32>;

// dZ at a token and a feature; zero beyond the last token.
fn element(token: u32, feature: u32) -> u32 {
    return select(0u, dz[c.dz_offset + min(token, c.p - 1u) * c.dz_stride + feature], token < c.p);
}

// Element i of four groups from token `first` on.
fn elements(first: u32, i: u32, feature: u32) -> vec4<u32> {
    return vec4<u32>(
        element(first + i, feature),
        element(first + 4u + i, feature),
        element(first + 8u + i, feature),
        element(first + 12u + i, feature),
    );
}

fn bit(condition: vec4<bool>, i: u32) -> vec4<u32> {
    return select(splat(0u), splat(1u << i), condition);
}

fn lowest(bits: vec4<u32>) -> vec4<u32> {
    return bits & (~bits + splat(1u));
}

// The highest of four bits.
fn highest(bits: vec4<u32>) -> vec4<u32> {
    return splat(0x80000000u) >> min(countLeadingZeros(bits), splat(31u));
}

// One bit per running sum: whether it is above t.
fn above(t: vec4<u32>, s0: vec4<u32>, s1: vec4<u32>, s2: vec4<u32>, s3: vec4<u32>) -> vec4<u32> {
    return bit(t < s0, 0u) | bit(t < s1, 1u) | bit(t < s2, 2u) | bit(t < s3, 3u);
}

// The estimate of one element: x if it is kept for certain, r with its sign if it is drawn, else 0.
fn estimate(x: vec4<u32>, a: vec4<u32>, r: vec4<u32>, scaled: vec4<u32>,
    keeps: vec4<bool>) -> vec4<u32> {
    let value = select((x & splat(SIGN)) | scaled, x, a >= r);
    return select(splat(0u), value, keeps);
}

@compute @workgroup_size(64)
fn mvue_compress(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = flat(id, groups, 64u);
    let calls = (c.p + 15u) / 16u;
    if number >= calls * c.r {
        return;
    }
    // Consecutive invocations have consecutive features.
    let feature = number % c.r;
    let first = number / c.r * 16u;
    let words = philox(feature * calls + number / c.r, c.site);

    let x0 = elements(first, 0u, feature);
    let x1 = elements(first, 1u, feature);
    let x2 = elements(first, 2u, feature);
    let x3 = elements(first, 3u, feature);
    var a0 = soft_abs(x0);
    var a1 = soft_abs(x1);
    var a2 = soft_abs(x2);
    var a3 = soft_abs(x3);
    let finite = max(max(a0, a1), max(a2, a3)) < splat(INFINITY);
    // If the sum overflows, everything is divided by 4.
    let overflows = soft_add(soft_add(a0, a1), soft_add(a2, a3)) >= splat(INFINITY);
    a0 = select(a0, soft_halved(a0, 2u), overflows);
    a1 = select(a1, soft_halved(a1, 2u), overflows);
    a2 = select(a2, soft_halved(a2, 2u), overflows);
    a3 = select(a3, soft_halved(a3, 2u), overflows);

    let p01 = soft_add(a0, a1);
    let p23 = soft_add(a2, a3);
    let without_largest = min(
        min(soft_add(a1, p23), soft_add(a0, p23)),
        min(soft_add(a3, p01), soft_add(a2, p01)),
    );
    let r = min(soft_halved(soft_add(p01, p23), 1u), without_largest);
    let scaled = select(r, min(r + splat(2u << 23u), splat(INFINITY)), overflows);

    let certain = bit(a0 >= r, 0u) | bit(a1 >= r, 1u) | bit(a2 >= r, 2u) | bit(a3 >= r, 3u);
    let zero = splat(0u);
    let d0 = (a0 < r) & (a0 > zero);
    let d1 = (a1 < r) & (a1 > zero);
    let d2 = (a2 < r) & (a2 > zero);
    let d3 = (a3 < r) & (a3 > zero);
    let drawable = bit(d0, 0u) | bit(d1, 1u) | bit(d2, 2u) | bit(d3, 3u);
    let s0 = select(zero, a0, d0);
    let s1 = soft_add(s0, select(zero, a1, d1));
    let s2 = soft_add(s1, select(zero, a2, d2));
    let s3 = soft_add(s2, select(zero, a3, d3));
    let t = soft_times_uniform(words, r);
    let hits = above(t, s0, s1, s2, s3) & drawable;
    let last = highest(drawable);
    let drawn = select(last, lowest(hits), hits != zero);
    // Two elements are drawn; the first draw leaves at least one for the second.
    let earlier = select(drawn, highest(drawable ^ last), drawn == last);
    let rest = drawable & ~(earlier | (earlier - splat(1u)));
    let late_hits = above(soft_add(t, r), s0, s1, s2, s3) & rest;
    let later = select(last, lowest(late_hits), late_hits != zero);

    let first_certain = lowest(certain);
    let second_certain = lowest(certain ^ first_certain);
    var keep = select(earlier | later, first_certain | drawn, certain != zero);
    keep = select(keep, first_certain | second_certain, second_certain != zero);
    // At most one element is not zero: keeps it and the one at its index xor 1.
    let pair = select(splat(3u), splat(12u), (a2 | a3) != zero);
    keep = select(keep, pair, r == zero);

    var y0 = estimate(x0, a0, r, scaled, (keep & splat(1u)) != zero);
    var y1 = estimate(x1, a1, r, scaled, (keep & splat(2u)) != zero);
    var y2 = estimate(x2, a2, r, scaled, (keep & splat(4u)) != zero);
    var y3 = estimate(x3, a3, r, scaled, (keep & splat(8u)) != zero);
    y0 = select(splat(NAN), y0, finite);
    y1 = select(splat(NAN), y1, finite);
    y2 = select(zero, y2, finite);
    y3 = select(zero, y3, finite);
    for (var group = 0u; group < 4u; group += 1u) {
        let token = first + 4u * group;
        let values = vec4<u32>(y0[group], y1[group], y2[group], y3[group]);
        for (var i = 0u; i < 4u; i += 1u) {
            if token + i < c.p {
                sampled[(token + i) * c.r + feature] = values[i];
            }
        }
    }
}

// mvue_approximate: MVUE(dZ^T) by the approximate estimator, as the dense [p,r] with zeros
// in   dZ, the bits of f32 [p,r]
// out  sampled dZ, the bits of f32 [p,r], contiguous, overwritten, never read
// pre  groups run along tokens; ceil(p/4) r < 2^32
// acc  indices in u32, IEEE rounding, in core's order; values in f32, from a group scaled by a
//      power of two to a largest magnitude in [1, 2)
// ref  sparse24_core::mvue::compress: the indices bit for bit

struct Constants {
    dz_offset: u32,
    dz_stride: u32,
    p: u32,
    r: u32,
    site: u32,
    second_site: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> dz: array<u32>;
@group(0) @binding(3) var<storage, read_write> sampled: array<u32>;

fn add_one(a: u32, b: u32) -> u32 {
    return soft_add(splat(a), splat(b)).x;
}

// Draws the first nonzero element, except the one to skip, whose running sum exceeds t; otherwise
// the last one.
fn draw(group: vec4<u32>, skip: u32, t: u32) -> u32 {
    var a = group;
    var running = 0u;
    var last = 0u;
    var found = false;
    for (var i = 0u; i < 4u; i += 1u) {
        if i != skip && a[i] > 0u && !found {
            running = add_one(running, a[i]);
            last = i;
            found = t < running;
        }
    }
    return last;
}

// The sum of all elements but one, in order.
fn without(group: vec4<u32>, skip: u32) -> u32 {
    var a = group;
    var sum = 0u;
    for (var i = 0u; i < 4u; i += 1u) {
        if i != skip {
            sum = add_one(sum, a[i]);
        }
    }
    return sum;
}

// A kept element's magnitude a over its probability p, as 1 / (p / a) without dividing by a, which
// may be too small.
fn estimate(group: vec4<f32>, i: u32) -> f32 {
    var a = group;
    let total = (a.x + a.y) + (a.z + a.w);
    var inverse = 1.0 / total;
    for (var j = 0u; j < 4u; j += 1u) {
        if j != i {
            var rest = 0.0;
            for (var l = 0u; l < 4u; l += 1u) {
                rest += select(a[l], 0.0, l == j);
            }
            // If one element is far larger, the others count as zero.
            inverse += a[j] / total / max(rest, 1.1754944e-38);
        }
    }
    return 1.0 / inverse;
}

// 2^n, or the nearest power of two that is a normal number.
fn power(n: i32) -> f32 {
    return bitcast<f32>(u32(clamp(n + 127, 1, 254)) << 23u);
}

// The bits of value * 2^n, in integers since WGSL may flush subnormal numbers to zero.
fn raised(value: f32, n: i32) -> u32 {
    let bits = bitcast<u32>(value);
    let exponent = i32(bits >> 23u) + n;
    if exponent >= 255 {
        return INFINITY;
    }
    if exponent <= 0 {
        return u32(round(value * power(n + 149)));
    }
    return (bits & 0x7fffffu) | (u32(exponent) << 23u);
}

@compute @workgroup_size(64)
fn mvue_approximate(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = flat(id, groups, 64u);
    let per_row = (c.p + 3u) / 4u;
    if number >= per_row * c.r {
        return;
    }
    let feature = number % c.r;
    let group = number / c.r;
    let call = feature * ((c.p + 15u) / 16u) + group / 4u;
    var words = philox(call, c.site);
    var seconds = philox(call, c.second_site);
    var x = vec4<u32>();
    for (var i = 0u; i < 4u; i += 1u) {
        if 4u * group + i < c.p {
            x[i] = dz[c.dz_offset + (4u * group + i) * c.dz_stride + feature];
        }
    }
    let magnitudes = soft_abs(x);
    let finite = all(magnitudes < splat(INFINITY));
    var a = magnitudes;
    var quartered = 0u;
    if add_one(add_one(a.x, a.y), add_one(a.z, a.w)) >= INFINITY {
        a = soft_halved(a, 2u);
        quartered = 2u;
    }
    let nonzero = select(splat(0u), vec4<u32>(1u, 2u, 4u, 8u), a > splat(0u));
    let bits = nonzero.x | nonzero.y | nonzero.z | nonzero.w;
    var y = vec4<u32>();
    if !finite {
        y = vec4<u32>(NAN, NAN, 0u, 0u);
    } else if countOneBits(bits) < 3u {
        y = x;
    } else {
        let total = add_one(add_one(a.x, a.y), add_one(a.z, a.w));
        let t = soft_times_uniform(splat(words[group % 4u]), splat(total)).x;
        let first = draw(a, 4u, t);
        let rest = soft_times_uniform(splat(seconds[group % 4u]), splat(without(a, first))).x;
        let second = draw(a, first, rest);
        // Exponents relative to the largest; elements below 2^-100 of it count as zero.
        let largest = max(max(a.x, a.y), max(a.z, a.w)) >> 23u;
        let down = 127u - min(largest, 127u);
        let up = max(largest, 127u) - 127u;
        let normal = a + splat(down << 23u) - splat(up << 23u);
        let subnormal = vec4<f32>(a) * power(i32(down) - 149);
        let exponents = a >> splat(23u);
        let scaled = select(
            select(bitcast<vec4<f32>>(normal), subnormal, exponents == splat(0u)),
            vec4<f32>(), exponents + splat(100u) < splat(largest),
        );
        for (var at = 0u; at < 2u; at += 1u) {
            let i = select(first, second, at == 1u);
            y[i] = (x[i] & SIGN) | raised(estimate(scaled, i), i32(up + quartered) - i32(down));
        }
    }
    for (var i = 0u; i < 4u; i += 1u) {
        if 4u * group + i < c.p {
            sampled[(4u * group + i) * c.r + feature] = y[i];
        }
    }
}

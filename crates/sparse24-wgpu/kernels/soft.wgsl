// IEEE binary32 in u32 arithmetic, rounded to nearest even, with subnormal numbers.
//
// WGSL implementations may round, fuse and reassociate f32 operations in their own way, and flush
// subnormal numbers, so kernels with discrete results use these functions. They take four numbers
// at a time, which are finite unless a function says otherwise.

const INFINITY: u32 = 0x7f800000u;
const MAGNITUDE: u32 = 0x7fffffffu;
const SIGN: u32 = 0x80000000u;

fn splat(x: u32) -> vec4<u32> {
    return vec4<u32>(x);
}

// The significand with its implicit bit.
fn soft_significand(x: vec4<u32>) -> vec4<u32> {
    return (x & splat(0x7fffffu)) | select(splat(0x800000u), splat(0u), (x
        & splat(INFINITY)) == splat(0u));
}

// The biased exponent; 1 for subnormal numbers.
fn soft_exponent(x: vec4<u32>) -> vec4<u32> {
    return max((x >> splat(23u)) & splat(0xffu), splat(1u));
}

// x / 2^shift, rounded to nearest even; shift at most 31.
fn soft_shifted(x: vec4<u32>, shift: vec4<u32>) -> vec4<u32> {
    let kept = x >> shift;
    let rest = x - (kept << shift);
    let half = (splat(1u) << shift) >> splat(1u);
    let up = (rest > half) | ((rest == half) & (shift > splat(0u)) & ((kept
        & splat(1u)) == splat(1u)));
    return kept + select(splat(0u), splat(1u), up);
}

// a + b; infinity if it overflows or a positive operand is infinite.
fn soft_add(a: vec4<u32>, b: vec4<u32>) -> vec4<u32> {
    let swaps = (a & splat(MAGNITUDE)) < (b & splat(MAGNITUDE));
    let large = select(a, b, swaps);
    let small = select(b, a, swaps);
    let exponent = soft_exponent(large);
    // Three guard bits; the last is a sticky bit.
    let distance = min(exponent - soft_exponent(small), splat(27u));
    let whole = soft_significand(small) << splat(3u);
    var aligned = whole >> distance;
    aligned |= select(splat(0u), splat(1u), (aligned << distance) != whole);
    let top = soft_significand(large) << splat(3u);
    let sum = select(top - aligned, top + aligned, ((large ^ small) & splat(SIGN)) == splat(0u));
    let carries = sum >= splat(1u << 27u);
    let left = min(max(countLeadingZeros(sum), splat(5u)) - splat(5u), exponent - splat(1u));
    let normal = select(sum << left, (sum >> splat(1u)) | (sum & splat(1u)), carries);
    let scale = select(exponent - left, exponent + splat(1u), carries);
    let rounded = ((scale - splat(1u)) << splat(23u)) + soft_shifted(normal, splat(3u));
    let signed = (large & splat(SIGN)) | min(rounded, splat(INFINITY));
    return select(signed, a & b & splat(SIGN), sum == splat(0u));
}

fn soft_sub(a: vec4<u32>, b: vec4<u32>) -> vec4<u32> {
    return soft_add(a, b ^ splat(SIGN));
}

fn soft_abs(x: vec4<u32>) -> vec4<u32> {
    return x & splat(MAGNITUDE);
}

// x / 2^power for magnitudes; power is at most 2.
fn soft_halved(x: vec4<u32>, power: u32) -> vec4<u32> {
    let exponent = soft_exponent(x);
    let shift = splat(power + 1u) - min(exponent, splat(power + 1u));
    let subnormal = soft_shifted(soft_significand(x), shift);
    return select(subnormal, x - splat(power << 23u), (x >> splat(23u)) > splat(power));
}

// The product of a magnitude x with the uniform number (word >> 8) * 2^-24.
fn soft_times_uniform(word: vec4<u32>, x: vec4<u32>) -> vec4<u32> {
    // The 48 bits of the product, in two halves of 24.
    let u = word >> splat(8u);
    let s = soft_significand(x);
    let twelve = splat(12u);
    let ones = splat(0xfffu);
    let middle = (u & ones) * (s >> twelve) + (u >> twelve) * (s & ones);
    let sum = (u & ones) * (s & ones) + ((middle & ones) << twelve);
    let low = sum & splat(0xffffffu);
    let high = (u >> twelve) * (s >> twelve) + (middle >> twelve) + (sum >> splat(24u));
    let bits = select(
        splat(32u) - countLeadingZeros(low),
        splat(56u) - countLeadingZeros(high),
        high != splat(0u),
    );
    // The exponent of the product is that of x plus bits - 48, and at least 1.
    let exponent = soft_exponent(x) + bits;
    let dropped = bits + splat(49u) - min(exponent, splat(49u));
    let scale = max(exponent, splat(49u)) - splat(48u);
    // At most 48 bits are dropped, since both `bits` and 49 less an exponent are at most 48.
    let near = max(dropped, splat(24u)) - splat(24u);
    let joined = (high << (splat(24u) - near)) | (low >> near);
    let lost = low - ((low >> near) << near);
    let half = (splat(1u) << near) >> splat(1u);
    let up = (lost > half) | ((lost == half) & (near > splat(0u)) & ((joined
        & splat(1u)) == splat(1u)));
    let close = joined + select(splat(0u), splat(1u), up);
    let short = low << (splat(24u) - min(dropped, splat(24u)));
    let significand = select(close, short, dropped <= splat(24u));
    let product = ((scale - splat(1u)) << splat(23u)) + significand;
    return select(product, splat(0u), bits == splat(0u));
}

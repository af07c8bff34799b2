// Exponentials and logarithms in f32, with known error bounds, which WGSL's own functions lack.

const LN_2: f32 = 0.6931471806;

// 2^x for x in [-126, 127], within 2 units in the last place.
fn power(x: f32) -> f32 {
    let whole = round(x);
    let r = x - whole;
    let slope = ((((0.00015453182 * r + 0.0013390887) * r + 0.009618082) * r + 0.05550357) * r
        + 0.2402265) * r + LN_2;
    return bitcast<f32>(bitcast<u32>(1.0 + r * slope) + (bitcast<u32>(i32(whole)) << 23u));
}

// e^x within a few units in the last place, for x from -2e38 to 88; 0 below -87.
fn exp_of(x: f32) -> f32 {
    let whole = round(x * 1.44269504);
    // ln 2 in two parts; the first has 15 bits, so its product with a small integer is exact.
    let r = (x - whole * 0.693145751953125) - whole * 0.0000014286068;
    let tail = (((0.0013926184 * r + 0.008363179) * r + 0.041666555) * r + 0.16666577) * r + 0.5;
    let mantissa = 1.0 + (r + r * r * tail);
    let exponent = clamp(i32(whole), -126, 127) + 127;
    return select(mantissa * bitcast<f32>(u32(exponent) << 23u), 0.0, x < -87.0);
}

// ln x of a positive normal number: 2^e m with m within sqrt 2 of 1, and ln m = 2 artanh(s).
fn log_of(x: f32) -> f32 {
    let bits = bitcast<u32>(x) - 0x3f3504f3u;
    let exponent = f32(bitcast<i32>(bits) >> 23u);
    let m = bitcast<f32>((bits & 0x7fffffu) + 0x3f3504f3u);
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let series = 0.6666667 + square * (0.4 + square * (0.2857143 + square * 0.2333));
    return exponent * 0.693145751953125 + (2.0 * s + (s * square * series + exponent
        * 0.0000014286068));
}

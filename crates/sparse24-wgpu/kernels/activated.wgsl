// Activations and their slopes in f32, with known error bounds.

// 1 / (1 + 2^-x) for x in [-126, 126].
fn sigmoid(x: f32) -> f32 {
    return 1.0 / (1.0 + power(-x));
}

// The value of an activation and its slope.
struct Activated {
    value: f32,
    slope: f32,
}

// z, at least -limit, times the sigmoid of an exponent, and the derivative; slope is ln 2 *
// exponent'. Beyond the limit, the sigmoid is that of the limit.
fn gate(z: f32, limit: f32, exponent: f32, slope: f32) -> Activated {
    let s = sigmoid(exponent);
    return Activated(max(z, -limit) * s, s + clamp(z, -limit, limit) * slope * (s * (1.0 - s)));
}

// GELU in its tanh form: z / (1 + 2^-(2.3022082 z + 0.10294324 z^3)).
fn gelu(z: f32) -> Activated {
    let x = clamp(z, -9.98, 9.98);
    let square = x * x;
    return gate(z, 9.98, x * (2.3022082 + 0.10294324 * square), LN_2 * 2.3022082 + 3.0 * LN_2
        * 0.10294324 * square);
}

fn silu(z: f32) -> Activated {
    return gate(z, 87.0, clamp(z, -87.0, 87.0) * 1.44269504, 1.0);
}

// z F(z), with F the standard normal distribution: F(-a) = e^(-a^2/2) m(a), with m a fit in
// t = 1 / (1 + 0.21 a) on a <= 12.9.
fn gelu_erf(z: f32) -> Activated {
    let x = clamp(z, -12.9, 12.9);
    let a = abs(x);
    let e = power(-0.7213475 * (a * a));
    let t = 1.0 / (1.0 + 0.21 * a);
    let low = ((((-0.072415546 * t + 0.28733882) * t - 0.33817586) * t + 0.35873744) * t
        - 0.10062995) * t;
    let m = (((low + 0.12787361) * t + 0.068375506) * t + 0.085192315) * t + 0.083703645;
    let tail = e * (t * m);
    let normal = select(1.0 - tail, tail, x < 0.0);
    return Activated(max(z, -12.9) * normal, normal + x * (0.3989423 * e));
}

// z + z^3 m(z^2) within 5/8, else 1 - 2 / (1 + e^2|z|) with the sign of z.
fn tanh_of(z: f32) -> Activated {
    let x = clamp(z, -43.0, 43.0);
    let square = x * x;
    let m = (((-0.005717166 * square + 0.020650728) * square - 0.053743556) * square + 0.13331492)
        * square - 0.33333284;
    let far = 1.0 - 2.0 * sigmoid(-2.88539008 * abs(x));
    let value = select(select(far, -far, x < 0.0), x + x * (square * m), abs(x) <= 0.625);
    return Activated(value, 1.0 - value * value);
}

fn relu(z: f32) -> Activated {
    return Activated(select(z, 0.0, z <= 0.0), select(select(0.0, 1.0, z > 0.0), z, z != z));
}

// Activations in the order of sparse24_core::op::Activation::ALL.
fn activated(activation: u32, z: f32) -> Activated {
    switch activation {
        case 0u, 2u: { return gelu(z); }
        case 1u: { return gelu_erf(z); }
        case 3u: { return silu(z); }
        case 4u: { return tanh_of(z); }
        default: { return relu(z); }
    }
}

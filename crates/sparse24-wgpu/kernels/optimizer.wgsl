// optimizer_step: one step of a parameter; does nothing while the flag is raised
// in   g f32 [n]; tiles of the mask; health: the norm of all gradients and the flag
// out  w, m, v f32 [n], in place; only Adam writes v
// pre  q columns; with a mask, a multiple of 4
// acc  f32
// ref  sparse24_cpu::optimizer

struct Constants {
    g_offset: u32,
    w_offset: u32,
    m_offset: u32,
    v_offset: u32,
    elements: u32,
    columns: u32,
    masked: u32,
    // 0: Adam, 1: SGD with momentum, 2: Lion.
    rule: u32,
    clips: u32,
    clip: f32,
    beta1: f32,
    beta2: f32,
    epsilon: f32,
    // Weight decay in the gradient (coupled) and beside the step (decoupled); the masked factors
    // are added to these for pruned weights.
    coupled: f32,
    decoupled: f32,
    masked_coupled: f32,
    masked_decoupled: f32,
    // 1 - beta1 and 1 - beta2.
    rest1: f32,
    rest2: f32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> g: array<f32>;
@group(0) @binding(3) var<storage, read> tiles: array<u32>;
@group(0) @binding(4) var<storage, read> health: array<u32>;
@group(0) @binding(5) var<storage, read_write> w: array<f32>;
@group(0) @binding(6) var<storage, read_write> m: array<f32>;
@group(0) @binding(7) var<storage, read_write> v: array<f32>;

fn is_pruned(i: u32) -> bool {
    let row = i / c.columns;
    let column = i % c.columns;
    let tile = row / 4u * (c.columns / 4u) + column / 4u;
    return ((tile_bits(tiles[tile / 2u], tile) >> (row % 4u * 4u + column % 4u)) & 1u) == 0u;
}

@compute @workgroup_size(64)
fn optimizer_step(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let i = flat(id, groups, 64u);
    if i >= c.elements || health[1] != HEALTHY {
        return;
    }
    var scale = 1.0;
    if c.clips != 0u {
        scale = min(c.clip / (bitcast<f32>(health[0]) + 1e-6), 1.0);
    }
    var on_gradient = c.coupled;
    var on_weight = c.decoupled;
    if c.masked != 0u && is_pruned(i) {
        on_gradient += c.masked_coupled;
        on_weight += c.masked_decoupled;
    }
    let weight = w[c.w_offset + i];
    let gradient = g[c.g_offset + i] * scale + on_gradient * weight;
    let moment = m[c.m_offset + i];
    var step = 0.0;
    var next = 0.0;
    switch c.rule {
        case 0u: {
            next = c.beta1 * moment + c.rest1 * gradient;
            let second = c.beta2 * v[c.v_offset + i] + c.rest2 * gradient * gradient;
            v[c.v_offset + i] = second;
            step = next / state.first_correction / (sqrt(second / state.second_correction)
                + c.epsilon);
        }
        case 1u: {
            next = c.beta1 * moment + gradient;
            step = next;
        }
        default: {
            next = c.beta2 * moment + c.rest2 * gradient;
            step = sign(c.beta1 * moment + c.rest1 * gradient);
        }
    }
    m[c.m_offset + i] = next;
    w[c.w_offset + i] = weight - state.learning_rate * (step + on_weight * weight);
}

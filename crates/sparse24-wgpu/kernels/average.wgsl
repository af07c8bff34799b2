// moving_average: average = decay * average + rest * w; does nothing while the flag is raised
// in   w f32 [n]; health: the norm of all gradients and the flag; rest = 1 - decay
// out  average f32 [n], in place
// acc  f32
// ref  sparse24_cpu::average

struct Constants {
    w_offset: u32,
    average_offset: u32,
    elements: u32,
    decay: f32,
    rest: f32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> w: array<f32>;
@group(0) @binding(3) var<storage, read> health: array<u32>;
@group(0) @binding(4) var<storage, read_write> average: array<f32>;

@compute @workgroup_size(64)
fn moving_average(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let i = flat(id, groups, 64u);
    if i < c.elements && health[1] == HEALTHY {
        let at = c.average_offset + i;
        average[at] = c.decay * average[at] + c.rest * w[c.w_offset + i];
    }
}

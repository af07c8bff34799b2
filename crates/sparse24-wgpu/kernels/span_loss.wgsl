// span_loss: the mean of the cross-entropies of a span's first and last token, over the tokens of a
//      sequence; logits are overwritten with their gradient
// in   targets u32 [n*length]: the first that is not 0xffffffff is at the span's first token,
//      and its value is the position of the last token; lengths u32 [n]
// out  logits, the bits of f32 [n*length,2], in place; losses f32 [n], overwritten
// pre  a workgroup per sequence
// acc  f32: sums of every 64th token, then a tree
// ref  sparse24_cpu::loss

struct Constants {
    logits_offset: u32,
    logits_stride: u32,
    targets_offset: u32,
    lengths_offset: u32,
    losses_offset: u32,
    sequences: u32,
    length: u32,
    trains: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> targets: array<u32>;
@group(0) @binding(3) var<storage, read> lengths: array<u32>;
@group(0) @binding(4) var<storage, read_write> logits: array<u32>;
@group(0) @binding(5) var<storage, read_write> losses: array<u32>;

fn logit(place: u32) -> f32 {
    return bitcast<f32>(logits[place]);
}

@compute @workgroup_size(64)
fn span_loss(
    @builtin(local_invocation_index) lane: u32,
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let sequence = flat(id, groups, 1u);
    if sequence >= c.sequences {
        return;
    }
    let first_row = sequence * c.length;
    let tokens = min(lengths[c.lengths_offset + sequence], c.length);
    var first = 0u;
    for (var i = 0u; i < c.length; i += 1u) {
        if targets[c.targets_offset + first_row + first] == IGNORE {
            first += 1u;
        }
        first = min(first, c.length - 1u);
    }
    let last = targets[c.targets_offset + first_row + first];
    let known = last != IGNORE;
    var loss = 0.0;
    var broken = select(1.0, 0.0, first < tokens && last < tokens);
    for (var column = 0u; column < 2u; column += 1u) {
        let at = c.logits_offset + first_row * c.logits_stride + column;
        let hit = select(first, last, column == 1u);
        var maximum = -3e38;
        for (var i = lane; i < tokens; i += 64u) {
            maximum = max(maximum, logit(at + i * c.logits_stride));
            broken += select(1.0, 0.0, is_finite(logits[at + i * c.logits_stride]));
        }
        maximum = workgroup_max(lane, maximum);
        var sum = 0.0;
        for (var i = lane; i < tokens; i += 64u) {
            sum += exp_of(logit(at + i * c.logits_stride) - maximum);
        }
        sum = workgroup_sum(lane, sum);
        let score = logit(at + min(hit, c.length - 1u) * c.logits_stride);
        loss += 0.5 * (log_of(sum) - (score - maximum));
        storageBarrier();
        workgroupBarrier();
        let scale = 0.5 * state.loss_scale;
        for (var i = lane; i < select(0u, c.length, c.trains != 0u); i += 64u) {
            let to = at + i * c.logits_stride;
            var gradient = exp_of(logit(to) - maximum) * (scale / sum);
            if i == hit {
                gradient -= scale;
            }
            logits[to] = select(0u, bitcast<u32>(gradient), known && i < tokens);
        }
    }
    broken = workgroup_sum(lane, broken);
    if lane == 0u {
        let bits = select(NAN, bitcast<u32>(loss), broken == 0.0);
        losses[c.losses_offset + sequence] = select(0u, bits, known);
    }
}

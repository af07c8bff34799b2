//! Software 2:4: Z = X W^T without sparse tensor cores, from the kept half of W.
//!
//! Each kept value is multiplied by an element of X whose index comes from the mask. One kind of
//! kernel reads that element from workgroup memory. The other holds four elements along k of each
//! row in registers and branches on the pattern, which consecutive invocations share.

use sparse24_core::op::Accumulate;

use super::{Device, FOURS, Kernel, Transposed, constants, open, products, time};

/// A variant. Each invocation multiplies `4 * vectors` rows of X by `columns` rows of W.
#[derive(Debug)]
struct Variant {
    branches: bool,
    /// Consecutive invocations, which share their rows of W.
    lanes: usize,
    vectors: usize,
    columns: usize,
    /// Rows of W of a workgroup, divided by `columns`.
    spans: usize,
    /// Values of k in workgroup memory, divided by 4.
    depth: usize,
}

const VARIANTS: [Variant; 4] = {
    let reads = Variant { branches: false, lanes: 8, vectors: 2, columns: 8, spans: 8, depth: 4 };
    let branches =
        Variant { branches: true, lanes: 32, vectors: 2, columns: 8, spans: 8, depth: 2 };
    let large = Variant { lanes: 16, spans: 16, ..reads };
    let tall = Variant { vectors: 4, spans: 4, depth: 1, ..branches };
    [reads, large, branches, tall]
};

/// The six patterns, each as the index of the first kept value plus 4 times that of the second.
const PATTERNS: [u32; 6] = [4, 8, 12, 9, 13, 14];

/// The kernel of a variant. It reads two kept values of each four of W as a vec2, and the patterns
/// of sixteen values from a word.
fn source(variant: &Variant) -> String {
    let &Variant { branches, lanes, vectors, columns, spans, depth } = variant;
    let each = |n: usize, of: &dyn Fn(usize) -> String| (0..n).map(of).collect::<String>();
    let sums =
        |of: &dyn Fn(usize, usize) -> String| each(columns, &|j| each(vectors, &|v| of(j, v)));
    let x = |k: &str, v: usize| format!("x_tile[({k}) * WIDTH + lane + {}u]", v * lanes);
    let column = |g: usize, j: usize| {
        let add = |kept: usize, x: &dyn Fn(usize) -> String| {
            each(vectors, &|v| format!("s{j}_{v} += y[{kept}] * {};", x(v)))
        };
        let read = |kept: usize| {
            let place = format!("{}u + (key >> {}u & 3u)", 4 * g, 2 * kept);
            add(kept, &|v| x(&place, v))
        };
        let case = |pattern: u32| {
            let held = |kept, place| add(kept, &|v| format!("x{place}_{v}"));
            let both = held(0, pattern % 4) + &held(1, pattern / 4);
            format!("case {pattern}u: {{ {both} }}")
        };
        let added = match branches {
            true => format!("switch key {{ {} default: {{}} }}", PATTERNS.map(case).concat()),
            false => each(2, &read),
        };
        format!(
            "{{ let y = y_tile[(column + {j}u) * DEPTH + {g}u];
            let key = (keys[column + {j}u] >> (4u * (first + {g}u) % 16u)) & 15u;
            {added} }}"
        )
    };
    let group = |g: usize| {
        let hold = |k: usize| {
            let k_of_tile = format!("{}u", 4 * g + k);
            each(vectors, &|v| format!("let x{k}_{v} = {};", x(&k_of_tile, v)))
        };
        let held = if branches { each(4, &hold) } else { String::new() };
        format!("{{ {held} {} }}", each(columns, &|j| column(g, j)))
    };
    let store = |j: usize, v: usize| {
        each(4, &|i| format!("out[to + {}u * c.n + {j}u] = s{j}_{v}[{i}];", 4 * v * lanes + i))
    };
    [
        include_str!("../../../kernels/interface.wgsl"),
        &format!(
            "const LANES: u32 = {lanes}u; const WIDTH: u32 = LANES * {vectors}u;
            const SIZE: u32 = LANES * {spans}u; const COLUMNS: u32 = {columns}u;
            const TILE: u32 = {spans}u * COLUMNS; const DEPTH: u32 = {depth}u;"
        ),
        "struct Constants { m: u32, n: u32, k: u32 }
        @group(0) @binding(0) var<uniform> c: Constants;
        @group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
        @group(0) @binding(3) var<storage, read> kept: array<vec2<f32>>;
        @group(0) @binding(4) var<storage, read> patterns: array<u32>;
        @group(0) @binding(5) var<storage, read_write> out: array<f32>;
        var<workgroup> x_tile: array<vec4<f32>, 4u * DEPTH * WIDTH>;
        var<workgroup> y_tile: array<vec2<f32>, DEPTH * TILE>;
        var<workgroup> keys: array<u32, TILE>;
        @compute @workgroup_size(SIZE) fn software24(
            @builtin(local_invocation_index) t: u32,
            @builtin(workgroup_id) id: vec3<u32>,
            @builtin(num_workgroups) groups: vec3<u32>,
        ) {
            let group = flat(id, groups, 1u);
            let of_x = group / (c.n / TILE) * 4u * WIDTH;
            let of_w = group % (c.n / TILE) * TILE;
            let step = c.k / 4u;
            let lane = t % LANES;
            let column = t / LANES * COLUMNS;",
        &sums(&|j, v| format!("var s{j}_{v} = vec4<f32>();")),
        "for (var first = 0u; first < step; first += DEPTH) {
            workgroupBarrier();
            for (var i = t; i < DEPTH * WIDTH; i += SIZE) {
                let at = (of_x + i % WIDTH * 4u) * step + first + i / WIDTH;
                let block = transpose(
                    mat4x4<f32>(x[at], x[at + step], x[at + 2u * step], x[at + 3u * step]));
                let to = i / WIDTH * 4u * WIDTH + i % WIDTH;
                x_tile[to] = block[0];
                x_tile[to + WIDTH] = block[1];
                x_tile[to + 2u * WIDTH] = block[2];
                x_tile[to + 3u * WIDTH] = block[3];
            }
            for (var i = t; i < DEPTH * TILE; i += SIZE) {
                y_tile[i] = kept[(of_w + i / DEPTH) * step + first + i % DEPTH];
            }
            for (var i = t; i < TILE; i += SIZE) {
                keys[i] = patterns[(of_w + i) * (step / 4u) + first / 4u];
            }
            workgroupBarrier();",
        &each(depth, &group),
        "}
        let to = (of_x + 4u * lane) * c.n + of_w + column;",
        &sums(&store),
        "}",
    ]
    .concat()
}

/// Times the variants beside both dense kernels with vec4 loads, whose results they must repeat.
#[test]
#[ignore = "a measurement"]
fn software24_beside_dense() {
    let Some(mut device) = open() else { return };
    let size = if device.is_software() { 512 } else { 4096 };
    println!("\n{}; {size}x{size}x{size}, TFLOP/s of the dense product", device.name());
    // Integers, whose sums are exact.
    let value = |i: usize| ((i as u32).wrapping_mul(0x9e37_79b9) >> 8) % 17;
    let bits = |value: u32| (value as f32 - 8.0).to_bits();
    let groups = size * size / 4;
    let patterns: Vec<u32> = (0..groups).map(|g| PATTERNS[value(g) as usize % 6]).collect();
    let kept: Vec<u32> = (0..2 * groups).map(|i| bits(value(i + 1))).collect();
    let mut dense = vec![0; 4 * groups];
    for (g, pattern) in patterns.iter().enumerate() {
        dense[4 * g + *pattern as usize % 4] = kept[2 * g];
        dense[4 * g + *pattern as usize / 4] = kept[2 * g + 1];
    }
    let words = patterns.chunks(4).map(|p| p[0] | p[1] << 4 | p[2] << 8 | p[3] << 12);
    let mut upload = |columns: usize, values: &[u32]| {
        let matrix = device.alloc("operand", [size, columns], "test").unwrap();
        device.upload(matrix, values).unwrap();
        matrix
    };
    let x = upload(size, &(0..4 * groups).map(|i| bits(value(i + 2))).collect::<Vec<_>>());
    let [w, kept] = [(size, &dense), (size / 2, &kept)].map(|(n, values)| upload(n, values));
    let patterns = upload(size / 16, &words.collect::<Vec<_>>());
    let z = device.alloc("z", [size; 2], "test").unwrap();
    let of_dense =
        constants((x, Transposed::No), (w, Transposed::Yes), None, z, Accumulate::Overwrite)
            .unwrap();
    let kernels = VARIANTS.map(|variant| {
        let source = source(&variant).leak();
        let kernel = Kernel { name: "software24", source, inputs: 3, outputs: 1 };
        let tile = 4 * variant.lanes * variant.vectors * variant.columns * variant.spans;
        (variant, &*Box::leak(Box::new(kernel)), size * size / tile)
    });
    let rate = |taken: std::time::Duration| 2e-12 * size.pow(3) as f64 / taken.as_secs_f64();
    for round in 0..3 {
        let mut expected = None;
        for product in [&FOURS, products(&device)[2]] {
            let taken = time(&mut device, |device| {
                product.run(device, [x, w, w, z], &of_dense).unwrap();
            });
            expected = Some(device.download(z).unwrap());
            println!("{round} dense, output tiles {:?}: {:.4}", product.tile, rate(taken));
        }
        for (variant, kernel, tiles) in &kernels {
            let multiply = |device: &mut Device| {
                device.run(kernel, [x, kept, patterns, z], &[size as u32; 3], *tiles).unwrap();
            };
            device.upload(z, &vec![0; size * size]).unwrap();
            multiply(&mut device);
            assert!(Some(device.download(z).unwrap()) == expected, "{variant:?}");
            println!("{round} {variant:?}: {:.4}", rate(time(&mut device, multiply)));
        }
    }
}

// permuted_mask: in each column, keeps the two largest of every four rows in an order, among the
//      elements that the row-wise mask keeps
// in   w, the bits of f32 [r,q]; tiles [r/4,q/4] of its row-wise mask; order u32 [2r]: a
//      permutation of the rows, then its inverse
// out  tiles [r/4,q/4], two per word, overwritten, never read
// pre  r and q multiples of 4
// acc  integers
// ref  sparse24_core::permute::permuted_mask, bit for bit

struct Constants {
    w_offset: u32,
    w_stride: u32,
    // Number of tiles in a row, and in all.
    columns: u32,
    tiles: u32,
    rows: u32,
}
@group(0) @binding(0) var<uniform> c: Constants;
@group(0) @binding(2) var<storage, read> w: array<u32>;
@group(0) @binding(3) var<storage, read> kept: array<u32>;
@group(0) @binding(4) var<storage, read> order: array<u32>;
@group(0) @binding(5) var<storage, read_write> tiles: array<u32>;

// The bits of an element, or zero if the mask prunes it.
fn masked(row: u32, column: u32) -> u32 {
    let tile = row / 4u * c.columns + column / 4u;
    let bits = tile_bits(kept[tile / 2u], tile);
    let keeps = ((bits >> (row % 4u * 4u + column % 4u)) & 1u) == 1u;
    return select(0u, w[c.w_offset + row * c.w_stride + column], keeps);
}

fn permuted(tile: u32) -> u32 {
    let first_row = tile / c.columns * 4u;
    let first_column = tile % c.columns * 4u;
    var bits = 0u;
    for (var row = 0u; row < 4u; row += 1u) {
        let place = order[c.rows + first_row + row];
        let group = place & ~3u;
        for (var column = 0u; column < 4u; column += 1u) {
            let at = first_column + column;
            let pair = largest_two(vec4<u32>(
                masked(order[group], at),
                masked(order[group + 1u], at),
                masked(order[group + 2u], at),
                masked(order[group + 3u], at),
            ));
            bits |= ((pair >> (place & 3u)) & 1u) << (4u * row + column);
        }
    }
    return bits & tile_bits(kept[tile / 2u], tile);
}

@compute @workgroup_size(64)
fn permuted_mask(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let word = flat(id, groups, 64u);
    if 2u * word < c.tiles {
        var bits = permuted(2u * word);
        if 2u * word + 1u < c.tiles {
            bits |= permuted(2u * word + 1u) << 16u;
        }
        tiles[word] = bits;
    }
}

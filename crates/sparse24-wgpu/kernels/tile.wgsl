// Masks: sixteen bits per 4x4 tile, bit 4 row + column, two tiles per word.

// The sixteen bits of a tile, from the word that holds it and another one.
fn tile_bits(word: u32, tile: u32) -> u32 {
    return (word >> (16u * (tile & 1u))) & 0xffffu;
}

// sparse24_core::tile::transpose.
fn tile_transposed(bits: u32) -> u32 {
    let inner = (bits ^ (bits >> 3u)) & 0x0a0au;
    let swapped = bits ^ inner ^ (inner << 3u);
    let outer = (swapped ^ (swapped >> 6u)) & 0x00ccu;
    return swapped ^ outer ^ (outer << 6u);
}

fn four_bits(x: vec4<bool>) -> u32 {
    return dot(select(vec4<u32>(0u), vec4<u32>(1u, 2u, 4u, 8u), x), vec4<u32>(1u));
}

// sparse24_core::prune::largest_two, as the bits of the kept elements. A later element beats an
// earlier one only if it is larger.
fn largest_two(group: vec4<u32>) -> u32 {
    // A NaN counts as infinite.
    let m = min(group & vec4<u32>(0x7fffffffu), vec4<u32>(0x7f800000u));
    // An element is kept if fewer than two of the others beat it.
    let a = four_bits(vec4<bool>(false, m.y > m.x, m.z > m.x, m.w > m.x));
    let b = four_bits(vec4<bool>(m.x >= m.y, false, m.z > m.y, m.w > m.y));
    let c = four_bits(vec4<bool>(m.x >= m.z, m.y >= m.z, false, m.w > m.z));
    let d = four_bits(vec4<bool>(m.x >= m.w, m.y >= m.w, m.z >= m.w, false));
    return four_bits(countOneBits(vec4<u32>(a, b, c, d)) < vec4<u32>(2u));
}

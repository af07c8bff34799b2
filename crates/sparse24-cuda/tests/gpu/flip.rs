//! flip_count beyond 32 bits. The conformance suite counts smaller masks.

use ndarray::{ArrayViewMut1, Zip};
use sparse24_core::{Mask, flip};
use sparse24_cuda::flip::flip_count;

use crate::support::{Poisoned, on_gpu, split_mix};

/// More than 2^30 random tiles, added up in rounds that are not a multiple of what a thread takes
/// at once.
#[test]
#[ignore = "4 GiB pass through the host: `run.sh long`"]
fn a_billion_random_tiles() {
    const TILES: usize = (1 << 24) + 3;
    on_gpu(|device| {
        let mut masks = [(); 2].map(|()| Mask::empty(4, 4 * TILES).expect("tiled"));
        let tiles = [(); 2].map(|()| Poisoned::<u16>::new(device, [1, TILES]).matrix);
        let count = Poisoned::<u64>::new(device, [1, 1]);
        device.upload(count.matrix, &[0]).expect("uploaded");
        let mut expected = 0;
        for round in 0..64 {
            for (of, (mask, tiles)) in masks.iter_mut().zip(tiles).enumerate() {
                let first = ((2 * round + of) * TILES) as u64;
                Zip::indexed(ArrayViewMut1::from(mask.tiles_mut()))
                    .par_for_each(|at, tile| *tile = split_mix(first + at as u64) as u16);
                device.upload(tiles, mask.tiles()).expect("uploaded");
            }
            flip_count(device, tiles[0], tiles[1], count.matrix).expect("queued");
            expected += flip::flip_count(&masks[0], &masks[1]).expect("equal shapes");
            assert_eq!(count.read(device), [expected], "round {round}");
        }
    });
}

//! flip_count.

use sparse24_core::{MaskKind, flip, search::mask_search};
use sparse24_cuda::flip::flip_count;

use crate::support::{affordable, gaussian, on_gpu};

#[test]
fn differing_elements_are_counted_exactly() {
    on_gpu(|device| {
        for shape in [[4, 4], [4, 36], [64, 64], [1024, 1600], [3072, 768]].into_iter().filter(|[r, q]| affordable(r * q)) {
            let masks = [1, 2].map(|seed| mask_search(gaussian::<f32>(shape, seed).view(), MaskKind::Transposable).expect("tiled"));
            let tiles = masks.each_ref().map(|mask| {
                let on_device = device.alloc::<u16>("mask", [shape[0] / 4, shape[1] / 4]).expect("memory");
                device.upload(on_device, mask.tiles()).expect("uploaded");
                on_device
            });
            let count = device.alloc::<u64>("count", [1, 1]).expect("memory");
            let expected = flip::flip_count(&masks[0], &masks[1]).expect("equal shapes");
            for times in 1..=2 {
                flip_count(device, tiles[0], tiles[1], count).expect("queued");
                assert_eq!(device.download(count).expect("read"), [times * expected as u64], "{shape:?}, call {times}");
            }
        }
    });
}

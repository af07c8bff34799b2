//! Running out of memory, and uploads.

use sparse24_cuda::{Device, Error, Settings};

use crate::support::on_gpu;

const MIB: usize = 1 << 20;

#[test]
fn out_of_memory_lists_the_holders() {
    on_gpu(|device| {
        // Like another process.
        let mut other = Device::open(&Settings::default()).expect("a second one");
        other.alloc_undefined::<u8>("elsewhere", [512, MIB]).expect("memory");
        device.set_purpose("weights");
        device.alloc_undefined::<f32>("w", [16, MIB]).expect("memory");
        device.set_purpose("activations");
        device.alloc_undefined::<f32>("z", [8, MIB]).expect("memory");
        let before = device.held();
        assert!(
            before.contains(&("weights", 64 * MIB)) && before.contains(&("activations", 32 * MIB)),
            "{before:?}"
        );
        for (shape, wanted) in [([1 << 20, MIB], Some(4 << 40)), ([1 << 40, 1 << 40], None)] {
            let error = device.alloc_undefined::<f32>("h.3.z", shape).expect_err("too much");
            let Error::OutOfMemory { name, purpose, asked, free, total, held } = &error else {
                panic!("{error}")
            };
            assert_eq!(
                (name.as_str(), *purpose, *asked, held),
                ("h.3.z", "activations", wanted, &before)
            );
            let known: usize = held.iter().map(|(_, bytes)| bytes).sum();
            assert!(*free > 0 && free + known + 512 * MIB <= *total, "{error}");
        }
        assert_eq!(device.held(), before);
        device.alloc::<f32>("z", [8, MIB]).expect("there is memory left");
    });
}

/// Uploads that reuse the pinned memory, make it grow, or go past it, each changed on the host as
/// soon as it is queued.
#[test]
fn queued_uploads_keep_their_values() {
    on_gpu(|device| {
        let sizes = [1, 100, MIB, 7, 3 * MIB, MIB, 0, 33 * MIB, 5].repeat(3);
        let matrices: Vec<_> = sizes
            .iter()
            .map(|&n| device.alloc::<u32>("uploaded", [1, n]).expect("memory"))
            .collect();
        let mut values = vec![0; 33 * MIB];
        for (i, (&n, &matrix)) in sizes.iter().zip(&matrices).enumerate() {
            values[..n].iter_mut().enumerate().for_each(|(j, x)| *x = (i * n + j) as u32);
            device.upload(matrix, &values[..n]).expect("queued");
        }
        for (i, (&n, &matrix)) in sizes.iter().zip(&matrices).enumerate() {
            let found = device.download(matrix).expect("values");
            assert!(found.iter().enumerate().all(|(j, &x)| x == (i * n + j) as u32), "upload {i}");
        }
    });
}

//! Transfers between two GPUs, as two threads.

use std::{thread, time::Instant};

use sparse24_cuda::{
    Device, Matrix, Settings,
    nccl::{self, Communicator, UniqueId},
};

use crate::support::{affordable, on_gpu};

const ELEMENTS: usize = 1 << 26;
const TIMES: usize = 10;

fn opened(ordinal: usize) -> Result<Device, sparse24_cuda::Error> {
    Device::open(&Settings { ordinal, ..Settings::default() })
}

fn values(rank: usize) -> Vec<f32> {
    (0..ELEMENTS).map(|at| (2 * (at % 4093) + rank) as f32).collect()
}

#[test]
fn matrices_arrive_in_the_order_in_which_they_are_sent() {
    on_gpu(|_| {
        if let Some(problem) = nccl::release().err().or_else(|| opened(1).err()) {
            return println!("skipped: {problem}");
        }
        if !affordable(ELEMENTS) {
            return;
        }
        let id = UniqueId::new().expect("NCCL is loaded");
        let rank = |rank: usize| {
            let mut device = opened(rank).expect("it opened before");
            let mut gpus = Communicator::new(&device, id, rank, 2).expect("both are there");
            let [own, received] =
                ["own", "received"].map(|name| device.alloc(name, [1, ELEMENTS]).expect("room"));
            device.upload(own, &values(rank)).expect("its shape");
            let pieces = |whole: Matrix<f32>| {
                [0..1001, 1001..ELEMENTS].map(|columns| (1 - rank, whole.columns(columns)))
            };
            let (sent, arriving) = (pieces(own), pieces(received));
            gpus.exchange(&mut device, &sent, &arriving).expect("queued");
            gpus.wait(&device).expect("no transfer failed");
            assert!(device.download(received).expect("copied") == values(1 - rank));
            let started = Instant::now();
            for _ in 0..TIMES {
                gpus.exchange(&mut device, &sent, &arriving).expect("queued");
            }
            gpus.wait(&device).expect("no transfer failed");
            let bytes = (TIMES * ELEMENTS * size_of::<f32>()) as f64;
            let speed = bytes / started.elapsed().as_secs_f64() / 1e9;
            println!("rank {rank} sends and receives {speed:.0} GB/s");
        };
        thread::scope(|scope| {
            for number in 0..2 {
                scope.spawn(move || rank(number));
            }
        });
    });
}

//! Waiting for copies to the host without blocking a thread that the copies need.

use std::{
    future::poll_fn,
    sync::{Arc, Mutex},
    task::{Poll, Waker},
};

use super::queue::waited;

/// Waits for the copies that a device has started.
///
/// A browser delivers copies only while no code of the page runs, so a page must await
/// [`Self::all`] before it reads one.
#[derive(Clone)]
pub struct Arrivals {
    device: wgpu::Device,
    queue: wgpu::Queue,
}

impl Arrivals {
    pub(super) fn new(device: &wgpu::Device, queue: &wgpu::Queue) -> Self {
        Self { device: device.clone(), queue: queue.clone() }
    }

    /// Resolves once the work submitted so far is done and its copies have arrived. Outside of
    /// browsers, it blocks until then.
    pub async fn all(&self) {
        let state = Arc::new(Mutex::new((false, None::<Waker>)));
        let done = Arc::clone(&state);
        // A browser resolves the earlier mappings first.
        self.queue.on_submitted_work_done(move || {
            let mut state = done.lock().expect("no holder panics");
            state.0 = true;
            if let Some(waker) = state.1.take() {
                waker.wake();
            }
        });
        // In a browser this does nothing. After a failure, which the read that follows reports, the
        // callback may never be called.
        if waited(|| self.device.poll(wgpu::PollType::wait_indefinitely())).is_err() {
            return;
        }
        poll_fn(|context| {
            let mut state = state.lock().expect("no holder panics");
            state.1 = Some(context.waker().clone());
            if state.0 { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

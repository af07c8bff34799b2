//! The exchange of gradients between GPUs through NCCL.
//!
//! All is queued: a group of transfers carries the sums of one bucket and the values of the next,
//! and the sums are added by the kernel of [`Add`](crate::backend::op::Add).

use sparse24_cuda::{
    Device, Matrix,
    add::add,
    nccl::{self, Communicator, UniqueId},
};

use super::{CudaBackend, buffers::Buffers};
use crate::{
    Error,
    backend::{
        Exchange, Region, Tensor,
        reduce::{BUCKET, LINE, additions, cut, length, parts},
    },
    group::{Group, misfit},
};

/// The GPUs of all ranks.
pub(super) struct Connection {
    communicator: Communicator,
    rank: usize,
    world: usize,
    /// The values of the other ranks for this rank's part of a bucket, one row each.
    received: Matrix<f32>,
}

/// `[rows, columns]` of [`Connection::received`].
pub(super) fn received_shape(gradients: &[Tensor], world: usize) -> [usize; 2] {
    let bucket = length(gradients).min(BUCKET);
    [world - 1, bucket.div_ceil(world).next_multiple_of(LINE)]
}

impl CudaBackend {
    /// See [`Backend::connect`](crate::backend::Backend::connect).
    pub(super) fn connect_gpus(
        &mut self,
        gradients: &[Tensor],
        group: &mut dyn Group,
    ) -> Result<String, Error> {
        let (rank, world) = (group.rank(), group.world());
        let release = match self.exchange {
            Exchange::Tcp => Err("backend.exchange is \"tcp\"".to_owned()),
            Exchange::Auto | Exchange::Nccl => agreed(&self.gpu, group)?,
        };
        let release = match release {
            Ok(release) => release,
            Err(problem) if self.exchange == Exchange::Nccl => {
                return Err(Error::Setting { key: "backend.exchange".to_owned(), problem });
            }
            Err(reason) => return Ok(format!("gradients are exchanged by TCP: {reason}")),
        };
        let id = if rank == 0 { UniqueId::new().map(|UniqueId(id)| id.to_vec()) } else { Ok(vec![]) };
        let id = group.broadcast(&id?)?;
        let id = UniqueId(id.try_into().map_err(|_| misfit("bytes of an id"))?);
        self.gpu.set_purpose(Region::Scratch.name());
        let received =
            self.gpu.alloc_undefined("received gradients", received_shape(gradients, world))?;
        let communicator = Communicator::new(&self.gpu, id, rank, world)?;
        self.connection = Some(Connection { communicator, rank, world, received });
        Ok(format!("gradients are exchanged by NCCL {release}"))
    }
}

/// The release of NCCL that all ranks have, or why they cannot use it, the same on each.
fn agreed(gpu: &Device, group: &mut dyn Group) -> Result<Result<String, String>, Error> {
    // The release and the GPU, or the reason, of each rank.
    let own = match nccl::release() {
        Ok((_, release)) => [release, format!("{:?}", gpu.uuid()?)],
        Err(error) => [String::new(), error.to_string()],
    };
    let all = group.all_gather(own.join("\n").as_bytes())?;
    let all: Vec<_> = all.iter().map(|text| String::from_utf8_lossy(text)).collect();
    let split = |text| str::split_once(text, '\n').ok_or_else(|| misfit("releases of NCCL"));
    let all: Vec<_> = all.iter().map(|text| split(text)).collect::<Result<_, _>>()?;
    let (first, _) = all[0];
    for (rank, (release, gpu)) in all.iter().enumerate() {
        if release.is_empty() {
            return Ok(Err(format!("on rank {rank}, {gpu}")));
        }
        if *release != first {
            return Ok(Err(format!("rank 0 has NCCL {first}, rank {rank} has {release}")));
        }
        if let Some(other) = all[..rank].iter().position(|(_, other)| other == gpu) {
            return Ok(Err(format!("ranks {other} and {rank} share a GPU")));
        }
    }
    Ok(Ok(first.to_owned()))
}

impl Connection {
    /// Queues [`Backend::reduce`](crate::backend::Backend::reduce).
    pub(super) fn reduce(
        &mut self,
        gpu: &mut Device,
        buffers: &Buffers,
        gradients: &[Tensor],
    ) -> Result<(), Error> {
        let &mut Self { rank: own, world, received, .. } = self;
        let buckets = cut(gradients, BUCKET);
        let parts: Vec<Vec<Vec<Matrix<f32>>>> = buckets
            .iter()
            .map(|bucket| {
                let floats = |part: &Vec<Tensor>| part.iter().map(|&t| buffers.floats(t)).collect();
                parts(bucket, world).iter().map(floats).collect()
            })
            .collect();
        let others: Vec<_> = (0..world).filter(|&rank| rank != own).collect();
        // The matrices of this rank's part in the row of another rank.
        let row = |part: &[Matrix<f32>], row| {
            let mut start = 0;
            let place = |matrix: &Matrix<f32>| {
                let end = start + matrix.elements();
                let place = received.rows(row..row + 1).columns(start..end);
                start = end.next_multiple_of(LINE);
                place
            };
            part.iter().map(place).collect::<Vec<_>>()
        };
        for at in 0..=parts.len() {
            let (mut sent, mut arriving) = (Vec::new(), Vec::new());
            if let Some(summed) = at.checked_sub(1).map(|before| &parts[before]) {
                for &rank in &others {
                    sent.extend(summed[own].iter().map(|&matrix| (rank, matrix)));
                    arriving.extend(summed[rank].iter().map(|&matrix| (rank, matrix)));
                }
            }
            let next = parts.get(at);
            if let Some(next) = next {
                for (at, &rank) in others.iter().enumerate() {
                    sent.extend(next[rank].iter().map(|&matrix| (rank, matrix)));
                    arriving.extend(row(&next[own], at).into_iter().map(|matrix| (rank, matrix)));
                }
            }
            self.communicator.exchange(gpu, &sent, &arriving)?;
            let Some(next) = next else { break };
            let mut pieces: Vec<_> = (0..others.len()).map(|at| row(&next[own], at)).collect();
            pieces.insert(own, next[own].clone());
            for [into, from] in additions(world, own) {
                for (&sum, &piece) in pieces[into].iter().zip(&pieces[from]) {
                    add(gpu, sum, piece, sum)?;
                }
            }
        }
        Ok(())
    }

    /// Waits for all queued work, unless a transfer fails.
    pub(super) fn wait(&mut self, gpu: &Device) -> Result<(), Error> {
        Ok(self.communicator.wait(gpu)?)
    }
}

//! Two ranks on two GPUs, as threads: whichever way gradients travel, they have the bits of one.

use std::{num::NonZeroU32, thread};

use sparse24_run::data::TokenizerKind;
use sparse24_train::{
    Error,
    backend::{BackendSettings, Exchange, cuda::CudaBackend},
    group::{Group, Threads},
    trainer::{Recipe, Trainer},
};

use crate::{
    plans::{finish, recipe},
    support::{embedded, on_gpu, trainer},
};

#[test]
fn two_gpus_have_the_bits_of_one() {
    on_gpu(|gpu| {
        if let Err(error) = CudaBackend::open(BackendSettings { gpu: 1, ..Default::default() }) {
            return println!("skipped: {error}");
        }
        let dataset = embedded(TokenizerKind::Byte);
        let replicas = NonZeroU32::new(2).expect("not zero");
        let recipe = Recipe { replicas, ..recipe(&dataset) };
        let mut alone = trainer(gpu, &recipe);
        let expected = finish(&mut alone, &dataset);
        let plans = alone.backend().plans();
        for exchange in [Exchange::Tcp, Exchange::Nccl] {
            let train = |group: Threads| -> Result<_, Error> {
                let settings =
                    BackendSettings { gpu: group.rank(), exchange, ..Default::default() };
                let backend = Box::new(CudaBackend::open(settings)?);
                let mut trainer = Trainer::in_group(backend, recipe.clone(), Box::new(group))?;
                trainer.use_plans(&plans)?;
                println!("{}", trainer.connect()?.expect("a GPU has a choice"));
                Ok(finish(&mut trainer, &dataset))
            };
            let results: Vec<_> = thread::scope(|scope| {
                let ranks = Threads::group(2).into_iter().map(|group| scope.spawn(|| train(group)));
                let ranks: Vec<_> = ranks.collect();
                ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
            });
            for result in results {
                match result {
                    Ok(result) => assert!(result == expected, "{exchange:?}"),
                    Err(Error::Setting { problem, .. }) => println!("skipped: {problem}"),
                    Err(error) => panic!("{error}"),
                }
            }
        }
    });
}

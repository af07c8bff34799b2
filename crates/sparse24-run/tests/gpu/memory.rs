//! Memory that does not suffice: because too much is asked for, or because another process holds
//! it. An error, and the GPU goes on.

use std::{
    env,
    io::{BufRead, BufReader, Lines, Read, stdin},
    num::NonZeroU32,
    process::{Child, ChildStdout, Command, Stdio},
};

use sparse24_run::{config::preset, data::TokenizerKind};
use sparse24_train::{
    Error,
    backend::{BACKENDS, Backend, BackendSettings, DType, Region, cuda::CudaBackend},
    estimate::estimate,
    method::Method,
    model::{EncoderSpec, Gpt2Spec, ModelSpec, Sparsify},
    nn::BatchShape,
    objective::{Batch, DataError, Objective},
    trainer::{FlipSampling, Trainer},
};

use crate::support::{drawn, embedded, gpt2, on_gpu};

const MIB: usize = 1 << 20;

/// The sentence of a device that refuses.
fn sentence<T>(result: Result<T, Error>) -> String {
    match result {
        Err(Error::Device(sentence)) if !sentence.contains('\n') => sentence,
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("there was room"),
    }
}

fn hold(backend: &mut dyn Backend, mib: usize) -> Result<(), Error> {
    backend.alloc("held", [mib, MIB / 4], DType::F32, Region::Activations).map(|_| ())
}

/// Another process that holds all memory of the GPU but less than these MiB, until it is dropped.
struct Holder {
    process: Child,
    _output: Lines<BufReader<ChildStdout>>,
}

impl Holder {
    fn leaving(mib: usize) -> Self {
        let mut command = Command::new(env::current_exe().expect("this test"));
        command
            .args(["--ignored", "--exact", "memory::holder", "--nocapture"])
            .env("SPARSE24_LEAVE_MIB", mib.to_string());
        let mut process =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("started");
        let mut output = BufReader::new(process.stdout.take().expect("piped")).lines();
        assert!(
            output.any(|line| line.expect("text").contains("holding")),
            "the other process could not hold the memory"
        );
        Self { process, _output: output }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // It ends with its input.
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

#[test]
fn a_model_beyond_the_memory_is_one_sentence_and_the_next_one_trains() {
    on_gpu(|mut gpu| {
        let text = sentence(hold(&mut *gpu, 4 << 20));
        assert!(text.contains("held needs 4194304 MiB of GPU memory"), "{text}");
        let dataset = embedded(TokenizerKind::Byte);
        let mut recipe = preset::find("quickstart")
            .expect("a preset")
            .recipe(dataset.vocabulary() as usize)
            .expect("possible");
        let layers = std::mem::replace(&mut gpt2(&mut recipe).layers, 1 << 12);
        recipe.batch.size = 1 << 15;
        let text = sentence(Trainer::new(gpu, recipe.clone()));
        assert!(text.contains("MiB of GPU memory"), "{text}");
        println!("{text}");

        gpt2(&mut recipe).layers = layers;
        recipe.batch.size = 12;
        let gpu = CudaBackend::open(BackendSettings::default()).expect("it opened before");
        let mut trainer = Trainer::new(Box::new(gpu), recipe.clone()).expect("room");
        let batches = drawn(&dataset, &recipe);
        assert!(
            trainer.train_step(&batches, FlipSampling::Sample).expect("finite").loss.is_finite()
        );
    });
}

/// Random tokens.
struct Noise(BatchShape);

impl Objective for Noise {
    fn fill(&self, step: u32, _: u32, batch: &mut Batch) -> Result<(), DataError> {
        batch.clear();
        let length = self.0.sequence_length;
        let windows: Vec<u32> = (0..self.0.size as u32 * (length as u32 + 1))
            .map(|i| (i * 97 + step) % 50_000)
            .collect();
        batch.set_next_tokens(&windows, length);
        batch.lengths.resize(self.0.size, length as u32);
        Ok(())
    }
}

#[test]
fn an_estimate_is_within_a_hundredth_of_the_memory_held() {
    let preset = preset::find("gpt2-124m").expect("a preset");
    for (method, encoder) in [("dense", false), ("fst", false), ("fst", true)] {
        on_gpu(|gpu| {
            let mut recipe = preset.recipe(50_257).expect("possible");
            recipe.method = Method::preset(method, 6e-5).expect("a method");
            recipe.batch.size = 4;
            recipe.gradient_accumulation_steps = NonZeroU32::MIN;
            if encoder {
                let &mut Gpt2Spec { layers, heads, d_model, d_ff, activation, .. } =
                    gpt2(&mut recipe);
                let (sequence_length, vocabulary, sparsify) = (1024, 50_257, Sparsify::Ffn);
                recipe.model = ModelSpec::Encoder(EncoderSpec {
                    layers,
                    heads,
                    d_model,
                    d_ff,
                    sequence_length,
                    vocabulary,
                    activation,
                    sparsify,
                    smoothing: 0.0,
                });
            }
            let cuda = BACKENDS.iter().find(|entry| entry.name == "cuda").expect("this backend");
            let estimated = estimate(&recipe, cuda).expect("possible").device_bytes();
            let noise = Noise(recipe.batch);
            let mut trainer = Trainer::new(gpu, recipe).expect("room");
            trainer.train_step(&noise, FlipSampling::Skip).expect("finite");
            let held: usize = trainer.backend().memory().iter().map(|(_, bytes)| bytes).sum();
            println!("{method}, encoder {encoder}: {held} held, {estimated} estimated");
            assert!((held as u64).abs_diff(estimated) * 100 <= estimated);
        });
    }
}

#[test]
#[ignore = "takes all memory of the GPU"]
fn memory_that_another_process_holds_is_one_sentence() {
    on_gpu(|mut gpu| {
        let holder = Holder::leaving(512);
        let text = sentence(hold(&mut *gpu, 1024));
        assert!(text.contains("held needs 1024 MiB of GPU memory"), "{text}");
        println!("{text}");
        drop(holder);
        hold(&mut *gpu, 1024).expect("the other process has ended");
        drop(gpu);
        let _holder = Holder::leaving(1);
        let text = sentence(CudaBackend::open(BackendSettings::default()));
        assert!(
            text.contains("wait for the other process") && text.contains("choose another GPU"),
            "{text}"
        );
    });
}

/// The other process of the test above.
#[test]
#[ignore = "only as the other process of a test"]
fn holder() {
    let Some(leave) = env::var("SPARSE24_LEAVE_MIB").ok().and_then(|mib| mib.parse().ok()) else {
        return;
    };
    let mut gpu = CudaBackend::open(BackendSettings::default()).expect("a GPU");
    let mut piece = 1 << 14;
    while piece >= leave {
        if hold(&mut gpu, piece).is_err() {
            piece /= 2;
        }
    }
    println!("\nholding");
    let _ = stdin().read(&mut [0]);
}

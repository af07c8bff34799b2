//! Named configurations, each with its source.

use std::num::NonZeroU32;

use super::{
    BackendConfig, BatchConfig, Config, DataConfig, MethodConfig, ModelConfig, ModelKind,
    OnNonFinite, OptimizerConfig, OptimizerName, RunConfig, TaskConfig, unknown,
};
use crate::{Error, data::TokenizerKind, images::Augmentation};
use sparse24_core::op::Activation;
use sparse24_train::{
    backend::{Arithmetic, Exchange},
    method,
    model::{ActivationCheckpointing, Sparsify},
    nn::NoWeightDecay,
    schedule::Decay,
};

mod transformer;

/// A row of the table of presets.
#[derive(Debug, Clone, Copy)]
pub struct Preset {
    /// Word of `--preset`.
    pub name: &'static str,
    /// The model and the purpose, in one line.
    pub summary: &'static str,
    /// Source of the numbers.
    pub source: &'static str,
    /// The corpus that it needs.
    pub corpus: Corpus,
    build: fn() -> Config,
}

/// The corpus that a preset needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Corpus {
    /// A text of any size; the embedded one by default.
    Any,
    /// A large corpus, which must be named.
    Named,
}

impl Preset {
    /// Builds the configuration.
    #[must_use]
    pub fn config(&self) -> Config {
        Config { preset: self.name.to_owned(), ..(self.build)() }
    }
}

/// The preset if none is named.
pub const DEFAULT: &str = "quickstart";

/// `preset` in the configuration of an imported model.
pub const IMPORTED: &str = "imported";

/// A source in nanoGPT, with our differences.
macro_rules! nanogpt {
    ($source:literal, $lambda:literal) => {
        concat!(
            $source,
            "; but GELU is its tanh form, and fst is the default, with lambda ",
            $lambda
        )
    };
}

const GPT2: &str = "the authors' code, thu-ml/2by4-pretrain-acc-examples (README, \
    config/train_gpt2.py): AdamW 1.5e-4 to 1e-5, 512 x 1024 tokens a step, 300k steps; lambda from \
    table 2 of Hu et al. 2024, arXiv 2404.01847; but the vocabulary is 50257, where that code \
    has 50304";

const DEIT: &str = "Touvron et al. 2021, arXiv 2012.12877, table 9: AdamW 1e-3 to 1e-5, weight \
    decay 0.05, 300 epochs of ImageNet (1,281,167 images) in batches of 1024, 5 of them warm-up; \
    lambda of deit-tiny from table 2 of Hu et al. 2024, arXiv 2404.01847, which has none for \
    deit-small; but the learning rate changes with every step instead of every epoch, and \
    optimizer.ema_decay, 0.99996 there, is 0";

/// All presets.
pub const PRESETS: [Preset; 17] = [
    Preset {
        name: "quickstart",
        summary: "a small GPT-2 on the embedded corpus, in a minute or two on a CPU",
        source: "sparse24: shakespeare-char-cpu, but on bytes, with 1500 steps instead of 2000 and \
            150 of warm-up instead of 100; lambda from lambda-search",
        corpus: Corpus::Any,
        build: quickstart,
    },
    Preset {
        name: "shakespeare-char-cpu",
        summary: "4 layers, d_model 128, sequence length 64: a character-level GPT-2 for CPUs",
        source: nanogpt!(
            "nanoGPT, README, \"I only have a macbook\": train_shakespeare_char.py with smaller \
                settings",
            "6e-3, from lambda-search on nanoGPT's text"
        ),
        corpus: Corpus::Any,
        build: shakespeare_char_cpu,
    },
    Preset {
        name: "shakespeare-char",
        summary: "6 layers, d_model 384, sequence length 256: a character-level GPT-2",
        source: nanogpt!(
            "nanoGPT, config/train_shakespeare_char.py",
            "6e-5, the paper's, not searched"
        ),
        corpus: Corpus::Any,
        build: shakespeare_char,
    },
    Preset {
        name: "bert-tiny-cpu",
        summary: "a small BERT on the embedded corpus, in a minute or two on a CPU",
        source: "Devlin et al. 2018, arXiv 1810.04805, with the width and heads of BERT-tiny (Turc \
            et al. 2019, arXiv 1908.08962); but 4 layers, sequences of 32 bytes, and the optimizer \
            of quickstart; lambda 2e-4, from lambda-search",
        corpus: Corpus::Any,
        build: bert_tiny_cpu,
    },
    Preset {
        name: "deit-cifar-cpu",
        summary: "a small DeiT for images of 32x32 pixels, in two minutes on a CPU",
        source: "Touvron et al. 2021, arXiv 2012.12877, with patches of 4x4, 4 layers and d_model \
            96 for CIFAR-10; but steps and batches for two minutes on two cores, without mixing, \
            RandAugment, erasing and repeats, which so short a run does not need; lambda 6e-3, \
            from lambda-search",
        corpus: Corpus::Named,
        build: deit_cifar_cpu,
    },
    Preset {
        name: "transformer-multi30k-cpu",
        summary: "2 + 2 layers, d_model 128: a Transformer for Multi30k, in seven minutes on a CPU",
        source: "sparse24: transformer-multi30k, but 2 + 2 layers, dropout 0.1, 2048 tokens a \
            batch, a vocabulary of 4000, and Adam 3e-3 after 500 steps of warm-up, for about 12 \
            epochs; lambda 2e-4, from lambda-search",
        corpus: Corpus::Named,
        build: || transformer::multi30k_cpu(shakespeare_char_cpu()),
    },
    Preset {
        name: "bert-base",
        summary: "BERT-base: 12 layers, d_model 768, sequence length 512",
        source: "Devlin et al. 2018, arXiv 1810.04805, and google-research/bert (optimization.py): \
            AdamW 1e-4, linear to 0, 256 x 512 tokens a step, 1M steps; but Adam's moments are \
            corrected for their bias, all steps have 512 tokens a sequence, there are no pairs of \
            sentences, WordPiece has up to 32768 pieces, trained on the corpus, not Google's \
            30522, and fst is the default, with the lambda of bert-crammed",
        corpus: Corpus::Named,
        build: bert_base,
    },
    Preset {
        name: "bert-crammed",
        summary: "crammed BERT: 16 layers, d_model 768, sequence length 128, lambda 6e-6",
        source: "the authors' code, thu-ml/2by4-pretrain-acc-examples, after Geiping and Goldstein \
            2022, arXiv 2212.14034: AdamW 1e-3, triangular schedule, 300k micro-batches of 128 x \
            128 tokens, 1 to 32 of them a step, the last 50k dense; norms are decayed as there, \
            where the list of exceptions misses their names; lambda from table 2 of Hu et al. \
            2024, arXiv 2404.01847; but WordPiece keeps characters beyond ASCII, and a batch is \
            windows from random places of the corpus, not sequences sorted by their sentences",
        corpus: Corpus::Named,
        build: bert_crammed,
    },
    Preset {
        name: "deit-tiny",
        summary: "DeiT-Ti: 12 layers, d_model 192, images of 224x224 pixels, lambda 2e-3",
        source: DEIT,
        corpus: Corpus::Named,
        build: || deit(192, 3, 2e-3),
    },
    Preset {
        name: "deit-small",
        summary: "DeiT-S: 12 layers, d_model 384, images of 224x224 pixels, lambda 2e-3",
        source: DEIT,
        corpus: Corpus::Named,
        build: || deit(384, 6, 2e-3),
    },
    Preset {
        name: "deit-base",
        summary: "DeiT-B: 12 layers, d_model 768, images of 224x224 pixels, lambda 1e-3",
        source: "the authors' code, thu-ml/2by4-pretrain-acc-examples: Lion 2e-4 to 1e-6, weight \
            decay 0.5, 300 epochs of ImageNet (1,281,167 images) in batches of 2048, masks every \
            10 steps, no clipping; regularization of Touvron et al. 2021, arXiv 2012.12877; \
            lambda of its table; but the learning rate changes with every step instead of every \
            epoch, and optimizer.ema_decay, which the code sets to 0.99996 and never evaluates, is \
            0",
        corpus: Corpus::Named,
        build: deit_base,
    },
    Preset {
        name: "transformer-multi30k",
        summary: "4 + 4 layers, d_model 128: a Transformer for small translation corpora",
        source: "Wu et al. 2021, \"Good for misconceived reasons\", arXiv 2105.14462 \
            (Transformer-Tiny on Multi30k): d_ff 256, dropout 0.3, label smoothing 0.1, 4096 \
            tokens a batch, 10,000 merges, Adam 5e-3 after 2000 steps of warm-up from 1e-7; but \
            bytes are merged, and fst is the default, with lambda 6e-4, from lambda-search",
        corpus: Corpus::Named,
        build: || transformer::multi30k(shakespeare_char_cpu()),
    },
    Preset {
        name: "transformer-base",
        summary: "Transformer-base: 6 + 6 layers, d_model 512, lambda 1e-6",
        source: "fairseq (transformer_wmt_en_de in examples/translation_moe): Adam 7e-4, inverse \
            square root after 4000 steps of warm-up from 1e-7, dropout 0.1, 100k steps; label \
            smoothing 0.1 and about 25k tokens a step from Vaswani et al. 2017, arXiv 1706.03762; \
            lambda from table 2 of Hu et al. 2024, arXiv 2404.01847; but padding counts as tokens",
        corpus: Corpus::Named,
        build: || transformer::base(shakespeare_char_cpu()),
    },
    gpt2_preset("gpt2-124m", "GPT-2 124M, lambda 6e-5", || gpt2(12, 12, 768, 6e-5)),
    gpt2_preset("gpt2-350m", "GPT-2 350M, lambda 2e-4", || gpt2(24, 16, 1024, 2e-4)),
    gpt2_preset("gpt2-774m", "GPT-2 774M, lambda 2e-4", || gpt2(36, 20, 1280, 2e-4)),
    gpt2_preset("gpt2-1558m", "GPT-2 1558M, lambda 6e-5", || gpt2(48, 25, 1600, 6e-5)),
];

const fn gpt2_preset(name: &'static str, summary: &'static str, build: fn() -> Config) -> Preset {
    Preset { name, summary, source: GPT2, corpus: Corpus::Named, build }
}

/// The configuration of a preset.
///
/// # Errors
/// [`Error::Setting`] for an unknown name, with the known ones.
pub fn find(name: &str) -> Result<Config, Error> {
    match PRESETS.iter().find(|preset| preset.name == name) {
        Some(preset) => Ok(preset.config()),
        None => Err(unknown("preset", name, PRESETS.iter().map(|preset| preset.name))),
    }
}

/// The preset called `name`, or [`imported`].
///
/// # Errors
/// Same as [`find`].
pub(super) fn named(name: &str) -> Result<Config, Error> {
    if name == IMPORTED { Ok(imported()) } else { find(name) }
}

/// The configuration under the shape of an imported model: GPT-2 124M, dense, batch size 1.
#[must_use]
pub fn imported() -> Config {
    let base = gpt2(12, 12, 768, 6e-5);
    Config {
        preset: IMPORTED.to_owned(),
        method: MethodConfig::of("dense", base.method.lambda),
        batch: BatchConfig { size: 1, ..base.batch },
        ..base
    }
}

/// The factor of masked decay where none is set: the preset's for the preset's method, otherwise
/// [the method's](method::Preset::lambda).
pub(super) fn own_lambda(Config { preset, method: found, .. }: &Config) -> Option<f32> {
    let of_preset = named(preset).ok().map(|config| config.method);
    let of_preset = of_preset.filter(|own| own.name == found.name).map(|own| own.lambda);
    of_preset.or_else(|| Some(method::PRESETS.iter().find(|row| row.name == found.name)?.lambda))
}

/// The corpus that a preset needs; any text for an unknown one.
pub(super) fn corpus(name: &str) -> Corpus {
    let preset = PRESETS.iter().find(|preset| preset.name == name);
    preset
        .map_or(if name == IMPORTED { Corpus::Named } else { Corpus::Any }, |preset| preset.corpus)
}

fn quickstart() -> Config {
    let base = shakespeare_char_cpu();
    Config {
        steps: 1500,
        optimizer: OptimizerConfig { warmup_steps: 150, ..base.optimizer },
        data: DataConfig { tokenizer: TokenizerKind::Byte, ..base.data },
        run: RunConfig { flip_every: 10, ..base.run },
        ..base
    }
}

fn bert_tiny_cpu() -> Config {
    let base = quickstart();
    Config {
        steps: 3000,
        model: ModelConfig {
            kind: ModelKind::Bert,
            heads: 2,
            sequence_length: 32,
            activation: Activation::GeluErf,
            bias: true,
            ..base.model
        },
        method: MethodConfig::of("fst", 2e-4),
        batch: BatchConfig { size: 32, ..base.batch },
        optimizer: OptimizerConfig { warmup_steps: 300, ..base.optimizer },
        ..base
    }
}

fn bert_base() -> Config {
    let base = gpt2(12, 12, 768, 6e-6);
    Config {
        steps: 1_000_000,
        model: ModelConfig {
            kind: ModelKind::Bert,
            sequence_length: 512,
            bias: true,
            dropout: 0.1,
            ..base.model
        },
        optimizer: OptimizerConfig {
            learning_rate: 1e-4,
            min_learning_rate: 0.0,
            schedule: Decay::Linear,
            warmup_steps: 10_000,
            beta2: 0.999,
            epsilon: 1e-6,
            weight_decay: 0.01,
            ..base.optimizer
        },
        batch: BatchConfig { size: 32, gradient_accumulation_steps: 8, ..base.batch },
        data: DataConfig { tokenizer: TokenizerKind::WordPiece, ..base.data },
        ..base
    }
}

fn bert_crammed() -> Config {
    let base = bert_base();
    Config {
        steps: 38_049,
        model: ModelConfig {
            kind: ModelKind::CrammedBert,
            layers: 16,
            d_ff: 1536,
            sequence_length: 128,
            activation: Activation::Geglu,
            bias: false,
            dropout: 0.0,
            ..base.model
        },
        optimizer: OptimizerConfig {
            learning_rate: 1e-3,
            schedule: Decay::Triangle,
            warmup_steps: 0,
            beta2: 0.98,
            epsilon: 1e-12,
            no_weight_decay: NoWeightDecay::Biases,
            max_grad_norm: 0.5,
            ..base.optimizer
        },
        batch: BatchConfig {
            size: 128,
            gradient_accumulation_steps: 1,
            final_gradient_accumulation_steps: 32,
            ..base.batch
        },
        ..base
    }
}

/// Images of ImageNet to train on.
const IMAGENET: u64 = 1_281_167;

/// Steps of this many epochs of ImageNet in batches of this size.
const fn epochs(epochs: u64, batch: u64) -> u32 {
    (epochs * IMAGENET / batch) as u32
}

fn deit(d_model: usize, heads: usize, lambda: f32) -> Config {
    let base = gpt2(12, heads, d_model, lambda);
    Config {
        steps: epochs(300, 1024),
        model: ModelConfig {
            kind: ModelKind::Deit,
            sequence_length: 14 * 14 + 1,
            image_size: 224,
            patch_size: 16,
            bias: true,
            drop_path: 0.1,
            label_smoothing: 0.1,
            ..base.model
        },
        method: MethodConfig::of("fst", lambda),
        optimizer: OptimizerConfig {
            learning_rate: 1e-3,
            min_learning_rate: 1e-5,
            warmup_learning_rate: 1e-6,
            warmup_steps: epochs(5, 1024),
            beta2: 0.999,
            weight_decay: 0.05,
            no_weight_decay: NoWeightDecay::VectorsAndEmbeddings,
            max_grad_norm: 0.0,
            ..base.optimizer
        },
        batch: BatchConfig { size: 256, gradient_accumulation_steps: 4, ..base.batch },
        data: DataConfig { tokenizer: TokenizerKind::Byte, ..base.data },
        augmentation: Augmentation {
            repeats: 3,
            flip: 0.5,
            rand_augment: 9.0,
            rand_augment_deviation: 0.5,
            random_erasing: 0.25,
            mixup: 0.8,
            cutmix: 1.0,
        },
        run: RunConfig { eval_every: 1251, eval_tokens: 0, checkpoint_every: 1251, ..base.run },
        ..base
    }
}

fn deit_base() -> Config {
    let base = deit(768, 12, 1e-3);
    Config {
        steps: epochs(300, 2048),
        method: MethodConfig { refresh: 10, ..base.method },
        optimizer: OptimizerConfig {
            name: OptimizerName::Lion,
            learning_rate: 2e-4,
            min_learning_rate: 1e-6,
            warmup_learning_rate: 1e-7,
            warmup_steps: epochs(5, 2048),
            beta2: 0.99,
            weight_decay: 0.5,
            ..base.optimizer
        },
        batch: BatchConfig { size: 256, gradient_accumulation_steps: 8, ..base.batch },
        ..base
    }
}

fn deit_cifar_cpu() -> Config {
    let base = deit(96, 3, 6e-3);
    Config {
        steps: 1000,
        model: ModelConfig {
            layers: 4,
            sequence_length: 8 * 8 + 1,
            image_size: 32,
            patch_size: 4,
            drop_path: 0.0,
            ..base.model
        },
        optimizer: OptimizerConfig {
            warmup_learning_rate: 0.0,
            warmup_steps: 100,
            ..base.optimizer
        },
        batch: BatchConfig { size: 32, gradient_accumulation_steps: 1, ..base.batch },
        augmentation: Augmentation { flip: 0.5, ..Augmentation::default() },
        run: RunConfig { eval_every: 500, flip_every: 10, checkpoint_every: 500, ..base.run },
        ..base
    }
}

fn shakespeare_char_cpu() -> Config {
    Config {
        preset: String::new(),
        seed: 1337,
        steps: 2000,
        model: ModelConfig {
            kind: ModelKind::Gpt2,
            layers: 4,
            heads: 4,
            d_model: 128,
            d_ff: 512,
            sequence_length: 64,
            image_size: 0,
            patch_size: 0,
            activation: Activation::Gelu,
            bias: false,
            dropout: 0.0,
            drop_path: 0.0,
            label_smoothing: 0.0,
            sparsify: Sparsify::Ffn,
            activation_checkpointing: ActivationCheckpointing::None,
        },
        method: MethodConfig::of("fst", 6e-3),
        optimizer: OptimizerConfig {
            name: OptimizerName::AdamW,
            learning_rate: 1e-3,
            min_learning_rate: 1e-4,
            schedule: Decay::Cosine,
            warmup_steps: 100,
            warmup_learning_rate: 0.0,
            decay_steps: 0,
            cooldown_steps: 0,
            momentum: 0.9,
            beta1: 0.9,
            beta2: 0.99,
            epsilon: 1e-8,
            weight_decay: 0.1,
            no_weight_decay: NoWeightDecay::Vectors,
            max_grad_norm: 1.0,
            ema_decay: 0.0,
        },
        batch: BatchConfig {
            size: 12,
            gradient_accumulation_steps: 1,
            final_gradient_accumulation_steps: 0,
            replicas: NonZeroU32::MIN,
        },
        data: DataConfig {
            path: String::new(),
            tokenizer: TokenizerKind::Character,
            validation_share: 0.1,
            source: String::new(),
            target: String::new(),
            vocabulary: 0,
        },
        augmentation: Augmentation::default(),
        task: TaskConfig::default(),
        run: RunConfig {
            eval_every: 250,
            eval_tokens: 0,
            flip_every: 20,
            instrument_every: 0,
            checkpoint_every: 500,
            keep_last: 2,
            keep_best: false,
            keep_every: 0,
            on_nonfinite: OnNonFinite::Stop,
            skip_limit: 10,
            spike_z: 0.0,
            spike_window: 100,
            flip_reference: String::new(),
        },
        backend: BackendConfig {
            name: "cpu".to_owned(),
            threads: 0,
            arithmetic: Arithmetic::Native,
            gpu: 0,
            cuda_graphs: true,
            exchange: Exchange::Auto,
        },
    }
}

fn shakespeare_char() -> Config {
    let base = shakespeare_char_cpu();
    Config {
        steps: 5000,
        model: ModelConfig {
            layers: 6,
            heads: 6,
            d_model: 384,
            d_ff: 1536,
            sequence_length: 256,
            dropout: 0.2,
            ..base.model
        },
        method: MethodConfig::of("fst", 6e-5),
        batch: BatchConfig { size: 64, ..base.batch },
        ..base
    }
}

fn gpt2(layers: usize, heads: usize, d_model: usize, lambda: f32) -> Config {
    let base = shakespeare_char_cpu();
    Config {
        steps: 300_000,
        model: ModelConfig {
            layers,
            heads,
            d_model,
            d_ff: 4 * d_model,
            sequence_length: 1024,
            activation: Activation::GeluErf,
            ..base.model
        },
        method: MethodConfig::of("fst", lambda),
        optimizer: OptimizerConfig {
            learning_rate: 1.5e-4,
            min_learning_rate: 1e-5,
            warmup_steps: 3000,
            beta2: 0.95,
            ..base.optimizer
        },
        batch: BatchConfig { size: 16, gradient_accumulation_steps: 32, ..base.batch },
        data: DataConfig { tokenizer: TokenizerKind::Gpt2, ..base.data },
        run: RunConfig {
            eval_every: 1000,
            eval_tokens: 1 << 21,
            flip_every: 100,
            checkpoint_every: 1000,
            ..base.run
        },
        ..base
    }
}

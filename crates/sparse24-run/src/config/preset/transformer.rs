//! The Transformers, from a configuration whose other settings they keep.

use crate::{
    config::{
        BatchConfig, Config, DataConfig, MethodConfig, ModelConfig, ModelKind, OptimizerConfig,
        OptimizerName, RunConfig,
    },
    data::TokenizerKind,
};
use sparse24_core::op::Activation;
use sparse24_train::schedule::Decay;

/// Transformer-base.
pub(super) fn base(base: Config) -> Config {
    Config {
        steps: 100_000,
        model: ModelConfig {
            kind: ModelKind::Transformer,
            layers: 6,
            heads: 8,
            d_model: 512,
            d_ff: 2048,
            sequence_length: 256,
            activation: Activation::Relu,
            bias: true,
            dropout: 0.1,
            label_smoothing: 0.1,
            ..base.model
        },
        method: MethodConfig::of("fst", 1e-6),
        optimizer: OptimizerConfig {
            name: OptimizerName::Adam,
            learning_rate: 7e-4,
            min_learning_rate: 0.0,
            schedule: Decay::InverseSqrt,
            warmup_steps: 4000,
            warmup_learning_rate: 1e-7,
            beta2: 0.98,
            epsilon: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: 0.0,
            ema_decay: 0.0,
            ..base.optimizer
        },
        batch: BatchConfig { size: 98, ..base.batch },
        data: DataConfig {
            tokenizer: TokenizerKind::Bpe,
            source: "en".to_owned(),
            target: "de".to_owned(),
            ..base.data
        },
        run: RunConfig { eval_every: 1000, flip_every: 100, checkpoint_every: 1000, ..base.run },
        ..base
    }
}

/// A small one, for Multi30k.
pub(super) fn multi30k(of: Config) -> Config {
    let base = base(of);
    Config {
        steps: 8000,
        model: ModelConfig {
            layers: 4,
            heads: 4,
            d_model: 128,
            d_ff: 256,
            sequence_length: 64,
            dropout: 0.3,
            ..base.model
        },
        method: MethodConfig::of("fst", 6e-4),
        optimizer: OptimizerConfig { learning_rate: 5e-3, warmup_steps: 2000, ..base.optimizer },
        batch: BatchConfig { size: 64, ..base.batch },
        data: DataConfig { vocabulary: 10_000, ..base.data },
        run: RunConfig { eval_every: 250, flip_every: 50, checkpoint_every: 500, ..base.run },
        ..base
    }
}

/// A smaller one, for a CPU.
pub(super) fn multi30k_cpu(of: Config) -> Config {
    let base = multi30k(of);
    Config {
        steps: 3000,
        model: ModelConfig { layers: 2, dropout: 0.1, ..base.model },
        method: MethodConfig::of("fst", 2e-4),
        optimizer: OptimizerConfig { learning_rate: 3e-3, warmup_steps: 500, ..base.optimizer },
        batch: BatchConfig { size: 32, ..base.batch },
        data: DataConfig { vocabulary: 4000, ..base.data },
        run: RunConfig { eval_every: 500, ..base.run },
        ..base
    }
}

"""Compares a trained Transformer with `torch.nn`'s layers: validation loss, and log probabilities.

From the root of the repository, with `pip install torch safetensors`:

    python tests/peers/transformer.py target/release/sparse24 [cuda]

It makes pairs of random sentences, trains on them in f32 on the CPU, and gives the weights of the
last checkpoint to `TransformerEncoderLayer` and `TransformerDecoderLayer`, with fairseq's embedding
and positions. It fails if a loss per token, or a log probability of a translation per token,
differs by more than 1e-4. On the backend cuda, whose activations are bf16, the limit is twice the
mean effect that bf16 has on PyTorch's own, and four times the largest for a single translation.
"""

import json, math, random, subprocess, sys, tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

D, HEADS, D_FF, LAYERS, LONGEST = 64, 4, 128, 2, 24
PADDING, END, FIRST = 1, 2, 4
WORDS = [f"w{number}" for number in range(40)]


def sentences(count, seed):
    """Sources, and targets that are their words in reverse, each shifted by one."""
    draw = random.Random(seed)
    sources = [[draw.randrange(40) for _ in range(draw.randint(1, 20))] for _ in range(count)]
    return sources, [[(word + 1) % 40 for word in source[::-1]] for source in sources]


def write(path, lines):
    path.write_text("".join(" ".join(WORDS[word] for word in line) + "\n" for line in lines))


def positions(length):
    """fairseq's sinusoids, the halves for sine and cosine."""
    rates = torch.exp(torch.arange(D // 2) * (-math.log(10000) / (D // 2 - 1)))
    angles = (torch.arange(length) + 2)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Transformer(torch.nn.Module):
    def __init__(self, weights):
        super().__init__()
        options = dict(d_model=D, nhead=HEADS, dim_feedforward=D_FF, dropout=0, batch_first=True)
        self.encoder = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(**options) for _ in range(LAYERS)
        )
        self.decoder = torch.nn.ModuleList(
            torch.nn.TransformerDecoderLayer(**options) for _ in range(LAYERS)
        )
        (self.table,) = (weights[name] for name in weights if "embed_tokens" in name)
        for stack, layers in [("encoder", self.encoder), ("decoder", self.decoder)]:
            for number, layer in enumerate(layers):
                layer.load_state_dict(self.layer(weights, f"{stack}.layers.{number}."))

    @staticmethod
    def layer(weights, prefix):
        """The weights of a layer under PyTorch's names."""
        ours = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        theirs = {}
        for kind in ["weight", "bias"]:
            of = lambda name: ours[f"{name}.{kind}"].squeeze(0)
            theirs[f"self_attn.in_proj_{kind}"] = of("self_attn.qkv_proj")
            theirs[f"self_attn.out_proj.{kind}"] = of("self_attn.out_proj")
            theirs[f"linear1.{kind}"], theirs[f"linear2.{kind}"] = of("fc1"), of("fc2")
            norms = ["self_attn_layer_norm", "final_layer_norm"]
            if f"encoder_attn.q_proj.{kind}" in ours:
                both = [of("encoder_attn.q_proj"), of("encoder_attn.kv_proj")]
                theirs[f"multihead_attn.in_proj_{kind}"] = torch.cat(both)
                theirs[f"multihead_attn.out_proj.{kind}"] = of("encoder_attn.out_proj")
                norms.insert(1, "encoder_attn_layer_norm")
            theirs |= {f"norm{at}.{kind}": of(name) for at, name in enumerate(norms, 1)}
        return theirs

    def embed(self, ids):
        return math.sqrt(D) * self.table[ids] + positions(len(ids))

    def forward(self, source, target):
        """Log probabilities of a target's tokens and its end."""
        x = self.embed([FIRST + word for word in source] + [END])[None]
        for layer in self.encoder:
            x = layer(x)
        wanted = [FIRST + word for word in target] + [END]
        y = self.embed([END] + wanted[:-1])[None]
        causal = torch.nn.Transformer.generate_square_subsequent_mask(len(wanted))
        for layer in self.decoder:
            y = layer(y, x, tgt_mask=causal)
        logits = (y[0] @ self.table.T).log_softmax(dim=1)
        return logits[range(len(wanted)), wanted]


def main():
    command, folder = Path(sys.argv[1]).resolve(), Path(tempfile.mkdtemp())
    backend = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    for name, count, seed in [("train", 2000, 1), ("val", 200, 2)]:
        for language, lines in zip(["en", "de"], sentences(count, seed)):
            write(folder / f"{name}.{language}", lines)
    for language in ["en", "de"]:
        (folder / f"dict.{language}.txt").write_text("".join(f"{word} 1\n" for word in WORDS))
    sparse24 = lambda *line: subprocess.run(
        [command, *map(str, line)], cwd=folder, check=True, capture_output=True, text=True
    ).stdout
    settings = dict(
        {"data.path": ".", "data.tokenizer": "dictionary", "steps": 400, "batch.size": 8},
        **{"model.layers": LAYERS, "model.heads": HEADS, "model.d_model": D, "model.d_ff": D_FF},
        **{"model.sequence_length": LONGEST, "optimizer.warmup_steps": 100},
    )
    line = [word for key, value in settings.items() for word in ["--set", f"{key}={value}"]]
    preset = ["--preset", "transformer-multi30k-cpu", "--method", "dense", "--backend", backend]
    sparse24("train", *preset, *line, "--out", "run")
    loss = json.loads(sparse24("eval", "run", "--json"))["loss"]
    line = ["--beam", 1, "--length-penalty", 0, "--json"]
    found = sparse24("translate", "run", "--input", "val.en", *line).splitlines()

    checkpoint = max((folder / "run/checkpoints").glob("step-*"))
    model = Transformer(load_file(checkpoint / "model.safetensors")).eval()
    score = lambda pair: torch.stack([model(*pair).sum(), torch.tensor(len(pair[1]) + 1.0)])
    with torch.no_grad():
        pairs = list(zip(*sentences(200, 2)))
        lines = [json.loads(line)["translation"].split() for line in found]
        translated = [(s, [WORDS.index(word) for word in line]) for (s, _), line in zip(pairs, lines)]
        ours = torch.tensor([json.loads(line)["score"] for line in found])
        of_pairs, of_translated = (torch.stack([score(p) for p in of]) for of in [pairs, translated])
        limits = [1e-4, 1e-4]
        if backend != "cpu":
            with torch.autocast("cpu", torch.bfloat16):
                rounded = [torch.stack([score(p).float() for p in of]) for of in [pairs, translated]]
            effect = [(a - b)[:, 0].abs() for a, b in zip(rounded, [of_pairs, of_translated])]
            limits = [
                2 * (effect[0].sum() / of_pairs[:, 1].sum()).item(),
                4 * (effect[1] / of_translated[:, 1]).max().item(),
            ]
        scores, tokens = of_pairs.sum(dim=0)
        differences = [
            abs(loss + (scores / tokens).item()),
            ((ours - of_translated[:, 0]) / of_translated[:, 1]).abs().max().item(),
        ]
    print(f"validation loss {loss:.6f}, difference {differences[0]:.1e}, limit {limits[0]:.1e}")
    print(f"translations, largest difference per token {differences[1]:.1e}, limit {limits[1]:.1e}")
    assert all(difference <= limit for difference, limit in zip(differences, limits))


main()

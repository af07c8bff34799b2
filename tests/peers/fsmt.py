"""Compares a trained Transformer with transformers' FSMT, out and back.

From the root of the repository, with `pip install torch transformers safetensors`:

    python tests/peers/fsmt.py target/release/sparse24

It makes pairs of random sentences, trains on them in f32 on the CPU, and exports the run to a
folder that `FSMTForConditionalGeneration` reads. It fails if a loss per token differs by more than
1e-4. Then transformers saves the model again, with its names and its copies of the table, and it
fails if an import of that has another vocabulary, or another loss by more than 1e-6.
"""

import json, random, subprocess, sys, tempfile
from pathlib import Path

import torch
from transformers import FSMTForConditionalGeneration

PADDING, END, UNKNOWN = 1, 2, 3
WORDS = [f"w{number}" for number in range(40)] + ["be@@"]


def sentences(count, seed):
    """Sources, and targets that are their words in reverse, each shifted by one."""
    draw = random.Random(seed)
    sources = [[draw.randrange(40) for _ in range(draw.randint(1, 20))] for _ in range(count)]
    return sources, [[(word + 1) % 40 for word in source[::-1]] for source in sources]


command, folder = Path(sys.argv[1]).resolve(), Path(tempfile.mkdtemp())
for name, count, seed in [("train", 2000, 1), ("val", 200, 2)]:
    for language, lines in zip(["en", "de"], sentences(count, seed)):
        lines = [" ".join(WORDS[word] for word in line) + "\n" for line in lines]
        (folder / f"{name}.{language}").write_text("".join(lines))
for language in ["en", "de"]:
    (folder / f"dict.{language}.txt").write_text("".join(f"{word} 1\n" for word in WORDS))
sparse24 = lambda line: subprocess.run(
    [command, *line.split()], cwd=folder, check=True, capture_output=True, text=True
).stdout
sparse24(
    "train --preset transformer-multi30k-cpu --method dense --data . --out run"
    " --set data.tokenizer=dictionary --set steps=300 --set batch.size=8"
    " --set model.d_model=64 --set model.d_ff=128 --set model.sequence_length=24"
    " --set optimizer.warmup_steps=100"
)
loss = json.loads(sparse24("eval run --json"))["loss"]
sparse24("export run exported")

model = FSMTForConditionalGeneration.from_pretrained(folder / "exported").eval()
losses = []
with torch.no_grad():
    for source, target in zip(*sentences(200, 2)):
        source, wanted = ([4 + word for word in line] + [END] for line in (source, target))
        given = torch.tensor([[END] + wanted[:-1]])
        # With a cache, transformers masks no later token.
        out = model(torch.tensor([source]), decoder_input_ids=given, use_cache=False)
        losses += (-out.logits[0].log_softmax(dim=1)[range(len(wanted)), wanted]).tolist()
theirs = sum(losses) / len(losses)
print(f"validation loss {loss:.6f}, difference {abs(loss - theirs):.1e}")
assert abs(loss - theirs) <= 1e-4

model.save_pretrained(folder / "again")
for name in ["vocab-src.json", "vocab-tgt.json"]:
    vocabulary = json.loads((folder / "exported" / name).read_text())
    assert vocabulary["w0</w>"] == 4 and vocabulary["be"] == 44 and vocabulary["<unk>"] == UNKNOWN
    (folder / "again" / name).write_text(json.dumps(vocabulary))
sparse24("import again imported")
again = json.loads(sparse24("eval imported --data . --json"))["loss"]
print(f"after transformers saved it, difference {abs(loss - again):.1e}")
assert abs(loss - again) <= 1e-6

"""Compares fine-tuned BERT and GPT-2 models with `transformers`: the loss of exported weights.

From the root of the repository, with `pip install torch transformers`:

    python tests/peers/classification.py target/release/sparse24 [cuda]

It makes sentences of random words and a class for each, pre-trains and fine-tunes on them, and
exports the models to folders that `transformers` reads. It fails if the losses per sentence differ
by more than 1e-4. On the backend cuda, whose activations are bf16, the limit is twice the mean
effect that bf16 has on the losses of `transformers`.
"""

import json, random, subprocess, sys, tempfile
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

command, folder = Path(sys.argv[1]).resolve(), Path(tempfile.mkdtemp())
backend = sys.argv[2] if len(sys.argv) > 2 else "cpu"
draw = random.Random(1)
words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 4))) for _ in range(200)]


def labelled():
    """A sentence, and whether most of its words have an even number of letters."""
    sentence = draw.choices(words, k=draw.choice([3, 5]))
    return " ".join(sentence), sum(1 - len(word) % 2 * 2 for word in sentence) > 0


for name, count in [("train", 600), ("validation", 200)]:
    examples = [labelled() for _ in range(count)]
    rows = "".join(f"{text},{'even' if even else 'odd'}\n" for text, even in examples)
    (folder / f"{name}.csv").write_text("text,label\n" + rows)
(folder / "text").write_text("".join(f"{labelled()[0]}\n\n" for _ in range(4000)))

sparse24 = lambda line: subprocess.run(
    [command, *line.split()], cwd=folder, check=True, capture_output=True, text=True
).stdout
for preset, tokenizer in [("bert-tiny-cpu", ""), ("quickstart", "--set data.tokenizer=byte")]:
    train = f"train --preset {preset} --method dense --backend {backend} --steps 60"
    sparse24(f"{train} {tokenizer} --data text --set optimizer.warmup_steps=6 --out {preset}")
    task = f"--task classification --data . --backend {backend} --init-from {preset}"
    sparse24(f"finetune {task} --epochs 2 --out {preset}-tuned")
    loss = json.loads(sparse24(f"eval {preset}-tuned --json"))["loss"]
    sparse24(f"export {preset}-tuned {preset}-exported")
    exported = folder / f"{preset}-exported"
    model = AutoModelForSequenceClassification.from_pretrained(exported).eval()
    encode = AutoTokenizer.from_pretrained(exported)

    def of_each():
        """The losses of the sentences, each alone."""
        for text, even in examples:
            logits = model(**encode(text, return_tensors="pt")).logits[0].float()
            label = model.config.label2id["even" if even else "odd"]
            yield -logits.log_softmax(dim=0)[label]

    with torch.no_grad():
        theirs = torch.stack([*of_each()])
        with torch.autocast("cpu", torch.bfloat16):
            rounded = torch.stack([*of_each()])
    limit = 1e-4 if backend == "cpu" else 2 * (rounded - theirs).abs().mean().item()
    difference = abs(loss - theirs.mean().item())
    print(f"{preset}: loss {loss:.6f}, difference {difference:.1e}, limit {limit:.1e}")
    assert difference <= limit

"""Compares a trained DeiT with timm's: the validation loss of exported weights.

From the root of the repository, with `pip install timm`:

    python tests/peers/deit.py target/release/sparse24 [cuda]

It makes images of three classes, trains on them in f32 on the CPU, and exports the run to a folder
that timm reads. It fails if the losses per image differ by more than 1e-4. On the backend cuda,
whose activations are bf16, the limit is twice the mean effect that bf16 has on timm's losses.
"""

import json, subprocess, sys, tempfile
from pathlib import Path

import numpy, timm, torch
from PIL import Image

MEAN = torch.tensor(timm.data.IMAGENET_DEFAULT_MEAN)
DEVIATION = torch.tensor(timm.data.IMAGENET_DEFAULT_STD)

command, folder = Path(sys.argv[1]).resolve(), Path(tempfile.mkdtemp())
random = numpy.random.default_rng(1)
pixels, classes = [], []
for split, count in [("train", 64), ("val", 40)]:
    # Classes are numbered in the order of their names.
    for number, name in enumerate(["blue", "green", "red"]):
        (folder / "images" / split / name).mkdir(parents=True)
        for at in range(count):
            image = random.integers(0, 200, (32, 32, 3), dtype=numpy.uint8)
            image[..., number] += 30
            Image.fromarray(image).save(folder / "images" / split / name / f"{at:03}.png")
            if split == "val":
                pixels.append((torch.tensor(image) / 255 - MEAN) / DEVIATION)
                classes.append(number)

sparse24 = lambda line: subprocess.run(
    [command, *line.split()], cwd=folder, check=True, capture_output=True, text=True
).stdout
backend = sys.argv[2] if len(sys.argv) > 2 else "cpu"
train = f"train --preset deit-cifar-cpu --method dense --backend {backend}"
sparse24(f"{train} --data images --steps 60 --out run")
loss = json.loads(sparse24("eval run --json"))["loss"]
sparse24("export run exported")
model = timm.create_model(f"local-dir:{folder / 'exported'}", pretrained=True).eval()
images, classes = torch.stack(pixels).permute(0, 3, 1, 2), torch.tensor(classes)
losses = lambda logits: torch.nn.functional.cross_entropy(logits, classes, reduction="none")
with torch.no_grad():
    theirs = losses(model(images))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = losses(model(images).float())
limit = 1e-4 if backend == "cpu" else 2 * (rounded - theirs).abs().mean().item()
difference = abs(loss - theirs.mean().item())
print(f"validation loss {loss:.6f}, difference {difference:.1e}, limit {limit:.1e}")
assert difference <= limit

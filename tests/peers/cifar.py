"""Trains timm's DeiT-tiny with patches of 4x4 on 32x32 images, on a GPU.

From the root of the repository, with `pip install timm torchvision`:

    python tests/peers/cifar.py FOLDER mix|nomix [EPOCHS=100]

FOLDER has `train` and `test` with a folder of images for each class. The recipe is that of the
preset `deit-tiny` with batches of 128 and gradients clipped at 1; `nomix` leaves mixup and CutMix
out. It prints the validation loss and acc@1 after every tenth epoch.
"""

import math, sys
from pathlib import Path

import numpy, timm, torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, Mixup, create_transform
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torchvision.transforms import RandomCrop

folder, mixes = Path(sys.argv[1]), {"mix": True, "nomix": False}[sys.argv[2]]
epochs = int(sys.argv[3]) if len(sys.argv) > 3 else 100
batch, rate, least, first = 128, 1e-3, 1e-5, 1e-6


def load(split):
    images, classes = [], []
    for number, of_class in enumerate(sorted((folder / split).iterdir())):
        for file in sorted(of_class.iterdir()):
            images.append(numpy.asarray(Image.open(file).convert("RGB")))
            classes.append(number)
    return numpy.stack(images), torch.tensor(classes)


class Training(torch.utils.data.Dataset):
    def __init__(self):
        self.images, self.classes = load("train")
        self.transform = create_transform(
            32, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", interpolation="bicubic",
            re_prob=0.25, re_mode="pixel", re_count=1,
        )
        # As DeiT's own code treats images of this size.
        self.transform.transforms[0] = RandomCrop(32, padding=4)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, at):
        return self.transform(Image.fromarray(self.images[at])), self.classes[at]


torch.manual_seed(1)
numpy.random.seed(1)
loader = torch.utils.data.DataLoader(
    Training(), batch, shuffle=True, drop_last=True, num_workers=11, persistent_workers=True,
    pin_memory=True, prefetch_factor=8,
)
images, classes = load("test")
mean, deviation = torch.tensor(IMAGENET_DEFAULT_MEAN), torch.tensor(IMAGENET_DEFAULT_STD)
images = ((torch.tensor(images) / 255 - mean) / deviation).permute(0, 3, 1, 2).cuda()
classes = classes.cuda()
model = timm.create_model(
    "deit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10, drop_path_rate=0.1
).cuda()
is_plain = lambda name, p: p.ndim <= 1 or name in ("pos_embed", "cls_token")
groups = [
    {"params": [p for name, p in model.named_parameters() if is_plain(name, p) == plain],
     "weight_decay": 0.0 if plain else 0.05}
    for plain in (False, True)
]
optimizer = torch.optim.AdamW(groups, lr=rate, fused=True)
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)
objective = SoftTargetCrossEntropy() if mixes else LabelSmoothingCrossEntropy(0.1)


def loss_of(x, y):
    with torch.autocast("cuda", torch.bfloat16):
        z = model(x)
    return objective(z.float(), y)


compiled = torch.compile(loss_of, mode="reduce-overhead")
steps = epochs * len(loader)
warmup, step = steps // 20, 0
for epoch in range(1, epochs + 1):
    model.train()
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        if mixes:
            x, y = mixup(x, y)
        if step < warmup:
            now = first + (rate - first) * step / warmup
        else:
            share = (step - warmup) / (steps - warmup)
            now = least + (rate - least) * 0.5 * (1 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = now
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    if epoch % 10 == 0 or epoch == epochs:
        model.eval()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            z = torch.cat([model(part) for part in images.split(1000)]).float()
        loss = torch.nn.functional.cross_entropy(z, classes).item()
        right = (z.argmax(1) == classes).float().mean().item()
        print(f"epoch {epoch}: validation loss {loss:.4f}, acc@1 {right:.4f}", flush=True)

"""Dense GPT-2 in PyTorch under DistributedDataParallel: tokens per second on one GPU or several.

Compiled, bf16 autocast, flash attention, fused AdamW, gradient clipping, random tokens; gradients
are exchanged with the backward pass of the last micro-batch.

    python3 tests/peers/ddp.py 774m 16 8 1
    torchrun --standalone --nproc-per-node 2 tests/peers/ddp.py 774m 16 8 1

The arguments are the size, the sequences per micro-batch, and numbers of micro-batches that each
GPU computes in a step, one measurement each.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

# Layers, heads, d_model.
SIZES = {
    "124m": (12, 12, 768),
    "350m": (24, 16, 1024),
    "774m": (36, 20, 1280),
    "1558m": (48, 25, 1600),
}
VOCABULARY, LENGTH = 50304, 1024
WARM_UP, STEPS = 3, 10


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Gpt2(nn.Module):
    def __init__(self, layers, heads, width):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, 0.0, 0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions.weight
        logits = F.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    size, batch = sys.argv[1], int(sys.argv[2])
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = Gpt2(*SIZES[size]).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), 1.5e-4, (0.9, 0.95), weight_decay=0.1, fused=True
    )
    compiled = torch.compile(model)
    if world > 1:
        dist.init_process_group("nccl", device_id=device)
        compiled = DistributedDataParallel(
            compiled, device_ids=[rank], gradient_as_bucket_view=True
        )
    for micro_batches in map(int, sys.argv[3:]):
        ids = torch.randint(VOCABULARY, (2, micro_batches, batch, LENGTH), device=device)
        times = []
        for _ in range(WARM_UP + STEPS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for micro_batch in range(micro_batches):
                if world > 1:
                    compiled.require_backward_grad_sync = micro_batch == micro_batches - 1
                with torch.autocast("cuda", torch.bfloat16):
                    loss = compiled(*ids[:, micro_batch]) / micro_batches
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        if rank == 0:
            tokens = world * micro_batches * batch * LENGTH
            times = sorted(times[WARM_UP:])
            least, median, most = (tokens / times[at] for at in (-1, STEPS // 2, 0))
            print(
                f"{size}, {world} GPU(s), {micro_batches} x {batch} x {LENGTH} tokens each: "
                f"{median:.0f} tokens/s (steps {least:.0f} to {most:.0f})",
                flush=True,
            )
    if world > 1:
        dist.destroy_process_group()


main()

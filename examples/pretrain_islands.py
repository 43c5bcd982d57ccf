"""Pre-training between islands of GPUs: FSDP2 with mixed precision and activation checkpointing within each, streaming
DiLoCo between them, checkpoints and metrics. On a laptop the ranks are processes on the CPU.

The settings are the fields of `Config`, and options of the command::

    ftopt launch -n 2 --ranks 2 examples/pretrain_islands.py
    ftopt launch -n 2 --ranks 8 examples/pretrain_islands.py --tokens 'data/*.bin' --vocab 50304 --width 768 \
        --layers 12 --heads 12 --length 1024 --batch-size 64 --steps 20000 --sync-every 100 --delay 5 --codec fp4

Kill a rank with ``kill -9``: its island is started again, fetches the state and goes on; the other one loses nothing.
If all are killed, start the same command again: the job goes on from its newest checkpoint. ``ftopt export
runs/pretrained model.safetensors`` writes the model, and `ftopt.follow` reads it while the job trains.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import ftopt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Config:
    """All settings."""

    tokens: str = ""  # files of uint16 tokens; "": the bytes of Python's library
    vocab: int = 256
    width: int = 64
    layers: int = 2
    heads: int = 2
    length: int = 64  # tokens in a window
    batch_size: int = 16  # windows of an island in a step
    steps: int = 120  # of the job
    lr: float = 3e-3
    warmup: int = 10
    clip: float = 1.0
    sync_every: int = 20  # inner steps between two outer steps of a fragment
    fragments: int = 2
    delay: int = 2  # inner steps that go on while a fragment is averaged
    codec: str = "bf16"  # of an outer gradient on the wire
    checkpoints: str = "runs/pretrained"
    every: int = 2  # outer steps between two checkpoints
    log_every: int = 10


def configured(words: Sequence[str]) -> Config:
    """The settings of a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    return Config(**vars(parser.parse_args(words)))


class Block(nn.Module):
    """Attention and a gated feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 8 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, 2)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, value = self.up(self.norms[1](x)).chunk(2, 2)
        return x + self.down(nn.functional.silu(gate) * value)


class Transformer(nn.Module):
    """A decoder; its blocks are computed again in the backward pass instead of keeping their activations."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.places = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        for table in self.tokens, self.places:
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def sharded(config: Config) -> nn.Module:
    """The model, divided among the island's ranks. Parameters and reduced gradients are in fp32, the rest in bf16."""
    torch.manual_seed(0)
    model = Transformer(config).to(DEVICE)
    mesh = init_device_mesh(DEVICE, (int(os.environ["WORLD_SIZE"]),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def windows(config: Config) -> ftopt.TokenWindows:
    """The data, mapped into memory."""
    if config.tokens:
        return ftopt.TokenWindows(config.tokens, config.length, vocab=config.vocab)
    library = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py"))[:60])
    return ftopt.TokenWindows(np.frombuffer(library, np.uint8), config.length)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens."""
    logits = model(inputs.to(DEVICE))
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.to(DEVICE).flatten())


class Metrics:
    """Loss and speed of an island since its last line."""

    def __init__(self, optimizer: ftopt.ReplicaOptimizer) -> None:
        self.optimizer, self.losses, self.tokens, self.since = optimizer, list[Tensor](), 0, time.perf_counter()

    def add(self, loss: Tensor, tokens: int) -> None:
        """One step of this rank."""
        self.losses.append(loss)
        self.tokens += tokens

    def tell(self) -> None:
        """Prints the mean over the island's ranks; all of them call it."""
        totals = torch.stack([torch.stack(self.losses).mean(), torch.tensor(float(self.tokens), device=DEVICE)])
        dist.all_reduce(totals)
        ranks, now = dist.get_world_size(), time.perf_counter()
        if dist.get_rank() == 0:
            o, rate = self.optimizer, float(totals[1]) / (now - self.since)
            lr = o.param_groups[0]["lr"]
            print(
                f"{o.replica}: step {o.inner_step}, version {o.version}, loss {float(totals[0]) / ranks:.3f}, "
                f"lr {lr:.2g}, {rate:,.0f} tokens/s",
                flush=True,
            )
        self.losses, self.tokens, self.since = [], 0, now


def main(words: Sequence[str] = ()) -> None:
    """One rank of an island."""
    config = configured(words)
    model = sharded(config)
    inner = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1)
    method = ftopt.StreamingDiLoCo(
        sync_every=config.sync_every,
        fragments=ftopt.fragments.Balanced(n=config.fragments),
        delay=config.delay,
        codec=config.codec,
    )
    optimizer = ftopt.wrap(inner, model, method, leave_on_signals=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / config.warmup, 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / config.steps))),
    )
    data = windows(config)
    loader = optimizer.loader(
        data, batch_size=config.batch_size, epochs=None, drop_last=True
    )  # divided among the ranks
    checkpoints = ftopt.Checkpoints(config.checkpoints, optimizer, every=config.every)
    checkpoints.resume()  # if there is one
    metrics, batches = Metrics(optimizer), iter(loader)
    with optimizer:
        checkpoints.include(scheduler=scheduler, loader=loader)
        for _ in optimizer.steps(config.steps):
            inputs, targets = next(batches)
            loss = loss_of(model, inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step(loss=loss.detach(), tokens=inputs.numel())
            scheduler.step()
            optimizer.zero_grad()
            checkpoints.step()
            metrics.add(loss.detach(), inputs.numel())
            if optimizer.passed(every=config.log_every):
                metrics.tell()
        checkpoints.close()
    if dist.get_rank() == 0:
        print(f"{optimizer.replica}: digest {optimizer.digest()[:12]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

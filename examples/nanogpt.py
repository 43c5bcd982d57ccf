"""A replica of a small GPT on memory-mapped tokens, in the manner of nanoGPT: warm-up and cosine by hand, clipping,
gradient accumulation. Started like ``examples/plain.py``.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import torch
from tiny import STEP_S, STEPS, SYNC_EVERY
from torch import Tensor, nn

import ftopt

BLOCK, VOCAB, WIDTH, ACCUMULATE, WARMUP, RATE = 16, 32, 32, 2, 5, 3e-3


class GPT(nn.Module):
    """Token and position embeddings, one block, tied output."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        for table in self.tokens, self.places:
            nn.init.normal_(table.weight, std=0.02)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(BLOCK), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        hidden = self.block(hidden, src_mask=self.mask, is_causal=True)
        return nn.functional.linear(hidden, self.tokens.weight)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens."""
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten().long())


def rate(step: int) -> float:
    """Warm-up, then cosine, by the job's inner step."""
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    return RATE * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def prepare(path: Path) -> None:
    """Writes the tokens; yours come from a tokenizer."""
    tokens = [1]
    for index in range(20_000):
        tokens.append((tokens[-1] * 5 + 3 + (index % 97 == 0)) % VOCAB)
    np.array(tokens, dtype=np.uint16).tofile(path)


def main(folder: str = ".") -> tuple[int, str, float]:
    """Trains one replica; returns the job's inner step, the digest of the global parameters, and their loss."""
    torch.manual_seed(0)
    model = GPT()
    decay = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    inner = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.95))
    optimizer = ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=SYNC_EVERY), leave_on_signals=True)
    path = Path(folder) / f"train-{optimizer.replica}.bin"
    prepare(path)
    windows = ftopt.TokenWindows(path, BLOCK, vocab=VOCAB)
    batches = iter(optimizer.loader(windows, batch_size=8, accumulate=ACCUMULATE, epochs=None).steps())
    held_out = [torch.stack(part) for part in zip(*(windows[index] for index in range(64)), strict=True)]
    with optimizer:
        for step in optimizer.steps(STEPS):  # of the job
            for each in optimizer.param_groups:
                each["lr"] = rate(step)
            micro_batches = next(batches)
            for inputs, targets in micro_batches:
                loss = loss_of(model, inputs, targets)
                (loss / len(micro_batches)).backward()
                optimizer.log(loss=loss)  # for the live page: the last micro-batch's
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"{optimizer.replica}: step {optimizer.inner_step}", flush=True)
            time.sleep(STEP_S)
    with torch.no_grad():
        return optimizer.status.committed_step, optimizer.digest(), float(loss_of(model, *held_out))


if __name__ == "__main__":
    print("step {}, digest {:.12}, loss {:.4f}".format(*main()))

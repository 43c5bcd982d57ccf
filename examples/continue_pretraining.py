"""Continued pre-training of a causal language model of Hugging Face, in a plain loop.

Without arguments it continues a tiny random model on the bytes of Python's library::

    ftopt launch -n 2 examples/continue_pretraining.py

With your own, from a folder or a name, on your text files, in bf16::

    ftopt launch -n 2 examples/continue_pretraining.py --model ./Llama-3.2-1B --text corpus/*.txt --bf16 \
        --steps 5000 --sync-every 100 --length 1024 --batch-size 8 --accumulate 4 --lr 2e-5

Each replica loads the model itself; the first one's parameters are the job's. At the end ``runs/continued/r0`` is a
folder for ``from_pretrained``, with the parameters that all replicas agree on. Needs ``pip install -e '.[trainers]'``.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny import STEP_S, STEPS, SYNC_EVERY
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import ftopt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIBRARY = sorted(Path(argparse.__file__).parent.glob("*.py"))[:50]


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The settings; the defaults fit a laptop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name; default: a tiny random model, whose tokens are bytes")
    parser.add_argument(
        "--text", nargs="+", type=Path, help="text files, a tenth of which is held out", default=LIBRARY
    )
    parser.add_argument("--out", type=Path, default=Path("runs/continued"), help="holds a folder for each replica")
    parser.add_argument("--bf16", action="store_true", help="computes in bf16; parameters and optimizer stay in fp32")
    parser.add_argument("--steps", type=int, default=STEPS, help="inner steps of the job")
    parser.add_argument("--sync-every", type=int, default=SYNC_EVERY, help="inner steps between two outer steps")
    parser.add_argument("--length", type=int, default=32, help="tokens in a window")
    parser.add_argument("--batch-size", type=int, default=8, help="windows in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in an inner step")
    parser.add_argument("--lr", type=float, default=3e-3, help="the inner rate, after a warm-up")
    return parser.parse_args(words)


def load(name: str | None) -> tuple[nn.Module, Any]:
    """The model in fp32, and its tokenizer; None: bytes are the tokens."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), AutoTokenizer.from_pretrained(name)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **shape, tie_word_embeddings=True)), None


def tokens_of(files: Sequence[Path], tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """The tokens to train on, and those held out. For a large corpus make a file of tokens once, and give its path to
    `ftopt.TokenWindows`, which maps it into memory."""
    if tokenizer is None:
        texts = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
    else:
        texts = [np.array(tokenizer(file.read_text("utf-8")).input_ids, np.uint32) for file in files]
    return np.concatenate([text for i, text in enumerate(texts) if i % 10]), np.concatenate(texts[::10])


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, *, bf16: bool) -> Tensor:
    """The mean over all tokens; the targets are one token ahead of the inputs."""
    with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
        logits = model(input_ids=inputs.to(DEVICE)).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.to(DEVICE).flatten())


@torch.no_grad()
def score(model: nn.Module, held_out: Any, *, bf16: bool) -> float:
    """The loss on some held-out windows."""
    batches: Iterator[Any] = iter(torch.utils.data.DataLoader(held_out, batch_size=16))
    losses = [loss_of(model, *next(batches), bf16=bf16).item() for _ in range(min(4, math.ceil(len(held_out) / 16)))]
    return sum(losses) / len(losses)


def main(words: Sequence[str] = ()) -> tuple[int, str, float]:
    """Trains one replica; returns the job's inner step, the digest of the global parameters, and the loss of the model
    that ``from_pretrained`` makes of them."""
    given = arguments(words)
    model, tokenizer = load(given.model)
    model.to(DEVICE).train()
    train, held_out = (ftopt.TokenWindows(part, given.length) for part in tokens_of(given.text, tokenizer))
    inner = torch.optim.AdamW(model.parameters(), lr=given.lr, betas=(0.9, 0.95), weight_decay=0.1)
    method = ftopt.DiLoCo(sync_every=given.sync_every)
    optimizer = ftopt.wrap(inner, model, method, leave_on_signals=True)
    warmup = max(1, given.steps // 20)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / given.steps))),
    )
    loader = optimizer.loader(train, batch_size=given.batch_size, accumulate=given.accumulate, epochs=None)
    batches = iter(loader.steps())
    with optimizer:
        for _ in optimizer.steps(given.steps):  # of the job
            micro_batches = next(batches)
            for inputs, targets in micro_batches:
                loss = loss_of(model, inputs, targets, bf16=given.bf16)
                (loss / len(micro_batches)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(loss=loss.detach(), tokens=sum(inputs.numel() for inputs, _ in micro_batches))
            scheduler.step()
            optimizer.zero_grad()
            print(f"{optimizer.replica}: step {optimizer.inner_step}", flush=True)
            time.sleep(STEP_S)
        folder = given.out / optimizer.replica
        for part in model.config, model.generation_config:
            part.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        optimizer.export(folder / "model.safetensors")  # the global parameters, under the model's names
    continued = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
    return optimizer.status.committed_step, optimizer.digest(), score(continued, held_out, bf16=given.bf16)


if __name__ == "__main__":
    print("step {}, digest {:.12}, loss {:.4f}".format(*main(sys.argv[1:])))

"""A replica with Hugging Face's `Trainer`: gradient accumulation, clipping, a schedule, evaluation and saving.

Started like ``examples/plain.py``; needs ``pip install -e '.[trainers]'``.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from tiny import STEP_S, STEPS, SYNC_EVERY, Rules
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import ftopt
from ftopt.integrations.hf import FtoptCallback


class Tell(TrainerCallback):
    """Tells the steps, and leaves time to kill a replica."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(f"{args.run_name}: step {state.global_step}", flush=True)
        time.sleep(STEP_S)


def main(folder: str = "runs/hf") -> tuple[int, str, float]:
    """Trains one replica; returns the job's inner step, the digest of the global parameters, and their loss."""
    set_seed(0)
    shape = {"vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=None, loss_type="ForCausalLM"))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=SYNC_EVERY), leave_on_signals=True)
    arguments = TrainingArguments(
        f"{folder}/{optimizer.replica}",
        run_name=optimizer.replica,
        max_steps=STEPS,  # of the job
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        save_total_limit=2,
        logging_steps=20,
        data_seed=optimizer.seed,  # each replica has an order of its own
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Rules(512),
        eval_dataset=Rules(32),
        optimizers=(optimizer, None),
        callbacks=[FtoptCallback(optimizer), Tell()],
    )
    trainer.train()
    return trainer.state.global_step, optimizer.digest(), trainer.evaluate()["eval_loss"]


if __name__ == "__main__":
    print("step {}, digest {:.12}, loss {:.4f}".format(*main()))

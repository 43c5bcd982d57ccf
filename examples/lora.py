"""Sites that fine-tune one LoRA adapter together, with Hugging Face's `Trainer` and peft: only the adapter travels.

On one machine it is started like ``examples/plain.py``. With two sites, the first one also runs the coordinator::

    ftopt launch -n 1 --bind 0.0.0.0:29410 examples/lora.py                                # here
    ftopt launch -n 1 --join http://10.0.0.2:29410 --token-file token examples/lora.py     # there, when you like

Each site loads the base model and its own data; what it sends in an outer step is the adapter's size. If one site is
cut off, both train on, and its steps count when it is back. Needs ``pip install -e '.[trainers]'``.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tiny import STEP_S, STEPS, SYNC_EVERY, Rules
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import ftopt
from ftopt.integrations.hf import FtoptCallback


class Tell(TrainerCallback):
    """Tells the steps, and leaves time to kill a replica."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(f"{args.run_name}: step {state.global_step}", flush=True)
        time.sleep(STEP_S)


def main(folder: str = "runs/lora") -> tuple[int, str, float]:
    """Trains one replica; returns the job's inner step, the digest of the global parameters, and their loss."""
    set_seed(0)  # the frozen weights are the same everywhere: each replica loads them for itself
    shape = {"vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    base = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=None, loss_type="ForCausalLM"))
    targets = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, **targets))
    trained = [p for p in model.parameters() if p.requires_grad]
    inner = torch.optim.AdamW(trained, lr=1e-2)
    optimizer = ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=SYNC_EVERY), leave_on_signals=True)
    arguments = TrainingArguments(
        f"{folder}/{optimizer.replica}",
        run_name=optimizer.replica,
        max_steps=STEPS,  # of the job
        per_device_train_batch_size=8,
        save_strategy="no",
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
    trainer.save_model(f"{folder}/adapter")  # the global parameters: the adapter that all replicas agree on
    return trainer.state.global_step, optimizer.digest(), trainer.evaluate()["eval_loss"]


if __name__ == "__main__":
    print("step {}, digest {:.12}, loss {:.4f}".format(*main()))

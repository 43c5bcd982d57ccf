"""LoRA: the adapter trains and travels; the frozen weights stay where they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ftopt
from ftopt.events import Event
from tests.integrations.running import needs
from tests.optimizer.running import PATIENT, together

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")]


def test_the_frozen_weights_neither_travel_nor_change(tmp_path: Path) -> None:
    needs("peft", "transformers")
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    def base(seed: int) -> GPT2LMHeadModel:
        torch.manual_seed(seed)
        shape = {"vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=None, loss_type="ForCausalLM"))

    told: list[Event] = []
    groups = ftopt.local_groups(2, policy=replace(PATIENT, frozen="ignore"), on_event=told.append)
    models, frozen = [], []
    for seed in range(2):  # unlike each other: what travelled would show
        adapted = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        models.append(get_peft_model(base(seed), adapted))
        frozen.append({n: p.detach().clone() for n, p in models[-1].named_parameters() if not p.requires_grad})
    trained = [[p for p in model.parameters() if p.requires_grad] for model in models]

    def replica(m: int) -> list[torch.Tensor]:
        inner = torch.optim.AdamW(trained[m], lr=1e-2)
        optimizer = ftopt.wrap(inner, models[m], ftopt.LocalSGD(sync_every=3), group=groups[m])
        with optimizer:
            for step in range(6):
                tokens = torch.arange(16)[None] * (1 + step + m) % 32
                models[m](input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert optimizer.sync()
        if m == 0:  # after the end, to which both come with one version, however late one of them began
            models[m].save_pretrained(tmp_path)
        return [p.detach().clone() for p in trained[m]]

    one, other = together([lambda: replica(0), lambda: replica(1)])
    assert all(map(torch.equal, one, other)), "the adapters are the same"
    for model, before in zip(models, frozen, strict=True):
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)
    reduced = [event.data["bytes"] for event in told if event.event == "prepare"]
    assert reduced, "the rounds tell what they have sent"
    size = 4 * sum(p.numel() for p in trained[0])
    assert max(reduced) < 2 * size + 1024 < 4 * sum(p.numel() for p in models[0].parameters()) / 10
    loaded = PeftModel.from_pretrained(base(0), tmp_path)
    found = dict(loaded.named_parameters())
    for name, p in models[0].named_parameters():
        if p.requires_grad:
            assert torch.equal(found[name], one.pop(0))

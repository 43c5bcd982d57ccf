"""Loops of one's own, plain and with Fabric and Accelerate: accumulation, clipping, a schedule, and a job resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

import ftopt
from ftopt.integrations import finish
from tests.integrations.running import needs
from tests.problems import flat

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec"),
]
STEPS, STOPS_AT = 16, 10


class Data:
    random = False

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.arange(4.0) * (1 + index % 7) / 4
        return x.sin(), x[:1].cos()


def _prepared(how: str, model: nn.Module, outer: ftopt.ReplicaOptimizer) -> tuple[Any, Any, Callable, Callable]:  # type: ignore[type-arg]
    """The model and the optimizer as the trainer gives them back, its backward pass, and its clipping."""
    if how == "Fabric":
        needs("lightning")
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu")
        given, optimizer = fabric.setup(model, outer)
        return given, optimizer, fabric.backward, lambda: fabric.clip_gradients(given, optimizer, max_norm=1.0)
    if how == "Accelerate":
        needs("accelerate")
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        given, optimizer = accelerator.prepare(model, outer)
        return given, optimizer, accelerator.backward, lambda: accelerator.clip_grad_norm_(given.parameters(), 1.0)
    return model, outer, Tensor.backward, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _train(how: str, folder: Path | None, until: int = STEPS) -> tuple[ftopt.ReplicaOptimizer, list[float], Tensor]:
    """Trains from the job's newest checkpoint; up to ``until``, where the process ends without leaving the job."""
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    group = ftopt.solo()
    outer = ftopt.wrap(torch.optim.AdamW(bare.parameters(), 0.05), bare, ftopt.DiLoCo(sync_every=4), group=group)
    loader = ftopt.DataLoader(Data(), 4, accumulate=2, epochs=None, group=group)
    model, optimizer, backward, clip = _prepared(how, bare, outer)
    checkpoints = None if folder is None else ftopt.Checkpoints(folder, outer, every=1)
    if checkpoints is not None:
        checkpoints.resume()
    rates = []
    outer.__enter__()
    schedule = LinearLR(outer, 1.0, 0.0, total_iters=STEPS)
    if checkpoints is not None:
        checkpoints.include(schedule=schedule, loader=loader)
    for micro_batches in loader.steps():
        for inputs, targets in micro_batches:
            backward(nn.functional.mse_loss(model(inputs), targets) / len(micro_batches))
        clip()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(outer.param_groups[0]["lr"])
        if checkpoints is not None:
            checkpoints.step()
        if outer.inner_step >= until:
            break
    if until == STEPS:
        finish(outer, STEPS)
    if checkpoints is not None:
        checkpoints.close()
    outer.close(flush=False)
    return outer, rates, flat(bare)


@pytest.mark.parametrize("how", ["plain", "Fabric", "Accelerate"])
def test_a_resumed_job_ends_as_one_that_was_not_interrupted(tmp_path: Path, how: str) -> None:
    whole, all_rates, expected = _train(how, None)
    _train(how, tmp_path, STOPS_AT)
    again, rates, found = _train(how, tmp_path)
    assert again.start_step in (4, 8), "the last checkpoint that was whole"
    assert rates == pytest.approx(all_rates[again.start_step :]) and rates[-1] == 0.0
    assert again.status.committed_step == whole.status.committed_step == STEPS
    assert again.digest() == whole.digest() and torch.equal(found, expected)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_a_plain_loop_in_half_precision_skips_what_its_scaler_skips(tmp_path: Path, precision: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=4), group=ftopt.solo())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=precision is torch.float16)
    with optimizer:
        for step in range(8):
            with torch.autocast("cpu", precision):
                loss = model(torch.full((2, 4), 0.1 * step)).float().square().mean()
            scaler.scale(loss * float("inf") if scaler.is_enabled() and step == 3 else loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert optimizer.inner_step == optimizer.local_steps == (7 if scaler.is_enabled() else 8)
        optimizer.eval()
        torch.save(model.state_dict(), tmp_path / "model.pt")
        optimizer.train()
        with optimizer.global_parameters():
            outer = flat(model)
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(torch.cat([saved["weight"].reshape(-1), saved["bias"]]), outer) and outer.isfinite().all()

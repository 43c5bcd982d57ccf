"""Half precision in each trainer, on the CPU: a step that a scaler skips is no step of the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ftopt
from tests.integrations.running import needs
from tests.problems import flat

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec"),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]
PRECISIONS = ["bf16", "fp16"]
BAD = 3
"""The batch whose loss is infinite, in fp16."""


def scaler_of(precision: str) -> torch.amp.GradScaler | None:
    """Trainers make none by themselves where there is no GPU."""
    return torch.amp.GradScaler("cpu", init_scale=4.0) if "16" in precision and "bf16" not in precision else None


def net() -> tuple[nn.Module, ftopt.ReplicaOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=4), group=ftopt.solo())


def loss_of(model: nn.Module, batch: int, precision: str) -> Tensor:
    loss = model(torch.full((2, 4), 0.1 * batch)).float().square().mean()
    return loss * float("inf") if precision == "fp16" and batch == BAD else loss


@pytest.mark.parametrize("precision", PRECISIONS)
def test_hugging_faces_trainer(tmp_path: Path, precision: str) -> None:
    needs("transformers", "accelerate")
    from tests.integrations.test_hf import Run

    seen, run = [], Run(tmp_path, max_grad_norm=1.0, gradient_accumulation_steps=2, **{precision: True})
    compute = run.trainer.compute_loss
    run.trainer.accelerator.scaler = scaler_of(precision)

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(0)
        found: Tensor = compute(*args, **kwargs)
        return found * float("inf") if precision == "fp16" and len(seen) == BAD else found

    run.trainer.compute_loss = loss
    run.trainer.train()
    assert run.trainer.state.global_step == run.optimizer.inner_step == run.optimizer.local_steps == 10
    assert len(seen) == (22 if precision == "fp16" else 20)
    assert bool(torch.isfinite(flat(run.model)).all())
    assert next(run.model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_lightning(tmp_path: Path, precision: str, manual: bool) -> None:
    needs("lightning")
    from lightning.pytorch.plugins import MixedPrecision

    from tests.integrations.test_lightning import Data, Module, loader_of, trainer

    class Half(Module):
        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
            self.batches += 1
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            if precision == "16-mixed" and self.batches == BAD:
                loss = loss * float("inf")
            if self.automatic_optimization:
                return loss
            optimizer: Any = self.optimizers()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return None

    module = Half(manual=manual)
    scaler = scaler_of(precision)
    how: dict[str, Any] = {"precision": precision}
    if scaler is not None:
        how = {"plugins": MixedPrecision("16-mixed", "cpu", scaler=scaler)}
    run = trainer(tmp_path, **how, **({} if manual else {"gradient_clip_val": 1.0}))
    run.fit(module, loader_of(module, dataset=Data(400)))
    assert run.global_step == module.optimizer.inner_step == module.optimizer.local_steps == 10
    assert module.batches == (11 if precision == "16-mixed" else 10)
    assert bool(torch.isfinite(flat(module)).all())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fabric(precision: str) -> None:
    needs("lightning")
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    scaler = scaler_of(precision)
    plugin = MixedPrecision("16-mixed" if scaler else "bf16-mixed", "cpu", scaler=scaler)
    fabric, (bare, outer) = Fabric(accelerator="cpu", plugins=plugin), net()
    model, optimizer = fabric.setup(bare, outer)
    with outer:
        for batch in range(8):
            fabric.backward(loss_of(model, batch, precision))
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
        assert outer.inner_step == outer.local_steps == (7 if scaler else 8)
    assert bool(torch.isfinite(flat(bare)).all())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_accelerate_with_its_scheduler_and_its_saved_state(tmp_path: Path, precision: str) -> None:
    needs("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def prepared() -> tuple[Any, ...]:
        AcceleratorState._reset_state(True)
        accelerator, (bare, outer) = Accelerator(cpu=True, mixed_precision=precision), net()
        accelerator.scaler = scaler_of(precision)
        scheduler = torch.optim.lr_scheduler.LinearLR(outer, 1.0, 0.0, total_iters=10)
        return accelerator, bare, outer, *accelerator.prepare(bare, outer, scheduler)

    try:
        accelerator, bare, outer, model, optimizer, scheduler = prepared()
        with outer:
            for batch in range(8):
                accelerator.backward(loss_of(model, batch, precision))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            steps = 7 if optimizer.scaler is not None else 8
            assert outer.inner_step == scheduler.scheduler.last_epoch == steps
            optimizer.eval()
            accelerator.save_state(str(tmp_path))
            with outer.global_parameters():
                saved = flat(bare)
            optimizer.train()
        assert bool(torch.isfinite(flat(bare)).all())
        accelerator, bare, outer, *_ = prepared()
        accelerator.load_state(str(tmp_path))
        with outer:
            assert torch.equal(flat(bare), saved), "a new job starts from what was loaded"
    finally:
        AcceleratorState._reset_state(True)

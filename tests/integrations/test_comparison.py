"""``docs/comparison.md``: our side of each pair runs as it stands there, and so do torch's and Accelerate's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ftopt

PAGE = Path(__file__).resolve().parents[2] / "docs" / "comparison.md"
EVERY = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
BLOCKS = [block for block in EVERY if "import ftopt" in block]


def yours() -> tuple[nn.Linear, dict[str, Any]]:
    """What the page leaves to its reader."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    batches = [(torch.randn(8, 4), torch.zeros(8, 1)) for _ in range(12)]
    return model, {"model": model, "batches": batches, "loss_of": nn.functional.mse_loss}


def check(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(ftopt, "connect", lambda *args, **named: (asked.append(named), ftopt.solo())[1])
    model, names = yours()
    before = model.weight.detach().clone()
    exec(compile(block, str(PAGE), "exec"), names)
    (optimizer,) = [each for each in names.values() if isinstance(each, ftopt.ReplicaOptimizer)]
    assert len(asked) == 1 and optimizer.inner_step == 12 and optimizer.pending_steps == 0
    assert optimizer.status.versions[0] >= 3 and not torch.equal(model.weight, before)


def test_each_library_has_both_sides() -> None:
    assert len(BLOCKS) == 3 and len(EVERY) == 9


@pytest.mark.parametrize("block", [block for block in BLOCKS if "accelerate" not in block])
def test_our_side_runs(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(block, monkeypatch)


@pytest.mark.parametrize("method", re.findall(r"with `(ftopt\.LocalSGD\(.*\))` as the", PAGE.read_text()))
def test_our_side_runs_with_the_methods_that_the_page_names_instead(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = [block for block in BLOCKS if "ftopt.SyncSGD(clip_norm=1.0)" in block]
    check(block.replace("ftopt.SyncSGD(clip_norm=1.0)", method), monkeypatch)


def test_our_side_runs_in_a_job_with_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    (named,) = re.findall(r"with `(group = ftopt\.connect\(job=.*\))`", PAGE.read_text())
    (block,) = [block for block in BLOCKS if "group = ftopt.connect()" in block]
    check(block.replace("group = ftopt.connect()", named), monkeypatch)


@pytest.mark.trainers
def test_our_side_runs_with_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="needs the extra `trainers`")
    (block,) = [block for block in BLOCKS if "accelerate" in block]
    check(block, monkeypatch)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch.distributed.optim's own
@pytest.mark.parametrize("named", ["clip_grad_norm_(ddp", "PostLocalSGDState("])
def test_torchs_side_runs(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer
    from torch.nn.parallel import DistributedDataParallel

    (block,) = [block for block in EVERY if named in block]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    model, names = yours()
    before = model.weight.detach().clone()
    imported = (DistributedDataParallel, PostLocalSGDState, post_localSGD_hook, PostLocalSGDOptimizer)
    names |= {each.__name__: each for each in (*imported, PeriodicModelAverager)} | {"torch": torch}
    try:
        exec(compile(block, str(PAGE), "exec"), names)
    finally:
        torch.distributed.destroy_process_group()
    assert not torch.equal(model.weight, before)


@pytest.mark.trainers
def test_accelerates_side_runs() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs the extra `trainers`")
    local_sgd = pytest.importorskip("accelerate.local_sgd")
    (block,) = [block for block in EVERY if "local_sgd_steps=" in block]
    model, names = yours()
    before = model.weight.detach().clone()
    names |= {"torch": torch, "Accelerator": accelerate.Accelerator, "LocalSGD": local_sgd.LocalSGD}
    exec(compile(block, str(PAGE), "exec"), names)
    assert not torch.equal(names["model"].weight, before)

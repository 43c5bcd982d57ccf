"""Which parameters a wrapped optimizer holds, which it refuses, and what it does when they blow up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ftopt._connect import solo
from ftopt.errors import UserError
from ftopt.methods import LocalSGD
from ftopt.optimizer import ReplicaOptimizer, wrap
from tests.problems import flat, problem

TASK = problem("mlp", "adamw")


def _wrapped(method: LocalSGD | None = None) -> tuple[ReplicaOptimizer, nn.Module]:
    model = TASK.model(0)
    return wrap(TASK.inner(model.parameters()), model, method or LocalSGD(sync_every=5), group=solo()), model


def _train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        optimizer.zero_grad()
        TASK.backward(model, 0, step)
        optimizer.step()


def test_parameters_that_train_but_are_in_no_inner_optimizer_are_named() -> None:
    model = TASK.model(0)
    with pytest.raises(UserError, match=r"2 parameters train but are in no inner optimizer: 2\.weight, 2\.bias; "):
        wrap(torch.optim.SGD(model[0].parameters(), lr=0.1), model, LocalSGD(sync_every=1), group=solo())  # type: ignore[index]


def test_parameters_outside_of_the_model_are_refused() -> None:
    model, head = TASK.model(0), nn.Linear(2, 2)
    inner = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    with pytest.raises(UserError, match="2 parameters that are not in the model"):
        wrap(inner, model, LocalSGD(sync_every=1), group=solo())


def test_double_precision_is_refused_with_what_to_do() -> None:
    model = TASK.model(0).double()
    with pytest.raises(UserError, match=r"convert the model with \.float\(\)"):
        wrap(TASK.inner(model.parameters()), model, LocalSGD(sync_every=1), group=solo())


@pytest.mark.parametrize(("inner", "said"), [([], "empty list"), (["adam"], "inner is a str")])
def test_what_is_no_optimizer_is_refused(inner: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        wrap(inner, TASK.model(0), LocalSGD(sync_every=1), group=solo())


def test_wrapping_twice_is_refused() -> None:
    optimizer, model = _wrapped()
    with pytest.raises(UserError, match="wrapped already"):
        wrap(optimizer, model, LocalSGD(sync_every=1), group=solo())


def test_groups_added_after_the_start_are_refused() -> None:
    model = TASK.model(0)
    first, last = model[0], model[2]  # type: ignore[index]
    last.requires_grad_(False)
    optimizer = wrap(torch.optim.SGD(first.parameters(), lr=0.1), model, LocalSGD(sync_every=1), group=solo())
    last.requires_grad_(True)
    optimizer.add_param_group({"params": list(last.parameters())})
    with optimizer, pytest.raises(UserError, match="after the start"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_frozen_tied_and_mixed_precision_parameters_are_each_held_once_or_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = wrap(torch.optim.SGD(parameters, lr=0.1), model, LocalSGD(sync_every=1), group=solo())
    with optimizer:
        (fragment,) = optimizer._core.started().fragments
        assert fragment.view.names == ["0.bias", "0.weight", "1.bias", "1.weight"]
        assert fragment.view.numel == 40


def test_a_compiled_model_has_the_names_of_the_plain_one() -> None:
    model = TASK.model(0)
    compiled = torch.compile(model, backend="eager")
    optimizer = wrap(TASK.inner(compiled.parameters()), compiled, LocalSGD(sync_every=1), group=solo())  # type: ignore[attr-defined, arg-type]
    with optimizer:
        assert optimizer._core.started().fragments[0].view.names[0] == "0.bias"


def test_nonfinite_inner_state_starts_anew_and_training_recovers() -> None:
    optimizer, model = _wrapped(LocalSGD(sync_every=3))
    with optimizer:
        _train(optimizer, model, 4)
        optimizer.zero_grad()
        TASK.backward(model, 0, 4)
        for parameter in model.parameters():
            parameter.grad.fill_(float("nan"))  # type: ignore[union-attr]
        optimizer.step()
        assert not torch.isfinite(flat(model)).all()
        _train(optimizer, model, 1, start=5)
        assert torch.isfinite(flat(model)).all()
        _train(optimizer, model, 3, start=6)
        assert torch.isfinite(flat(model)).all() and optimizer.local_steps == 9


def test_fsdp2_shards_train_as_the_bare_inner_optimizer_does() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        bare, sharded = fully_shard(TASK.model(0), mesh=mesh), fully_shard(TASK.model(0), mesh=mesh)
        reference = TASK.inner(bare.parameters())
        optimizer = wrap(TASK.inner(sharded.parameters()), sharded, LocalSGD(sync_every=3), group=solo())
        assert isinstance(next(sharded.parameters()), DTensor)
        with optimizer:
            for step in range(10):
                _train(optimizer, sharded, 1, start=step)
                _train(reference, bare, 1, start=step)
        assert optimizer.version == 4
        for ours, theirs in zip(sharded.parameters(), bare.parameters(), strict=True):
            assert torch.equal(ours.to_local(), theirs.to_local())  # type: ignore[attr-defined]
    finally:
        torch.distributed.destroy_process_group()

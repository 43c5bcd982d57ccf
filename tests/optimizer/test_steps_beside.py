"""Who steps an inner optimizer, in place of the wrapped one or beside it, reads so in the log, at once and once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

import ftopt

SAID = "was stepped by itself: the job counts no such step"


class Sam(Optimizer):
    """SAM as it is widely copied: two half-steps, the second by an optimizer inside."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {"rho": 0.05, **settings})
        self.base_optimizer = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    def first_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=0.05)

    def second_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad, alpha=0.05)
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:
        assert closure is not None
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


def small() -> nn.Module:
    return nn.Linear(4, 2)


def backward(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(3, 4)).pow(2).mean()
    loss.backward()
    return loss


def wrapped(inner: Any, model: nn.Module, **settings: Any) -> ftopt.ReplicaOptimizer:
    return ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=3), group=ftopt.solo(), **settings)


def in_backward(model: nn.Module) -> None:
    each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: each[p].step())  # type: ignore[arg-type, index]
    with wrapped(list(each.values()), model):
        for _ in range(4):
            backward(model)


def inner_in_its_place(model: nn.Module) -> None:
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    with wrapped(inner, model):
        for _ in range(4):
            backward(model)
            inner.step()


def some_beside(model: nn.Module) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with wrapped(inner, model) as optimizer:
        for step in range(6):
            backward(model)
            (inner if step % 2 else optimizer).step()


def half_steps(model: nn.Module) -> None:
    sam = Sam(model.parameters(), lr=0.1)
    with wrapped(sam, model):
        for half in (sam.first_step, sam.second_step) * 2:
            backward(model)
            half()


def through_a_scaler(model: nn.Module) -> None:
    inner, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    with wrapped(inner, model):
        for _ in range(3):
            scaler.scale(model(torch.ones(3, 4)).mean()).backward()
            scaler.step(inner)
            scaler.update()


@pytest.mark.parametrize("mistake", [in_backward, inner_in_its_place, some_beside, half_steps, through_a_scaler])
def test_a_step_of_an_inner_optimizer_is_told_once(
    mistake: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    mistake(small())
    assert caplog.text.count(SAID) == 1


def test_the_first_such_step_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    model = small()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with wrapped(inner, model):
        backward(model)
        inner.step()
        assert SAID in caplog.text


def warm_up_and_go_on_after_the_end(model: nn.Module) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wrapped(inner, model)
    backward(model)
    inner.step()
    with optimizer:
        optimizer.step()
    inner.step()


def suspended(model: nn.Module) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with wrapped(inner, model) as optimizer:
        backward(model)
        with optimizer.suspended():
            optimizer.step()
            inner.step()


def closure_and_nested(model: nn.Module) -> None:
    with wrapped(Sam(model.parameters(), lr=0.1), model) as optimizer:
        for _ in range(4):
            backward(model)
            optimizer.step(lambda: backward(model))


def scaled(model: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu")
    with wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model) as optimizer:
        for _ in range(4):
            scaler.scale(model(torch.ones(3, 4)).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def copied(model: nn.Module) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with wrapped(inner, model) as optimizer:
        backward(model)
        optimizer.step()
        pair = copy.deepcopy((model, inner))
        backward(pair[0])
        pair[1].step()


def state_set_up_for_a_checkpoint(model: nn.Module) -> None:
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    with wrapped(inner, model) as optimizer:
        get_optimizer_state_dict(model, inner)
        backward(model)
        optimizer.step()


def another_optimizer_and_back(model: nn.Module) -> None:
    """Adaptation at test time: of the same parameters, which are put back."""
    with wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model) as optimizer:
        backward(model)
        optimizer.step()
        kept, other = copy.deepcopy(model.state_dict()), torch.optim.SGD(model.parameters(), lr=0.5)
        other.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])


def undone(model: nn.Module) -> None:
    with wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model, undo=True) as optimizer:
        backward(model)
        optimizer.step()
        ftopt.undo.undo_step(optimizer)
        optimizer.step()


HONEST = [
    warm_up_and_go_on_after_the_end, suspended, closure_and_nested, scaled, copied, state_set_up_for_a_checkpoint,
    another_optimizer_and_back, undone,
]  # fmt: skip


@pytest.mark.parametrize("honest", HONEST)
def test_honest_steps_are_not_told(honest: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture) -> None:
    honest(small())
    assert SAID not in caplog.text

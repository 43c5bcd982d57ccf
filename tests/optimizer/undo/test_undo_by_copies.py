"""`undo_step` on optimizers whose steps have no inverse: a recorded step is taken back to the bit by a copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import (
    LBFGS,
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)

import ftopt
from ftopt.errors import UserError
from tests.optimizer.undo.undoing import give_gradients, parameters


class Lamb(Optimizer):
    """Scales each tensor's step by norms of the parameters before it, and counts in its group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
        for p in parameters(self):
            with torch.no_grad():
                assert p.grad is not None
                p.sub_(p.grad, alpha=0.1 * float(p.norm() / p.grad.norm()))


KINDS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: Adagrad(p, lr=0.01),
    "nadam": lambda p: NAdam(p, lr=0.01),
    "radam": lambda p: RAdam(p, lr=0.01),
    "adamax": lambda p: Adamax(p, lr=0.01),
    "adafactor": lambda p: Adafactor(p, lr=0.01),
    "amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "small beta": lambda p: AdamW(p, lr=0.01, betas=(0.0, 0.9)),
    "strong decay": lambda p: SGD(p, lr=0.1, weight_decay=20.0),
    "norms": lambda p: Lamb(p, lr=0.1),
}


def made_of(kind: str) -> Optimizer:
    torch.manual_seed(0)
    return ftopt.undo.undoable(
        KINDS[kind]([torch.nn.Parameter(torch.randn(shape)) for shape in ((7, 5), (33,), (2, 3, 4))])
    )


def held(made: Optimizer) -> tuple[list[Tensor], dict[Any, Any], list[dict[str, Any]]]:
    groups = [{name: value for name, value in group.items() if name != "params"} for group in made.param_groups]
    return [p.detach().clone() for p in parameters(made)], copy.deepcopy(made.state_dict()["state"]), groups


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_taken_back_to_the_bit_and_can_be_taken_again(kind: str, steps: int) -> None:
    made = made_of(kind)
    for _ in range(steps):
        give_gradients(made)
        made.step()
    give_gradients(made)
    before = held(made)
    made.step()
    after = held(made)
    assert ftopt.undo.undo_step(made) == ftopt.undo.Undone(whole=True, reverted=3, untouched=0)
    assert_same(held(made), before)
    made.step()
    assert_same(held(made), after)


@pytest.mark.parametrize("kind", ["rmsprop", "adamax", "amsgrad"])
def test_a_step_that_raised_half_way_is_repaired(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_of(kind)
    for _ in range(2):
        give_gradients(made)
        made.step()
    give_gradients(made)
    before = held(made)
    own = type(made).step

    def breaks_off(self: Optimizer, closure: Any = None) -> Any:
        with torch.no_grad():
            parameters(self)[0].add_(1.0)
            self.state[parameters(self)[1]]["step"] += 1
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(made), "step", Optimizer.profile_hook_step(breaks_off))
    with pytest.raises(RuntimeError, match="out of memory"):
        made.step()
    monkeypatch.setattr(type(made), "step", own)
    assert ftopt.undo.undo_step(made) == ftopt.undo.Undone(whole=False, reverted=1, untouched=2)
    assert_same(held(made), before)


def test_a_closure_is_called_within_the_step() -> None:
    p = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    made = ftopt.undo.undoable(LBFGS([p], lr=0.1))

    def closure() -> Tensor:
        made.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    made.step(closure)
    before = held(made)
    made.step(closure)
    ftopt.undo.undo_step(made)
    assert_same(held(made), before)


def test_a_rate_that_a_schedule_has_set_since_stays() -> None:
    made = made_of("nadam")
    give_gradients(made)
    made.step()
    made.param_groups[0]["lr"] = 0.5
    ftopt.undo.undo_step(made)
    assert made.param_groups[0]["lr"] == 0.5


def test_what_is_no_last_step_is_refused() -> None:
    made = made_of("nadam")
    with pytest.raises(UserError, match="none has been taken since its steps are recorded"):
        ftopt.undo.undo_step(made)
    give_gradients(made)
    made.step()
    with torch.no_grad():
        parameters(made)[1].add_(1.0)
    with pytest.raises(UserError, match=r"parameter 1 \(33,\) has been changed since the step"):
        ftopt.undo.undo_step(made)
    made.step()
    ftopt.undo.undo_step(made)
    with pytest.raises(UserError, match="the last one is undone already"):
        ftopt.undo.undo_step(made)
    made.step()
    made.load_state_dict(made.state_dict())
    with pytest.raises(UserError, match="its state has been loaded since"):
        ftopt.undo.undo_step(made)

"""Steps that were broken off, at every operation of every variant, and what `undo_step` makes of them."""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

import ftopt
from ftopt.errors import UserError
from tests.optimizer.undo.undoing import (
    KINDS,
    RULES,
    Held,
    assert_undone,
    give_gradients,
    optimizer,
    parameters,
)


class Broken(RuntimeError):
    """What the test raises inside of a step."""


class Breaks(TorchFunctionMode):
    """Raises instead of the n-th operation that changes a tensor in place."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if (name.endswith("_") and not name.endswith("__")) or name == "__iadd__":
            if self.left == 0:
                raise Broken
            self.left -= 1
        return func(*args, **(kwargs or {}))


def broken_off(made: Optimizer, at: int) -> bool:
    """Takes a step that is broken off before operation ``at``; False when it is through before."""
    try:
        with Breaks(at):
            made.step()
    except Broken:
        return True
    return False


def _made(rule: str, kind: str, steps: int, **more: Any) -> tuple[Optimizer, Held, Held]:
    """An optimizer before a step: what it holds, and what it would hold after it."""
    torch.manual_seed(7)
    made = optimizer(rule, kind, **more)
    for _ in range(steps):
        give_gradients(made)
        made.step()
    give_gradients(made)
    whole = _copy(made)
    whole.step()
    return made, Held.by(made), Held.by(whole)


def _copy(made: Optimizer) -> Optimizer:
    copied = copy.deepcopy(made)
    for p, q in zip(parameters(made), parameters(copied), strict=True):
        q.grad = p.grad
    return copied


def cases() -> Iterator[tuple[str, str, int]]:
    """Each rule and kind before a first step or after some; those of the usual optimizers both."""
    for number, (rule, kind) in enumerate(itertools.product(RULES, KINDS)):
        for steps in (0, 3) if rule in ("momentum", "adamw") else (3 * (number % 2),):
            yield rule, kind, steps


@pytest.mark.parametrize(("rule", "kind", "steps"), list(cases()))
def test_a_step_broken_off_at_any_operation_is_repaired(rule: str, kind: str, steps: int) -> None:
    start, before, after = _made(rule, kind, steps)
    every = 1 if kind != "loop" or rule in ("momentum", "adam, decay", "adamw") else 7
    breaks = 0
    for at in itertools.count(step=every):
        made = ftopt.undo.undoable(_copy(start))
        if not broken_off(made, at):
            break
        undone = ftopt.undo.undo_step(made)
        assert not undone.whole
        assert undone.reverted + undone.untouched == 5
        assert at > 0 or undone.reverted == 0
        assert_undone(made, before, after)
        made.step()
        assert_undone(made, after, after, cycles=2)
        breaks += 1
    assert breaks >= (1 if every > 1 else 2), "nothing was broken off"


@pytest.mark.parametrize("kind", ["loop", "foreach"])
@pytest.mark.parametrize("rule", ["momentum", "adam", "adamw"])
def test_a_step_broken_off_after_recorded_ones_is_repaired(rule: str, kind: str) -> None:
    for at in itertools.count(step=5):
        torch.manual_seed(7)
        made = ftopt.undo.undoable(optimizer(rule, kind))
        for step in range(4):
            give_gradients(made)
            parameters(made)[step % 2].grad = None  # counts, and when states begin, are not alike
            made.step()
        ftopt.undo.undo_step(made)
        give_gradients(made)
        before, whole = Held.by(made), _copy(made)
        whole.step()
        if not broken_off(made, at):
            break
        assert not ftopt.undo.undo_step(made).whole
        assert_undone(made, before, Held.by(whole))
    assert at


@pytest.mark.parametrize("rule", ["momentum", "adamw"])
def test_moments_written_to_by_hand_before_a_broken_step_come_back_as_they_were_written(rule: str) -> None:
    made = ftopt.undo.undoable(optimizer(rule, "loop"))
    for _ in range(2):
        give_gradients(made)
        made.step()
    last = parameters(made)[-1]
    moment = "momentum_buffer" if rule == "momentum" else "exp_avg"
    give_gradients(made)
    made.state[last][moment].mul_(0.5)
    whole = _copy(made)
    whole.step()
    before, after = Held.by(made), Held.by(whole)
    assert broken_off(made, 3)
    assert ftopt.undo.undo_step(made).untouched
    assert_undone(made, before, after)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["adam", "adamw"])
@pytest.mark.parametrize("steps", [0, 3])
def test_without_a_record_step_counts_tell_of_a_break_between_groups(
    rule: str, kind: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, before, after = _made(rule, kind, steps)
    _breaks_in_group(monkeypatch, "adam", 1)
    with pytest.raises(Broken):
        made.step()
    assert ftopt.undo.undo_step(made) == ftopt.undo.Undone(whole=False, reverted=3, untouched=2)
    monkeypatch.undo()
    if steps:
        assert_undone(made, before, after)
    made.step()
    assert_undone(made, after, after, cycles=2)


def _breaks_in_group(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    module = importlib.import_module(f"torch.optim.{name}")
    real, seen = getattr(module, name), iter(range(9))

    def function(*args: Any, **kwargs: Any) -> None:
        if next(seen) == number:
            raise Broken
        real(*args, **kwargs)

    monkeypatch.setattr(module, name, function)


def test_without_a_record_momentum_that_has_not_begun_tells_of_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    made, before, after = _made("nesterov", "fused", 0)
    _breaks_in_group(monkeypatch, "sgd", 1)
    with pytest.raises(Broken):
        made.step()
    assert ftopt.undo.undo_step(made) == ftopt.undo.Undone(whole=False, reverted=3, untouched=2)
    assert_undone(made, before, after)


def test_without_a_record_counts_that_say_nothing_are_refused() -> None:
    made, _, _ = _made("adamw", "loop", 2)
    parameters(made)[0].grad = None
    made.step()
    give_gradients(made)
    made.step()  # the first parameter is one step behind the others, and no step stops there
    with pytest.raises(
        UserError, match=r"cannot tell what the step did: step counts of 3 to 4; call ftopt\.undo\.undoable"
    ):
        ftopt.undo.undo_step(made)
    ftopt.undo.undoable(made)
    made.step()
    assert ftopt.undo.undo_step(made).whole


def test_a_closure_that_raises_leaves_nothing_to_revert() -> None:
    made = ftopt.undo.undoable(_made("adamw", "foreach", 2)[0])
    before = Held.by(made)

    def closure() -> float:
        raise Broken

    with pytest.raises(Broken):
        made.step(closure)
    assert ftopt.undo.undo_step(made).reverted == 0
    assert_undone(made, before, before)


def test_fused_tensors_without_a_telling_gradient_are_refused() -> None:
    for scale in (0.0, 1.0):
        made = ftopt.undo.undoable(_made("sgd", "fused", 1)[0])
        give_gradients(made, scale=scale)
        assert broken_off(made, 1)
        if scale:
            assert ftopt.undo.undo_step(made).reverted == 3
            continue
        with pytest.raises(UserError, match="cannot tell how far the step has come: it was broken off among fused"):
            ftopt.undo.undo_step(made)


def test_a_parameter_changed_by_more_than_the_step_is_refused() -> None:
    made = ftopt.undo.undoable(_made("momentum", "loop", 1)[0])
    assert broken_off(made, 6)
    with torch.no_grad():
        parameters(made)[0].add_(1.0)
    with pytest.raises(UserError, match=r"parameter 0 \(7, 5\) of group 0 has been changed by more than the step"):
        ftopt.undo.undo_step(made)


def test_a_gradient_dropped_after_the_break_is_missed() -> None:
    made = ftopt.undo.undoable(_made("adam", "loop", 1)[0])
    assert broken_off(made, 9)
    parameters(made)[0].grad = None
    with pytest.raises(UserError, match=r"gone or has been changed: parameter 0 \(7, 5\) of group 0"):
        ftopt.undo.undo_step(made)

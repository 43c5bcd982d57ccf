"""What the code of a user's own method raises, or returns that is of no use, reaches the training thread at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt.errors import UserError
from ftopt.methods import Execution, Method


@dataclass(frozen=True, kw_only=True)
class Own(Method):
    name: ClassVar[str] = "own"

    sync_every: int = 1
    makes: Callable[[Tensor], Any] = field(default=lambda anchor: None)

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(anchor)}

    def outer_step(self, anchor: Tensor, state: Any, mean: Tensor, round: Any) -> Any:
        return self.makes(anchor)


def raises(anchor: Tensor) -> Any:
    return {}["nothing"]


@pytest.mark.parametrize(
    ("makes", "said"),
    [
        (raises, "outer_step() failed: KeyError"),
        (lambda anchor: None, "outer_step() returns NoneType None; must be (next anchor, next outer state)"),
        (lambda anchor: (anchor.clone(), None), "must be (next anchor, next outer state)"),
        (lambda anchor: (torch.zeros(3), {"momentum": anchor.clone()}), "another anchor"),
        (lambda anchor: (anchor.double(), {"momentum": anchor.clone()}), "another anchor"),
        (lambda anchor: (anchor.clone(), {}), "another momentum"),
        (lambda anchor: (anchor.clone(), {"momentum": anchor.clone(), "more": anchor.clone()}), "another more"),
    ],
)
def test_what_it_returns_must_be_like_what_there_is(makes: Callable[[Tensor], Any], said: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, Own(makes=makes), group=ftopt.solo())
    with pytest.raises(UserError) as error, optimizer:
        for _ in range(3):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
    assert "method own: " in str(error.value) and said in str(error.value)


@dataclass(frozen=True, kw_only=True)
class Careless(Method):
    """Each of its answers can be replaced."""

    name: ClassVar[str] = "careless"

    sync_every: int = 1
    answers: dict[str, Any] = field(default_factory=dict)

    def _answer(self, what: str, usual: Any) -> Any:
        answer = self.answers.get(what, usual)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    @property
    def execution(self) -> Execution:
        return Execution(elementwise=self.answers.get("elementwise", False))

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        return self._answer("init", {})  # type: ignore[no-any-return]

    def weight(self, stats: Any) -> float:
        return self._answer("weight", 1.0)  # type: ignore[no-any-return]

    def payload(self, view: Any, out: Tensor) -> Tensor:
        return self._answer("payload", super().payload(view, out))  # type: ignore[no-any-return]

    def scalars(self, view: Any) -> tuple[float, ...]:
        return self._answer("scalars", ())  # type: ignore[no-any-return]

    def outer_step(self, anchor: Tensor, state: Any, mean: Tensor, round: Any) -> Any:
        return self._answer("outer_step", (anchor - mean, {}))

    def average(self, anchor: Tensor, mean: Tensor, round: Any) -> Tensor:
        return self._answer("average", super().average(anchor, mean, round))  # type: ignore[no-any-return]


RAISED = [RuntimeError("x"), ConnectionError("x"), TimeoutError("x"), InterruptedError("x"), ZeroDivisionError("x")]


CALLS = ["weight", "payload", "scalars", "average", "init"]


@pytest.mark.parametrize(
    ("what", "error", "elementwise"),
    [
        *(("outer_step", error, False) for error in RAISED),  # errors of the network among them
        ("outer_step", RAISED[0], True),
        *((what, RAISED[number], elementwise) for number, what in enumerate(CALLS) for elementwise in (False, True)),
    ],
    ids=repr,
)
def test_what_it_raises_is_raised_at_once_whatever_that_is(what: str, error: Exception, elementwise: bool) -> None:
    method = Careless(answers={what: error, "elementwise": elementwise}, average_until_step=4 * (what == "average"))
    with pytest.raises(UserError, match=rf"method careless: {what}\(\) failed: {type(error).__name__}: x") as got:
        _train(method)
    assert got.value.__cause__ is error


NOTHING = torch.zeros(0)
ANSWERS: dict[str, tuple[Any, ...]] = {
    "weight": (None, "1", float("nan"), float("inf"), -1, 1e25, True, torch.tensor(2.0)),
    "init": (None, [], {"m": 3.0}, {1: torch.zeros(10)}, {"m": torch.zeros(3)}),
    "payload": (None, NOTHING, torch.zeros(10)),
    "scalars": (None, 1.0, ("1",), [1.0]),
    "outer_step": (None, "x", (NOTHING, {}), (torch.zeros(()), {}), (torch.zeros(10), None)),
    "average": (None, NOTHING, torch.zeros(10, dtype=torch.float64)),
}


@pytest.mark.parametrize(
    ("what", "answer", "elementwise"),
    [
        (what, answer, elementwise)
        for what, answers in ANSWERS.items()
        for number, answer in enumerate(answers)
        for elementwise in (False, True)  # it makes outer steps by pieces
        if elementwise == (number % 2 == 1) or what in ("outer_step", "average")
    ],
    ids=repr,
)
def test_what_is_of_no_use_is_refused(what: str, answer: Any, elementwise: bool) -> None:
    method = Careless(answers={what: answer, "elementwise": elementwise}, average_until_step=4 * (what == "average"))
    with pytest.raises(UserError, match=rf"method careless: {what}\(\) (gives|returns|returned)"):
        _train(method)


def _train(method: Method) -> None:
    model = nn.Linear(4, 2)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, method, group=ftopt.solo())
    with optimizer:
        for _ in range(3):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("name", ["usual", "agreed", "present"])
def test_its_outer_state_has_names_of_its_own(name: str) -> None:
    model = nn.Linear(4, 2)
    method = Careless(answers={"init": {name: torch.zeros(())}})
    with pytest.raises(UserError, match=f"method careless: init.. names outer state {name}; .* another name"):
        optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, method, group=ftopt.solo())
        optimizer.__enter__()

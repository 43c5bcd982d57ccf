"""What a method of the user's own gets wrong in `outer_step` reaches the training thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import ftopt


@dataclass(frozen=True, kw_only=True)
class Own(ftopt.Method):
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
    with pytest.raises(ftopt.UserError) as error, optimizer:
        for _ in range(3):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
    assert "method own: " in str(error.value) and said in str(error.value)

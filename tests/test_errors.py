"""What a user sees of an error that a script of their own has made."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ftopt
from ftopt.errors import UserError, without_internals


def _joins_nobody() -> None:
    model = nn.Linear(4, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    group = ftopt.connect("http://127.0.0.1:9", "r0", connect_s=0.0)
    with ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=2), group=group):
        pass


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: ftopt.connect("nowhere"),
        lambda: ftopt.wrap(1, 2, 3),  # type: ignore[arg-type,call-arg]
        lambda: ftopt.wrap(1, 2, 3, group=ftopt.solo()),  # type: ignore[arg-type]
        lambda: ftopt.recipe("diloco_bytes", ["lr=1"]),
        lambda: ftopt.recipe("dilco_bytes"),
        _joins_nobody,
    ],
)
def test_a_traceback_ends_behind_the_line_of_the_script_that_is_wrong(mistake: Callable[[], object]) -> None:
    with pytest.raises(UserError) as caught:
        mistake()
    here, script, behind = traceback.extract_tb(caught.value.__traceback__)
    assert here.filename == script.filename == __file__ and behind.name == "call"
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_the_cause_of_an_error_is_shown_as_it_is() -> None:
    @without_internals
    def fails() -> None:
        try:
            int("five")
        except ValueError as error:
            raise UserError("give a number") from error

    with pytest.raises(UserError, match="give a number") as caught:
        fails()
    assert isinstance(caught.value.__cause__, ValueError) and caught.value.__cause__.__traceback__ is not None

"""A number is a number, whatever the user has computed it with."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import ftopt
from ftopt.errors import UserError, plain_number
from ftopt.outer import SGD, Adam

WHOLE: list[Callable[[int], Any]] = [numpy.int64, numpy.uint8, numpy.array, torch.tensor, lambda n: torch.tensor([n])]
REAL: list[Callable[[float], Any]] = [numpy.float64, numpy.float32, torch.tensor, Fraction, Decimal]


@pytest.mark.parametrize("of", WHOLE)
def test_settings_that_are_whole_numbers_are_ints(of: Callable[[int], Any], tmp_path: Path) -> None:
    method = ftopt.DiLoCo(sync_every=of(5))
    assert method == ftopt.DiLoCo(sync_every=5) and type(method.sync_every) is int
    assert type(ftopt.FaultPolicy(start_replicas=of(2)).start_replicas) is int
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ftopt.wrap(inner, model, method, group=ftopt.solo())
    ftopt.Checkpoints(tmp_path, optimizer, every=of(3), keep=of(2))
    assert len(ftopt.local_groups(of(2))) == 2
    data = torch.utils.data.TensorDataset(torch.zeros(8, 2))
    assert len(list(ftopt.DataLoader(data, batch_size=of(4), epochs=of(1), seed=of(7)))) == 2


@pytest.mark.parametrize("of", REAL)
def test_settings_that_are_real_numbers_are_floats(of: Callable[[float], Any]) -> None:
    method = ftopt.DiLoCo(sync_every=5, outer=SGD(lr=of(0.5), momentum=of(0.25)))
    assert method == ftopt.DiLoCo(sync_every=5, outer=SGD(lr=0.5, momentum=0.25))
    assert type(method.outer.lr) is float  # type: ignore[union-attr]
    assert list(Adam(lr=of(0.5), betas=(of(0.5), of(0.25))).betas) == [0.5, 0.25]
    assert type(ftopt.FaultPolicy(grace_s=of(2.5)).grace_s) is float


@pytest.mark.parametrize("wrong", [numpy.float64(2.5), numpy.bool_(True), torch.ones(2), "5", numpy.array([5, 5]), 1j])
def test_what_is_no_whole_number_is_refused(wrong: object) -> None:
    with pytest.raises(UserError, match="sync_every="):
        ftopt.DiLoCo(sync_every=wrong)  # type: ignore[arg-type]


def test_what_is_no_number_stays_as_it_is() -> None:
    for value in (None, "5", [1, "a"], {"a": numpy.float64(1)}, torch.ones(2), torch.float32, nn.Linear(1, 1), print):
        assert plain_number(value) is value or plain_number(value) == value

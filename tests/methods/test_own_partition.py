"""What a method of the user's own gets wrong in `partition`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import ftopt
from ftopt.errors import UserError
from ftopt.fragments import Parameter


@dataclass(frozen=True, kw_only=True)
class Cut(ftopt.LocalSGD):
    parts: tuple[tuple[str, ...], ...] = ()

    def partition(self, parameters: Sequence[Parameter]) -> list[list[str]]:
        return [list(part) for part in self.parts]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((("weight",),), "partition() gives 'bias' to 0 fragments"),
        ((("weight", "bias"), ("bias",)), "partition() gives 'bias' to 2 fragments"),
        ((("weight", "bias", "scale"),), "partition() gives 'scale' to 1 fragment;"),
        ((("weight", "bias"), ()), "partition() gives [['weight', 'bias'], []]"),
        ((), "partition() gives 'weight' to 0 fragments"),
    ],
)
def test_each_parameter_belongs_to_one_fragment(parts: tuple[tuple[str, ...], ...], said: str) -> None:
    model = nn.Linear(4, 2)
    method = Cut(sync_every=2, parts=parts)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, method, group=ftopt.solo())
    with pytest.raises(UserError) as error, optimizer:
        pass
    assert said in str(error.value) and "must give each trained parameter to one fragment" in str(error.value)

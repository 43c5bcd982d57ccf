"""Replicas whose models have the same names, made in another order, as from a set of strings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt.errors import Refused
from ftopt.methods import Method
from tests.optimizer.running import PATIENT, together

METHODS = {
    "diloco": ftopt.DiLoCo(sync_every=2), "buffers": ftopt.LocalSGD(sync_every=2, buffers="mean"),
    "syncsgd": ftopt.SyncSGD(verify_every=2), "moments": ftopt.SlowMo(sync_every=2, inner_state="average"),
    "paft": ftopt.PAFT(sync_every=2),
}  # fmt: skip


def model_of(order: Sequence[str]) -> nn.ModuleDict:
    torch.manual_seed(0)
    made = {name: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for name in sorted(order)}
    return nn.ModuleDict({name: made[name] for name in order})


def named(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in sorted(model.named_parameters())}


def run(method: Method, orders: Sequence[str]) -> list[tuple[dict[str, Tensor], str]]:
    groups = ftopt.local_groups(len(orders), policy=PATIENT)
    models = [model_of(order) for order in orders]

    def replica(m: int) -> tuple[dict[str, Tensor], str]:
        model, chance = models[m], torch.Generator().manual_seed(m)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = ftopt.wrap(inner, model, method, group=groups[m])
        with optimizer:
            for _ in range(6):
                optimizer.zero_grad()
                inputs = torch.randn(8, 4, generator=chance)
                loss: Tensor = torch.stack([model[name](inputs).pow(2).mean() for name in "abc"]).sum()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            optimizer.sync()
            with optimizer.global_parameters():
                return named(model), optimizer.digest()

    return together([partial(replica, m) for m in range(len(orders))])


@pytest.mark.parametrize("method", METHODS)
def test_the_order_in_which_modules_were_made_changes_nothing(method: str) -> None:
    expected, found = run(METHODS[method], ["abc", "abc"]), run(METHODS[method], ["abc", "cab"])
    (first, digest), (second, other) = found
    assert digest == other
    for name, tensor in expected[0][0].items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], tensor)


def test_of_fragments_in_another_order_the_refusal_says_so() -> None:
    groups = ftopt.local_groups(2, policy=ftopt.FaultPolicy(start_replicas=1, grace_s=60.0, dead_after_s=60.0))
    method = ftopt.StreamingDiLoCo(sync_every=6, fragments=ftopt.fragments.Balanced(n=3))
    first, second = (
        ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, method, group=group)
        for model, group in zip([model_of("abc"), model_of("cab")], groups, strict=True)
    )
    said = r"the same names, .* modules were made in another order"
    with first, pytest.raises(Refused, match=said), second:
        pass

"""The comparison of live models and inner states."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ftopt.step.inner import Inner
from ftopt.step.tensors.live import Live
from tests.step.outer.test_alike import flip


class Odd(torch.optim.SGD):
    """Keeps state of many kinds."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["codes"] = torch.arange(5, dtype=torch.uint8)
                state["small"] = torch.ones(3, dtype=torch.float8_e4m3fn)
                state["mask"] = torch.tensor([True, False])
                state["none"], state["count"], state["empty"] = None, 3, torch.empty(0)
                state["scalar"] = torch.tensor(2, dtype=torch.int8)


def made(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[nn.Module, torch.optim.Optimizer, Live]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2).to(torch.bfloat16))
    inner = optimizer(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    inner.step()
    return model, inner, Live(model, Inner([inner]))


@pytest.mark.parametrize("bit", range(32))
def test_any_one_bit_of_any_tensor_changes_the_digest(bit: int) -> None:
    model, inner, live = made()
    before = live.compared()[0]
    weight = next(model.parameters())
    for tensor in (weight, inner.state[weight]["exp_avg"], inner.state[weight]["exp_avg_sq"]):
        flip(tensor, bit)
        assert live.compared()[0] != before
        flip(tensor, bit)
        assert live.compared()[0] == before


def test_the_peak_is_the_largest_number_and_infinity_for_what_is_none() -> None:
    model, inner, live = made()
    assert 0 < live.compared()[1] < 1.0
    weight = next(model.parameters())
    inner.state[weight]["step"].fill_(50_000)  # a counter is no such number
    assert live.compared()[1] < 1.0
    inner.state[weight]["exp_avg"].view(-1)[7] = -9.0
    assert live.compared()[1] == 9.0
    with torch.no_grad():
        weight.view(-1)[3] = math.nan
    assert live.compared()[1] == math.inf


def test_state_of_any_kind_can_be_compared() -> None:
    model, inner, live = made(Odd)
    before = live.compared()[0]
    for name in ("codes", "small", "mask", "scalar"):
        state = inner.state[next(model.parameters())]
        kept, state[name] = state[name], torch.zeros_like(state[name])
        assert live.compared()[0] != before, name
        state[name] = kept
    assert live.compared()[0] == before


def test_large_tensors_are_compared_in_pieces_and_small_ones_together() -> None:
    model = nn.Sequential(nn.Linear(1200, 1100), *(nn.Linear(3, 3) for _ in range(50)))
    live = Live(model, Inner([torch.optim.SGD(model.parameters(), lr=1.0)]))
    before = live.compared()[0]
    for parameter in (model[0].weight, model[7].bias):
        with torch.no_grad():
            parameter.view(-1)[-1] += 1
        assert live.compared()[0] != before
        before = live.compared()[0]


def test_a_step_at_fetched_rates_keeps_what_the_optimizer_counts_in_its_groups() -> None:
    _, inner, live = made()
    group = inner.param_groups[0]
    group["k"] = 0
    with live.stepping({"rate.0.lr": torch.tensor(0.5, dtype=torch.float64)}):
        assert group["lr"] == 0.5
        group["k"] += 1
    assert (group["lr"], group["k"]) == (1e-3, 1)

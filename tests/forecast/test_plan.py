"""What a recipe's job will reach on given machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import ftopt
from ftopt.codecs.named import codec_named
from ftopt.config.optimizers import parameters_of
from ftopt.config.schema import Recipe
from ftopt.forecast.plan import HEADERS, Forecast, Machines, forecast, link_seconds
from ftopt.methods import Method
from ftopt.run.preview import Plan, _state_bytes, plan_of
from ftopt.sync.protocol.policy import FaultPolicy

MACHINES = Machines(step_s=0.1, gbit_s=1.0, latency_s=0.01, round_s=0.02, element_s=0.0)


def of(
    method: Method,
    machines: Machines = MACHINES,
    *,
    replicas: int = 2,
    codec: str = "fp32",
    **policy: object,
) -> Forecast:
    recipe = Recipe(name="a", method=replace(method, codec=codec), replicas=replicas, policy=FaultPolicy(**policy))  # type: ignore[arg-type]
    return forecast(recipe, plan(recipe), machines)


def plan(recipe: Recipe) -> Plan:
    model = nn.ParameterList([torch.empty(500_000) for _ in range(4)])
    inner = [torch.optim.SGD(model.parameters(), lr=0.1)]
    return plan_of(recipe, model, inner, recipe.method.partition(parameters_of(model)))


def test_a_blocking_outer_step_adds_link_latency_and_its_own_time() -> None:
    outer_s = HEADERS * 8 * 8_000_000 / 1e9 + 3 * 0.01 + 0.02  # 2M parameters; two round trips, and one of the ring
    got = of(ftopt.DiLoCo(sync_every=20))
    assert got.utilization == pytest.approx(2.0 / (2.0 + outer_s))
    assert got.goodput == got.utilization
    assert got.sync_bytes == 8_000_000
    assert got.bytes_s == pytest.approx(8_000_000 / (2.0 + outer_s))


def test_synchronous_training_pays_at_each_step() -> None:
    assert of(ftopt.SyncSGD()).utilization < of(ftopt.DiLoCo(sync_every=2)).utilization < 0.8


def test_a_delay_hides_the_outer_step_but_for_a_fifth_of_its_own_time() -> None:
    fragments = ftopt.fragments.Balanced(n=4)
    got = of(ftopt.StreamingDiLoCo(sync_every=20, delay=2, fragments=fragments))
    assert got.utilization == pytest.approx(2.0 / (2.0 + 4 * 0.2 * 0.02))
    assert got.sync_bytes == 2_000_000


def test_a_codec_sends_less_and_takes_its_own_time() -> None:
    plain, coded = of(ftopt.DiLoCo(sync_every=20)), of(ftopt.DiLoCo(sync_every=20), codec="int8")
    assert coded.sync_bytes < plain.sync_bytes / 3.9
    busy = replace(MACHINES, codec_s={"int8": 1e-6})
    assert of(ftopt.DiLoCo(sync_every=20), busy, codec="int8").utilization < plain.utilization
    assert codec_named("int8").encoded_bytes(1_000_000) < 1_020_000


def test_one_replica_sends_nothing() -> None:
    got = of(ftopt.DiLoCo(sync_every=20), replicas=1)
    assert got.bytes_s == got.sync_bytes == got.stall_s == 0
    assert got.utilization == pytest.approx(2.0 / 2.02)


def test_failures_cost_pending_steps_the_return_and_the_others_wait() -> None:
    fast = replace(MACHINES, gbit_s=1e9, latency_s=0.0, round_s=0.0, start_s=10.0)
    got = of(ftopt.DiLoCo(sync_every=20), replace(fast, mtbf_s=1000.0), replicas=4, dead_after_s=1.0)
    assert got.pending_s == pytest.approx(1.0)
    assert got.stall_s == pytest.approx(0.25)  # a second in half of the moments of a round of two: on average a quarter
    assert got.goodput == pytest.approx((1000 - 1.0 - 3 * 0.25) / 1010)
    assert of(ftopt.DiLoCo(sync_every=200), replace(fast, mtbf_s=60.0)).goodput < got.goodput
    assert of(ftopt.DiLoCo(sync_every=20), replace(fast, mtbf_s=0.5), dead_after_s=1.0).goodput == 0.0


def test_rounds_that_are_shorter_than_the_silence_wait_for_most_of_it() -> None:
    fast = replace(MACHINES, gbit_s=1e9, latency_s=0.0, round_s=0.0)
    assert of(ftopt.SyncSGD(), fast, dead_after_s=3.0).stall_s == pytest.approx(3.0 - 0.05)


def test_mixing_overwrites_a_share_of_the_overlapped_steps() -> None:
    method = ftopt.StreamingDiLoCo(sync_every=20, delay=4, mix=0.5, fragments=ftopt.fragments.Balanced(n=2))
    got = of(method)
    assert got.discarded == pytest.approx(0.1)
    assert got.goodput == pytest.approx(0.9 * got.utilization)


def test_gradients_and_parameters_of_one_method_are_both_sent() -> None:
    both, gradients = of(ftopt.PAFT(sync_every=10)), of(ftopt.SyncSGD())
    assert both.utilization < gradients.utilization
    assert both.pending_s < 1.0


def test_link_seconds_count_headers() -> None:
    assert link_seconds(125_000_000, MACHINES) == pytest.approx(HEADERS)


def test_the_memory_of_an_optimizer_s_state_is_what_its_tensors_take() -> None:
    assert _state_bytes(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)) == 0
    assert _state_bytes(torch.optim.AdamW([nn.Parameter(torch.zeros(1))])) == 8
    torchao = pytest.importorskip("torchao.optim", exc_type=ImportError)  # its versions go with those of torch
    with torch.compiler.set_stance("force_eager"):  # its step would be compiled with a C++ compiler
        got = _state_bytes(torchao.AdamW8bit([nn.Parameter(torch.zeros(1))]))
    assert got == 2, "not 8, although its tensors claim to be fp32"

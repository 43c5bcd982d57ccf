"""Every method x inner optimizer x number of replicas x codec against its plain loop (``tests/reference``), 100 steps.

All of it bit for bit, the codecs too: in one process sums run in the order of the ranks, as in the loops, and what a
codec makes of a block depends on nothing but the block, which begins at the same places in both. So no bound of a codec
is needed here; ``tests/codecs`` has those. Gloo adds fp32 up in an order of its own, which moves the result by less
than 1e-6; encoded payloads it moves as they are, and the sums are ours again: bit for bit.

The default run has those of the product in which each pair of settings occurs once at least (PAFT's overlap goes by the
codec), without fp32, which the methods' own tests run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import Tensor

from ftopt.fragments import Strided
from ftopt.methods import PAFT, DecoupledDiLoCo, DiLoCo, LocalSGD, Method, SlowMo, StreamingDiLoCo, SyncSGD
from ftopt.step.tensors.flat import parameters
from ftopt.transport.gloo import GlooTransport
from tests.optimizer.running import Noise, train_and_look
from tests.problems import Problem, problem
from tests.reference.codecs import Mean
from tests.reference.decoupled import radial
from tests.reference.diloco import diloco
from tests.reference.local_sgd import local_sgd
from tests.reference.paft import paft
from tests.reference.slowmo import slowmo
from tests.reference.streaming import Combine, streaming
from tests.reference.sync_sgd import sync_sgd

H, STEPS, LONG_S = 10, 100, 60.0
DELAY = 7
"""More than the 5 steps between two fragments: both are under way at once."""

Expected = tuple[list[Tensor] | None, list[list[Tensor]]]
"""The anchor (None: the method has none of parameters) and each replica's parameters, tensor by tensor."""


@dataclass(frozen=True)
class Case:
    """A method, and its loop: (problem, replicas, how they average) -> what comes out."""

    method: Method
    loop: Callable[[Problem, int, Mean], Expected]
    noise: Noise | None = None


def _alike(anchor: list[Tensor], replicas: int) -> Expected:
    return anchor, [anchor] * replicas


def _diloco(task: Problem, replicas: int, mean: Mean) -> Expected:
    return _alike(diloco(task, replicas=replicas, sync_every=H, steps=STEPS, mean=mean), replicas)


def _local_sgd(task: Problem, replicas: int, mean: Mean) -> Expected:
    return _alike(local_sgd(task, replicas=replicas, sync_every=H, steps=STEPS, mean=mean), replicas)


def _slowmo(task: Problem, replicas: int, mean: Mean) -> Expected:
    found = slowmo(task, replicas=replicas, sync_every=H, steps=STEPS, alpha=0.9, beta=0.6, mean=mean)
    return _alike(found, replicas)


def _sync_sgd(task: Problem, replicas: int, mean: Mean) -> Expected:
    return None, [sync_sgd(task, replicas=replicas, steps=STEPS, mean=mean)] * replicas


def _spoil(replica: int, step: int, gradients: list[Tensor]) -> None:
    """Of replicas whose gradients stay alike PAFT would average equal parameters."""
    chance = torch.Generator().manual_seed(1000 * step + replica)
    for gradient in gradients:
        gradient.add_(torch.randn(gradient.shape, generator=chance) * 0.01)


def _paft(overlap: bool) -> Callable[[Problem, int, Mean], Expected]:
    def loop(task: Problem, replicas: int, mean: Mean) -> Expected:
        return None, paft(task, replicas=replicas, sync_every=H, steps=STEPS, noise=_spoil, overlap=overlap, mean=mean)

    return loop


def _streaming(combine: Combine | None) -> Callable[[Problem, int, Mean], Expected]:
    def loop(task: Problem, replicas: int, mean: Mean) -> Expected:
        theta, params = streaming(
            task,
            replicas=replicas,
            fragments=RULE.fragments(parameters(task.model(0))),
            sync_every=H,
            delay=DELAY,
            steps=STEPS,
            combine=combine,
            mean=mean,
        )
        return list(theta.values()), params

    return loop


RULE = Strided(n=2)
OVERLAPPED = {"sync_every": H, "outer": "paper", "fragments": RULE, "delay": DELAY, "wait_for_result_s": LONG_S}
CASES = {
    "local_sgd": Case(LocalSGD(sync_every=H), _local_sgd),
    "diloco": Case(DiLoCo(sync_every=H, outer="paper"), _diloco),
    "streaming": Case(StreamingDiLoCo(**OVERLAPPED), _streaming(None)),  # type: ignore[arg-type]
    "decoupled": Case(DecoupledDiLoCo(**OVERLAPPED, adaptive_grace=0.0), _streaming(radial())),  # type: ignore[arg-type]
    "slowmo": Case(SlowMo(sync_every=H, slow_lr=0.9), _slowmo),
    "sync_sgd": Case(SyncSGD(), _sync_sgd),
    "paft": Case(PAFT(sync_every=H), _paft(False), _spoil),
    "paft_dyn": Case(PAFT(sync_every=H, delay=1), _paft(True), _spoil),
}
CODECS = ["fp32", "bf16", "int8", "fp4", "top_k:0.1:4"]
INNER = ["adamw", "sgd"]
REPLICAS = [1, 2, 4]


def _product() -> Iterator[ParameterSet]:
    for i, name in enumerate(CASES):
        for j, codec in enumerate(CODECS):
            row = min(i, len(CASES) - 2)  # PAFT's two ways are one
            pair = (INNER[(row + j) % 2], REPLICAS[(row + j) % 3])
            shown = codec in ("fp4", "top_k:0.1:4") and name != ("paft", "paft_dyn")[j % 2]
            for inner in INNER:
                for replicas in REPLICAS:
                    marks = [] if shown and (inner, replicas) == pair else [pytest.mark.slow]
                    yield pytest.param(name, codec, inner, replicas, marks=marks)


@pytest.mark.long
@pytest.mark.parametrize(("name", "codec", "inner", "replicas"), list(_product()))
def test_it_equals_its_plain_loop_bit_for_bit(name: str, codec: str, inner: str, replicas: int) -> None:
    _compare(name, codec, inner, replicas, atol=0.0)


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        pytest.param(name, codec, marks=[] if (name, codec) == ("streaming", "fp32") else [pytest.mark.slow])
        for name in CASES
        for codec in ("fp32", "fp4")
    ],
)
def test_over_gloo_it_does_so_too(name: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftopt.transport.local.LocalTransport", partial(GlooTransport, "127.0.0.1"))
    _compare(name, codec, "adamw", 4, atol=1e-6 if codec == "fp32" else 0.0)


def _compare(name: str, codec: str, inner: str, replicas: int, *, atol: float) -> None:
    task, case = problem("wide", inner), CASES[name]
    names = [name for name, _ in task.model(0).named_parameters()]
    anchor, params = case.loop(task, replicas, Mean(codec, names=names))
    ran = train_and_look(task, case.method, replicas=replicas, steps=STEPS, codec=codec, noise=case.noise)
    for m, ours in enumerate(ran):
        torch.testing.assert_close(ours.params, params[m], rtol=0, atol=atol)
        if anchor is not None:
            torch.testing.assert_close(ours.anchor, anchor, rtol=0, atol=atol)

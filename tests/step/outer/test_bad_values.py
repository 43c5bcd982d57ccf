"""One replica's bad value: it reaches nobody, it is told, and its holder heals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import ftopt
from ftopt.events import Event
from ftopt.methods import Method
from ftopt.step.outer.step import OuterStep
from tests.optimizer.running import PATIENT, together

ROUND = 5
TOP = 30
"""The highest bit of a float's exponent."""
METHODS: dict[str, Method] = {
    "diloco": ftopt.DiLoCo(sync_every=ROUND),
    "local_sgd": ftopt.LocalSGD(sync_every=ROUND),
    "slowmo": ftopt.SlowMo(sync_every=ROUND),
    "streaming": ftopt.StreamingDiLoCo(sync_every=ROUND, fragments=ftopt.fragments.Strided(n=1)),
    "decoupled": ftopt.DecoupledDiLoCo(sync_every=ROUND, fragments=ftopt.fragments.Balanced(n=2)),
    "paft": ftopt.PAFT(sync_every=ROUND),
}


def flip(tensor: Tensor, bit: int = TOP, element: int = 3) -> None:
    tensor.detach().view(-1).view(torch.int32)[element] ^= 1 << bit


@dataclass
class Job:
    """A small regression, trained by replicas as threads; what happens is noted."""

    method: Method
    replicas: int = 2
    steps: int = 8 * ROUND
    inner: Callable[[Iterator[nn.Parameter]], Optimizer] = lambda p: SGD(p, lr=0.05, momentum=0.9)
    strike: Callable[[int, int, nn.Module, Optimizer], None] = lambda replica, step, model, inner: None
    """Called after the backward pass of each step, which count from 1."""
    scale: Callable[[int], float] = lambda replica: 1.0
    rate: Callable[[int], float] | None = None
    on_event: Callable[[Event, Job], None] = lambda event, job: None
    codec: str = "fp32"
    ratio: float | None = 100.0
    size: float = 0.3
    """Of the initial parameters."""
    events: list[Event] = field(default_factory=list)
    outers: dict[str, OuterStep] = field(default_factory=dict)
    models: list[nn.Module] = field(default_factory=list)

    def model(self) -> nn.Module:
        generator = torch.Generator().manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * self.size)
        return model

    def run(self) -> Job:
        policy = ftopt.FaultPolicy(grace_s=PATIENT.grace_s, dead_after_s=PATIENT.dead_after_s, outlier_ratio=self.ratio)

        def note(event: Event) -> None:
            self.events.append(event)
            self.on_event(event, self)

        groups = ftopt.local_groups(self.replicas, policy=policy, on_event=note)
        self.models = [self.model() for _ in range(self.replicas)]
        together([lambda m=m: self._replica(m, groups[m]) for m in range(self.replicas)])  # type: ignore[misc]
        return self

    def _replica(self, m: int, group: Any) -> None:
        model, generator = self.models[m], torch.Generator().manual_seed(100 + m)
        inner, target = self.inner(model.parameters()), torch.linspace(-1, 1, 12)
        with ftopt.wrap(inner, model, replace(self.method, codec=self.codec), group=group) as optimizer:
            self.outers[group.replica] = optimizer._core.started()
            for step in range(1, self.steps + 1):
                if self.rate is not None:
                    inner.param_groups[0]["lr"] = self.rate(step)
                x = torch.randn(16, 12, generator=generator)
                optimizer.zero_grad()
                (self.scale(m) * (model(x)[:, 0] - x @ target).square().mean()).backward()
                self.strike(m, step, model, inner)
                optimizer.step()

    def told(self, *names: str) -> Counter[str]:
        return Counter(e.event for e in self.events if e.event in names)

    def discarded(self) -> list[tuple[str, str, int]]:
        found = [(e.replica, e.data) for e in self.events if e.event == "discarded"]
        return [(replica, str(data["reason"]), int(data["steps"])) for replica, data in found]

    def is_sound(self, most: float = 100.0) -> bool:
        """All that hold one version hold the same, and no element of it is larger than ``most``."""
        states = [(f.index, f.state) for outer in self.outers.values() for f in outer.fragments]
        versions = {(index, state.meta.version, state.digest) for index, state in states}
        alike = len(versions) == len({version[:2] for version in versions})
        return alike and all(bool((state.anchor.abs() < most).all()) for _, state in states)


def at_step(which: int, what: Callable[[nn.Module, Optimizer], None]) -> Callable[..., None]:
    """Strikes replica 0 at a step."""

    def strike(replica: int, step: int, model: nn.Module, inner: Optimizer) -> None:
        if replica == 0 and step == which:
            what(model, inner)

    return strike


def first(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", METHODS)
def test_an_overflowing_parameter_is_committed_by_no_method(name: str, replicas: int) -> None:
    job = Job(METHODS[name], replicas, strike=at_step(4 * ROUND, lambda model, _: flip(first(model))))
    most = 100.0
    if name == "decoupled":  # its rounds wait for nobody: who is out of line may miss some, and few average little
        job.steps *= 3
        most = 1e6
    assert job.run().is_sound(most)
    assert job.told("outlier", "discarded").keys() == {"outlier", "discarded"}


@pytest.mark.parametrize("codec", ["bf16", "int8", "fp4", "top_k:0.1:4"])
def test_an_overflowing_parameter_is_committed_through_no_codec(codec: str) -> None:
    hit = at_step(4 * ROUND, lambda model, _: flip(first(model)))
    assert Job(METHODS["diloco"], 3, strike=hit, codec=codec).run().is_sound()


@pytest.mark.parametrize("part", ["own", "owed"])
@pytest.mark.parametrize("codec", ["bf16", "int8", "fp4", "top_k:0.1:4"])
def test_what_a_codec_has_left_out_and_changes_in_memory_is_not_committed(codec: str, part: str) -> None:
    struck = list[str]()

    def strike(event: Event, job: Job) -> None:
        if (event.event, event.version) == ("propose", 5) and not struck:
            residual = job.outers[event.replica].fragments[0].residuals[""]
            hit = residual.own if part == "own" else residual.owed[1]  # of a small sum one of the two owes all
            if hit is not None and hit.numel():
                flip(hit, element=int(hit.abs().argmax()))
                struck.append(event.replica)

    job = Job(METHODS["diloco"], 2, codec=codec, on_event=strike).run()
    assert struck
    assert job.told("implausible")
    assert job.is_sound()


def test_the_second_bad_round_drops_the_work_and_resets_the_inner_state(caplog: pytest.LogCaptureFixture) -> None:
    seen = list[float]()

    def strike(replica: int, step: int, model: nn.Module, inner: Optimizer) -> None:
        if replica == 0:
            if step == 4 * ROUND:
                flip(inner.state[first(model)]["momentum_buffer"])
            state = inner.state.get(first(model), {}).get("momentum_buffer")
            seen.append(0.0 if state is None else float(state.abs().max()))

    job = Job(METHODS["diloco"], 3, strike=strike, steps=10 * ROUND).run()
    assert job.discarded() == [("r0", "outlier", 2 * ROUND)]
    assert f"back at the anchor, inner step {5 * ROUND}, and the inner state is reset" in caplog.text
    assert max(seen) > 1e30
    assert max(seen[-3 * ROUND :]) < 10
    later = [e for e in job.events if e.event == "decide" and (e.version or 0) > 6]
    assert all(len(e.data["members"]) == 3 and all(row[4] for row in e.data["members"]) for e in later)
    assert job.is_sound()


def test_an_outlier_is_not_committed_when_its_peers_have_left() -> None:
    def strike(replica: int, step: int, model: nn.Module, inner: Optimizer) -> None:
        if replica == 0 and step >= 4 * ROUND:
            flip(first(model))  # it never heals

    class Short(Job):
        def _replica(self, m: int, group: Any) -> None:
            self.steps = 8 * ROUND if m == 0 else 5 * ROUND
            super()._replica(m, group)

    job = Job(METHODS["diloco"], 2, strike=strike)
    groups = ftopt.local_groups(2, policy=PATIENT, on_event=job.events.append)
    job.models = [job.model() for _ in range(2)]
    short = Job(METHODS["diloco"], 2, steps=5 * ROUND, models=job.models, events=job.events, outers=job.outers)
    together([lambda: job._replica(0, groups[0]), lambda: short._replica(1, groups[1])])
    anchor = job.outers["r0"].fragments[0].state.anchor
    assert float(anchor.abs().max()) < 10
    assert {reason for _, reason, _ in job.discarded()} == {"outlier"}


def test_a_result_that_is_not_finite_changes_nothing_and_training_goes_on() -> None:
    def strike(replica: int, step: int, model: nn.Module, inner: Optimizer) -> None:
        if step == 1:
            assert first(model).grad is not None
            first(model).grad.view(-1)[0] = -3e38  # type: ignore[union-attr]

    job = Job(ftopt.DiLoCo(sync_every=1), 2, steps=20, ratio=None, strike=strike, inner=lambda p: SGD(p, lr=1.0)).run()
    assert job.told("implausible")["implausible"] == 2, "each doubts once"
    assert job.told("overflow")["overflow"] >= 2
    assert all(bool(torch.isfinite(o.fragments[0].state.anchor).all()) for o in job.outers.values())
    assert max(e.version or 0 for e in job.events if e.event == "decide") >= 19
    assert not job.told("void")


def test_steps_that_stay_non_finite_because_of_the_inner_state_end_with_that() -> None:
    hit = at_step(4 * ROUND, lambda model, inner: flip(inner.state[first(model)]["exp_avg_sq"], bit=31))
    job = Job(METHODS["diloco"], 2, strike=hit, inner=lambda p: AdamW(p, lr=0.01), steps=10 * ROUND).run()
    assert job.discarded() == [("r0", "nonfinite", ROUND)] * 2
    assert job.is_sound()


@pytest.mark.parametrize("method", [ftopt.SyncSGD(), ftopt.PAFT(sync_every=ROUND)], ids=["sync_sgd", "paft"])
def test_gradients_400_times_larger_are_part_of_the_large_batch(method: Method) -> None:
    job = Job(method, 3, steps=20, scale=lambda m: 400.0 if m == 2 else 1.0, inner=lambda p: AdamW(p, lr=0.01)).run()
    assert not job.told("outlier", "void", "discarded", "implausible")
    assert job.is_sound()


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_rate_that_is_raised_many_times_drops_nothing(replicas: int) -> None:
    """In mid-run, with tiny parameters: all that was usual before is left by far."""

    def rate(step: int) -> float:
        return 1e-9 if step <= 4 * ROUND else 0.05

    job = Job(METHODS["diloco"], replicas, steps=16 * ROUND, size=1e-4, inner=lambda p: SGD(p, lr=1e-9))
    job.rate = rate
    job.run()
    assert not job.told("outlier", "void", "discarded", "implausible", "overflow")


def test_what_stays_out_of_line_does_not_become_usual() -> None:
    """Parameters that are bad give bad gradients in every step, until they are averaged."""

    def strike(replica: int, step: int, model: nn.Module, inner: Optimizer) -> None:
        for p in model.parameters() if replica == 2 and step > 5 else ():
            assert p.grad is not None
            p.grad.mul_(1e6)

    job = Job(ftopt.PAFT(sync_every=1000), 3, steps=20, strike=strike, inner=lambda p: SGD(p, lr=1e-4)).run()
    late = [e for e in job.events if e.event == "decide" and e.fragment == 0 and (e.version or 0) > 7]
    assert len(late) > 8
    assert not any(row[4] for e in late for row in e.data["members"] if row[0] == "r2")


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_replica_that_is_bad_in_every_round_is_never_taken_in(replicas: int) -> None:
    def strike(replica: int, step: int, model: nn.Module, inner: Optimizer) -> None:
        if replica == 0 and step > 3 * ROUND and step % ROUND == 0:
            with torch.no_grad():
                first(model).view(-1)[0] += 2000.0

    job = Job(METHODS["diloco"], replicas, strike=strike, steps=14 * ROUND).run()
    assert job.is_sound()
    assert len(job.discarded()) >= 3


@pytest.mark.parametrize(
    ("method", "replicas"),
    [(ftopt.LocalSGD(sync_every=1), 1), (ftopt.LocalSGD(sync_every=1), 3), (ftopt.SyncSGD(), 2)],
    ids=["local_sgd-1", "local_sgd-3", "sync_sgd-2"],
)
def test_zeros_that_begin_to_move_are_no_bad_value(method: Method, replicas: int) -> None:
    job = Job(method, replicas, steps=24, size=0, inner=lambda p: SGD(p, lr=1e-12))
    job.rate = lambda step: 1e-12 if step < 4 else 0.02
    job.run()
    assert not job.told("outlier", "void", "discarded", "implausible", "overflow")


@pytest.mark.parametrize("replicas", [1, 2])
def test_zeros_take_nothing_out_of_proportion_in_their_first_round(replicas: int) -> None:
    hit = at_step(1, lambda model, _: flip(first(model), bit=30))

    def strike(replica: int, step: int, model: nn.Module, inner: Optimizer) -> None:
        if step == 2:
            hit(replica, 1, model, inner)

    job = Job(ftopt.DiLoCo(sync_every=2), replicas, steps=30, size=0, strike=strike).run()
    assert job.is_sound()


def test_a_lone_paft_whose_model_is_not_finite_goes_back_to_its_last_average() -> None:
    hit = at_step(4 * ROUND + 2, lambda model, _: model[-1].weight.data.fill_(float("nan")))  # type: ignore[index]
    job = Job(METHODS["paft"], 1, strike=hit).run()
    assert job.is_sound()
    assert all(bool(torch.isfinite(p).all()) for p in job.models[0].parameters())
    assert job.told("void")["void"] <= 3


@pytest.mark.parametrize("point", ["prepare", "reduce"])
def test_a_lone_replicas_state_that_changes_in_memory_before_it_is_applied_is_mended(point: str) -> None:
    def on_event(event: Event, job: Job) -> None:
        if event.event == point and event.version == 4:
            fragment = job.outers["r0"].fragments[0]
            state = fragment.result if point == "prepare" else fragment.state
            if state is not None:
                flip(state.anchor)

    job = Job(METHODS["diloco"], 1, on_event=on_event).run()
    assert job.is_sound()


@pytest.mark.parametrize(
    ("rate", "replicas"),
    [
        (lambda step: 1e-12 if step < 3 else 0.05, 1),
        (lambda step: 1e-12 if step < 3 else 0.05, 3),
        (lambda step: 0.0 if step % 7 else 0.05, 2),
        (lambda step: 0.05 * (step < 9), 2),
    ],
    ids=["a floor, then warm-1", "a floor, then warm-3", "pauses-2", "it ends in 0-2"],
)
def test_a_schedule_of_rates_is_no_bad_value(rate: Callable[[int], float], replicas: int) -> None:
    job = Job(ftopt.LocalSGD(sync_every=1), replicas, steps=30, rate=rate, inner=lambda p: SGD(p, lr=0.05)).run()
    assert not job.told("outlier", "void", "discarded", "implausible", "overflow")


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("point", ["payload", "reduce.after"])
def test_a_bit_that_flips_in_the_reduction_is_not_prepared(point: str, replicas: int) -> None:
    def on_event(event: Event, job: Job) -> None:
        if event.event == point and event.replica == "r0" and event.version == 4 and not job.told("abort"):
            reduced = job.outers["r0"].reduction.reduced
            assert reduced is not None
            flip(reduced)

    job = Job(METHODS["local_sgd"], replicas, on_event=on_event).run()
    assert job.is_sound()
    assert job.told("implausible", "mismatch")
    assert not job.told("discarded", "outlier")


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_what_a_device_that_always_computes_wrong_makes_alone_is_not_committed(name: str) -> None:
    def on_event(event: Event, job: Job) -> None:
        if event.event == "reduce.after" and (event.version or 0) >= 4:
            reduced = job.outers["r0"].reduction.reduced
            assert reduced is not None
            reduced.detach().add_(1e12)

    job = Job(METHODS[name], 1, on_event=on_event, steps=5 * ROUND).run()
    assert job.is_sound()
    assert [e.version for e in job.events if e.event == "overflow"] == [4, 5]
    assert job.told("implausible")["implausible"] == 2, "each version is computed twice"


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_frozen_copy_that_changes_in_memory_is_mended(replicas: int) -> None:
    def on_event(event: Event, job: Job) -> None:
        if event.event == "reduce" and event.replica == "r0" and event.version == 4 and not job.told("abort"):
            snapshot = job.outers["r0"].fragments[0].snapshot
            assert snapshot is not None and snapshot.params.copy is not None
            flip(snapshot.params.copy)

    job = Job(METHODS["streaming"], replicas, on_event=on_event).run()
    assert job.is_sound()
    assert job.told("implausible", "repaired").keys() == {"implausible", "repaired"}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", ["streaming", "decoupled"])
def test_an_anchor_that_changes_while_a_copied_contribution_is_on_offer_is_mended(name: str, replicas: int) -> None:
    struck = list[bool]()

    def strike(event: Event, job: Job) -> None:
        if (event.event, event.replica) == ("reduce", "r0") and (event.version or 0) >= 3 and not struck:
            struck.append(True)
            flip(job.outers["r0"].fragments[event.fragment or 0].state.anchor)

    job = Job(METHODS[name], replicas, on_event=strike).run()
    assert struck
    assert job.is_sound()


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("what", ["anchor", "momentum"])
def test_a_committed_state_that_changes_in_memory_is_mended(what: str, replicas: int) -> None:
    def strike(replica: int, step: int, model: nn.Module, inner: Optimizer) -> None:
        if replica == 0 and step == 4 * ROUND - 2:
            state = job.outers["r0"].fragments[0].state
            flip(state.anchor if what == "anchor" else state.outer["momentum"])

    job = Job(METHODS["diloco"], replicas, strike=strike)
    job.run()
    assert job.is_sound()
    assert job.told("damaged", "implausible")

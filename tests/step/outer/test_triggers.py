"""Triggers in training: what is measured when, what members agree on, and who brings whom to a round."""

from __future__ import annotations

import math
import threading
import time
import warnings
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftopt._connect import local_groups, solo
from ftopt.events import Event
from ftopt.fragments import Strided
from ftopt.methods import DiLoCo, LocalSGD, Method, StreamingDiLoCo
from ftopt.methods.triggers import RoundStats
from ftopt.optimizer import ReplicaOptimizer, wrap
from ftopt.outer import SGD
from ftopt.step.outer.trigger_metrics import TriggerMetrics
from ftopt.sync.protocol.policy import FaultPolicy
from ftopt.triggers import (
    AdaComm,
    AnyOf,
    Every,
    EverySeconds,
    LinearFDA,
    LocalCondition,
    PAFTRatio,
    SignalToNoise,
)
from tests.optimizer.running import PATIENT, together, train_and_look
from tests.problems import Problem, flat, laid_out, problem


def _looks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Sweeps over the parameters from now on."""
    found: list[object] = []
    look = TriggerMetrics.look

    def counted(self: TriggerMetrics, *args: Any) -> Any:
        found.append(args[0])
        return look(self, *args)

    monkeypatch.setattr(TriggerMetrics, "look", counted)
    return found


def _alone(method: Method, steps: int, *, loss: bool = False) -> list[int]:
    """Trains one replica; returns the steps at which it proposed."""
    task = problem("mlp", "sgd")
    model = task.model(0)
    rounds = []
    with wrap(task.inner(model.parameters()), model, method, group=solo()) as optimizer:
        for step in range(steps):
            optimizer.zero_grad()
            value = task.backward(model, 0, step)
            optimizer.log(loss=value if loss else None)
            optimizer.step()
            if optimizer.pending_steps == 0:
                rounds.append(step + 1)
    return rounds


def _agreed(optimizer: ReplicaOptimizer) -> RoundStats:
    return optimizer._core.started().schedule.progress(optimizer._core.started().fragments[0]).agreed


def _replicas(
    method: Method, steps: int, *, replicas: int = 3, name: str = "sgd"
) -> list[list[tuple[int, RoundStats]]]:
    """Trains replicas on their own batches; of each the steps of its rounds, and what was agreed on in them."""
    task = problem("linear", name)
    models, groups = [task.model(0) for _ in range(replicas)], local_groups(replicas, policy=PATIENT)

    def replica(m: int) -> list[tuple[int, RoundStats]]:
        rounds = []
        with wrap(task.inner(models[m].parameters()), models[m], method, group=groups[m]) as optimizer:
            for step in range(steps):
                optimizer.zero_grad()
                optimizer.log(loss=task.backward(models[m], m, step))
                optimizer.step()
                if optimizer.pending_steps == 0:
                    rounds.append((step + 1, _agreed(optimizer)))
            return rounds

    return together([lambda m=m: replica(m) for m in range(replicas)])


# ---------------------------------------------------------------- what is measured when


def test_nothing_is_measured_for_triggers_by_steps_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = _looks(monkeypatch)
    assert _alone(LocalSGD(sync_every=9, trigger=AnyOf([Every(4), EverySeconds(1000.0)])), 13) == [4, 8, 12]
    assert looks == []


def test_a_norm_is_swept_every_so_many_steps_and_no_oftener(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = _looks(monkeypatch)
    assert _alone(LocalSGD(sync_every=20, trigger=LocalCondition(1e9, check_every=5)), 40) == [20, 40]
    assert len(looks) == 6, "after 5, 10 and 15 steps; the 20th is due anyway"


def test_seconds_are_those_since_the_last_round() -> None:
    task = problem("linear", "sgd")
    model, now = task.model(0), [0.0]
    optimizer = wrap(
        task.inner(model.parameters()), model, LocalSGD(sync_every=99, trigger=EverySeconds(2.0)), group=solo()
    )
    optimizer._core.training.clock = lambda: now[0]
    rounds = []
    with optimizer:
        for step in range(12):
            now[0] += 0.5 if step < 6 else 1.0
            task.backward(model, 0, step)
            optimizer.step()
            if optimizer.pending_steps == 0:
                rounds.append(step + 1)
    assert rounds == [4, 7, 9, 11]


def test_the_local_condition_fires_as_soon_as_the_replica_is_too_far() -> None:
    task = problem("linear", "sgd")
    model = task.model(0)
    method = LocalSGD(sync_every=1000, trigger=LocalCondition(0.5, check_every=1))
    with wrap(task.inner(model.parameters()), model, method, group=solo()) as optimizer:
        for step in range(30):
            anchor = optimizer._core.started().fragments[0].start.clone()
            optimizer.zero_grad()
            task.backward(model, 0, step)
            optimizer.step()
            far = float((laid_out(model) - anchor).double().square().sum()) > 0.5
            assert far == (optimizer.pending_steps == 0)
        assert optimizer.status.versions[0] >= 2


# ---------------------------------------------------------------- what members agree on


def _naive(task: Problem, replicas: int, steps: int) -> tuple[list[Tensor], list[float]]:
    """Parameters of the replicas, and the mean loss of each, after ``steps`` from the start."""
    params, losses = [], []
    for m in range(replicas):
        model = task.model(0)
        inner, total = task.inner(model.parameters()), 0.0
        for step in range(steps):
            inner.zero_grad()
            total += float(task.backward(model, m, step).detach())
            inner.step()
        params.append(flat(model).double())
        losses.append(total / steps)
    return params, losses


@pytest.mark.parametrize("method", [LocalSGD, DiLoCo])
def test_members_agree_on_the_exact_divergence_and_the_mean_loss(method: type[Method]) -> None:
    trigger = AnyOf([AdaComm(initial=6), SignalToNoise(initial=6), PAFTRatio(initial=6)])
    found = _replicas(method(sync_every=16, trigger=trigger), 6)
    params, losses = _naive(problem("linear", "sgd"), 3, 6)
    start = flat(problem("linear", "sgd").model(0)).double()
    theta = torch.stack(params)
    var = float((theta - theta.mean(0)).square().sum(1).mean())
    for ((step, agreed),) in found:
        assert step == 6
        assert agreed.members == 3.0
        assert agreed.divergence == pytest.approx(var, rel=1e-5)
        assert agreed.loss == agreed.first_loss == pytest.approx(sum(losses) / 3, rel=1e-6)
        assert agreed.displacement == pytest.approx(float((theta.mean(0) - start).square().sum()), rel=1e-5)
        assert agreed.gradient_norm is not None and agreed.gradient_norm > 0
    assert found[0] == found[1] == found[2], "bit for bit"


def test_adacomm_meets_by_the_agreed_loss() -> None:
    trigger = AdaComm(initial=8)
    found = _replicas(LocalSGD(sync_every=16, trigger=trigger), 60)
    assert found[0] == found[1] == found[2]
    assert found[0][0][0] == 8
    periods = []
    for (step, agreed), (after, _) in pairwise(found[0]):
        assert agreed.loss is not None and agreed.first_loss is not None
        periods.append(after - step)
        assert after - step == math.ceil(math.sqrt(agreed.loss / agreed.first_loss) * 8)
    assert min(periods) < 6


def test_a_closures_loss_counts_and_none_at_all_is_told() -> None:
    task = problem("linear", "sgd")
    model = task.model(0)
    method = LocalSGD(sync_every=16, trigger=AdaComm(initial=2))
    with wrap(task.inner(model.parameters()), model, method, group=solo()) as optimizer:
        losses = [float(optimizer.step(lambda step=step: task.backward(model, 0, step)).detach()) for step in range(2)]
        assert _agreed(optimizer).loss == pytest.approx(sum(losses) / 2)
    with pytest.warns(UserWarning, match=r"call optimizer.log\(loss=loss\)"):
        assert _alone(method, 4) == [2, 4]


def test_a_newcomer_knows_what_was_agreed_on_before_it_came() -> None:
    task = problem("linear", "sgd")
    method = LocalSGD(sync_every=16, trigger=AdaComm(initial=4))
    groups = local_groups(2, policy=replace(PATIENT, start_replicas=1))
    models = [task.model(0), task.model(0)]
    first = wrap(task.inner(models[0].parameters()), models[0], method, group=groups[0])
    with first:
        for step in range(20):
            first.zero_grad()
            first.log(loss=task.backward(models[0], 0, step))
            first.step()
        second = wrap(task.inner(models[1].parameters()), models[1], method, group=groups[1])
        second._core.start()
        assert _agreed(second) == _agreed(first)
        assert _agreed(second).members == 1.0
        second.close(flush=False)


def test_a_newcomer_takes_the_period_that_the_others_measured() -> None:
    task, trigger = problem("linear", "sgd"), SignalToNoise(initial=4, most=64)
    method, groups = (
        LocalSGD(sync_every=64, trigger=trigger),
        local_groups(3, policy=replace(PATIENT, start_replicas=2)),
    )
    models, have_trained = [task.model(0) for _ in range(3)], threading.Barrier(3, timeout=60.0)

    def replica(m: int) -> RoundStats:
        optimizer = wrap(task.inner(models[m].parameters()), models[m], method, group=groups[m])
        with optimizer:
            for step in range(4):
                optimizer.zero_grad()
                task.backward(models[m], m, step)
                optimizer.step()
            have_trained.wait()
            have_trained.wait()
            return _agreed(optimizer)

    def newcomer() -> RoundStats:
        have_trained.wait()
        optimizer = wrap(task.inner(models[2].parameters()), models[2], method, group=groups[2])
        optimizer._core.start()
        agreed = _agreed(optimizer)
        have_trained.wait()
        optimizer.close(flush=False)
        return agreed

    found = together([lambda: replica(0), lambda: replica(1), newcomer])
    assert found[0] == found[1] == found[2]
    assert found[2].members == 2 and trigger.period(found[2]) != trigger.initial


@pytest.mark.parametrize(
    ("method", "trigger"),
    [
        (DiLoCo, SignalToNoise()),
        (DiLoCo, PAFTRatio()),
        (StreamingDiLoCo, SignalToNoise()),
        (StreamingDiLoCo, AdaComm()),
    ],
    ids=lambda x: getattr(x, "__name__", repr(x)),
)
def test_what_is_agreed_on_leaves_the_anchor_as_it_is(method: type[DiLoCo], trigger: Any) -> None:
    """With a trigger that never fires first, the same bits as without one."""
    task, most = problem("deep", "sgd"), {"initial": 16, "least": 16}
    settings: dict[str, Any] = {"sync_every": 16, "outer": SGD(lr=0.7, momentum=0.9, nesterov=True)}
    if method is StreamingDiLoCo:
        settings |= {"fragments": Strided(n=2), "delay": 3, "wait_for_result_s": 60.0}
    with_it = method(**settings, trigger=replace(trigger, **most))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no loss is counted here
        ours = train_and_look(task, with_it, replicas=2, steps=40)
    bare = train_and_look(task, method(**settings), replicas=2, steps=40)
    for a, b in zip(ours, bare, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.anchor, b.anchor, strict=True))


# ---------------------------------------------------------------- together


def _race(method: Method, *, rates: list[float], steps: int) -> list[dict[str, Any]]:
    """Trains replicas that walk at their own pace, until each has taken ``steps`` and all have met in a round with
    some; returns what happened, in order.

    Each walks at random, at its own rate. The grace is longer than anybody waits here.
    """
    events: list[dict[str, Any]] = []
    lock, have_met, most = threading.Lock(), threading.Event(), 5_000

    def on_event(event: Event) -> None:
        with lock:
            events.append({"event": event.event, "replica": event.replica, "version": event.version, **event.data})
        if event.event == "decide" and [member[2] > 0 for member in event.data["members"]] == [True] * len(rates):
            have_met.set()

    groups = local_groups(
        len(rates), policy=FaultPolicy(heartbeat_s=0.02, dead_after_s=600.0, grace_s=600.0), on_event=on_event
    )

    def replica(m: int) -> None:
        model = nn.Linear(50, 1, bias=False)
        nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=rates[m])
        generator = torch.Generator().manual_seed(m)
        with wrap(inner, model, method, group=groups[m]) as optimizer:
            while optimizer.local_steps < steps or not (have_met.is_set() or optimizer.local_steps == most):
                model.weight.grad = torch.randn(1, 50, generator=generator)
                optimizer.step()
                time.sleep(0.003)  # a step of some length, so that heartbeats come between

    together([lambda m=m: replica(m) for m in range(len(rates))])
    return events


def test_the_replica_that_diverges_calls_the_others_to_the_round() -> None:
    """Only its trigger can have brought them."""
    method = LocalSGD(sync_every=10_000, trigger=LocalCondition(1.0, check_every=1))
    events = _race(method, rates=[0.001, 0.001, 0.1], steps=60)  # 5,000 steps of those two come to 0.25
    decided = [e for e in events if e["event"] == "decide"]
    met = [e for e in decided if len(e["members"]) == 3 and all(member[2] > 0 for member in e["members"])]
    assert met, "all three, with what they had"
    assert {e["replica"] for e in events if e["event"] == "hurry"} == {"r2"}
    called = {e["replica"] for e in events if e["event"] == "call_in"}
    assert called == {"r0", "r1"}


def test_the_means_of_all_bring_a_linear_fda_job_together() -> None:
    """No replica alone is far enough from the anchor: it is their divergence, told with the heartbeats."""
    trigger = LinearFDA(2.0, check_every=1)
    events = _race(LocalSGD(sync_every=10_000, trigger=trigger), rates=[0.03] * 3, steps=150)
    decided = [e for e in events if e["event"] == "decide" and len(e["members"]) == 3]
    assert decided
    assert [e for e in events if e["event"] == "hurry"]
    # 50 elements, rate 0.03: |u|^2 grows by 0.045 a step, and so does the divergence: 44 steps to the threshold.
    steps = [member[2] for member in decided[0]["members"]]
    assert max(steps) >= 25, steps


def test_linear_fda_without_peers_waits_for_sync_every() -> None:
    assert _alone(LocalSGD(sync_every=10, trigger=LinearFDA(1e-12, check_every=1)), 20) == [10, 20]

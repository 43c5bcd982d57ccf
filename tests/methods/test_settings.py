from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from functools import partial

import pytest
import torch
from torch import nn

from ftopt._connect import local_groups
from ftopt.errors import UserError
from ftopt.events import Event
from ftopt.fragments import Balanced, Named
from ftopt.methods import ContributionStats, DecoupledDiLoCo, DiLoCo, LocalSGD, ReplicaView, StreamingDiLoCo
from ftopt.methods.method import settings_of
from ftopt.methods.short_runs import outer_problems
from ftopt.optimizer import wrap
from ftopt.outer import SGD, Adam, Torch
from ftopt.step.outer.step import OuterStep
from ftopt.step.tensors.flat import FlatView, parameters
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.policy import FaultPolicy
from ftopt.sync.protocol.replica.effects import Send
from ftopt.sync.protocol.replica.identity import Identity
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.triggers import AnyOf, Progress
from tests.optimizer.running import together
from tests.problems import problem


def test_an_outer_optimizer_may_be_given_as_a_class_of_torch_or_by_its_two_numbers() -> None:
    nesterov = SGD(lr=0.7, momentum=0.9, nesterov=True)
    assert DiLoCo(outer=partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True, foreach=True)).outer == nesterov
    assert DiLoCo(outer=partial(torch.optim.SGD, lr=1.0)).outer == SGD(lr=1.0)
    damped = partial(torch.optim.SGD, lr=1.0, momentum=0.5, dampening=0.1)
    assert DiLoCo(outer=damped).outer == Torch(cls="torch.optim.SGD", args=damped.keywords)
    assert DiLoCo(outer=partial(torch.optim.RMSprop, lr=0.1)).outer == Torch(
        cls="torch.optim.RMSprop", args={"lr": 0.1}
    )
    assert DiLoCo(outer_lr=0.7, outer_momentum=0.9) == DiLoCo(outer=nesterov)
    assert StreamingDiLoCo(outer="paper", outer_lr=1).outer == SGD(lr=1, momentum=0.9, nesterov=True)
    assert DiLoCo(outer_momentum=0).outer == SGD(lr=1)
    method = DiLoCo(outer_momentum=0.5)
    assert replace(method, outer_lr=2) == DiLoCo(outer=SGD(lr=2, momentum=0.5, nesterov=True))
    assert "outer_lr" not in repr(method)
    assert (method.outer_lr, method.outer_momentum) == (None, None)


def _after(steps: int) -> Progress:
    return Progress(fragment=0, steps=steps, pending_steps=steps, local_steps=steps, inner_step=steps)


@pytest.mark.parametrize("method", [DiLoCo(sync_every=5), LocalSGD(sync_every=5)])
def test_a_method_is_due_after_its_steps_and_stays_due(method: DiLoCo | LocalSGD) -> None:
    assert [method.timing.due(_after(steps)) for steps in (1, 4, 5, 6)] == [False, False, True, True]


@pytest.mark.parametrize("sync_every", [0, -1, 2.5, True, "10"])
@pytest.mark.parametrize("method", [DiLoCo, LocalSGD])
def test_a_period_that_is_no_number_of_steps_is_refused(method: type, sync_every: object) -> None:
    with pytest.raises(ValueError, match="at least 1; use"):
        method(sync_every=sync_every)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: StreamingDiLoCo(mix=2), r"mix=2; must be a number in \[0, 1\]"),
        (lambda: StreamingDiLoCo(mix=float("nan")), "mix=nan; must be a number"),
        (lambda: StreamingDiLoCo(delay="3"), "delay='3'; must be a whole number"),
        (lambda: StreamingDiLoCo(wait_for_result_s=float("inf")), "must be a finite number of seconds, at least 0"),
        (lambda: StreamingDiLoCo(fragments=Named(patterns="abc")), "fragments.patterns='abc'; give one"),
        (lambda: StreamingDiLoCo(fragments=Balanced), "must be a rule of ftopt.fragments"),
        (lambda: SGD(schedule=3), "outer.schedule=3; must be a schedule"),
        (lambda: Torch(args=3), "with args=3; must be"),
        (lambda: AnyOf(3), "trigger.triggers: got 3"),
        (lambda: FaultPolicy(grace_s="x"), "policy.grace_s='x'; must be a number of seconds above 0"),
        (lambda: FaultPolicy(min_replicas=1.5), "policy.min_replicas=1.5; must be a whole number, at least 1"),
        (lambda: FaultPolicy(outlier_ratio="x"), "policy.outlier_ratio='x'; must be a number, at least 10"),
    ],
)
def test_a_setting_of_the_wrong_type_is_a_user_error(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


@pytest.mark.parametrize("method", [DiLoCo, StreamingDiLoCo, DecoupledDiLoCo])
def test_the_outer_optimizer_suits_short_runs_and_the_papers_has_a_name(method: type[DiLoCo]) -> None:
    assert method() == method(outer="auto") == method(outer=SGD(lr=1, momentum=0.25, nesterov=True))
    papers = SGD(lr=0.7 if method is DiLoCo else 0.4, momentum=0.9, nesterov=True)
    assert method(outer="paper").outer == papers
    for default in ("auto", "sgd"):
        assert outer_problems(method(sync_every=50, outer=default), 600) == []
    assert method(outer="adam").outer == Adam()
    with pytest.raises(UserError, match="outer='fast'; must be auto, paper, sgd, adam, or an outer optimizer"):
        method(outer="fast")


def test_methods_are_frozen_and_take_keywords_only() -> None:
    with pytest.raises(FrozenInstanceError):
        DiLoCo().sync_every = 3  # type: ignore[misc]
    with pytest.raises(UserError, match="settings go by name"):
        LocalSGD(10)  # type: ignore[misc]


def test_a_torch_optimizer_outside_is_refused_with_what_to_use() -> None:
    with pytest.raises(ValueError, match=r"functools\.partial\(torch\.optim\.SGD, lr=0\.7"):
        DiLoCo(outer=torch.optim.SGD([torch.zeros(1)], lr=0.1))  # type: ignore[arg-type]


def test_replicas_must_agree_on_all_settings_but_their_own_pace() -> None:
    assert settings_of(DiLoCo(sync_every=50)) == {
        "trigger": "None",
        "weights": "steps",
        "codec": "fp32",
        "error_feedback": "1.0",
        "average_until_step": "0",
        "buffers": "local",
        "pacing": "None",
        "outer": "SGD",
        "outer.lr": "1.0",
        "outer.momentum": "0.25",
        "outer.nesterov": "True",
        "outer.schedule": "ConstantRate",
        "outer.schedule.warmup": "0",
        "outer.momentum_schedule": "ConstantRate",
        "outer.momentum_schedule.warmup": "0",
    }
    assert "sync_every" not in settings_of(LocalSGD(sync_every=50))
    streaming = settings_of(StreamingDiLoCo(fragments=Balanced(n=4)))
    assert streaming["fragments"] == "Balanced" and streaming["fragments.n"] == "4"
    assert not {"delay", "wait_for_result_s"} & streaming.keys()


def test_weights_go_by_steps() -> None:
    assert (
        DiLoCo().weight(ContributionStats(30, 1000)) == LocalSGD(sync_every=1).weight(ContributionStats(30, 7)) == 30.0
    )


def test_weights_go_by_tokens_or_not_at_all_on_request() -> None:
    assert DiLoCo(weights="tokens").weight(ContributionStats(30, 1000)) == 1000.0
    assert DiLoCo(weights="uniform").weight(ContributionStats(30, 1000)) == 1.0
    assert DiLoCo(weights="uniform").weight(ContributionStats(0, 0)) == 0.0, "what has no steps weighs nothing"


def test_a_lone_bf16_payload_of_local_sgd_is_the_parameters_themselves() -> None:
    anchor, params = torch.randn(100), torch.randn(100).bfloat16().float()
    start = anchor.bfloat16().float()
    out = LocalSGD(sync_every=1).payload(ReplicaView(anchor, start, params, (), alone=True), torch.empty(100))
    assert torch.equal(out, params)


def test_replicas_of_unlike_pace_meet_with_what_they_have() -> None:
    decided: list[dict[str, int]] = []

    def on_event(event: Event) -> None:
        if event.event == "decide":
            decided.append({member[0]: member[2] for member in event.data["members"]})

    groups = local_groups(2, policy=FaultPolicy(grace_s=0.05, dead_after_s=60.0), on_event=on_event)
    paces = (DiLoCo(sync_every=4), DiLoCo(sync_every=20))
    models = [problem().model(0) for _ in paces]

    def replica(m: int) -> None:
        optimizer = wrap(problem().inner(models[m].parameters()), models[m], paces[m], group=groups[m])
        with optimizer:
            while optimizer.version < 5:
                optimizer.zero_grad()
                problem().backward(models[m], m, optimizer.local_steps)
                optimizer.step()
                time.sleep(0.01)  # a step of some length: 20 of them last longer than the grace

    together([lambda m=m: replica(m) for m in range(2)])
    assert any(0 < members.get("r1", 0) < 20 for members in decided), "called in before its own pace"


@pytest.mark.long
@pytest.mark.parametrize("n", [1, 4, 24, 300])
def test_a_hello_tells_of_many_fragments_in_few_words(n: int) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(n)))
    method = DecoupledDiLoCo(fragments=Balanced(n=n))
    views = [FlatView(model, names) for names in method.partition(parameters(model))]
    (group,) = local_groups(1)
    told = OuterStep(views, method, group).fingerprint()
    identity = Identity("job", "r0", dict(told.lines), {}, told.initial, told.fragments, "host:1")
    ((hello,),) = ([e.message for e in Replica(identity).connect() if isinstance(e, Send)],)
    assert isinstance(hello, m.Hello)
    m.from_replica(m.encode(hello))
    views[-1].write(torch.ones(views[-1].numel))
    other = OuterStep(views, method, group).fingerprint()
    assert other.initial != told.initial and other.lines == told.lines

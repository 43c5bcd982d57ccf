"""Coming, going, looking at the anchor: a wrapped optimizer's life around its steps."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from ftopt._connect import local_groups, solo
from ftopt.errors import UserError
from ftopt.events import Event
from ftopt.fragments import Balanced
from ftopt.methods import DiLoCo, LocalSGD, Method, StreamingDiLoCo
from ftopt.optimizer import ReplicaOptimizer, wrap
from ftopt.outer import SGD, OuterOptimizer, Torch
from ftopt.sync.group import ReplicaGroup
from ftopt.sync.protocol.policy import FaultPolicy
from ftopt.sync.replica.session import Session
from tests.optimizer.running import PATIENT, note_digest, together
from tests.problems import flat, laid_out, problem

TASK = problem("mlp", "adamw")


def _step(optimizer: ReplicaOptimizer, model: nn.Module, step: int, replica: int = 0) -> None:
    optimizer.zero_grad()
    TASK.backward(model, replica, step)
    optimizer.step()


def test_the_counters_say_where_training_stands() -> None:
    model = TASK.model(0)
    optimizer = wrap(TASK.inner(model.parameters()), model, DiLoCo(sync_every=4), group=solo())
    assert (optimizer.inner_step, optimizer.local_steps, optimizer.status.versions) == (0, 0, ())
    with optimizer:
        for step in range(6):
            _step(optimizer, model, step)
        assert (optimizer.inner_step, optimizer.local_steps, optimizer.pending_steps) == (6, 6, 2)
        assert (optimizer.version, optimizer.status.committed_step) == (1, 4)
        assert optimizer.sync()
        assert (optimizer.status.versions, optimizer.pending_steps, optimizer.status.counted_step) == ((2,), 0, 6)
        assert optimizer.sync(), "nothing to hand in is no failure"
        assert optimizer.status.versions == (2,)


def test_a_replica_that_has_left_does_not_enter_again_without_a_word() -> None:
    model = TASK.model(0)
    optimizer = wrap(TASK.inner(model.parameters()), model, DiLoCo(sync_every=4), group=solo())
    with optimizer:
        _step(optimizer, model, 0)
    with pytest.raises(RuntimeError, match="`with optimizer:` after close"), optimizer:
        raise AssertionError("a loop that goes by inner_step takes no step here")


def test_events_come_in_order_and_before_their_effect() -> None:
    told: list[tuple[str, int | None]] = []
    seen: list[int] = []
    model = TASK.model(0)

    def on_event(event: Event) -> None:
        if event.event in ("inner", "stepped", "propose", "apply", "stall"):
            told.append((event.event, event.inner_step))
        if event.event == "apply":
            seen.append(optimizer._core.started().fragments[0].applied.meta.version)
        if event.event == "stall":
            assert event.data["stall_s"] > 0

    optimizer = wrap(TASK.inner(model.parameters()), model, LocalSGD(sync_every=2), group=solo(on_event=on_event))
    with optimizer:
        for step in range(3):
            _step(optimizer, model, step)
        assert told == [
            ("inner", 1),
            ("stepped", 1),
            ("inner", 2),
            ("stepped", 2),
            ("propose", 2),
            ("apply", 2),
            ("stall", 2),
            ("inner", 3),
            ("stepped", 3),
        ]
        assert seen == [0], "the event comes before the parameters change"


def test_counted_tokens_go_along() -> None:
    told: list[Event] = []
    model = TASK.model(0)
    optimizer = wrap(TASK.inner(model.parameters()), model, LocalSGD(sync_every=2), group=solo(on_event=told.append))
    with optimizer:
        optimizer.log(tokens=100, samples=2)
        _step(optimizer, model, 0)
        optimizer.log(tokens=50)
        _step(optimizer, model, 1)
    counted = [event.data for event in told if event.event == "stepped"]
    assert [(data["tokens"], data["samples"]) for data in counted] == [(100, 2), (50, 0)]
    assert optimizer._core.started().fragments[0].base.tokens == 150
    with pytest.raises(ValueError, match="0 or more"):
        optimizer.log(tokens=-1)


def test_outer_parameters_show_the_anchor_and_come_back_bit_for_bit() -> None:
    model = TASK.model(0).bfloat16()
    optimizer = wrap(TASK.inner(model.parameters()), model, DiLoCo(sync_every=3), group=solo())
    with optimizer:
        for step in range(5):
            _step(optimizer, model, step)
        mine = flat(model)
        with optimizer.global_parameters():
            anchor = optimizer._core.started().fragments[0].state.anchor
            assert torch.equal(laid_out(model), anchor.bfloat16().float())
            assert not torch.equal(flat(model), mine)
            with pytest.raises(RuntimeError, match="global_parameters"):
                optimizer.step()
            with pytest.raises(RuntimeError, match="already"):
                optimizer._core.evaluating.enter(optimizer._core.start)
        assert torch.equal(flat(model), mine)
        optimizer._core.evaluating.exit()
        assert torch.equal(flat(model), mine)
        _step(optimizer, model, 5)
        assert optimizer.status.versions == (2,)
    with optimizer.global_parameters():
        pass  # After the end too: for a last evaluation.


@pytest.mark.parametrize(
    "method",
    [DiLoCo(sync_every=4), StreamingDiLoCo(sync_every=4, delay=2, fragments=Balanced(n=2))],
    ids=lambda m: m.name,
)
def test_what_is_called_in_inference_mode_does_what_it_does_elsewhere(method: Method) -> None:
    def run(*, inference: bool) -> tuple[str, torch.Tensor]:
        model = TASK.model(0)
        optimizer = wrap(TASK.inner(model.parameters()), model, method, group=solo())
        with torch.inference_mode(inference):
            optimizer.__enter__()
        for step in range(20):
            optimizer.zero_grad()
            TASK.backward(model, 0, step)
            with torch.inference_mode(inference):
                optimizer.step()
                optimizer.sync(propose=False)
                if step % 5 == 0:
                    optimizer.sync()
                with optimizer.global_parameters():
                    assert torch.is_inference_mode_enabled() == inference
        with torch.inference_mode(inference):
            optimizer.close()
        assert optimizer.pending_steps == 0
        return optimizer.digest(), flat(model)

    (digest, params), (usual, usual_params) = run(inference=True), run(inference=False)
    assert digest == usual
    assert torch.equal(params, usual_params)


def test_leaving_hands_the_pending_steps_in() -> None:
    model = TASK.model(0)
    with wrap(TASK.inner(model.parameters()), model, LocalSGD(sync_every=100), group=solo()) as optimizer:
        for step in range(3):
            _step(optimizer, model, step)
    assert (optimizer.version, optimizer.status.counted_step, optimizer.pending_steps) == (
        1,
        3,
        0,
    )
    optimizer.close()
    with pytest.raises(RuntimeError, match=r"call ftopt\.wrap\(\) with a new group"):
        optimizer.step()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_who_leaves_while_a_round_is_under_way_hands_in_to_the_next_one(seed: int) -> None:
    """Each leaves when it likes, as at the end of a job: rounds of three fragments are under way."""
    chance, groups = random.Random(seed), local_groups(4, policy=FaultPolicy(dead_after_s=60.0))
    method = StreamingDiLoCo(sync_every=12, delay=1, fragments=Balanced(n=3))

    def replica(group: ReplicaGroup, steps: int) -> tuple[int, ...]:
        model = TASK.model(0)
        with wrap(TASK.inner(model.parameters()), model, method, group=group) as optimizer:
            for step in range(steps):
                _step(optimizer, model, step)
        return optimizer.status.pending_steps

    lengths = [chance.randint(30, 40) for _ in groups]
    left = together([lambda g=g, n=n: replica(g, n) for g, n in zip(groups, lengths, strict=True)])
    assert left == [(0, 0, 0)] * 4


def test_an_exception_leaves_at_once_and_hands_nothing_in(caplog: pytest.LogCaptureFixture) -> None:
    model = TASK.model(0)
    optimizer = wrap(TASK.inner(model.parameters()), model, LocalSGD(sync_every=100), group=solo())
    with pytest.raises(KeyError), optimizer:
        _step(optimizer, model, 0)
        raise KeyError("user code")
    assert (optimizer.version, optimizer.pending_steps) == (0, 1)
    assert "r0 has left with 1 inner step that no committed state contains" in caplog.text


def test_who_leaves_at_once_in_a_round_says_that_it_may_still_count_its_steps(caplog: pytest.LogCaptureFixture) -> None:
    groups, models = local_groups(2, policy=replace(PATIENT, min_replicas=2)), [TASK.model(0), TASK.model(0)]
    method = DiLoCo(sync_every=2)
    first, second = (
        wrap(TASK.inner(model.parameters()), model, method, group=group)
        for model, group in zip(models, groups, strict=True)
    )
    together([first.__enter__, second.__enter__])
    _step(first, models[0], 0)
    first._core.started().propose_pending(0, lr=0.1)
    first.close(flush=False)
    second.close(flush=False)
    text = "left with 1 inner step that no committed state contains, unless the round that it was in still counts them"
    assert text in caplog.text


def test_who_leaves_offers_all_fragments_at_once() -> None:
    told = list[Event]()
    groups, models = local_groups(2, policy=PATIENT, on_event=told.append), [TASK.model(0), TASK.model(0)]
    method = StreamingDiLoCo(sync_every=100, delay=1, fragments=Balanced(n=3))
    first, second = (
        wrap(TASK.inner(model.parameters()), model, method, group=group)
        for model, group in zip(models, groups, strict=True)
    )
    together([first.__enter__, second.__enter__])
    _step(first, models[0], 0)
    first.close(timeout_s=0.1)  # the other one takes no part in a round
    second.close(flush=False)
    assert [event.fragment for event in told if event.event == "propose"] == [0, 1, 2]


def test_connections_that_close_slowly_are_no_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, end = "r0: its connections are not closed after 0 s, which goes on", Session.end

    async def slow(session: Session) -> None:
        limit_s = time.monotonic() + 60.0
        while text not in caplog.text and time.monotonic() < limit_s:
            await asyncio.sleep(0.01)
        await end(session)

    monkeypatch.setattr(Session, "end", slow)
    monkeypatch.setattr("ftopt.sync.replica.client._END_S", 0.0)
    model = TASK.model(0)
    with wrap(TASK.inner(model.parameters()), model, LocalSGD(sync_every=1), group=solo()) as optimizer:
        _step(optimizer, model, 0)
    assert optimizer.status.versions == (1,)
    assert text in caplog.text


def test_leaving_waits_no_longer_than_it_was_told() -> None:
    groups = local_groups(2, policy=replace(PATIENT, min_replicas=2))
    models = [TASK.model(0), TASK.model(0)]
    left = threading.Event()

    def replica(m: int) -> float:
        optimizer = wrap(TASK.inner(models[m].parameters()), models[m], LocalSGD(sync_every=100), group=groups[m])
        optimizer.__enter__()
        if m == 1:  # Never hands anything in while the other wants to leave.
            assert left.wait(60)
            optimizer.close(flush=False)
            return 0.0
        _step(optimizer, models[m], 0)
        began = time.perf_counter()
        optimizer.close(timeout_s=0.3)
        left.set()
        return time.perf_counter() - began

    assert together([lambda m=m: replica(m) for m in range(2)])[0] < 25.0, "less than the grace, and than the usual"


def test_a_replica_whose_parameters_differ_starts_from_the_jobs() -> None:
    groups = local_groups(2, policy=PATIENT)
    models = [TASK.model(0), TASK.model(1)]
    both_are_there = threading.Barrier(2, timeout=60.0)

    def replica(m: int) -> tuple[torch.Tensor, dict[int, str]]:
        with wrap(TASK.inner(models[m].parameters()), models[m], LocalSGD(sync_every=2), group=groups[m]) as optimizer:
            start, digests = flat(models[m]), {}
            both_are_there.wait()  # or the other one starts from a later version
            for step in range(10):
                _step(optimizer, models[m], step, m)
                note_digest(digests, optimizer)
            return start, digests

    (start, digests), (other_start, other_digests) = together([lambda m=m: replica(m) for m in range(2)])
    assert torch.equal(start, other_start)
    common = digests.keys() & other_digests.keys()
    assert common and all(digests[version] == other_digests[version] for version in common)


def test_without_with_a_first_gradient_for_other_parameters_is_not_applied() -> None:
    groups = local_groups(2, policy=PATIENT)
    models = [TASK.model(0), TASK.model(1)]
    both_have_stepped = threading.Barrier(2, timeout=60.0)

    def replica(m: int) -> tuple[int, torch.Tensor]:
        optimizer = wrap(TASK.inner(models[m].parameters()), models[m], LocalSGD(sync_every=1000), group=groups[m])
        _step(optimizer, models[m], 0)
        result = optimizer.local_steps, flat(models[m])
        both_have_stepped.wait()  # who leaves sooner takes the state away
        optimizer.close(flush=False)
        return result

    results = together([lambda m=m: replica(m) for m in range(2)])
    assert sorted(steps for steps, _ in results) == [0, 1], "one brought the state, the other fetched it"
    fetched = next(params for steps, params in results if steps == 0)
    assert any(torch.equal(fetched, flat(TASK.model(seed))) for seed in (0, 1))


def test_without_with_a_cold_start_applies_the_first_gradient() -> None:
    model, bare = TASK.model(0), TASK.model(0)
    optimizer = wrap(TASK.inner(model.parameters()), model, LocalSGD(sync_every=2), group=solo())
    reference = TASK.inner(bare.parameters())
    for step in range(3):
        _step(optimizer, model, step)
        reference.zero_grad()
        TASK.backward(bare, 0, step)
        reference.step()
    assert torch.equal(flat(model), flat(bare)) and optimizer.local_steps == 3
    optimizer.close()


@pytest.mark.parametrize("outer", [SGD(lr=0.7), Torch(cls="torch.optim.Adam", args={"lr": 0.1})], ids=["sgd", "torch"])
def test_a_newcomer_starts_at_the_jobs_step_with_the_jobs_parameters_and_outer_state(outer: OuterOptimizer) -> None:
    running, proposed = threading.Event(), threading.Event()

    def on_event(event: Event) -> None:
        if event.event == "gather" and event.replica == "r1":
            proposed.set()

    groups = local_groups(2, policy=replace(PATIENT, start_replicas=1), on_event=on_event)
    models = [TASK.model(0), TASK.model(1)]
    method = DiLoCo(sync_every=5, outer=outer)

    digests: tuple[dict[int, str], dict[int, str]] = ({}, {})

    def train(m: int, optimizer: ReplicaOptimizer, steps: range) -> None:
        for step in steps:
            _step(optimizer, models[m], step, m)
            note_digest(digests[m], optimizer)

    def first() -> None:
        with wrap(TASK.inner(models[0].parameters()), models[0], method, group=groups[0]) as optimizer:
            train(0, optimizer, range(10))
            running.set()
            assert proposed.wait(60)  # newcomers are waited for half a second
            train(0, optimizer, range(10, 30))

    def second() -> None:
        assert running.wait(60)
        with wrap(TASK.inner(models[1].parameters()), models[1], method, group=groups[1]) as optimizer:
            assert (optimizer.start_step, optimizer.inner_step, optimizer.status.versions) == (10, 10, (2,))
            assert torch.equal(laid_out(models[1]), optimizer._core.started().fragments[0].state.anchor)
            train(1, optimizer, range(20))

    together([first, second])
    common = digests[0].keys() & digests[1].keys()
    assert len(common) >= 3
    assert all(digests[0][version] == digests[1][version] for version in common)


def test_what_needs_a_start_says_so() -> None:
    model = TASK.model(0)
    optimizer = wrap(TASK.inner(model.parameters()), model, LocalSGD(sync_every=2), group=solo())
    with pytest.raises(RuntimeError, match="not started"):
        optimizer.digest()
    optimizer.close()


def test_a_group_whose_job_is_over_says_so() -> None:
    first, late = local_groups(2, policy=FaultPolicy(start_replicas=1))
    for group in (first, late):
        model = TASK.model(0)
        optimizer = wrap(TASK.inner(model.parameters()), model, LocalSGD(sync_every=2), group=group)
        if group is late:
            with pytest.raises(UserError, match="the job of this group is over"):
                optimizer.__enter__()
            optimizer.close()
            continue
        with optimizer:
            _step(optimizer, model, 0)


def test_a_closed_optimizer_keeps_no_thread() -> None:
    before = {*threading.enumerate()}
    model = TASK.model(0)
    method = StreamingDiLoCo(sync_every=2, delay=1, fragments=Balanced(n=1))
    optimizer = wrap(TASK.inner(model.parameters()), model, method, group=solo())
    with optimizer:
        for step in range(6):
            _step(optimizer, model, step)
    for thread in {*threading.enumerate()} - before:
        thread.join(60.0)
        assert not thread.is_alive(), thread


def test_an_optimizer_whose_group_is_closed_says_at_once_what_is_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftopt.optimizer.ending.hand_in._POLL_S", -1.0)  # a wait while it leaves is a ValueError
    model, group = TASK.model(0), solo()
    optimizer = wrap(TASK.inner(model.parameters()), model, LocalSGD(sync_every=2), group=group)
    with optimizer:
        for step in range(3):
            _step(optimizer, model, step)
        group.close()
        for call in (lambda: _step(optimizer, model, 3), optimizer.sync, lambda: optimizer.sync(propose=False)):
            with pytest.raises(UserError, match="the group of this optimizer is closed"):
                call()
    assert (optimizer.status.versions, optimizer.local_steps) == ((1,), 3)
    assert "left with 1 inner step that no committed state contains: its group was closed before" in caplog.text


@pytest.mark.parametrize("which", ["inner", "wrapped", "neither"])
def test_a_loop_that_steps_the_inner_optimizer_in_place_of_the_wrapped_one_is_told_of_it(
    which: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = TASK.model(0)
    inner = TASK.inner(model.parameters())
    optimizer = wrap(inner, model, DiLoCo(sync_every=4), group=solo())
    with optimizer:
        for step in range(3 if which != "neither" else 0):
            TASK.backward(model, 0, step)
            (inner if which == "inner" else optimizer).step()
    assert ("without one step() of the wrapped optimizer" in caplog.text) == (which == "inner")

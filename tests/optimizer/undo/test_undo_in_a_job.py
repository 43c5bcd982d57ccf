"""`undo_step` on a wrapped optimizer: what is counted, and which steps are no longer this replica's own."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

from ftopt._connect import local_groups, solo
from ftopt.errors import UserError
from ftopt.events import Event
from ftopt.fragments import Balanced
from ftopt.methods import PAFT, DiLoCo, LocalSGD, Method, StreamingDiLoCo, SyncSGD
from ftopt.optimizer import ReplicaOptimizer, wrap
from ftopt.outer import SGD
from ftopt.sync.group import Samples
from ftopt.undo import Undone, undo_step, undoable
from tests.optimizer.running import PATIENT, together
from tests.optimizer.undo.test_undo_half_applied import Breaks, Broken
from tests.problems import flat, problem

TASK = problem("mlp", "adamw")


def _wrapped(method: Method, *, told: list[Event] | None = None) -> tuple[ReplicaOptimizer, nn.Module]:
    model = TASK.model(0)
    group = solo() if told is None else solo(on_event=told.append)
    return wrap(TASK.inner(model.parameters()), model, method, group=group, undo=True), model


def _step(optimizer: ReplicaOptimizer, model: nn.Module, step: int, replica: int = 0) -> None:
    optimizer.zero_grad()
    TASK.backward(model, replica, step)
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RAdam])
def test_steps_of_other_optimizers_are_undone_in_a_job_too(kind: type[torch.optim.Optimizer]) -> None:
    model = TASK.model(0)
    optimizer = wrap(kind(model.parameters(), lr=1e-3), model, LocalSGD(sync_every=9), group=solo(), undo=True)  # type: ignore[call-arg]
    with optimizer:
        for step in range(4):
            _step(optimizer, model, step)
        before = flat(model)
        _step(optimizer, model, 4)
        after = flat(model)
        assert undo_step(optimizer).whole and optimizer.pending_steps == 4
        assert torch.equal(flat(model), before)
        optimizer.step()
        assert torch.equal(flat(model), after)


def test_an_undone_step_is_counted_nowhere_and_can_be_taken_again() -> None:
    told: list[Event] = []
    optimizer, model = _wrapped(DiLoCo(sync_every=4), told=told)
    with optimizer:
        for step in range(6):
            _step(optimizer, model, step)
        before = flat(model)
        optimizer.log(tokens=100)
        _step(optimizer, model, 6)
        after = flat(model)
        assert (optimizer.local_steps, optimizer.pending_steps, optimizer.inner_step) == (7, 3, 7)
        assert undo_step(optimizer) == Undone(whole=True, reverted=4, untouched=0)
        assert (optimizer.local_steps, optimizer.pending_steps, optimizer.inner_step) == (6, 2, 6)
        assert optimizer._core.started().counters.tokens == 0
        torch.testing.assert_close(flat(model), before, rtol=1e-6, atol=1e-7)
        optimizer.step()
        torch.testing.assert_close(flat(model), after, rtol=1e-6, atol=1e-7)
        assert (optimizer.local_steps, optimizer.pending_steps) == (7, 3)
        _step(optimizer, model, 7)
        assert (optimizer.status.versions, optimizer.pending_steps, optimizer.status.committed_step) == ((2,), 0, 8)
    assert [(event.inner_step, event.data) for event in told if event.event == "undone"] == [(6, {"steps": 1})]


def test_a_run_in_which_steps_are_undone_and_taken_again_ends_where_the_plain_one_does() -> None:
    ends = []
    for again in (False, True):
        optimizer, model = _wrapped(DiLoCo(sync_every=4, outer=SGD(lr=0.7)))
        with optimizer:
            for step in range(20):
                _step(optimizer, model, step)
                if again and step % 4 != 3:
                    undo_step(optimizer)
                    optimizer.step()
            ends.append((flat(model), optimizer.status.versions, optimizer.local_steps))
    torch.testing.assert_close(ends[1][0], ends[0][0], rtol=1e-5, atol=1e-6)
    assert ends[0][1:] == ends[1][1:]


def test_the_samples_of_an_undone_step_are_in_no_contribution_until_a_step_uses_them() -> None:
    told: list[Event] = []
    model = TASK.model(0)
    group = solo(on_event=told.append)
    units = group.keep_ledger(Samples(samples=12, batch_size=1, epochs=1))
    with wrap(TASK.inner(model.parameters()), model, LocalSGD(sync_every=4), group=group, undo=True) as optimizer:
        for step in range(12):
            unit = units.take(timeout_s=60)
            assert unit is not None
            assert units.draw(unit)
            _step(optimizer, model, step)
            if step in (1, 2):
                held = units.offer()
                undo_step(optimizer)
                assert units.offer() == ((0, held[0][1] - 1),)
                if step == 1:
                    optimizer.step()
                    assert units.offer() == held
    done = [x for event in told if event.event == "decide" for part in event.data["ranges"].values() for x in part]
    assert sorted(unit for start, stop in done for unit in range(start, stop)) == list(range(12))


def test_a_step_that_is_proposed_or_committed_stays() -> None:
    optimizer, model = _wrapped(LocalSGD(sync_every=3))
    with optimizer:
        for step in range(3):
            _step(optimizer, model, step)
        held = flat(model)
        with pytest.raises(UserError, match=r"inner step 3 is in what this replica has proposed last \(fragment 0\)"):
            undo_step(optimizer)
        assert torch.equal(flat(model), held)
        assert optimizer.local_steps == 3
        _step(optimizer, model, 3)
        assert optimizer.sync()
        with pytest.raises(UserError, match="inner step 4 is in what this replica has proposed"):
            undo_step(optimizer)


def test_with_a_delay_steps_behind_the_snapshot_can_be_undone_and_nothing_is_lost() -> None:
    method = StreamingDiLoCo(sync_every=6, delay=3, fragments=Balanced(n=1), wait_for_result_s=60.0)
    models = [TASK.model(0) for _ in range(2)]
    groups = local_groups(2, policy=PATIENT)
    undone = [0, 0]
    abreast = threading.Barrier(2, timeout=60.0)  # or one would come to its last step before the round before is over

    def replica(m: int) -> tuple[ReplicaOptimizer, list[int]]:
        optimizer = wrap(TASK.inner(models[m].parameters()), models[m], method, group=groups[m], undo=True)
        with optimizer:
            for step in range(24):
                abreast.wait()
                _step(optimizer, models[m], step, m)
                if step % 2 == m:
                    try:
                        undo_step(optimizer)
                    except UserError:
                        continue
                    undone[m] += 1
                    optimizer.step()
            assert optimizer.local_steps == 24
            assert optimizer.sync(propose=False)
            counted = [f.base.step for f in optimizer._core.started().fragments]
            assert [24 - n for n in counted] == list(optimizer.status.pending_steps)
        return optimizer, list(optimizer.status.pending_steps)

    ends = together([lambda m=m: replica(m) for m in range(2)])  # type: ignore[misc]
    assert all(times >= 4 for times in undone), undone
    assert [pending for _, pending in ends] == [[0] * len(ends[0][1])] * 2
    assert ends[0][0].digest() == ends[1][0].digest()


def test_after_an_outer_step_was_taken_up_the_parameters_are_others() -> None:
    optimizer, model = _wrapped(StreamingDiLoCo(sync_every=4, delay=2, fragments=Balanced(n=1)))
    with optimizer:
        for step in range(5):
            _step(optimizer, model, step)
        optimizer.sync(propose=False)
        with pytest.raises(UserError, match=r"an outer step \(fragment 0\) has moved the parameters"):
            undo_step(optimizer)


def test_a_step_that_raises_is_repaired_and_was_never_counted() -> None:
    told: list[Event] = []
    optimizer, model = _wrapped(DiLoCo(sync_every=4), told=told)
    with optimizer:
        for step in range(5):
            _step(optimizer, model, step)
        before = flat(model)
        for at in (0, 1, 3, 8):
            optimizer.zero_grad()
            TASK.backward(model, 0, 5)
            with pytest.raises(Broken), Breaks(at):
                optimizer.step()
            assert not undo_step(optimizer).whole
            torch.testing.assert_close(flat(model), before, rtol=1e-6, atol=1e-7)
            assert (optimizer.local_steps, optimizer.pending_steps) == (5, 1)
        optimizer.step()
        assert (optimizer.local_steps, optimizer.pending_steps) == (6, 2)
    assert not [event for event in told if event.event == "undone"]


def test_of_several_inner_optimizers_those_that_the_step_had_not_reached_are_left_alone() -> None:
    model = TASK.model(0)
    weights, biases = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    inner = [torch.optim.SGD(weights, lr=0.1, momentum=0.9, foreach=False), torch.optim.AdamW(biases, lr=0.1)]
    with wrap(inner, model, DiLoCo(sync_every=10), group=solo(), undo=True) as optimizer:
        for step in range(3):
            _step(optimizer, model, step)
        before, state = flat(model), copy.deepcopy(inner[1].state_dict()["state"])
        for at, reverted in ((4, 2), (0, 0)):
            optimizer.zero_grad()
            TASK.backward(model, 0, 3)
            with pytest.raises(Broken), Breaks(at):
                optimizer.step()
            assert undo_step(optimizer) == Undone(whole=False, reverted=reverted, untouched=4 - reverted)
            torch.testing.assert_close(flat(model), before, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(inner[1].state_dict()["state"], state)
        _step(optimizer, model, 3)
        assert undo_step(optimizer) == Undone(whole=True, reverted=4, untouched=0)
        _step(optimizer, model, 3)
        inner[1].step()
        with pytest.raises(UserError, match="an inner optimizer has been stepped by itself since"):
            undo_step(optimizer)


def test_a_schedulers_rate_is_no_obstacle() -> None:
    optimizer, model = _wrapped(DiLoCo(sync_every=10))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    with optimizer:
        for step in range(4):
            before = flat(model)
            _step(optimizer, model, step)
            scheduler.step()
        undo_step(optimizer)
        torch.testing.assert_close(flat(model), before, rtol=1e-6, atol=1e-7)


def test_what_is_no_step_of_this_replica_is_refused() -> None:
    optimizer, model = _wrapped(DiLoCo(sync_every=10))
    assert undoable(optimizer) is optimizer
    with pytest.raises(UserError, match="there is no step to undo: none has been taken"):
        undo_step(optimizer)
    with optimizer:
        _step(optimizer, model, 0)
        undo_step(optimizer)
        with pytest.raises(UserError, match="the last one is undone already"):
            undo_step(optimizer)
        _step(optimizer, model, 1)
        with (
            optimizer.global_parameters(),
            pytest.raises(RuntimeError, match=r"undo_step\(\) while the global"),
        ):
            undo_step(optimizer)
        with optimizer.suspended():
            _step(optimizer, model, 2)
            undo_step(optimizer)
        with pytest.raises(UserError, match="there is no step to undo"):
            undo_step(optimizer)
        assert optimizer.local_steps == 1
    with pytest.raises(RuntimeError, match=r"undo_step\(\) after close\(\)"):
        undo_step(optimizer)


@pytest.mark.parametrize("method", [SyncSGD(), PAFT(sync_every=2)], ids=lambda method: method.name)
def test_steps_that_all_replicas_take_together_are_refused(method: Method) -> None:
    with pytest.raises(UserError, match="one alone cannot undo it; leave undo out"):
        _wrapped(method)


@pytest.mark.filterwarnings("ignore:this ReplicaOptimizer is a copy")
def test_a_detached_copy_undoes_its_own_steps() -> None:
    optimizer, model = _wrapped(DiLoCo(sync_every=10))
    both: Any = copy.deepcopy((optimizer, model))
    detached, own = both
    TASK.backward(own, 0, 0)
    before = flat(own)
    detached.step()
    assert undo_step(detached).reverted == 4
    torch.testing.assert_close(flat(own), before, rtol=1e-6, atol=1e-7)


def test_without_undo_a_wrapped_optimizer_keeps_no_record() -> None:
    model = TASK.model(0)
    inner = TASK.inner(model.parameters())
    with wrap(inner, model, DiLoCo(sync_every=10), group=solo()) as optimizer:
        _step(optimizer, model, 0)
        held = flat(model)
        assert not inner._optimizer_step_pre_hooks
        hooks = [type(hook).__name__ for hook in inner._optimizer_step_post_hooks.values()]
        assert hooks == ["_Beside"], "which notes steps that the wrapped optimizer does not take"
        for refused, match in ((undo_step, r"undo_step: .* not recorded"), (undoable, r"undoable: .* is wrapped")):
            with pytest.raises(UserError, match=rf"{match}; call ftopt\.wrap\(\.\.\., undo=True\)"):
                refused(optimizer)
        assert torch.equal(flat(model), held)
        assert optimizer.local_steps == 1

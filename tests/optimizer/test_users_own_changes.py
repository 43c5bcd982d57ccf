"""What becomes of parameters that the user changes in place between two steps, and of steps that GradScaler skips."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import ftopt
from ftopt.methods import Method
from ftopt.step.tensors.flat import FlatView
from tests.optimizer.running import PATIENT, together
from tests.problems import seeded

Change = Callable[[nn.Module], None]


def plus_100(model: nn.Module) -> None:
    """Weight clipping and the like: in place."""
    with torch.no_grad():
        model.weight.add_(100.0)  # type: ignore[operator, union-attr]


def data_plus_100(model: nn.Module) -> None:
    """An EMA that is swapped in: other memory."""
    model.weight.data = model.weight.detach() + 100.0  # type: ignore[operator, union-attr]


def train(method: Method, *, steps: int, change_after: int, change: Change = plus_100) -> list[list[tuple[float, int]]]:
    """Two replicas, whose steps add 1 to their only weight; the first one's is changed by 100 after a step.

    Returns, for each, the weight and the pending steps after every step, after a `settle` and after a `sync`.
    """
    groups = ftopt.local_groups(2, policy=replace(PATIENT, outlier_ratio=None))  # 100 is much beside a weight of 0
    all_there = threading.Barrier(2, timeout=60.0)

    def replica(m: int) -> list[tuple[float, int]]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model, method, group=groups[m])
        seen = []
        with optimizer:
            for step in range(1, steps + 1):
                model.weight.grad = torch.full((1, 1), -1.0)
                optimizer.step()
                if step == change_after and not m:
                    change(model)
                seen.append((model.weight.item(), optimizer.pending_steps))
            for call in (lambda: optimizer.sync(propose=False), optimizer.sync):
                all_there.wait()
                assert call()
                seen.append((model.weight.item(), optimizer.pending_steps))
            all_there.wait()
        return seen

    return together([lambda m=m: replica(m) for m in range(2)])  # type: ignore[misc]


@pytest.mark.parametrize("change", [plus_100, data_plus_100])
def test_a_change_within_a_round_counts_as_this_replicas_work(change: Change) -> None:
    first, second = train(ftopt.LocalSGD(sync_every=4), steps=4, change_after=3, change=change)
    assert first[2] == (103.0, 3) and second[2] == (3.0, 3)
    assert first[3] == second[3] == (54.0, 0), "the mean of 104 and 4"


def test_a_change_right_after_a_round_goes_with_the_next_one() -> None:
    first, second = train(ftopt.LocalSGD(sync_every=4), steps=8, change_after=4)
    assert first[3:8] == [(104.0, 0), (105.0, 1), (106.0, 2), (107.0, 3), (58.0, 0)]
    assert second[7] == (58.0, 0)


def test_a_change_without_steps_is_kept_and_not_handed_in() -> None:
    first, second = train(ftopt.LocalSGD(sync_every=4), steps=4, change_after=4)
    assert first[4:] == [(104.0, 0)] * 2 and second[4:] == [(4.0, 0)] * 2


def test_a_change_while_a_contribution_is_under_way_goes_with_the_one_after() -> None:
    method = ftopt.StreamingDiLoCo(
        sync_every=4,
        delay=2,
        wait_for_result_s=60.0,
        fragments=ftopt.fragments.Balanced(n=1),
        outer=ftopt.outer.SGD(lr=1.0),
    )
    first, second = train(method, steps=6, change_after=5)
    assert first[4][0] == 105.0 and first[5] == (106.0, 2) and second[5] == (6.0, 2), "of 4, applied after step 6"
    assert first[-1] == second[-1] == (56.0, 0), "the mean of 106 and 6"


def test_a_change_without_steps_is_overwritten_by_a_newer_state() -> None:
    groups = ftopt.local_groups(2, policy=ftopt.FaultPolicy(grace_s=0.05, dead_after_s=60.0))
    both, moved = threading.Barrier(2, timeout=60.0), threading.Event()

    def r0() -> float:
        optimizer, model = _one(groups[0])
        with optimizer, optimizer.busy("waiting for the other"):
            plus_100(model)
            both.wait()
            assert moved.wait(60.0)
            while not optimizer.status.versions[0]:  # it hears of it any moment
                assert optimizer.sync(propose=False)
            both.wait()
        return model.weight.item()  # type: ignore[operator, union-attr, return-value]

    def r1() -> float:
        optimizer, model = _one(groups[1])
        with optimizer:
            both.wait()
            _step(optimizer, model)
            moved.set()
            both.wait()
        return model.weight.item()  # type: ignore[operator, union-attr, return-value]

    assert together([r0, r1]) == [1.0, 1.0], "the anchor's, without the change"


def test_with_gradients_a_change_stays_at_home() -> None:
    first, second = train(ftopt.SyncSGD(), steps=3, change_after=1)
    assert (first[2], second[2]) == ((103.0, 0), (3.0, 0))


def _one(group: ftopt.ReplicaGroup, method: Method | None = None) -> tuple[ftopt.ReplicaOptimizer, nn.Module]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    method = method or ftopt.LocalSGD(sync_every=1)
    return ftopt.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model, method, group=group), model


def _step(optimizer: ftopt.ReplicaOptimizer, model: nn.Module) -> None:
    model.weight.grad = torch.full((1, 1), -1.0)
    optimizer.step()


@pytest.mark.parametrize(
    "method", [ftopt.LocalSGD(sync_every=2, weights="tokens"), ftopt.SyncSGD()], ids=lambda method: method.name
)
def test_of_a_step_that_grad_scaler_skips_nothing_is_counted_but_what_the_next_one_uses(
    method: Method,
) -> None:
    optimizer, model = _one(ftopt.solo(), method)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with optimizer:
        tokens, weights = [], []
        for step in range(4):
            optimizer.zero_grad()
            optimizer.log(tokens=10 + step)
            scaler.scale(-model(torch.ones(1, 1)).sum()).backward()
            if step == 1:
                model.weight.grad.fill_(float("inf"))  # type: ignore[operator, union-attr]
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            tokens.append(optimizer._core.started().counters.tokens)
            weights.append(model.weight.item())  # type: ignore[operator, union-attr]
        assert tokens == [10, 10, 33, 46], "those of the skipped step go with the next"
        assert weights == [1.0, 1.0, 2.0, 3.0] and optimizer.local_steps == 3


class Average:
    """An average of the weights, as `torch_ema` and others swap it in for an evaluation. Here it is all zeros."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters, self.kept = list(model.parameters()), list[torch.Tensor]()

    def swap(self) -> None:
        self.kept = [p.detach().clone() for p in self.parameters]
        for parameter in self.parameters:
            parameter.data.zero_()

    def restore(self) -> None:
        for parameter, kept in zip(self.parameters, self.kept, strict=True):
            parameter.data.copy_(kept)


BALANCED = ftopt.fragments.Balanced(n=2)
LOOKED_AT: dict[str, Method] = {
    "StreamingDiLoCo": ftopt.StreamingDiLoCo(sync_every=4, delay=2, wait_for_result_s=60.0, fragments=BALANCED),
    "mixed": ftopt.StreamingDiLoCo(sync_every=4, delay=2, mix=0.5, wait_for_result_s=60.0, fragments=BALANCED),
    "DecoupledDiLoCo": ftopt.DecoupledDiLoCo(sync_every=4, delay=2, wait_for_result_s=60.0, fragments=BALANCED),
    "PAFT": ftopt.PAFT(sync_every=4, delay=1),
    "DiLoCo": ftopt.DiLoCo(sync_every=4),
    "SyncSGD": ftopt.SyncSGD(),
}


@pytest.mark.parametrize("method", LOOKED_AT.values(), ids=LOOKED_AT)
def test_no_other_thread_reads_the_model_while_it_holds_other_weights(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = [threading.Event(), threading.Event()]
    read, found, owners, trains = FlatView._locals, list[str](), dict[int, int](), dict[int, int]()

    def watched(self: FlatView) -> list[torch.Tensor]:
        m = owners.get(id(self._parameters[0])) if type(self) is FlatView else None
        other = m is not None and m in trains and trains[m] != threading.get_ident()
        if m is not None and other and looking[m].wait(0.05):  # so much time to swap
            found.append(threading.current_thread().name)
        return read(self)

    monkeypatch.setattr(FlatView, "_locals", watched)
    groups = ftopt.local_groups(2, policy=PATIENT)

    def replica(m: int) -> None:
        with seeded(0):
            model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        owners.update((id(p), m) for p in model.parameters())
        optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, method, group=groups[m])
        average = Average(model)
        with optimizer:
            trains[m] = threading.get_ident()
            for step in range(9):
                model(torch.full((2, 4), float(m + step % 3))).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                average.swap()
                looking[m].set()
                looking[m].clear()
                average.restore()

    together([lambda m=m: replica(m) for m in range(2)])  # type: ignore[misc]
    assert found == []

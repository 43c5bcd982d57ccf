"""Loaders and optimizers of one job's replicas together: every sample in one committed contribution."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import ftopt
from ftopt.errors import UserError
from ftopt.sync.protocol.policy import FaultPolicy
from tests.data.units import Numbers
from tests.notes import Notes
from tests.optimizer.running import together

FAST = FaultPolicy(grace_s=0.2, heartbeat_s=0.05, dead_after_s=60.0)


def train(group: ftopt.ReplicaGroup, seen: list[list[int]], method: Any, **loading: Any) -> None:
    model = nn.Linear(1, 1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    loader = ftopt.DataLoader(Numbers(203), 2, group=group, seed=7, **loading)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), 0.01), model, method, group=group)
    with optimizer:
        for micro_batches in loader.steps():
            for batch in micro_batches:
                seen.append(batch.tolist())
                model(batch.float().view(-1, 1) / 200).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.pending_steps == 0


METHODS = [
    ftopt.DiLoCo(sync_every=4),
    ftopt.StreamingDiLoCo(sync_every=6, fragments=ftopt.fragments.Named(patterns=["weight", "bias"]), delay=1),
]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_three_replicas_share_the_epochs_and_each_sample_is_committed_once(method: Any, accumulate: int) -> None:
    notes = Notes()
    groups = ftopt.local_groups(3, policy=FAST, on_event=notes)
    seen: list[list[list[int]]] = [[] for _ in groups]
    together(
        [
            lambda group=group, mine=mine: train(group, mine, method, epochs=2, accumulate=accumulate)
            for group, mine in zip(groups, seen, strict=True)
        ]
    )
    assert notes.committed() == Counter(range(204))
    assert Counter(index for mine in seen for batch in mine for index in batch) == Counter(dict.fromkeys(range(203), 2))
    assert all(seen)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_alone_with_workers_each_sample_is_committed_once(workers: int) -> None:
    notes = Notes()
    group, seen = ftopt.solo(on_event=notes), []
    train(group, seen, ftopt.DiLoCo(sync_every=5), epochs=1, num_workers=workers)
    assert notes.committed() == Counter(range(102))
    assert sorted(index for batch in seen for index in batch) == list(range(203))


def test_each_replica_tells_once_that_the_data_have_ended_and_that_a_further_loop_gets_no_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    groups = ftopt.local_groups(2, policy=FAST)

    def loop(group: ftopt.ReplicaGroup, epochs: int) -> None:
        model = nn.Linear(1, 1)
        loader = ftopt.DataLoader(Numbers(40), 2, group=group)
        optimizer = ftopt.wrap(
            torch.optim.SGD(model.parameters(), 0.01), model, ftopt.LocalSGD(sync_every=5), group=group
        )
        with optimizer:
            for _ in range(epochs):
                for batch in loader:
                    model(batch.float().view(-1, 1) / 40).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()

    together(
        [lambda group=group, epochs=epochs: loop(group, epochs) for group, epochs in zip(groups, (1, 4), strict=True)]
    )
    said = [record.getMessage() for record in caplog.records]
    ended = sorted(line for line in said if "the data have ended" in line)
    assert [line.split(",")[0] for line in ended] == [
        f"replica {group.replica}: the data have ended after 1 epoch" for group in groups
    ]
    (line,) = (line for line in said if "gets no batch" in line)
    assert line.startswith(f"replica {groups[1].replica}: a loop over the loader") and "epochs=N" in line


def test_data_whose_last_steps_are_not_finite_end_all_the_same() -> None:
    """The last round has no weight at all; its samples are done, and spent."""
    notes, seen = Notes(), 0
    group, model = ftopt.solo(on_event=notes), nn.Linear(1, 1)
    loader = ftopt.DataLoader(Numbers(20), 2, group=group, seed=7, epochs=1)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), 0.01), model, ftopt.DiLoCo(sync_every=4), group=group)
    with optimizer:
        for batch in loader:
            seen += 1
            loss = model(batch.float().view(-1, 1) / 200).square().mean()
            (loss * float("nan") if seen > 8 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen == 10
    assert notes.committed() == Counter(range(10))
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def test_data_end_though_the_steps_of_one_replica_weigh_nothing() -> None:
    """Its steps stay pending, but the units of the last ones must be done."""
    groups = ftopt.local_groups(2, policy=FAST)

    def replica(m: int) -> int:
        model = nn.Linear(1, 1)
        loader = ftopt.DataLoader(Numbers(40), 2, group=groups[m], seed=7, epochs=1)
        method = ftopt.DiLoCo(sync_every=4, weights="tokens")
        optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), 0.01), model, method, group=groups[m])
        with optimizer:
            for batch in loader:
                model(batch.float().view(-1, 1) / 40).square().mean().backward()
                optimizer.log(tokens=8 if m else 0)
                optimizer.step()
                optimizer.zero_grad()
            return optimizer.pending_steps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps without tokens
        assert together([lambda m=m: replica(m) for m in range(2)]) == [0, 0]


def test_units_of_steps_that_were_dropped_are_offered_again_without_a_step() -> None:
    """At the end of the data nobody has steps left, and they must be done."""
    group, model, offered = ftopt.solo(), nn.Linear(1, 1), list[ftopt.sync.group.Contribution]()
    loader = ftopt.DataLoader(Numbers(40), 2, group=group, seed=7, epochs=1)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), 0.01), model, ftopt.DiLoCo(sync_every=4), group=group)
    with optimizer:
        for _, batch in zip(range(4), loader, strict=False):
            (model(batch.float().view(-1, 1)) * float("nan")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        outer = optimizer._core.started()
        assert outer.settle()
        assert optimizer.pending_steps == 0
        propose = group.propose
        group.propose = lambda contribution, **how: (offered.append(contribution), propose(contribution, **how))[1]  # type: ignore[method-assign]
        assert outer.propose_pending(0, lr=0.01, spent=True)
    assert [(each.steps, sum(stop - start for start, stop in each.ranges)) for each in offered[:1]] == [(0, 4)]


def test_a_batch_that_is_out_of_line_each_time_is_spent_and_the_data_end() -> None:
    notes, model, steps = Notes(), nn.Linear(1, 1, bias=False), 0
    nn.init.constant_(model.weight, 0.1)
    group = ftopt.solo(on_event=notes)
    loader = ftopt.DataLoader(Numbers(100), 2, group=group, seed=7, epochs=1)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), 0.01), model, ftopt.DiLoCo(sync_every=5), group=group)
    with optimizer:
        for batch in loader:
            steps += 1
            assert steps < 100
            bad = 1e6 if 60 in batch.tolist() else 1.0
            (bad * model(batch.float().view(-1, 1) / 100).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert notes.of("outlier")
    assert notes.committed() == Counter(range(50))
    assert float(model.weight.detach().abs()) < 1.0


def test_a_job_hands_out_one_data_set() -> None:
    group = ftopt.solo()
    ftopt.DataLoader(Numbers(100), 2, group=group)
    with pytest.raises(UserError, match=r"hands out Samples\(samples=100.*asks for Samples\(samples=90"):
        ftopt.DataLoader(Numbers(90), 2, group=group)


def test_a_loader_made_after_the_start_is_told_to_come_before() -> None:
    model, group = nn.Linear(1, 1), ftopt.solo()
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), 0.01), model, ftopt.DiLoCo(sync_every=5), group=group)
    with optimizer, pytest.raises(UserError, match="before `with optimizer:`"):
        ftopt.DataLoader(Numbers(100), 2, group=group)

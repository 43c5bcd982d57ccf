"""A folder may hold the checkpoints of several jobs: none removes the other's, and nothing is taken unasked."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ftopt import Checkpoints, LocalSGD, local_groups, wrap
from ftopt.checkpoint.reader import _start_of, find, start_of, verified, whole
from ftopt.cli.run import resumable
from ftopt.config.loader import load
from ftopt.errors import UserError
from tests.checkpoint.conftest import no_waiting_for_the_disk as no_waiting_for_the_disk
from tests.checkpoint.parts import part, writer
from tests.optimizer.running import PATIENT, together
from tests.problems import seeded

THEIRS = "1" * 32


def train(
    folder: Path,
    seed: int,
    *,
    resume: bool = False,
    names: tuple[str, ...] = ("r0", "r1"),
    others: Callable[[], object] = lambda: None,
) -> None:
    """A job of its own, by the seed of its model; two outer steps, each of them saved. ``others``: what another job
    does after the first."""
    groups = local_groups(len(names), policy=PATIENT, names=names)

    def replica(index: int) -> None:
        with seeded(seed):
            model = nn.Linear(3, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = wrap(inner, model, LocalSGD(sync_every=2), group=groups[index])
        checkpoints = Checkpoints(folder, optimizer, every=1)
        if resume:
            assert checkpoints.resume(replicas=names)
        with optimizer:
            for number in range(4):
                if number == 3 and not index:
                    others()
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                checkpoints.step()
                assert checkpoints._writer.wait(30)
        assert checkpoints.close()

    together([lambda i=i: replica(i) for i in range(len(names))])


def test_a_second_job_adds_its_own_and_names_the_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer(tmp_path)[0].write(part("r0", version=3, chain=THEIRS))
    (theirs,) = whole(tmp_path)
    train(tmp_path, 1)
    *older, newest = whole(tmp_path)
    assert theirs in older and len(older) == 2
    named = f"also holds checkpoints of another job, or of this one before it began anew, the newest {theirs}"
    assert caplog.text.count(named) == 2, "once for each replica"
    with pytest.raises(UserError, match="holds checkpoints of several jobs"):
        find(tmp_path)
    train(tmp_path, 1, resume=True)
    assert f"resuming from {newest}: version 2; the folder also holds those of another job" in caplog.text


def test_a_job_that_begins_at_the_same_time_is_named_as_soon_as_it_has_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 1, others=lambda: writer(tmp_path)[0].write(part("r0", version=3, chain=THEIRS)))
    assert caplog.text.count("also holds checkpoints of another job, or of this one before it began anew") == 2


def test_a_job_that_goes_on_or_comes_back_with_more_replicas_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 1)
    for names in (("r0", "r1"), ("r0",), ("r0", "r1", "r2")):
        train(tmp_path, 2, resume=True, names=names)
    assert "another job" not in caplog.text and "is back" not in caplog.text and "no checkpoint" not in caplog.text
    assert find(tmp_path).manifest.version == 8


def test_two_jobs_that_begin_with_equal_weights_in_one_second_keep_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    monkeypatch.setattr("time.time", lambda: 1_800_000_000 + next(clock) / 1000)
    train(tmp_path, 1)
    train(tmp_path, 1)
    assert next(clock) < 1000, "within one second"
    there = whole(tmp_path)
    assert len(there) == 4 and len({start_of(path) for path in there}) == 2
    for path in there:
        verified(path)


def test_each_of_two_jobs_removes_only_its_own(tmp_path: Path) -> None:
    ours, told = writer(tmp_path, keep=1)
    theirs, _ = writer(tmp_path, keep=1)
    for version in (1, 2, 3):
        ours.write(part("r0", version=version))
        theirs.write(part("r0", version=version, attempt=2000 + version, chain=THEIRS))
    assert [path.name for path in whole(tmp_path)] == ["v00000003-1003", "v00000003-2003"]
    assert told.names() == ["checkpoint"] * 3


def test_what_was_just_completed_stays_although_a_later_run_of_the_job_has_newer_ones(tmp_path: Path) -> None:
    ours, told = writer(tmp_path, keep=1)
    theirs, _ = writer(tmp_path, keep=1)
    theirs.write(part("r0", version=49, attempt=9000))
    theirs.write(part("r0", version=50, attempt=9001))
    ours.write(part("r0", version=30))
    assert "v00000030-1030" in [path.name for path in whole(tmp_path)] and told.names() == ["checkpoint"]


def test_of_two_that_were_completed_at_once_none_is_removed_or_taken_unasked(tmp_path: Path) -> None:
    first, other = tmp_path / "a", tmp_path / "b"
    writer(first)[0].write(part("r0", version=3))
    writer(other)[0].write(part("r0", version=2, attempt=2000, chain=THEIRS))
    (other / "v00000002-2000").rename(first / "v00000002-2000")
    both = whole(first)
    with pytest.raises(UserError, match=r"checkpoints of several jobs, the newest \S+v00000003-1003 and \S+-2000"):
        find(first)
    assert find(both[0]).path == both[0] and whole(first) == both


def test_a_recipe_is_refused_before_anything_starts(tmp_path: Path) -> None:
    where = f"checkpoint.dir={tmp_path}"
    resumable(load("diloco_bytes", [where]))
    writer(tmp_path)[0].write(part("r0"))
    with pytest.raises(UserError, match=r"holds checkpoints of another job, the newest .* give checkpoint.resume="):
        resumable(load("diloco_bytes", [where]))
    resumable(load("diloco_bytes", [where, "checkpoint.every=0"]))
    assert resumable(load("diloco_bytes", [where, f"checkpoint.resume={tmp_path}"])).checkpoint.resume == str(
        whole(tmp_path)[0]
    )


def test_a_checkpoint_that_could_not_be_read_once_is_read_again(tmp_path: Path) -> None:
    writer(tmp_path)[0].write(part("r0", chain=THEIRS))
    (path,) = whole(tmp_path)
    note = path / "replica-r0.json"
    note.rename(path / "away")
    _start_of.cache_clear()  # as in a process that has not written it
    assert start_of(path) is None
    (path / "away").rename(note)
    assert start_of(path) == THEIRS[:8]

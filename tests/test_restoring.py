"""All replicas die and are started again, with the coordinator alive: nobody says that they are to resume."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ftopt import Checkpoints, LocalSGD, StreamingDiLoCo, local_groups, solo, wrap
from ftopt.checkpoint import resuming
from ftopt.checkpoint.reader import Checkpoint, whole
from ftopt.errors import FtoptError, UserError
from ftopt.events import Event
from ftopt.fragments import Strided
from ftopt.methods import Method
from ftopt.sync.group import ReplicaGroup
from ftopt.sync.protocol.samples import Samples
from ftopt.sync.replica.loop import LoopThread
from tests.checkpoint.conftest import no_waiting_for_the_disk as no_waiting_for_the_disk
from tests.ledger import with_ledger
from tests.optimizer.running import PATIENT, together
from tests.problems import problem

TASK = problem("deep", "adamw")
LOCAL = LocalSGD(sync_every=4)
STREAMING = StreamingDiLoCo(sync_every=6, fragments=Strided(n=3), delay=3, mix=None, wait_for_result_s=30)


@dataclass
class Began:
    """Where a replica began: the committed inner step, pending steps, steps that its AdamW has behind it."""

    inner_step: int
    pending: tuple[int, ...]
    adam_steps: float
    included: int


class Watched:
    """Some state of the loop."""

    def __init__(self) -> None:
        self.passes = 0

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


@contextmanager
def lives(names: Sequence[str], events: list[Event], samples: Samples | None = None) -> Iterator[list[ReplicaGroup]]:
    """Groups of one job, whose coordinator lives: two lives of each replica."""
    # While the job recovers, a second process of an id waits so long for the first one, which may not be gone.
    policy = replace(PATIENT, start_replicas=len(names), grace_s=60.0 if samples is None else 1.0, dead_after_s=10.0)
    groups = local_groups(2 * len(names), policy=policy, names=[*names, *names], on_event=events.append)
    with_ledger(groups, samples)
    network: LoopThread = groups[0]._network  # type: ignore[attr-defined]
    errors: list[BaseException] = []
    network.acquire(errors.append)
    try:
        yield groups
    finally:
        network.release(errors.append)


def live(
    groups: Sequence[ReplicaGroup],
    folders: Sequence[Path],
    method: Method = LOCAL,
    *,
    dies_at: int = 10_000,
    resumes: bool = False,
) -> list[Began]:
    """One life of each replica: it dies at a step of its own, or ends after 40 more, or with the data."""

    def replica(group: ReplicaGroup, folder: Path) -> Began:
        model, watched = models.pop(), Watched()
        optimizer = wrap(TASK.inner(model.parameters()), model, method, group=group)
        checkpoints = Checkpoints(folder, optimizer, every=1, keep=20)
        if resumes:
            checkpoints.resume()
        with optimizer:
            checkpoints.include(watched=watched)
            state = [float(values["step"]) for values in optimizer.state.values() if "step" in values]
            began = Began(optimizer.start_step, optimizer.status.pending_steps, max(state, default=0.0), watched.passes)
            if dies_at == 10_000:
                all_have_joined.wait()  # else a fast one has left before a late one comes
            ends_at = 40 + sum(began.pending) if group.units is None else 10_000
            while optimizer.local_steps < min(dies_at, ends_at):
                if group.units is not None:
                    unit = group.units.take()
                    if unit is None:
                        break
                    assert group.units.draw(unit)
                optimizer.zero_grad()
                TASK.backward(model, int(group.replica[1:]), optimizer.local_steps)
                optimizer.step()
                watched.passes += 1
                checkpoints.step()
                assert checkpoints._writer.wait(30)
            checkpoints.close()
            if optimizer.local_steps == dies_at:
                group.close()
                raise KeyboardInterrupt
            return began

    models = [TASK.model(0) for _ in groups]
    all_have_joined = threading.Barrier(len(groups), timeout=60.0)
    tasks = [lambda i=i: replica(groups[i], folders[i]) for i in range(len(groups))]
    if dies_at == 10_000:
        return together(tasks)
    with pytest.raises(KeyboardInterrupt):
        together(tasks)
    return []


def steps_of_adam(checkpoint: Checkpoint, replica: str) -> float:
    (inner,) = checkpoint.own(replica)["replica"]["inner"]
    return max(float(values["step"]) for values in inner["state"].values())


@pytest.mark.long
def test_they_go_on_from_the_newest_checkpoint_with_what_each_had(tmp_path: Path) -> None:
    names, events = ("r0", "r1", "r2"), list[Event]()
    with lives(names, events) as groups:
        live(groups[:3], [tmp_path] * 3, STREAMING, dies_at=21)
        newest = Checkpoint(whole(tmp_path)[-1])
        began = live(groups[3:], [tmp_path] * 3, STREAMING)
        assert [event.event for event in events].count("start") == 1
        assert {event.replica for event in events if event.event == "restore"} == set(names)
        at = [event.event for event in events].index("restore")
        assert "disconnected" not in [event.event for event in events[at:]], "they connect again by themselves"
        for name, each in zip(names, began, strict=True):
            own = newest.own(name)
            pending = tuple(own["replica"]["local_steps"] - part["base_step"] for part in own["replica"]["fragments"])
            assert each == Began(
                newest.manifest.inner_step, pending, steps_of_adam(newest, name), own["loops"][0]["watched"]["passes"]
            )
            assert sum(pending) > 0 and each.inner_step > 0
        assert whole(tmp_path)[-1] != newest.path, "it makes checkpoints again"


def test_one_that_has_no_checkpoint_fetches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftopt.events._SLOW_S", math.inf)
    events = list[Event]()
    with lives(("r0", "r1"), events) as groups:
        live(groups[:2], [tmp_path / "a"] * 2, dies_at=10)
        caplog.clear()
        began = live(groups[2:], [tmp_path / "a", tmp_path / "b"])
        assert [each.inner_step for each in began] == [8, 8]
        assert [each.adam_steps for each in began] == [8.0, 0.0]
    (path,) = (path for path in whole(tmp_path / "a") if Checkpoint(path).manifest.inner_step == 8)
    usual = ("is averaged with", "is back as", "ends with version")
    told = [text for text in caplog.messages if not any(each in text for each in usual)]
    assert told == [f"r0: no connected replica holds the job's state; resuming from {path}"]


def test_without_any_checkpoint_the_job_begins_anew(tmp_path: Path) -> None:
    """Who is late goes on from what the other one has committed meanwhile; no step of a former life is in that."""
    events = list[Event]()
    with lives(("r0", "r1"), events) as groups:
        live(groups[:2], [tmp_path] * 2, dies_at=3)
        began = live(groups[2:], [tmp_path] * 2)
        decided = [event for event in events if event.event == "decide"]
        assert {life for event in decided for _, life, *_ in event.data["members"]} == {2}
        assert min(each.inner_step for each in began) == 0
        assert {each.inner_step for each in began} <= {0, *(event.inner_step for event in decided)}


def test_a_damaged_one_is_refused_and_never_passed_over(tmp_path: Path) -> None:
    events = list[Event]()
    with lives(("r0", "r1"), events) as groups:
        live(groups[:2], [tmp_path] * 2, dies_at=10)
        before, damaged = whole(tmp_path)
        (damaged / "replica-r1.json").write_text("{}")
        with pytest.raises(UserError) as caught:
            live(groups[2:], [tmp_path] * 2)
        assert str(caught.value).startswith(f"{damaged / 'replica-r1.json'}: ")
        assert str(caught.value).endswith(f"the previous one is sound: use {before}")


@pytest.mark.parametrize("restores", [True, False], ids=["the job asks for it", "resume()"])
def test_one_that_is_removed_while_it_is_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restores: bool
) -> None:
    """Others train on, and keep two; this one was stopped for a while."""
    with lives(("r0", "r1"), list[Event]()) as groups:
        live(groups[:2], [tmp_path] * 2, dies_at=10)
    left, removed = whole(tmp_path)
    name = "_as_another_life" if restores else "_resume_of"
    make, read = getattr(resuming, name), list[Path]()

    def slowly(checkpoint: Checkpoint, *more: Any) -> Any:
        read.append(checkpoint.path)
        shutil.rmtree(removed, ignore_errors=True)
        return make(Checkpoint(checkpoint.path), *more)

    monkeypatch.setattr(resuming, name, slowly)
    model = TASK.model(0)
    optimizer = wrap(TASK.inner(model.parameters()), model, LOCAL, group=solo())
    checkpoints = Checkpoints(tmp_path, optimizer)
    assert checkpoints._resuming.go_on(7) if restores else checkpoints.resume()
    assert read == [removed, left]


@pytest.mark.parametrize("method", [LOCAL, STREAMING], ids=["nothing is pending", "pending steps have used units"])
def test_every_sample_is_in_one_commit_that_stands(tmp_path: Path, method: Method) -> None:
    events = list[Event]()
    samples = Samples(samples=119, batch_size=2, epochs=1)
    with lives(("r0", "r1"), events, samples) as groups:
        live(groups[:2], [tmp_path] * 2, method, dies_at=14)
        newest = Checkpoint(whole(tmp_path)[-1])
        assert any(note["membership"]["used"] for note in newest.notes.values()) == (method is STREAMING)
        done = newest.record["done"]
        standing = [unit for start, stop in done for unit in range(start, stop)]
        assert 0 < len(standing) < 60
        live(groups[2:], [tmp_path] * 2, method)
        since = [event.event for event in events].index("recover")
        decided = [event for event in events[since:] if event.event == "decide" and not event.fragment]
        ranges = [parts for event in decided for parts in event.data["ranges"].values()]
        standing += [unit for parts in ranges for start, stop in parts for unit in range(start, stop)]
        assert sorted(standing) == list(range(60))


def test_who_says_resume_at_each_start_is_a_newcomer_where_others_live(tmp_path: Path) -> None:
    """It is taken for its dead self at first; no step and no unit is counted twice for that."""
    events = list[Event]()
    with lives(("r0", "r1"), events, Samples(samples=239, batch_size=2, epochs=1)) as groups:

        def two_lives() -> list[Began]:
            live(groups[1:2], [tmp_path], dies_at=10)
            return live(groups[3:4], [tmp_path], resumes=True)

        _, (began,) = together([lambda: live(groups[:1], [tmp_path], resumes=True), two_lives])
    assert began.inner_step >= 8
    decided = [event for event in events if event.event == "decide"]
    ranges = [part for event in decided for parts in event.data["ranges"].values() for part in parts]
    assert sorted(unit for start, stop in ranges for unit in range(start, stop)) == list(range(120))
    # Where it died before the checkpoint of version 2 was complete, the job has counted more of r1's steps than it has.
    # It is a newcomer then: it goes on counting its steps where the checkpoint's end, and drops what it did meanwhile.
    dropped = sum(event.data["steps"] for event in events if event.event == "discarded")
    last = {("r1", 2): 4 + dropped} if any(event.event == "reset" for event in events) else {}
    for event in decided:
        for replica, life, steps, last_step, *_ in event.data["members"]:
            assert steps == last_step - last.get((replica, life), 0)
            last[replica, life] = last_step


@pytest.mark.long
def test_who_resumes_under_the_id_of_a_living_replica_is_refused_and_costs_it_nothing(tmp_path: Path) -> None:
    """A supervisor has started a second process of it, whose script says resume."""
    events = list[Event]()
    policy = replace(PATIENT, start_replicas=1, dead_after_s=4.0, heartbeat_s=0.1)
    groups = local_groups(2, policy=policy, names=["a", "a"], on_event=events.append)
    saved, refused = threading.Event(), threading.Event()

    def replica(group: ReplicaGroup, *, second: bool) -> tuple[int, int]:
        model = TASK.model(0)
        optimizer = wrap(TASK.inner(model.parameters()), model, LOCAL, group=group)
        checkpoints = Checkpoints(tmp_path, optimizer, every=1)
        if second:
            assert saved.wait(60)
            checkpoints.resume()
        with optimizer:
            while second or not refused.wait(0.002):
                optimizer.zero_grad()
                TASK.backward(model, 0, optimizer.local_steps)
                optimizer.step()
                checkpoints.step()
                if list(tmp_path.glob("*/manifest.json")):
                    saved.set()
        return optimizer.local_steps, optimizer.status.counted_step

    def refusal() -> str:
        try:
            with pytest.raises(FtoptError) as raised:
                replica(groups[1], second=True)
        finally:
            refused.set()
        return str(raised.value)

    (steps, counted), error = together([lambda: replica(groups[0], second=False), refusal])
    assert "end the other process" in error
    assert steps == counted, "close() has handed in what was pending"
    assert [(event.replica, event.incarnation) for event in events if event.event in ("join", "return")] == [("a", 1)]
    assert not [event for event in events if event.event == "lost"]

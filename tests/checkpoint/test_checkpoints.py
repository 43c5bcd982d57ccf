"""Jobs that go on from a checkpoint: with as many replicas bit for bit, with more or fewer without losing a step."""

from __future__ import annotations

import copy
import json
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from ftopt import (
    PAFT,
    Checkpoints,
    DiLoCo,
    LocalSGD,
    SlowMo,
    StreamingDiLoCo,
    SyncSGD,
    connect,
    local_groups,
    wrap,
)
from ftopt.checkpoint.manifest import NAME
from ftopt.checkpoint.part import Part
from ftopt.checkpoint.reader import Checkpoint, find, verified, whole
from ftopt.errors import UserError
from ftopt.events import Event
from ftopt.fragments import Strided
from ftopt.methods import Method
from ftopt.outer import SGD, Adam
from ftopt.step.tensors.mapped import is_mapped
from ftopt.sync.protocol.samples import Samples
from ftopt.triggers import AdaComm
from tests.checkpoint.conftest import no_waiting_for_the_disk as no_waiting_for_the_disk
from tests.checkpoint.parts import FullDisk
from tests.ledger import with_ledger
from tests.optimizer.running import PATIENT, together
from tests.problems import Problem, alike, flat, laid_out, problem

TASK = problem("deep", "adamw")
STREAMING = StreamingDiLoCo(sync_every=6, fragments=Strided(n=3), delay=4, mix=0.5, wait_for_result_s=30)


def test_a_spare_resumes_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same script and the same overrides start a spare: it takes the state of the replicas that train."""
    model = nn.Linear(2, 1)
    group = connect("http://127.0.0.1:9", "s0", standby=True)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, LocalSGD(sync_every=5), group=group)
    checkpoints = Checkpoints(tmp_path, optimizer)
    assert not checkpoints.resume() and not checkpoints.resume(tmp_path / "job7")
    assert caplog.text.count("s0 stands by: it takes the state of the replicas that train") == 2


@dataclass
class Ended:
    """A replica at its end."""

    params: Tensor
    digest: str
    chain: str
    rate: float
    began: tuple[int, tuple[int, ...]]
    pending: Tensor


def run(
    folder: Path,
    method: Method,
    *,
    steps: int = 24,
    more: int | None = None,
    names: Sequence[str] = ("r0", "r1", "r2"),
    resume: Path | None = None,
    task: Problem = TASK,
    codec: str = "fp32",
    every: int = 1,
    keep: int = 50,
    on_event: Callable[[Event], None] = lambda event: None,
    dtype: torch.dtype = torch.float32,
    state_dir: Path | None = None,
) -> list[Ended]:
    """Trains each replica until its step, or so many ``more`` after a resume, with a checkpoint at each outer step."""
    models = [task.model(0).to(dtype) for _ in names]
    method = replace(method, codec=codec)
    groups = local_groups(len(names), policy=PATIENT, names=list(names), on_event=on_event)

    def replica(index: int) -> Ended:
        model, number = models[index], int(names[index][1:])
        optimizer = wrap(task.inner(model.parameters()), model, method, group=groups[index], state_dir=state_dir)
        checkpoints = Checkpoints(folder, optimizer, every=every, keep=keep)
        if resume is not None:
            checkpoints.resume(resume, replicas=names)
        with optimizer:
            scheduler = CosineAnnealingLR(optimizer, 100)
            checkpoints.include(scheduler=scheduler)
            first = optimizer._core.started().fragments[-1]
            assert is_mapped(first.state.anchor) == is_mapped(first.start) == (state_dir is not None)
            pending = first.view.read(first.view.empty()) - first.base.params
            began = optimizer.status.committed_step, optimizer.status.pending_steps
            end = steps if more is None else optimizer.local_steps + more
            while optimizer.local_steps < end:
                optimizer.zero_grad()
                optimizer.log(loss=task.backward(model, number, optimizer.local_steps))
                optimizer.step()
                scheduler.step()
                checkpoints.step()
                assert checkpoints._writer.wait(30)  # each one is whole, however fast the steps
            optimizer.sync(propose=False)
            chain = (
                optimizer._core.standing().committed.record.chain if optimizer._core.standing().committed.record else ""
            )
            checkpoints.close()
            rate = optimizer.param_groups[0]["lr"]
            return Ended(laid_out(model), optimizer.digest(), chain, rate, began, pending)

    return together([lambda i=i: replica(i) for i in range(len(names))])


BIT_EQUAL: dict[str, Callable[[], dict[str, Any]]] = {
    "diloco": lambda: {"method": DiLoCo(sync_every=5)},
    "diloco, momentum, bf16": lambda: {
        "method": DiLoCo(sync_every=5), "task": problem("mlp", "sgd"), "dtype": torch.bfloat16,
    },
    "streaming with delay, mixed": lambda: {"method": STREAMING},
    "streaming with delay, rebased": lambda: {"method": replace(STREAMING, mix=None, delay=3)},
    "slowmo": lambda: {"method": SlowMo(sync_every=5)},
    "paft": lambda: {"method": PAFT(sync_every=4), "every": 6},
    "paft, moments": lambda: {"method": PAFT(sync_every=4, inner_state="average"), "every": 6},
    "sync_sgd": lambda: {"method": SyncSGD(), "every": 6},
    "local_sgd": lambda: {"method": LocalSGD(sync_every=4)},
    "diloco, error feedback": lambda: {"method": DiLoCo(sync_every=5), "codec": "int8"},
    "a trigger that members agree on": lambda: {"method": LocalSGD(sync_every=16, trigger=AdaComm(initial=4))},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("case", BIT_EQUAL)
def test_a_fault_free_resume_at_half_way_is_the_uninterrupted_run(tmp_path: Path, case: str) -> None:
    settings = BIT_EQUAL[case]()
    uninterrupted = run(tmp_path / "a", **settings)
    there = whole(tmp_path / "a")
    resumed = run(tmp_path / "b", **settings, resume=there[len(there) // 2 - 1])
    for a, b in zip(uninterrupted, resumed, strict=True):
        assert 0 < b.began[0] < 24, b.began
        assert torch.equal(a.params, b.params)
        assert (a.digest, a.chain, a.rate) == (b.digest, b.chain, b.rate)


@pytest.mark.parametrize(
    "method", [pytest.param(DiLoCo(sync_every=5), marks=pytest.mark.long), STREAMING], ids=["diloco", "streaming"]
)
def test_committed_states_in_files_are_saved_and_resumed(tmp_path: Path, method: Method) -> None:
    """As they are from RAM, by all replicas and by fewer."""
    expected = run(tmp_path / "ram", method)
    saved = run(tmp_path / "disk", method, state_dir=tmp_path)
    there = whole(tmp_path / "disk")[1]
    resumed = run(tmp_path / "again", method, resume=there, state_dir=tmp_path)
    for a, b, c in zip(expected, saved, resumed, strict=True):
        assert torch.equal(a.params, b.params) and torch.equal(a.params, c.params)
        assert a.digest == b.digest == c.digest
    fewer = [
        run(tmp_path / f"fewer {where}", method, names=("r0",), resume=there, more=8, state_dir=where)[0]
        for where in (None, tmp_path)
    ]
    assert fewer[0].digest == fewer[1].digest and torch.equal(fewer[0].params, fewer[1].params)


def test_fragments_under_way_go_on_though_their_commit_had_arrived(tmp_path: Path) -> None:
    """A commit that was not applied to the parameters has not happened for the checkpoint: it happens again."""
    ends: list[Tensor] = []
    captured: list[Any] = []
    seen = []
    for resume in (False, True):
        model = TASK.model(0)
        (group,) = local_groups(1, policy=PATIENT)
        optimizer = wrap(TASK.inner(model.parameters()), model, STREAMING, group=group)
        if resume:
            optimizer._core.joining.go_on_from(captured[0])
        with optimizer:
            core = optimizer._core.started()
            while optimizer.local_steps < 40:
                optimizer.zero_grad()
                TASK.backward(model, 0, optimizer.local_steps)
                optimizer.step()
                for fragment in core.fragments:
                    group.wait(fragment.index)
                untaken = [fragment.index for fragment in core.fragments if fragment.state is not fragment.applied]
                seen.append(untaken)
                if untaken and not captured and optimizer.local_steps > 18:
                    captured.append(_resume_of(optimizer))
            ends.append(flat(model))
    assert max(len(untaken) for untaken in seen) >= 2
    assert torch.equal(ends[0], ends[1])


def _resume_of(optimizer: Any) -> Any:
    from ftopt.optimizer.saved.restore import Resume
    from ftopt.step.tensors.pool import CopyPool

    saved = copy.deepcopy(optimizer._core.saving.capture(CopyPool()))
    saved = replace(saved, held=replace(saved.held, roster={"r0": 1}))
    lines = optimizer._core.started().fingerprint().lines
    return Resume(saved, (), saved.committed, lines, "here", UserError, UserError)


# More replicas, or fewer.


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three replicas with pending work and fragments under way."""
    folder = tmp_path_factory.mktemp("made")
    run(folder, replace(STREAMING, mix=None))
    return whole(folder)[1]


def work_of(checkpoint: Checkpoint, replica: str, fragment: int) -> tuple[Tensor, int]:
    """A replica's pending work and steps of one fragment, from the files alone."""
    part = checkpoint.own(replica)["replica"]["fragments"][fragment]
    steps = checkpoint.own(replica)["replica"]["local_steps"] - part["base_step"]
    return part["params"] - checkpoint.committed(replica)[fragment].tensors["anchor"], steps


@pytest.mark.parametrize("names", [("r0",), ("r1", "r2"), ("r7",), ("r0", "r7")])
def test_fewer_replicas_take_over_what_the_missing_ones_had_pending(
    tmp_path: Path, made: Path, names: tuple[str, ...]
) -> None:
    checkpoint = Checkpoint(made)
    works = [work_of(checkpoint, replica, 2) for replica in checkpoint.replicas]
    assert all(steps > 0 for _, steps in works)
    events: list[Event] = []
    ends = run(tmp_path, replace(STREAMING, mix=None), names=names, resume=made, more=12, on_event=events.append)
    assert sum(end.began[1][2] for end in ends) == sum(steps for _, steps in works)
    together_moved = torch.stack([end.pending for end in ends]).sum(0)
    torch.testing.assert_close(together_moved, torch.stack([delta for delta, _ in works]).sum(0))
    assert not [event for event in events if event.event in ("fork", "reset", "refuse")]
    _every_step_once(events, [end.began[1] for end in ends], names)


def _every_step_once(events: list[Event], inherited: list[tuple[int, ...]], names: Sequence[str]) -> None:
    """Executed and inherited steps of each fragment are all committed or pending, none twice."""
    executed = sum(event.event == "stepped" for event in events)
    for fragment in range(3):
        committed, last = 0, dict[tuple[str, int], int]()
        for event in events:
            if event.event == "decide" and event.fragment == fragment:
                for replica, life, steps, last_step, *_ in event.data["members"]:
                    assert steps <= last_step - last.get((replica, life), 0), "a step was counted twice"
                    last[replica, life] = last_step
                    committed += steps
        pending = executed + sum(each[fragment] for each in inherited) - committed
        assert 0 <= pending <= 12 * len(names)


def test_more_replicas_begin_with_the_newest_state(tmp_path: Path, made: Path) -> None:
    names = ("r0", "r1", "r2", "r3", "r4")
    ends = run(tmp_path, replace(STREAMING, mix=None), names=names, resume=made, more=12)
    assert [end.began[1] for end in ends[3:]] == [(0, 0, 0)] * 2
    assert len({end.began[0] for end in ends}) == 1


@pytest.mark.parametrize("method", [PAFT(sync_every=1000), PAFT(sync_every=10)], ids=["long ago", "just averaged"])
def test_where_all_take_each_step_alike_the_work_of_one_is_that_of_all(tmp_path: Path, method: Method) -> None:
    run(tmp_path / "a", method, every=6)
    there = whole(tmp_path / "a")[1]
    saved = Checkpoint(there).own("r0")["replica"]["fragments"][1]["params"]
    for names in (("r0",), ("r0", "r7"), ("r7",), ("r0", "r1", "r2", "r3")):
        ends = run(tmp_path / "b", method, names=names, resume=there, more=0, every=100)
        assert all(torch.equal(end.params, saved) for end in ends), names


# With a sample ledger.


@pytest.mark.parametrize("names", [("r0", "r1", "r2"), ("r1",), ("r0", "r1", "r2", "r3")])
def test_every_sample_is_in_one_commit_though_all_died(tmp_path: Path, names: tuple[str, ...]) -> None:
    """An epoch of 90 units: all die, those who come back end it."""
    samples = Samples(samples=179, batch_size=2, epochs=1)
    first = _epoch(tmp_path, samples, ("r0", "r1", "r2"), dies_at=18)
    there = whole(tmp_path)[-1]
    done = Checkpoint(there).newest[0].record["done"]
    assert 0 < sum(stop - start for start, stop in done) < 90
    committed = [unit for start, stop in done for unit in range(start, stop)]
    assert set(committed) <= set(first)
    committed += _epoch(tmp_path / "b", samples, names, resume=there)
    assert sorted(committed) == list(range(90))


def _epoch(
    folder: Path, samples: Samples, names: Sequence[str], *, resume: Path | None = None, dies_at: int = 1000
) -> list[int]:
    """Trains on the units that the ledger hands out; the units of all commits, as often as they are in one."""
    events: list[Event] = []
    models = [TASK.model(0) for _ in names]
    policy = replace(PATIENT, grace_s=1.0)  # at the end of the data nobody waits for those who have none left
    groups = with_ledger(local_groups(len(names), policy=policy, names=list(names), on_event=events.append), samples)

    def replica(index: int) -> None:
        group, model = groups[index], models[index]
        optimizer = wrap(TASK.inner(model.parameters()), model, LocalSGD(sync_every=4), group=group)
        checkpoints = Checkpoints(folder, optimizer, every=2)
        if resume is not None:
            checkpoints.resume(resume, replicas=names)
        units = group.units
        assert units is not None
        with optimizer:
            checkpoints.include()
            while (unit := units.take()) is not None:
                assert units.draw(unit)
                optimizer.zero_grad()
                TASK.backward(model, 0, unit)
                optimizer.step()
                checkpoints.step()
                if optimizer.local_steps == dies_at:
                    checkpoints.close()
                    raise KeyboardInterrupt
            checkpoints.close()

    tasks = [lambda i=i: replica(i) for i in range(len(names))]
    with pytest.raises(KeyboardInterrupt) if dies_at < 1000 else nullcontext():
        together(tasks)
    ranges = [each for event in events if event.event == "decide" for each in event.data.get("ranges", {}).values()]
    return [unit for each in ranges for start, stop in each for unit in range(start, stop)]


def test_who_waits_for_units_at_the_end_of_the_data_gives_its_part_of_every_checkpoint(tmp_path: Path) -> None:
    """A checkpoint is complete with the parts of all members of its outer step, also of one without a step to take."""
    samples, waits = Samples(samples=40, batch_size=1, epochs=1), threading.Event()
    models = [TASK.model(0) for _ in range(2)]
    groups = with_ledger(local_groups(2, policy=replace(PATIENT, grace_s=0.2)), samples)
    applied: list[int] = []

    def replica(index: int) -> None:
        group, model = groups[index], models[index]
        optimizer = wrap(TASK.inner(model.parameters()), model, LocalSGD(sync_every=4), group=group)
        checkpoints, units = Checkpoints(tmp_path, optimizer, every=1, keep=50), group.units
        assert units is not None
        with optimizer:
            checkpoints.include()
            if index:

                def offer_rest() -> None:
                    optimizer._core.joining._out_of_units.offer_rest()
                    assert checkpoints._writer.wait(30)
                    waits.set()

                units.when_out_of_units(offer_rest)
            while (unit := units.take()) is not None:
                assert units.draw(unit)
                optimizer.zero_grad()
                TASK.backward(model, index, unit)
                optimizer.step()
                checkpoints.step()
                assert checkpoints._writer.wait(30)
                if not index:  # the other one uses what it has, and waits
                    assert waits.wait(30)
                    applied.append(optimizer.version)
            checkpoints.close()

    together([lambda: replica(0), lambda: replica(1)])
    since = {version for version in applied if version > applied[0] + 1}
    assert len(since) > 1
    complete = {Checkpoint(path).newest[0].record["version"] for path in whole(tmp_path)}
    assert since <= complete


def test_another_data_set_is_refused(tmp_path: Path) -> None:
    samples = Samples(samples=179, batch_size=2, epochs=1)
    _epoch(tmp_path, samples, ("r0",), dies_at=18)
    with pytest.raises(UserError, match=r"its job handed out .*batch_size=2.* this one .*batch_size=3"):
        _epoch(tmp_path / "b", replace(samples, batch_size=3), ("r0",), resume=whole(tmp_path)[-1])


# Refused.


def refused(path: Path, method: Method, *, task: Problem = TASK) -> str:
    with pytest.raises(UserError) as caught:
        run(path.parent / "refused", method, task=task, names=("r0",), resume=path)
    return str(caught.value)


def test_a_foreign_checkpoint_is_refused_with_the_reason_and_no_other_of_its_job_is_offered(made: Path) -> None:
    advice = "; resume it with the settings it was written with, or start a new job in another folder"

    def wider(seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 6), nn.Linear(6, 4))

    rebased = replace(STREAMING, mix=None)
    wide = Problem(wider, TASK.inner)
    for reason, message in [
        ("it is of another model: 4 tensors", refused(made, rebased, task=wide)),
        (
            r"it is of another model: 4 tensors.*; its method has other settings, too: method\.fragments\.n=3 there",
            refused(made, replace(rebased, fragments=Strided(n=2))),
        ),
        (
            r"its method has other settings: method\.outer=SGD there, Adam here;",
            refused(made, replace(rebased, outer=Adam())),
        ),
        (
            r"its method has other settings: method\.outer\.lr=\S+ there, 0\.7 here, method\.outer\.momentum=",
            refused(made, replace(rebased, outer=SGD(lr=0.7))),
        ),
        ("it is of another method: streaming_diloco there, diloco here", refused(made, DiLoCo(sync_every=5))),
        (
            r"parameter groups of the inner optimizers: .*'AdamW', 1.* in the checkpoint, .*'SGD', 1.* here",
            refused(made, rebased, task=problem("deep", "sgd")),
        ),
    ]:
        assert re.match(re.escape(f"{made}: ") + reason, message) and message.endswith(advice), message


def test_a_damaged_state_that_its_manifest_vouches_for_is_refused_and_the_one_before_is_offered(
    tmp_path: Path, made: Path
) -> None:
    """The committed state has a digest of its own, which the job knows it by."""
    shutil.copytree(made.parent, tmp_path / "c")
    (before, path), manifest = [tmp_path / "c" / each.name for each in whole(made.parent)[:2]], made / NAME
    name = Checkpoint(path).manifest.committed[0]
    tensors = load_file(path / name)
    tensors["anchor"][3] += 1
    save_file(tensors, path / name)
    told = json.loads(manifest.read_text())
    raw = (path / name).read_bytes()
    told["files"][name] = {"bytes": len(raw), "sha256": sha256(raw).hexdigest()}
    (path / NAME).write_text(json.dumps(told))
    message = refused(path, replace(STREAMING, mix=None))
    assert message.startswith(f"{path}: ") and message.endswith(f"; the previous one is sound: use {before}")


def test_other_settings_are_told(tmp_path: Path, made: Path) -> None:
    with pytest.warns(UserWarning, match=r"was written with other settings: method\.outer\.lr=1"):
        run(
            tmp_path,
            replace(STREAMING, mix=None, outer=SGD(lr=0.3, momentum=0.9)),
            names=("r0",),
            resume=made,
            more=1,
        )


def test_state_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    model = TASK.model(0)
    run(tmp_path, LocalSGD(sync_every=4), names=("r0",), steps=8)
    optimizer = wrap(TASK.inner(model.parameters()), model, LocalSGD(sync_every=4), group=local_groups(1)[0])
    checkpoints = Checkpoints(tmp_path, optimizer)
    assert checkpoints.resume()
    with optimizer, pytest.raises(UserError, match="holds no state of 'loader'; it holds scheduler"):
        checkpoints.include(loader=optimizer)


def test_a_loop_that_saved_no_state_is_told_that_it_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for makes in (True, False):
        model = TASK.model(0)
        optimizer = wrap(TASK.inner(model.parameters()), model, LocalSGD(sync_every=4), group=local_groups(1)[0])
        checkpoints = Checkpoints(tmp_path, optimizer)
        assert checkpoints.resume() is not makes
        with optimizer:
            if not makes:
                caplog.clear()
                checkpoints.include(scheduler=CosineAnnealingLR(optimizer, 100))
            while makes and optimizer.local_steps < 8:
                optimizer.zero_grad()
                TASK.backward(model, 0, optimizer.local_steps)
                optimizer.step()
                checkpoints.step()
            checkpoints.close()
    told = "has no state of this replica's loop to restore (scheduler): it had included nothing; optimizer.start_step"
    assert f"r0: {find(tmp_path).path} {told}" in caplog.text


def test_a_job_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    model = TASK.model(0)
    optimizer = wrap(TASK.inner(model.parameters()), model, LocalSGD(sync_every=4), group=local_groups(1)[0])
    assert not Checkpoints(tmp_path / "none", optimizer).resume()
    for wrong in ("r0", 3, [0, 1]):
        with pytest.raises(UserError, match="must be a list of the replicas' ids"):
            Checkpoints(tmp_path / "none", optimizer).resume(tmp_path, replicas=wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="path=3; must be the path of a checkpoint"):
        Checkpoints(tmp_path / "none", optimizer).resume(3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        Checkpoints(tmp_path / "none", optimizer).resume(tmp_path)


def test_settings_are_checked(tmp_path: Path) -> None:
    model = TASK.model(0)
    optimizer = wrap(TASK.inner(model.parameters()), model, LocalSGD(sync_every=4), group=local_groups(1)[0])
    with pytest.raises(ValueError, match="every=0; must be a whole number of outer steps, at least 1"):
        Checkpoints(tmp_path, optimizer, every=0)
    with pytest.raises(ValueError, match="a copy without a group"):
        Checkpoints(tmp_path, copy.deepcopy(optimizer))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is a file; give another path"):
        Checkpoints(tmp_path / "file", optimizer)


def test_a_full_disk_stops_no_training_and_the_checkpoint_before_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is room for a few parts a replica."""
    plenty = run(tmp_path / "plenty", LocalSGD(sync_every=2), names=("r0", "r1"))
    part = sum(path.stat().st_size for path in whole(tmp_path / "plenty")[0].glob("*r0*"))
    rooms = iter((3 * part, 4 * part))
    events: list[Event] = []
    with monkeypatch.context() as patch, caplog.at_level("WARNING", logger="ftopt.checkpoint"):
        patch.setattr("ftopt.checkpoint.writer.Disk", lambda: FullDisk(next(rooms)))
        full = run(tmp_path / "full", LocalSGD(sync_every=2), names=("r0", "r1"), keep=1, on_event=events.append)
    assert all(torch.equal(a.params, b.params) for a, b in zip(full, plenty, strict=True))
    (found,) = whole(tmp_path / "full")
    assert 0 < verified(found).manifest.version < 12
    failed = {event.replica for event in events if event.event == "checkpoint_failed"}
    told = [record.getMessage() for record in caplog.records if record.name.startswith("ftopt.checkpoint")]
    assert failed and len([text for text in told if "not saved" in text]) == len(failed), "at the end, each says so"


def test_buffers_and_counters_of_a_replica_come_back(tmp_path: Path) -> None:
    """BatchNorm's statistics and counters are each replica's own."""

    @alike
    def model(seed: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))

    task = Problem(model, TASK.inner)
    uninterrupted = run(tmp_path / "a", LocalSGD(sync_every=4), task=task, names=("r0", "r1"))
    there = whole(tmp_path / "a")[2]
    resumed = run(tmp_path / "b", LocalSGD(sync_every=4), task=task, names=("r0", "r1"), resume=there)
    assert all(torch.equal(a.params, b.params) for a, b in zip(uninterrupted, resumed, strict=True))
    own = Checkpoint(there).own("r0")["replica"]["buffers"]
    assert int(own["1.num_batches_tracked"]) == 12


def test_what_the_loop_has_is_copied_before_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Average:
        def __init__(self) -> None:
            self.mean, self.seen = torch.zeros(3), [0]

        def state_dict(self) -> dict[str, Any]:
            return {"mean": self.mean, "seen": self.seen}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise NotImplementedError

    model = torch.nn.Linear(2, 1)
    optimizer = wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), model, LocalSGD(sync_every=1), group=local_groups(1)[0]
    )
    checkpoints = Checkpoints(tmp_path / "saved", optimizer, every=1)
    average = Average()
    write = checkpoints._writer.begin

    def train_on_before_it_is_written(part: Part) -> None:
        average.mean.add_(1.0)
        average.seen.append(1)
        write(part)

    monkeypatch.setattr(checkpoints._writer, "begin", train_on_before_it_is_written)
    with optimizer:
        checkpoints.include(average=average)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert checkpoints.step()
        checkpoints.close()
    saved = find(tmp_path / "saved").own("r0")["loops"][0]["average"]
    assert saved["mean"].tolist() == [0.0] * 3
    assert saved["seen"] == [0]

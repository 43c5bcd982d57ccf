"""A process that is no member follows a job by its checkpoints."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt.checkpoint.follow import Weights
from ftopt.checkpoint.manifest import NAME, BadCheckpoint
from ftopt.checkpoint.reader import OF_A_RUN, find, whole
from ftopt.errors import UserError
from tests.checkpoint.parts import part, writer
from tests.forkserver import CONTEXT

SHAPES = {"weight": (20, 4), "bias": (20,)}


def written(folder: Path, *versions: int, attempts: int = 1000, keep: int = 100) -> None:
    """Checkpoints of one replica, whose parameters all equal the version."""
    saves, _ = writer(folder, keep=keep)
    for version in versions:
        own = {"replica": {"buffers": {}, "model": torch.zeros(1)}}
        made = part(version=version, attempt=attempts + version, own=own, shapes=SHAPES)
        spans = {"weight": (0, 80), "bias": (80, 100)}
        for name, place in made.model["tensors"].items():
            place |= {"start": spans[name][0], "stop": spans[name][1], "dtype": "bfloat16"}
        saves.write(made)


def version_in(weights: Weights | None) -> int:
    """The version, which all parameters must equal."""
    assert weights is not None
    assert {name: tuple(x.shape) for name, x in weights.state_dict.items()} == SHAPES
    assert all(x.dtype == torch.bfloat16 and bool((x == weights.version).all()) for x in weights.state_dict.values())
    assert weights.inner_step == 10 * weights.version
    return weights.version


def test_it_returns_the_newest_and_then_each_newer_one_but_none_twice(tmp_path: Path) -> None:
    follower = ftopt.follow(str(tmp_path / "job"))
    assert follower.newer() is None, "the folder may appear later"
    written(tmp_path / "job", 1, 2)
    assert version_in(follower.newer()) == 2
    assert follower.newer() is None
    written(tmp_path / "job", 3, 4, 5, keep=1)
    assert version_in(next(follower)) == 5, "those in between are skipped"
    assert follower.newer() is None


def test_a_runs_folder_is_followed_by_its_checkpoints(tmp_path: Path) -> None:
    written(tmp_path / OF_A_RUN, 7)
    assert version_in(ftopt.follow(tmp_path).newer()) == 7


def test_a_checkpoint_without_its_manifest_is_not_read(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    (whole(tmp_path)[-1] / NAME).unlink()
    assert version_in(ftopt.follow(tmp_path).newer()) == 1


def test_a_job_that_resumed_from_an_older_version_is_followed_backwards(tmp_path: Path) -> None:
    written(tmp_path, 5)
    follower = ftopt.follow(tmp_path)
    assert version_in(follower.newer()) == 5
    written(tmp_path, 3, attempts=2000)  # attempt numbers grow through all lives of a job
    assert version_in(follower.newer()) == 3


def test_it_waits_until_one_is_complete(tmp_path: Path) -> None:
    follower, found = ftopt.follow(tmp_path), list[int]()
    thread = threading.Thread(target=lambda: found.append(version_in(follower.newer(math.inf))))
    thread.start()
    written(tmp_path, 4)
    thread.join(60)
    assert found == [4]
    assert follower.newer(timeout_s=0.01) is None


def test_a_damaged_checkpoint_is_one_error_until_the_next_one_replaces_it(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    follower = ftopt.follow(tmp_path)
    (file,) = whole(tmp_path)[-1].glob("committed-*")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    for _ in range(2):
        with pytest.raises(BadCheckpoint, match=r"was changed since .*; call newer\(\) again when it is mended"):
            next(follower)
    written(tmp_path, 3)
    assert version_in(next(follower)) == 3


def test_a_folder_whose_name_is_not_what_is_inside_is_refused_until_it_is_named_so(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    follower = ftopt.follow(tmp_path)
    assert version_in(follower.newer()) == 2
    (older, _), false = whole(tmp_path), tmp_path / "v00000009-9000"
    older.rename(false)
    for _ in range(2):
        with pytest.raises(
            BadCheckpoint, match="v00000009-9000: was renamed: by its manifest it is v00000001-1001; name"
        ):
            follower.newer()
    with pytest.raises(BadCheckpoint, match=r"was renamed: .* the previous one is sound: use \S+v00000002-1002"):
        find(tmp_path)
    false.rename(tmp_path / "a copy of mine")
    assert find(tmp_path / "a copy of mine").manifest.version == 1, "another name says nothing"
    written(tmp_path, 3)
    assert version_in(follower.newer()) == 3


@pytest.mark.parametrize("gone", ["manifest", "note", "committed"])
def test_one_that_the_job_removes_while_it_is_read_is_replaced_by_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """At each file that is read: the job completes the next checkpoint, and removes this one."""
    written(tmp_path, 1)
    from ftopt.checkpoint import reader

    real, done = reader.open_regular, list[Path]()

    def opened(path: Path) -> Any:
        if not done and gone in path.name.replace("replica-", "note-"):
            done.append(path)
            written(tmp_path, 2, keep=1)
        return real(path)

    monkeypatch.setattr(reader, "open_regular", opened)
    monkeypatch.setattr("ftopt.checkpoint.manifest.open_regular", opened)
    assert version_in(ftopt.follow(tmp_path).newer()) == 2
    assert done and not done[0].exists()


def test_wrong_arguments_are_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong, said in (
        (3, "folder=3; must be the path of a folder of checkpoints"),
        (tmp_path / "file", "is a file; give the job's folder"),
        (tmp_path / "v00000001-1001", "is a single checkpoint, which never changes; give its folder"),
    ):
        with pytest.raises(UserError, match=said):
            ftopt.follow(wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"call it as in ftopt.follow\(folder\)"):
        ftopt.follow()  # type: ignore[call-arg]
    for timeout_s in (-1, "3", math.nan, None):
        with pytest.raises(UserError, match=r"timeout_s=.*must be a number of seconds, at least 0"):
            ftopt.follow(tmp_path).newer(timeout_s)  # type: ignore[arg-type]


def _writes(folder: Path, count: int) -> None:
    for version in range(1, count + 1):
        written(folder, version, keep=1)


@pytest.mark.long
def test_each_is_whole_while_another_process_writes_and_removes_as_fast_as_it_can(tmp_path: Path) -> None:
    process = CONTEXT.Process(target=_writes, args=(tmp_path, 200))
    process.start()
    try:
        found = [version_in(weights) for weights in _until(ftopt.follow(tmp_path), 200)]
    finally:
        process.kill()
        process.join()
    assert found == sorted(set(found)) and found[-1] == 200


def _until(follower: ftopt.Follower, version: int) -> Iterator[Weights]:
    while (weights := follower.newer(60)) is not None:
        yield weights
        if weights.version == version:
            return
    raise AssertionError("nothing newer in a minute")


# A real job, whose replicas all die and come back while it is followed.

_SCRIPT = """
import sys
import torch
from torch import nn
import ftopt

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1).to(torch.bfloat16))
group = ftopt.connect(sys.argv[1], sys.argv[2], policy=ftopt.FaultPolicy(start_replicas=2))
optimizer = ftopt.wrap(torch.optim.AdamW(model.parameters()), model, ftopt.DiLoCo(sync_every=5), group=group)
checkpoints = ftopt.Checkpoints("job", optimizer, every=1, keep=1)
torch.manual_seed(len(sys.argv[2]))
with optimizer:
    checkpoints.include()
    while optimizer.inner_step < int(sys.argv[3]):
        model[:2](torch.randn(8, 4)).bfloat16().mm(model[2].weight.T).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.step()
    checkpoints.close()
if sys.argv[2] == "r0":
    optimizer.export("last.safetensors")
"""


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1).to(torch.bfloat16))


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_job_that_dies_and_comes_back_is_followed_to_its_last_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (tmp_path / "train.py").write_text(_SCRIPT)
    environment = {**os.environ, "FTOPT_TOKEN": "a-token-of-this-test-of-32-letters"}
    with ExitStack() as ends:

        def start(*arguments: str) -> subprocess.Popen[str]:
            command = [sys.executable, *arguments]
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
            ends.enter_context(process)
            ends.callback(process.kill)
            return process

        head = start("-m", "ftopt", "coordinator", "--new", "--bind", "127.0.0.1:0", "--journal", "journal")
        assert head.stdout is not None
        url = head.stdout.readline().split()[2].rstrip(";")
        follower = ftopt.follow(tmp_path / "job")
        first = [start("train.py", url, f"r{i}", "1000000") for i in range(2)]
        seen = [_loads(follower.newer(100)) for _ in range(3)]
        for process in first:
            process.kill()
            process.wait()
        at = seen[-1].inner_step
        while (weights := follower.newer()) is not None:  # what they wrote before they died
            at = _loads(weights).inner_step
        second = [start("train.py", url, f"r{i}", str(at + 50)) for i in range(2)]
        while seen[-1].inner_step < at + 50:
            seen.append(_loads(follower.newer(100)))
        assert [process.wait(100) for process in second] == [0, 0]
    assert len({weights.version for weights in seen}) == len(seen)
    last = load_file(tmp_path / "last.safetensors")
    while (weights := follower.newer()) is not None:
        seen.append(weights)
    for name, tensor in seen[-1].state_dict.items():
        if "running" not in name and "num_batches" not in name:  # each replica has its own
            assert torch.equal(tensor, last[name]), name


def _loads(weights: Weights | None) -> Weights:
    """The weights, which a model takes."""
    assert weights is not None
    state: dict[str, Tensor] = weights.state_dict
    model = _model()
    model.load_state_dict(state, strict=True)
    assert all(x.isfinite().all() for x in model.state_dict().values())
    assert {name: x.dtype for name, x in model.state_dict().items()} == {name: x.dtype for name, x in state.items()}
    return weights

"""Committed states in files: the same bits as in RAM, no memory between outer steps, and nothing left behind."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt._connect import local_groups
from ftopt.errors import UserError
from ftopt.fragments import Strided
from ftopt.methods import DiLoCo, LocalSGD, Method, SlowMo, StreamingDiLoCo, SyncSGD
from ftopt.methods.outer_optimizers import Adam
from ftopt.optimizer import ReplicaOptimizer, wrap
from ftopt.step.tensors import mapped, pieces
from ftopt.step.tensors.digest import block_sums, damage
from ftopt.step.tensors.flat import FlatView
from ftopt.step.tensors.fused import OUTER_STEPS
from ftopt.step.tensors.mapped import Mapped, behind, is_mapped, let_go
from tests.optimizer.running import PATIENT, together
from tests.problems import problem

CPU = torch.device("cpu")
TASK = problem("mlp", "sgd")
MANY = 3_000_000
"""Elements: 12 MB, more than the noise of a process' resident memory."""


def _resident_bytes(folder: Path) -> int:
    """Of what is mapped from files in the folder."""
    count, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            ours = f" {folder}/" in line
        elif ours and line.startswith("Rss:"):
            count += 1024 * int(line.split()[1])
    return count


def test_pages_that_are_let_go_of_need_no_memory_and_keep_their_values(tmp_path: Path) -> None:
    tensor = Mapped(tmp_path).take(MANY, CPU)
    tensor.copy_(torch.arange(MANY, dtype=torch.float32))
    assert _resident_bytes(tmp_path) > 3 * MANY
    let_go(tensor)
    assert _resident_bytes(tmp_path) == 0
    assert torch.equal(tensor, torch.arange(MANY, dtype=torch.float32))
    assert _resident_bytes(tmp_path) > 3 * MANY
    let_go(tensor[: MANY // 2])
    assert MANY < _resident_bytes(tmp_path) < 3 * MANY


def test_what_is_in_ram_is_left_alone() -> None:
    tensor = torch.arange(100_000)
    let_go(tensor)
    assert not is_mapped(tensor) and torch.equal(tensor, torch.arange(100_000))
    parts = [(tensor, slice(0, 100_000))]
    assert behind(parts, tensor) is parts


def test_a_sweep_lets_go_behind_itself(tmp_path: Path) -> None:
    memory = Mapped(tmp_path)
    kept, sizes = memory.place(torch.randn(MANY)), [20_000] * 50 + [1_000_000] + [100_000] * 10
    let_go(kept)
    seen, stop = list[int](), 0

    def parts() -> object:
        nonlocal stop
        for size in sizes:
            yield kept[stop : stop + size], slice(stop, stop + size)
            stop += size

    for i, (part, _) in enumerate(behind(parts(), kept)):  # type: ignore[arg-type]
        part.sum()
        if i % 10 == 0:
            seen.append(_resident_bytes(tmp_path))
    assert stop == MANY and max(seen) < 6 << 20 and _resident_bytes(tmp_path) == 0


@pytest.mark.parametrize("numel", [5, 100_000, 1_000_003])
def test_sums_of_blocks_are_those_of_ram(tmp_path: Path, numel: int) -> None:
    values = torch.randn(numel)
    kept = Mapped(tmp_path).place(values)
    assert is_mapped(kept) and torch.equal(block_sums(kept), block_sums(values))
    assert damage(kept, block_sums(values)) == []


def test_no_file_has_a_name(tmp_path: Path) -> None:
    tensor = Mapped(tmp_path).take(MANY, CPU)
    assert is_mapped(tensor) and list(tmp_path.iterdir()) == []


METHODS: dict[str, Method] = {
    "diloco": DiLoCo(sync_every=3),
    "adam": DiLoCo(sync_every=3, outer=Adam()),
    "local_sgd": LocalSGD(sync_every=3),
    "slowmo": SlowMo(sync_every=3),
    "averaging first": DiLoCo(sync_every=3, average_until_step=4),
    "streaming, mixed": StreamingDiLoCo(sync_every=4, delay=2, fragments=Strided(n=2), mix=0.5, wait_for_result_s=60.0),
    "streaming, rebased": StreamingDiLoCo(sync_every=4, delay=2, fragments=Strided(n=2), wait_for_result_s=60.0),
    "sync_sgd": SyncSGD(),
}


def _ran(method: Method, folders: tuple[Path | None, ...], dtype: torch.dtype, codec: str = "fp32") -> list[Tensor]:
    """The parameters of each replica after 14 steps; ``folders``: where each one's committed states lie."""
    models, groups = (
        [TASK.model(0).to(dtype) for _ in folders],
        local_groups(len(folders), policy=PATIENT),
    )
    all_there = threading.Barrier(len(folders), timeout=60)

    def replica(m: int) -> Tensor:
        inner = TASK.inner(models[m].parameters())
        with wrap(inner, models[m], replace(method, codec=codec), group=groups[m], state_dir=folders[m]) as optimizer:
            for step in range(14):
                optimizer.zero_grad()
                TASK.backward(models[m], m, step)
                optimizer.step()
            optimizer.sync(propose=False)
            for fragment in optimizer._core.started().fragments:
                flats = [t for t in fragment.state.tensors().values() if t.dim() and t.dtype == torch.float32]
                assert all(is_mapped(t) == (folders[m] is not None) for t in (*flats, fragment.start))
            params = torch.cat([p.detach().float().reshape(-1) for p in models[m].parameters()])
            all_there.wait()
            return params

    return together([lambda m=m: replica(m) for m in range(len(folders))])


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", METHODS)
def test_bits_are_those_of_ram(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    expected = _ran(METHODS[name], (None, None), dtype)
    found = _ran(METHODS[name], (None, tmp_path), dtype)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_bits_are_those_of_ram_with_a_codec(tmp_path: Path) -> None:
    expected = _ran(METHODS["diloco"], (None, None), torch.float32, "int8")
    found = _ran(METHODS["diloco"], (tmp_path, None), torch.float32, "int8")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


class _Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(MANY // 4) for _ in range(4)])


def test_between_outer_steps_and_in_them_states_need_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls, seen = _Large(), list[None](), list[int]()
    there = pieces.let_go

    def look(*tensors: Tensor) -> None:
        calls.append(None)
        if len(calls) % 30 == 0:
            seen.append(_resident_bytes(tmp_path))
        there(*tensors)

    monkeypatch.setattr(pieces, "let_go", look)
    monkeypatch.setattr(OUTER_STEPS, "ready", lambda: None)  # with kernels there are fewer calls
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with wrap(inner, model, DiLoCo(sync_every=1), group=ftopt.solo(), state_dir=tmp_path) as optimizer:
        assert _resident_bytes(tmp_path) < MANY
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        assert _resident_bytes(tmp_path) < MANY
    assert optimizer.status.versions == (3,) and len(seen) > 1 and 0 < max(seen) < 2 * MANY


def test_a_peer_fetches_from_files_into_files(tmp_path: Path) -> None:
    groups = local_groups(2, policy=replace(PATIENT, start_replicas=1))
    models = [TASK.model(m) for m in range(2)]
    made = [
        wrap(TASK.inner(model.parameters()), model, DiLoCo(sync_every=2), group=group, state_dir=tmp_path)
        for model, group in zip(models, groups, strict=True)
    ]
    with made[0] as first:
        for step in range(4):
            first.zero_grad()
            TASK.backward(models[0], 0, step)
            first.step()
        with made[1] as second:
            assert second.status.versions == first.status.versions == (2,)
            assert second.digest() == first.digest()
            state = second._core.started().fragments[0].state
            assert state.fetched and is_mapped(state.anchor) and is_mapped(state.outer["momentum"])
            assert torch.equal(FlatView(models[1]).read(torch.empty(state.anchor.numel())), state.anchor)


def _large_in(folder: Path) -> ReplicaOptimizer:
    model = _Large()
    inner = torch.optim.SGD(model.parameters())
    return wrap(inner, model, DiLoCo(sync_every=1), group=ftopt.solo(), state_dir=folder)


def _full(fd: int, offset: int, length: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_at_the_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", _full)
    model = _Large()
    optimizer = wrap(
        torch.optim.SGD(model.parameters()), model, DiLoCo(sync_every=1), group=ftopt.solo(), state_dir=tmp_path
    )
    with pytest.raises(UserError, match=r"MiB free; 46 MiB are needed.*make room, or name a folder"):
        optimizer.sync()


def test_a_disk_without_room_for_the_next_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(mapped.shutil, "disk_usage", lambda folder: usage(100 << 20, 80 << 20, 20 << 20))
    model = _Large()
    optimizer = wrap(
        torch.optim.SGD(model.parameters()), model, DiLoCo(sync_every=1), group=ftopt.solo(), state_dir=tmp_path
    )
    with pytest.raises(UserError, match="has 43 MiB free; 46 MiB are needed"):
        optimizer.sync()


def test_when_the_disk_gets_full_training_goes_on_in_ram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _steps(None)
    with caplog.at_level(logging.WARNING):
        found = _steps(tmp_path, lambda: monkeypatch.setattr(os, "posix_fallocate", _full))
    assert torch.equal(found, expected)
    told = [record.message for record in caplog.records if "state_dir" in record.message]
    assert told == [
        f"state_dir={tmp_path}: {os.strerror(errno.ENOSPC)}; committed states that find no room there lie in RAM"
    ]


def _steps(folder: Path | None, started: object = None) -> Tensor:
    model = TASK.model(0)
    inner = TASK.inner(model.parameters())
    with wrap(inner, model, DiLoCo(sync_every=2), group=ftopt.solo(), state_dir=folder) as optimizer:
        if callable(started):
            started()
        for step in range(8):
            optimizer.zero_grad()
            TASK.backward(model, 0, step)
            optimizer.step()
        assert optimizer.status.versions == (4,)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no folder; create it, or name one on a local disk"):
        Mapped(tmp_path / "not there")
    with pytest.raises(UserError, match=r"no file can be made in it .*; use a folder"):
        Mapped(Path("/proc/self"))


def test_a_folder_that_is_ram_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared = Path("/dev/shm")
    if not shared.is_mount():
        pytest.skip("there is no /dev/shm")
    Mapped(shared)
    assert "is on a tmpfs, which is RAM" in caplog.text


def test_a_model_on_another_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"with a model on cuda:0; .* or keep the model there"):
        Mapped(tmp_path).check(torch.device("cuda:0"))

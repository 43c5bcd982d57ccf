"""Windows of token files: all there, none across files, and clear words about files that do not fit."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ftopt.data.loader import DataLoader
from ftopt.data.tokens import TokenWindows
from ftopt.errors import UserError


def written(path: Path, tokens: Any, dtype: str, *, header: bytes = b"") -> Path:
    path.write_bytes(header + np.asarray(tokens, dtype).tobytes())
    return path


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_windows_are_side_by_side_with_the_next_tokens_as_targets(tmp_path: Path, dtype: str) -> None:
    tokens = np.random.default_rng(0).integers(0, 60_000, 1003)
    windows = TokenWindows(written(tmp_path / "train.bin", tokens, dtype), 50, dtype=dtype)
    assert len(windows) == 20
    inputs = torch.cat([windows[index][0] for index in range(20)])
    targets = torch.cat([windows[index][1] for index in range(20)])
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs, torch.from_numpy(tokens[:1000]))
    assert torch.equal(targets, torch.from_numpy(tokens[1:1001]))


def test_several_at_once_are_the_single_ones(tmp_path: Path) -> None:
    windows = TokenWindows(np.arange(1000) % 256, 10)
    several = windows.__getitems__([5, 98, 0])
    for index, (inputs, targets) in zip([5, 98, 0], several, strict=True):
        assert torch.equal(inputs, windows[index][0]) and torch.equal(targets, windows[index][1])
    assert windows.__getitems__([]) == []


def test_no_window_reaches_into_the_next_file(tmp_path: Path) -> None:
    for index, size in enumerate([25, 3, 0, 31]):
        written(tmp_path / f"part{index}.bin", 100 * index + np.arange(size), "uint16")
    windows = TokenWindows(str(tmp_path / "part*.bin"), 10)
    starts = [int(windows[index][0][0]) for index in range(len(windows))]
    assert starts == [0, 10, 300, 310, 320]
    assert all((targets - inputs == 1).all() for inputs, targets in (windows[index] for index in range(5)))
    assert len(TokenWindows(tmp_path, 10)) == 5
    assert len(TokenWindows([tmp_path / "part0.bin", tmp_path / "part3.bin"], 10)) == 5


def test_a_header_is_skipped(tmp_path: Path) -> None:
    file = written(tmp_path / "train.bin", range(21), "uint16", header=b"\xff" * 1024)
    assert TokenWindows(file, 10, skip_bytes=1024)[0][0].tolist() == list(range(10))


def test_text_is_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world, hello", encoding="utf-8")
    inputs, targets = TokenWindows(tmp_path / "a.txt", 5, dtype="uint8")[1]
    assert bytes(inputs.tolist()) == b" worl" and bytes(targets.tolist()) == b"world"


def test_another_process_maps_the_files_itself(tmp_path: Path) -> None:
    file = written(tmp_path / "train.bin", np.arange(100_000) % 60_000, "uint16")
    windows = TokenWindows(file, 100)
    sent = pickle.dumps(windows)
    assert len(sent) < 2000
    assert torch.equal(pickle.loads(sent)[7][0], windows[7][0])
    array = TokenWindows(np.arange(50), 5)
    assert torch.equal(pickle.loads(pickle.dumps(array))[3][1], array[3][1])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_of_a_loader_has_every_window_once(tmp_path: Path, workers: int) -> None:
    file = written(tmp_path / "train.bin", np.arange(1001), "uint16")
    loader = DataLoader(TokenWindows(file, 10), 8, num_workers=workers)
    shapes, starts = set(), []
    for inputs, targets in loader:
        shapes.add(tuple(targets.shape))
        starts += inputs[:, 0].tolist()
    assert sorted(starts) == list(range(0, 1000, 10))
    assert shapes == {(8, 10), (4, 10)}


@pytest.mark.slow
def test_a_spawned_worker_reads_the_same(tmp_path: Path) -> None:
    file = written(tmp_path / "train.bin", np.arange(101), "uint16")
    loader = DataLoader(TokenWindows(file, 10), 5, num_workers=1, multiprocessing_context="forkserver")
    assert sorted(start for inputs, _ in loader for start in inputs[:, 0].tolist()) == list(range(0, 100, 10))


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (b"\0" * 101, {}, "101 bytes: 101 after skip_bytes=0 are no whole number of uint16 tokens"),
        (b"\0" * 100, {"skip_bytes": 200}, "skip_bytes=200"),
        (b"\0" * 20, {}, "10 tokens in 1 part; a window needs 11"),
        (b"", {}, "0 tokens"),
        (b"\0" * 100, {"dtype": "float32"}, "allowed: uint8, uint16, uint32"),
        (b"\0" * 100, {"length": 0}, "length=0"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, content: bytes, settings: Any, message: str) -> None:
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(UserError, match=message):
        TokenWindows(tmp_path / "train.bin", **{"length": 10, **settings})


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.*no file is there"):
        TokenWindows(tmp_path / "nowhere*.bin", 10)
    with pytest.raises(UserError, match="nowhere cannot be read: No such file"):
        TokenWindows([tmp_path / "nowhere"], 10)


def test_tokens_beyond_the_vocabulary_are_named(tmp_path: Path) -> None:
    windows = TokenWindows(np.array([1, 2, 300, 4]), 3, vocab=256)
    with pytest.raises(UserError, match="token 300 in the data; must be below vocab=256"):
        windows[0]

"""Corpora and windows: what is split from what, and which seed gives which batch."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ftopt.data import corpus
from ftopt.data.draws import windows
from ftopt.data.seeds import seed_of
from ftopt.errors import UserError


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for index in range(60):
        (tmp_path / f"{index}.txt").write_text(f"{index:04d}" * 10, encoding="utf-8")
    return tmp_path


def test_train_and_held_out_files_are_apart_and_all_there(files: Path) -> None:
    got = corpus.text(str(files))
    train, held = ({part.tobytes()[i : i + 40] for i in range(0, part.size, 40)} for part in (got.train, got.held_out))
    assert not train & held
    assert len(train) + len(held) == 60
    assert 1 <= len(held) <= 12


def test_the_split_depends_on_the_names_alone(files: Path) -> None:
    first, again = corpus.text(str(files)), corpus.text(f"{files}/*.txt")
    assert np.array_equal(first.held_out, again.held_out)


def test_a_single_file_is_split_by_its_tail(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(100)) * 10)
    got = corpus.text(str(path))
    assert (got.train.size, got.held_out.size) == (950, 50)


def test_missing_or_empty_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file is there"):
        corpus.text(str(tmp_path / "*.md"))
    for name in "ab":
        (tmp_path / name).touch()
    with pytest.raises(UserError, match="holds no text"):
        corpus.text(str(tmp_path))


def test_the_library_has_text_to_train_and_to_evaluate_on() -> None:
    got = corpus.stdlib_bytes()
    assert got.train.size > 1_000_000
    assert got.held_out.size > 50_000
    assert got.train.size <= corpus.LIMIT_BYTES


def test_targets_are_the_bytes_that_follow() -> None:
    data = np.arange(200, dtype=np.uint8)
    inputs, targets = windows(data, 8, batch_size=32, seed=1).batch()
    assert inputs.shape == targets.shape == (32, 8)
    assert torch.equal(inputs + 1, targets)


def test_every_start_is_drawn_also_the_last() -> None:
    starts = windows(np.arange(10, dtype=np.uint8), 8, batch_size=500, seed=1).batch()[0][:, 0]
    assert set(starts.tolist()) == {0, 1}


def test_one_seed_gives_one_sequence_and_a_successor_gets_another() -> None:
    data = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)

    def first(*parts: object) -> torch.Tensor:
        return windows(data, 16, batch_size=4, seed=seed_of(*parts)).batch()[0]

    assert torch.equal(first(0, "r1", 1), first(0, "r1", 1))
    assert not torch.equal(first(0, "r1", 1), first(0, "r1", 2))
    assert not torch.equal(first(0, "r1", 1), first(0, "r2", 1))


def test_too_short_a_text_is_refused() -> None:
    with pytest.raises(UserError, match="9 bytes; a window needs 17"):
        windows(np.zeros(9, dtype=np.uint8), 16, batch_size=1, seed=0)

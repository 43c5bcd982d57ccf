"""Where a recipe's batches come from: each sample once, at random, token files; and a job that ends with its data."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftopt._connect import local_groups
from ftopt.config.loader import load
from ftopt.config.schema import Recipe
from ftopt.config.tasks import task_of
from ftopt.errors import UserError
from ftopt.run.subscribers import CurrentStep
from ftopt.run.train import Trainer
from tests.notes import Notes
from tests.optimizer.running import PATIENT, together
from tests.run.running import TINY, text


def trained(recipe: Recipe, replicas: int) -> Notes:
    """Trains in threads, to the end."""
    notes = Notes()
    trainers = [
        Trainer(recipe, group, record=CurrentStep(), evaluates=False)
        for group in local_groups(replicas, policy=PATIENT, on_event=notes)
    ]
    assert together([trainer.run for trainer in trainers]) == [True] * replicas
    return notes


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_job_ends_with_its_data_and_every_sample_is_in_one_commit(tmp_path: Path, accumulate: int) -> None:
    settings = [*TINY, text(tmp_path), "data.epochs=1", "data.batch_size=12", f"train.accumulate={accumulate}"]
    notes = trained(load("diloco_bytes", settings), 2)
    windows = (18_000 * 95 // 100 - 1) // 16
    assert notes.committed() == Counter(range(-(-windows // 12)))
    assert [event.data["reason"] for event in notes.of("end")][-2:] == ["done", "done"]
    assert len({event.data["anchor_digest"] for event in notes.of("end")}) == 1
    assert {event.data["pending_steps"] for event in notes.of("end")} == {0}


def test_token_files_train_a_model_of_their_vocabulary(tmp_path: Path) -> None:
    tokens = np.arange(8001) * 7 % 1000
    tokens.astype(np.uint32).tofile(tmp_path / "train.bin")
    given = [item for item in TINY if not item.startswith("data.name")]
    settings = [*given, "data.name=tokens", f"data.path={tmp_path / 'train.bin'}", "data.dtype=uint32"]
    small = [*settings, "train.inner_steps=40", "model.vocab=1000"]
    assert trained(load("diloco_bytes", small), 1).of("evaluate")[-1].data["samples"] == 25  # 5 % of 500 windows
    task = task_of(load("diloco_bytes", [*small, f"data.held_out={tmp_path / 'train.bin'}"]))
    assert len(task.dataset()) == 500
    assert task.score(thorough=True).samples == 500
    with pytest.raises(UserError, match="must be below vocab=256"):
        task_of(load("diloco_bytes", [*settings, "model.vocab=256"])).score(thorough=True)


@pytest.mark.parametrize("sampling", ["once", "random"])
def test_one_seed_draws_the_same_and_another_one_does_not(tmp_path: Path, sampling: str) -> None:
    def batch(seed: int) -> Any:
        settings = [*TINY, text(tmp_path), f"data.sampling={sampling}", f"train.seed={seed}"]
        (group,) = local_groups(1)
        trainer = Trainer(load("diloco_bytes", settings), group, record=CurrentStep(), evaluates=False)
        with trainer.optimizer:
            ((inputs, _),) = next(trainer._micro_batches(trainer._loader or trainer._task.batches(seed)))
        return inputs.tolist()

    assert batch(0) == batch(0) != batch(1)


def test_who_is_told_to_stop_waits_for_no_more_samples(tmp_path: Path) -> None:
    (group,) = local_groups(1)
    trainer = Trainer(load("diloco_bytes", [*TINY, text(tmp_path)]), group, record=CurrentStep(), evaluates=False)
    with trainer.optimizer:
        trainer.stop()
        assert group.units is not None
        deadline_s = time.monotonic() + 60  # the word reaches it by another thread
        while group.units.take() is not None:
            assert time.monotonic() < deadline_s, "it waits for more, of data without end"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.sampling=twice", "data.sampling='twice'; allowed: once, random"),
        ("data.epochs=0", "data.epochs=0; must be at least 1"),
        ("data.workers=-1", "data.workers=-1; must be at least 0"),
        ("data.name=tokens", "data.path is empty; data.name=tokens needs it"),
        ("model.vocab=100", "model.vocab=100 with text"),
        ("data={name: stdlib_bytes, sampling: random, epochs: 2}", "no effect with data.sampling=random"),
        ("data={name: tokens, path: x.bin, dtype: int8}", "data.dtype='int8'; allowed: uint8, uint16, uint32"),
    ],
)
def test_wrong_settings_of_data_are_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load("diloco_bytes", [override])

"""The images of digits: which are held out, and which seed gives which batch."""

import sys

import pytest
import torch

from ftopt.config.loader import load
from ftopt.config.tasks import task_of
from ftopt.data.digits import digits
from ftopt.errors import UserError


def test_train_and_held_out_images_are_apart_all_there_and_always_the_same() -> None:
    (train, _), (held, held_labels) = (images.tensors for images in digits())
    torch.manual_seed(1)
    assert torch.equal(train, digits()[0].tensors[0])
    assert (len(train), len(held_labels)) == (1438, 359)
    assert len(torch.cat([train, held]).flatten(1).unique(dim=0)) == 1797
    assert held_labels.bincount().min() >= 20


def test_training_pixels_are_normalised_and_held_out_ones_by_the_same_numbers() -> None:
    train, held = (images.tensors[0] for images in digits())
    assert train.shape == (1438, 1, 8, 8)
    assert train.dtype == torch.float32
    assert float(train.mean()) == pytest.approx(0, abs=1e-5)
    assert float(train.std()) == pytest.approx(1, abs=1e-5)
    assert float(held.min()) == float(train.min())


def test_one_seed_gives_one_sequence_of_images_with_their_labels() -> None:
    task, (all_pixels, all_labels) = task_of(load("digits")), digits()[0].tensors
    pixels, labels = task.batches(3).batch()
    assert pixels.shape == (task.batch_size, 1, 8, 8)
    assert torch.equal(pixels, task.batches(3).batch()[0])
    assert not torch.equal(pixels, task.batches(4).batch()[0])
    place = int((all_pixels == pixels[0]).all(dim=(1, 2, 3)).nonzero()[0])
    assert all_labels[place] == labels[0]


def test_all_held_out_images_come_once() -> None:
    batches = task_of(load("digits")).held_out(thorough=True)
    assert torch.equal(torch.cat([labels for _, labels in batches]), digits()[1].tensors[1])


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match=r"pip install 'ftopt\[digits\]'"):
        digits()

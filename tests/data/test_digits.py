"""The images of digits: which are held out, and which seed gives which batch."""

import sys

import pytest
import torch

from ftopt.data.digits import Draws, digits
from ftopt.errors import UserError


def test_train_and_held_out_images_are_apart_all_there_and_always_the_same() -> None:
    train, held = digits()
    torch.manual_seed(1)
    again, _ = digits()
    assert torch.equal(train.pixels, again.pixels)
    assert (len(train.labels), len(held.labels)) == (1438, 359)
    assert len(torch.cat([train.pixels, held.pixels]).flatten(1).unique(dim=0)) == 1797
    assert held.labels.bincount().min() >= 20


def test_training_pixels_are_normalised_and_held_out_ones_by_the_same_numbers() -> None:
    train, held = digits()
    assert train.pixels.shape == (1438, 1, 8, 8)
    assert train.pixels.dtype == torch.float32
    assert float(train.pixels.mean()) == pytest.approx(0, abs=1e-5)
    assert float(train.pixels.std()) == pytest.approx(1, abs=1e-5)
    assert float(held.pixels.min()) == float(train.pixels.min())


def test_one_seed_gives_one_sequence_of_images_with_their_labels() -> None:
    train, _ = digits()
    pixels, labels = Draws(train, batch_size=16, seed=3).batch()
    assert pixels.shape == (16, 1, 8, 8)
    assert torch.equal(pixels, Draws(train, batch_size=16, seed=3).batch()[0])
    assert not torch.equal(pixels, Draws(train, batch_size=16, seed=4).batch()[0])
    place = int((train.pixels == pixels[0]).all(dim=(1, 2, 3)).nonzero()[0])
    assert train.labels[place] == labels[0]


def test_all_held_out_images_come_once() -> None:
    _, held = digits()
    assert torch.equal(torch.cat([labels for _, labels in held.in_order()]), held.labels)


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match=r"pip install 'ftopt\[digits\]'"):
        digits()

"""Handwritten digits: 1,797 images of 8 x 8 pixels from scikit-learn. The only file that imports it.

Source: the test set of UCI's "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ftopt.errors import UserError

CLASSES = 10
_HELD_OUT = 0.2
_SPLIT_SEED = 0
_AT_ONCE = 256


@dataclass(frozen=True)
class Images:
    """Images with their labels.

    Args:
        pixels: (images, 1, 8, 8), fp32.
        labels: (images,), int64, 0 to 9.
    """

    pixels: Tensor
    labels: Tensor

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All images once, in batches of at most 256."""
        yield from zip(torch.split(self.pixels, _AT_ONCE), torch.split(self.labels, _AT_ONCE), strict=True)


def digits() -> tuple[Images, Images]:
    """Loads the images to train on (1,438) and those held out (359); the split does not depend on machine or seed.

    Pixels are normalised by the mean and standard deviation of all training pixels.

    Raises:
        UserError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(
            f"data.name=digits needs scikit-learn, which has the images ({error}); "
            "pip install 'ftopt[digits]', or choose another data.name"
        ) from error
    found = load_digits()
    pixels = torch.as_tensor(found.images, dtype=torch.float32).unsqueeze(1)
    labels = torch.as_tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    held, train = order.tensor_split([int(len(labels) * _HELD_OUT)])
    pixels = (pixels - pixels[train].mean()) / pixels[train].std()
    return Images(pixels[train], labels[train]), Images(pixels[held], labels[held])


class Draws:
    """Batches of images, drawn with replacement by a seeded generator.

    Args:
        images: the images to draw from.
        batch_size: images in a batch.
        seed: of the generator.
    """

    def __init__(self, images: Images, *, batch_size: int, seed: int) -> None:
        self._images = images
        self._batch_size = batch_size
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Pixels (batch_size, 1, 8, 8), fp32, and labels (batch_size,), int64."""
        drawn = torch.randint(len(self._images.labels), (self._batch_size,), generator=self._generator)
        return self._images.pixels[drawn], self._images.labels[drawn]

    def state_dict(self) -> dict[str, Tensor]:
        """The generator's state."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Goes on from what `state_dict` returned."""
        self._generator.set_state(state_dict["generator"])

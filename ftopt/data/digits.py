"""Handwritten digits: 1,797 images of 8 x 8 pixels from scikit-learn. The only file that imports it.

Source: the test set of UCI's "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from ftopt.errors import UserError

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

CLASSES = 10
_HELD_OUT = 0.2
_SPLIT_SEED = 0


def check_installed() -> None:
    """Raises UserError unless scikit-learn is installed. Imports neither it nor torch."""
    if find_spec("sklearn") is None:
        raise UserError(_lacks("it is not installed"))


def _lacks(why: str) -> str:
    return (
        f"data.name=digits needs scikit-learn, which has the images ({why}); pip install 'ftopt[digits]', or choose "
        "another data.name"
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Loads the images to train on (1,438) and those held out (359); the split does not depend on machine or seed.

    An image is its pixels, (1, 8, 8), fp32, normalised by the mean and standard deviation of all training pixels; and
    its label, int64, 0 to 9.

    Raises:
        UserError: scikit-learn is not installed.
    """
    import torch
    from torch.utils.data import TensorDataset

    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(_lacks(str(error))) from error
    found = load_digits()
    pixels = torch.as_tensor(found.images, dtype=torch.float32).unsqueeze(1)
    labels = torch.as_tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    held, train = order.tensor_split([int(len(labels) * _HELD_OUT)])
    pixels = (pixels - pixels[train].mean()) / pixels[train].std()
    return TensorDataset(pixels[train], labels[train]), TensorDataset(pixels[held], labels[held])

"""Handwritten digits: 1,797 images of 8 x 8 pixels from scikit-learn. The only file that imports it.

Source: the test set of UCI's "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998).
"""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from ftopt.errors import UserError

CLASSES = 10
_HELD_OUT = 0.2
_SPLIT_SEED = 0


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Loads the images to train on (1,438) and those held out (359); the split does not depend on machine or seed.

    An image is its pixels, (1, 8, 8), fp32, normalised by the mean and standard deviation of all training pixels; and
    its label, int64, 0 to 9.

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
    return TensorDataset(pixels[train], labels[train]), TensorDataset(pixels[held], labels[held])

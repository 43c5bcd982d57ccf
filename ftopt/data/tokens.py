"""Windows of a long sequence of tokens: memory-mapped files as tokenizers write them, and text as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ftopt.data.windows import Windows


class TokenWindows(Windows, Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of ``length`` tokens: the inputs of sample i are tokens i L to (i + 1) L, and its targets the
    tokens that follow each of them.

    A map-style data set. No window crosses from one file into the next; fewer than L + 1 tokens at a file's end are
    left out. Files are memory-mapped: only what is read takes memory.

    Args:
        source: a file of tokens, a folder (all files in it), a glob pattern (``**`` allowed), a list of files, or an
            array of whole numbers, 1-D. For text files, ``dtype="uint8"``: their bytes are the tokens.
        length: tokens in a window, L.
        dtype: the files' dtype: ``uint8``, ``uint16`` (default; large enough for GPT-2's vocabulary) or ``uint32``, in
            this machine's byte order, little-endian on nearly all.
        skip_bytes: length of the header at each file's start. Default 0.
        vocab: all tokens must be below this; None (default): not checked.

    Raises:
        UserError: there is no file, a file's size is not a whole number of tokens, or all are shorter than a window.
    """

    random = False

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, (length,), int64."""
        ((inputs, targets),) = self.__getitems__([index])
        return inputs, targets

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets of several samples."""
        tokens = torch.from_numpy(self.rows(indices))
        return [(row[:-1], row[1:]) for row in tokens]

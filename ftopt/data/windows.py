"""Random windows of a corpus, at positions drawn by a seeded generator."""

from __future__ import annotations

import torch
from torch import Tensor

from ftopt.data.corpus import Bytes
from ftopt.errors import UserError


class Windows:
    """Batches of windows of ``context`` bytes, and the bytes that follow each.

    Args:
        data: uint8, 1-D.
        context: bytes in a window.
        batch_size: windows in a batch.
        seed: of the generator that draws where windows start.

    Raises:
        UserError: ``data`` is shorter than one window.
    """

    def __init__(self, data: Bytes, *, context: int, batch_size: int, seed: int) -> None:
        if data.size <= context:
            raise UserError(
                f"the corpus has {data.size} bytes; a window needs {context + 1}; "
                "give more text in data.path, or a smaller model.context"
            )
        self._data = torch.tensor(data) if not data.flags.writeable else torch.from_numpy(data)
        self._offsets = torch.arange(context + 1)
        self._batch_size = batch_size
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, (batch_size, context), int64."""
        last = self._data.numel() - self._offsets.numel()
        starts = torch.randint(last + 1, (self._batch_size, 1), generator=self._generator)
        rows = self._data[starts + self._offsets].long()
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, Tensor]:
        """The generator's state."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Goes on from what `state_dict` returned."""
        self._generator.set_state(state_dict["generator"])

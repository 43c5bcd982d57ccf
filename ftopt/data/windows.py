"""Windows of a long sequence of tokens, without torch: memory-mapped files as tokenizers write them, text as bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ftopt.common.plural import count
from ftopt.data.corpus import files_at, unreadable
from ftopt.errors import UserError, check_choice, names_arguments

DTYPES = ("uint8", "uint16", "uint32")

TokenSource = str | Path | Sequence[str | Path] | npt.NDArray[Any]


class Windows:
    """The tokens of `ftopt.TokenWindows`; see there."""

    @names_arguments("ftopt.TokenWindows(source, 1024)")
    def __init__(
        self, source: TokenSource, length: int, *, dtype: str = "uint16", skip_bytes: int = 0, vocab: int | None = None
    ) -> None:
        check_choice("dtype", dtype, DTYPES)
        if length < 1 or skip_bytes < 0:
            raise UserError(f"length={length}, skip_bytes={skip_bytes}; must be at least 1 and 0")
        self.length = length
        self._vocab = vocab
        self._dtype, self._skip = np.dtype(dtype), skip_bytes
        self._files: list[Path] | None = None
        if isinstance(source, str | Path):
            self._files = files_at(source, "source")
        elif not isinstance(source, np.ndarray):
            self._files = [Path(item).expanduser() for item in source]
        self._parts = [source] if isinstance(source, np.ndarray) else self._mapped()
        self._ends = list(accumulate(max(0, (part.size - 1) // length) for part in self._parts))
        if not self._ends[-1]:
            raise UserError(
                f"{sum(part.size for part in self._parts):,} tokens in {count(len(self._parts), 'part')}; "
                f"a window needs {length + 1} in one part; give more text, or a smaller length"
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def rows(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        """The tokens of several windows, each with the token after it: (windows, length + 1)."""
        rows = np.empty((len(indices), self.length + 1), np.int64)
        for row, index in zip(rows, indices, strict=True):
            row[:] = self._window(index)
        if self._vocab is not None and rows.size and int(rows.max()) >= self._vocab:
            raise UserError(
                f"token {int(rows.max())} in the data; must be below vocab={self._vocab}; give the files' own dtype "
                f"(now {self._dtype}), or a larger vocabulary"
            )
        return rows

    def _window(self, index: int) -> npt.NDArray[Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        part = bisect_right(self._ends, index)
        start = (index - (self._ends[part - 1] if part else 0)) * self.length
        return self._parts[part][start : start + self.length + 1]

    def _mapped(self) -> list[npt.NDArray[Any]]:
        return [_map(path, self._dtype, self._skip) for path in self._files or ()]

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the maps: a pickled map would hold the whole file, so another process maps the files itself."""
        return {**self.__dict__, "_parts": None} if self._files is not None else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._files is not None:
            self._parts = self._mapped()


def _map(path: Path, dtype: np.dtype[Any], skip_bytes: int) -> npt.NDArray[Any]:
    try:
        size = path.stat().st_size - skip_bytes
        if size < 0 or size % dtype.itemsize:
            raise UserError(
                f"{path} has {size + skip_bytes:,} bytes: {size:,} after skip_bytes={skip_bytes} are no whole number "
                f"of {dtype} tokens; give the file's own dtype and skip_bytes"
            )
        if not size:
            return np.empty(0, dtype)  # an empty file cannot be mapped
        return np.memmap(path, dtype=dtype, mode="r", offset=skip_bytes)
    except OSError as error:
        raise unreadable(path, error) from error

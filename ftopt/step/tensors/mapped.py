"""Memory of committed states in files, of which only the parts being read are resident.

Anchor and outer state are read only briefly, at an outer step. They may lie in memory-mapped files, whose pages are
released after every sweep: the bytes stay on the disk, and in the kernel's cache while there is room, and pages return
when they are read. `let_go` of a tensor in RAM does nothing.

A file is unlinked as soon as it is open, so a killed process leaves nothing. Its disk blocks are allocated when it is
made, so that a full disk raises an error then, rather than a fatal signal when a page is written.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ftopt.errors import UserError
from ftopt.step.tensors.memory import Memory

_log = logging.getLogger(__name__)

_STRIDE_BYTES = 512 << 10
"""A sweep releases pages in units of this size."""
_AROUND_BYTES = 64 << 10
"""Bytes that Linux reads in at a time, aligned to a multiple of this."""

_maps: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""The files' mappings by the address at which they begin."""


def is_mapped(tensor: Tensor) -> bool:
    """Whether the tensor lies in a file."""
    return bool(_maps) and tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _maps


def let_go(*tensors: Tensor) -> None:
    """Releases the pages of tensors in files until they are read again. Any thread, any time; values do not change."""
    if not _maps:
        return
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.numel():
            continue
        begin = tensor.untyped_storage().data_ptr()
        if (mapped := _maps.get(begin)) is not None:
            first = (tensor.data_ptr() - begin) // _AROUND_BYTES * _AROUND_BYTES
            mapped.madvise(mmap.MADV_DONTNEED, first, tensor.data_ptr() - begin + tensor.nbytes - first)


def behind(parts: Iterable[tuple[Tensor, slice]], *flats: Tensor) -> Iterable[tuple[Tensor, slice]]:
    """Yields ``parts`` in order, each with its place in the flat tensors; releases pages of ``flats`` after their
    use."""
    mapped = [flat for flat in flats if is_mapped(flat)]
    return _behind(parts, mapped) if mapped else parts


def _behind(parts: Iterable[tuple[Tensor, slice]], flats: list[Tensor]) -> Iterator[tuple[Tensor, slice]]:
    stride, start, stop = _STRIDE_BYTES // flats[0].element_size(), 0, 0
    for part, where in parts:
        if stop - start >= stride:
            let_go(*(flat[start:stop] for flat in flats))
            start = stop
        yield part, where
        stop = where.stop
    let_go(*(flat[start:] for flat in flats))


def _is_ram(folder: Path) -> bool:
    """Whether its file system is in RAM."""
    device = folder.stat().st_dev
    ours = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return any(fields[2] == ours and fields[fields.index("-") + 1] in ("tmpfs", "ramfs") for fields in mounts)


class Mapped(Memory):
    """Flat fp32 tensors in files of one folder on a disk. UserError: it is not a folder, or files cannot be made in
    it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._held_bytes, self._started = folder, 0, False
        self._short: OSError | None = None
        if not folder.is_dir():
            raise UserError(f"state_dir={str(folder)!r} is no folder; create it, or name one on a local disk")
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            why = f"no file can be made in it ({error.strerror}); use a folder that this user may write to"
            raise UserError(f"state_dir={str(folder)!r}: {why}") from None
        if _is_ram(folder):
            _log.warning("state_dir=%s is on a tmpfs, which is RAM: nothing is saved; name a folder on a disk", folder)

    def check(self, device: torch.device) -> None:
        """Refuses (UserError), once the first states exist, a disk too small for the next ones, and a model not on the
        CPU."""
        if device.type != "cpu":
            raise UserError(
                f"state_dir={str(self._folder)!r} with a model on {device}; committed states lie where parameters do: "
                "only a CPU's can lie in files; leave state_dir out, or keep the model there"
            )
        free = shutil.disk_usage(self._folder).free
        if self._short is not None or free < self._held_bytes:
            need = 2 * self._held_bytes
            got = free if self._short is not None else free + self._held_bytes
            raise UserError(
                f"state_dir={str(self._folder)!r} has {_mib(got)} free; {_mib(need)} are needed, for the committed "
                "state and the next one; make room, or name a folder on another disk"
            )
        self._started = True

    def _new(self, numel: int) -> Tensor:
        nbytes = numel * torch.float32.itemsize
        self._held_bytes += 0 if self._started else nbytes
        try:
            with tempfile.TemporaryFile(dir=self._folder, prefix="ftopt-state-") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                mapped = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            if self._started and self._short is None:
                text = "state_dir=%s: %s; committed states that find no room there lie in RAM"
                _log.warning(text, self._folder, error.strerror)
            self._short = error
            return super()._new(numel)
        block = torch.frombuffer(mapped, dtype=torch.float32)
        _maps[block.data_ptr()] = mapped
        return block

    def target(self, flat: Tensor) -> Tensor:
        return self.take(flat.numel(), flat.device)

    def place(self, tensor: Tensor) -> Tensor:
        if tensor.dim() != 1 or tensor.dtype != torch.float32 or is_mapped(tensor):
            return tensor
        kept = self.take(tensor.numel(), tensor.device)
        stride = _STRIDE_BYTES // tensor.element_size()
        for part, place in zip(torch.split(tensor, stride), torch.split(kept, stride), strict=True):
            place.copy_(part)
            let_go(place)
        return kept

    def release(self) -> None:
        for mapped in list(_maps.values()):
            mapped.madvise(mmap.MADV_DONTNEED)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"

"""Kernels for the CPU, compiled behind the start of a job; torch's operations are used until then.

Kernels need numba (the extra ``fast``). They never change a result: they give the bits of torch's operations, and are
not used if they do not on this machine. So members of a round with and without kernels agree.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from ftopt.common.later import torch

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

_LEAST = 1 << 19
"""Elements of a model from which on kernels are compiled: loading those of outer steps takes 0.6 s of CPU time, and
they save 3 ns for each element of an outer step, which is as much after 400 of the least model's."""
_MOST_THREADS = 4
"""A kernel uses one thread, and takes 0.2 to 0.6 of the CPU time of torch's operations, which use as many as torch is
set to. Beyond this number they would be done sooner."""
_PATIENCE_S = 30.0
"""The longest wait for a loader by a process that ends or forks. A thread that dies within a compiler may abort the
process, and a fork would have the compiler's locks as they are, and nobody to release them."""

Kernel = Callable[..., Any]
K = TypeVar("K", bound=NamedTuple)

_lock = threading.Lock()
_ending = threading.Event()
_loading: list[threading.Thread] = []


class Loader(Generic[K]):
    """The kernels of one module.

    Args:
        what: what they compute, for the log.
        module: its name. It has a function for each field of ``kernels``, and the types of their arguments,
            ``SIGNATURES``.
        kernels: the type of the kernels.
    """

    def __init__(self, what: str, module: str, kernels: type[K]) -> None:
        self._what, self._module, self._kind = what, module, kernels
        self._thread: threading.Thread | None = None
        self._kernels: K | None = None

    def ready(self) -> K | None:
        """The kernels, once they are compiled, if they are not slower than torch's operations on this thread; None: use
        those. Any thread."""
        return self._kernels if self._kernels is not None and torch.get_num_threads() <= _MOST_THREADS else None

    def prepare(self, device: torch.device, numel: int, difference: Callable[[K], str]) -> threading.Thread | None:
        """Begins to load the kernels for a model of ``numel`` elements, once for the process. Any thread.

        Args:
            difference: names what has other bits by kernels than by torch; "": nothing.

        Returns:
            The thread that loads them, or has done; None: kernels are not possible here, or not worth it.
        """
        if device.type != "cpu" or numel < _LEAST or importlib.util.find_spec("numba") is None:
            return None
        with _lock:
            if self._thread is None:
                if not _loading:
                    atexit.register(_end)
                    os.register_at_fork(before=_await_loading)
                self._thread = threading.Thread(target=self._load, args=[difference], name="ftopt-kernels", daemon=True)
                _loading.append(self._thread)
                self._thread.start()
            return self._thread

    def _load(self, difference: Callable[[K], str]) -> None:
        """Whatever goes wrong leaves torch's operations in use."""
        start = time.perf_counter()
        try:
            module = importlib.import_module(self._module)
            for kernel, types in module.SIGNATURES.items():
                if _ending.is_set():
                    return
                kernel.compile(types)
                kernel.disable_compile()  # for other types
            found = self._kind(*(getattr(module, name) for name in self._kind._fields))
            different = difference(found)
        except Exception as error:
            text = "%s use torch's operations, at more CPU time: numba's kernels cannot be compiled (%s: %s)"
            _log.warning(text, self._what, type(error).__name__, str(error).partition("\n")[0])
            return
        if different:
            text = "%s use torch's operations, at more CPU time: the kernel of %s gives other bits here"
            _log.warning(text, self._what, different)
            return
        self._kernels = found
        _log.info("%s use numba's kernels, ready after %.1f s", self._what, time.perf_counter() - start)


def fits(*tensors: Tensor) -> bool:
    """Whether kernels can read and write these tensors: plain, contiguous, on the CPU."""
    return all(
        type(tensor) is torch.Tensor and tensor.is_cpu and tensor.is_contiguous() and not tensor.requires_grad
        for tensor in tensors
    )


def _end() -> None:
    _ending.set()
    _await_loading()


def _await_loading() -> None:
    for thread in _loading:
        if thread is not threading.current_thread():
            thread.join(_PATIENCE_S)

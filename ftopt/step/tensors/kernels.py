"""Kernels for outer steps on the CPU, compiled behind the start of a job; torch's operations are used until then.

Kernels need numba (the extra ``fast``). They never change a result: they give the bits of torch's operations, and are
not used if they do not on this machine. So members of a round with and without kernels agree.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import threading
import time

import torch

from ftopt.step.tensors.fused import Kernels, difference

_log = logging.getLogger(__name__)

_LEAST = 1 << 20
"""Elements of a model from which on kernels are compiled: loading them takes 0.6 s of CPU time, and they save 3 ns for
each element of an outer step."""
_MOST_THREADS = 4
"""A kernel uses one thread, and takes 0.4 of the CPU time of torch's operations, which use as many as torch is set to.
Beyond this number they would be done sooner."""
_PATIENCE_S = 30.0
"""The longest wait for the loader by a process that ends or forks. A thread that dies within a compiler may abort the
process, and a fork would have the compiler's locks as they are, and nobody to release them."""

_lock = threading.Lock()
_ending = threading.Event()
_loader: threading.Thread | None = None
_kernels: Kernels | None = None


def ready() -> Kernels | None:
    """The kernels, once they are compiled, if they are not slower than torch's operations on this thread; None: use
    those. Any thread."""
    return _kernels if _kernels is not None and torch.get_num_threads() <= _MOST_THREADS else None


def prepare(device: torch.device, numel: int) -> threading.Thread | None:
    """Begins to load the kernels for a model of ``numel`` elements, once for the process. Returns the thread that does,
    or has done; None: kernels are not possible here, or not worth it. Any thread."""
    global _loader
    if device.type != "cpu" or numel < _LEAST or importlib.util.find_spec("numba") is None:
        return None
    with _lock:
        if _loader is None:
            loader = threading.Thread(target=_load, name="ftopt-kernels", daemon=True)
            loader.start()
            _loader = loader
            atexit.register(_end)
            os.register_at_fork(before=_await_loader)
        return _loader


def _end() -> None:
    _ending.set()
    _await_loader()


def _await_loader() -> None:
    if _loader is not None and _loader is not threading.current_thread():
        _loader.join(_PATIENCE_S)


def _load() -> None:
    """Loads the kernels; whatever goes wrong leaves torch's operations in use."""
    global _kernels
    start = time.perf_counter()
    try:
        from ftopt.step.tensors import numba_kernels as by_numba

        for kernel, types in by_numba.SIGNATURES.items():
            if _ending.is_set():
                return
            kernel.compile(types)
            kernel.disable_compile()  # for other types
        found = Kernels(*(getattr(by_numba, name) for name in Kernels._fields))
        different = difference(found)
    except Exception as error:
        text = "outer steps use torch's operations, at more CPU time: numba's kernels cannot be compiled (%s: %s)"
        _log.warning(text, type(error).__name__, str(error).partition("\n")[0])
        return
    if different:
        text = "outer steps use torch's operations, at more CPU time: the kernel of %s gives other bits here"
        _log.warning(text, different)
        return
    _kernels = found
    _log.info("outer steps use numba's kernels, ready after %.1f s", time.perf_counter() - start)

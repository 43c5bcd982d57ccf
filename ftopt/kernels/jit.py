"""numba, and how kernels are compiled: one rounding per operation. There is no fast-math, so LLVM neither fuses a
multiplication with an addition nor reorders terms. Imported by the modules of kernels alone."""

from __future__ import annotations

import numba

helper = numba.njit(nogil=True, error_model="numpy")
"""Decorates a function that kernels call, and that becomes a part of them."""
kernel = numba.njit(nogil=True, error_model="numpy", cache=True)
"""Decorates a kernel, whose machine code is kept on disk."""
types = numba.types

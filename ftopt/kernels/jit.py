"""numba, how kernels are compiled, and what several of them need. Imported by the modules of kernels alone.

Every operation rounds once: there is no fast-math, so LLVM neither fuses a multiplication with an addition nor reorders
terms. Integers are kept in 32 bits by a conversion after each operation: numba computes in 64, half as many at a time.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Flat = NDArray[np.float32]

helper = numba.njit(nogil=True, error_model="numpy")
"""Decorates a function that kernels call, and that becomes a part of them."""
kernel = numba.njit(nogil=True, error_model="numpy", cache=True)
"""Decorates a kernel, whose machine code is kept on disk."""
types = numba.types

NO_SIGN = np.int32(0x7FFFFFFF)


@helper
def peak_of(values: Flat, found: np.int32) -> np.int32:
    """The larger of ``found`` and the largest absolute value, as bits. For numbers without a sign the order of the bits
    is that of the values, NaN is above infinity, and an integer maximum is computed by vector instructions, while one
    of floating-point numbers is not."""
    bits = values.view(np.int32)
    for i in range(bits.size):
        x = np.int32(bits[i] & NO_SIGN)
        found = x if x > found else found
    return found

"""Outer steps in one pass over memory. Only `ftopt.kernels.loader` imports this file, in a thread of its own: the
import takes a third of a second, and the first one on a machine compiles for seconds.

Each kernel gives the bits of the torch operations that it replaces.

All arrays are flat fp32 and do not overlap; sums are int64, as `ftopt.step.tensors.digest.block_sums`. Arrays that
need sums begin at a multiple of 8 bytes. Kernels return the largest absolute values as `peak_of` does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ftopt.kernels.jit import Flat, helper, kernel, peak_of, types

Sums = NDArray[np.int64]
Peaks = tuple[np.int32, np.int32]

BLOCK = 16_384
"""Elements of a digest's block."""
_CHUNK = 1024
"""Elements worked on at a time, a row of `Measured` and a divisor of the block: what all loops need of them stays in
the innermost cache."""
_LANES = 64
_SMALL, _LARGE = np.int32((127 - 56) << 23), np.int32((127 + 60) << 23)
"""The bits of 2^-56 and 2^60."""


@helper
def _sum(values: Flat) -> np.int64:
    """The sum of the values' 64-bit words, the last one filled up with zeros."""
    even, total = values.size // 2 * 2, np.int64(0)
    words = values[:even].view(np.int64)
    for i in range(words.size):
        total += words[i]
    if even < values.size:
        total += np.int64(values[even:].view(np.uint32)[0])
    return total


@kernel
def displace(a: Flat, b: Flat, out: Flat, factor: np.float32, squares: NDArray[np.float64]) -> np.int32:
    """``out <- factor * (a - b)``, unless ``out`` is empty. Returns the peak of ``a - b``; adds its squares, if fp32
    holds them, as `ftopt.step.tensors.pieces.Measured`."""
    peak, apart, square = np.int32(0), np.empty(_CHUNK, np.float32), np.empty(_CHUNK, np.float32)
    rows = (a.size + _CHUNK - 1) // _CHUNK
    sums = np.empty((rows, _LANES), np.float32)
    for row in range(rows):
        start, stop = row * _CHUNK, min((row + 1) * _CHUNK, a.size)
        x, y, z, d = a[start:stop], b[start:stop], out[start:stop], apart[: stop - start]
        if z.size:
            for i in range(d.size):
                d[i] = x[i] - y[i]
                square[i] = d[i] * d[i]
                z[i] = d[i] * factor
        else:
            for i in range(d.size):
                d[i] = x[i] - y[i]
                square[i] = d[i] * d[i]
        for i in range(d.size, _CHUNK):
            square[i] = 0
        peak = peak_of(d, peak)
        for i in range(512):
            square[i] += square[i + 512]
        for i in range(256):
            square[i] += square[i + 256]
        for i in range(128):
            square[i] += square[i + 128]
        for i in range(_LANES):
            sums[row, i] = square[i] + square[i + _LANES]
    if _SMALL < peak < _LARGE:
        for row in range(rows):
            for i in range(_LANES):
                squares[row * _LANES + i] += sums[row, i]
    return peak


@kernel
def average(anchor: Flat, mean: Flat, sums: Sums) -> np.int32:
    """``A <- mean``: nothing is written. Returns the largest change."""
    moved, peak = np.empty(_CHUNK, np.float32), np.int32(0)
    for block in range(sums.size):
        sums[block] = 0
        for start in range(block * BLOCK, min((block + 1) * BLOCK, mean.size), _CHUNK):
            stop = min(start + _CHUNK, mean.size)
            a, g, d = anchor[start:stop], mean[start:stop], moved[: stop - start]
            for i in range(d.size):
                d[i] = g[i] - a[i]
            peak = peak_of(d, peak)
            sums[block] += _sum(g)
    return peak


@kernel
def plain(anchor: Flat, mean: Flat, rate: np.float32, sums: Sums) -> np.int32:
    """``A <- A - rate * Delta``, in the memory of ``mean``. Returns the largest change."""
    moved, peak = np.empty(_CHUNK, np.float32), np.int32(0)
    for block in range(sums.size):
        sums[block] = 0
        for start in range(block * BLOCK, min((block + 1) * BLOCK, mean.size), _CHUNK):
            stop = min(start + _CHUNK, mean.size)
            a, g, d = anchor[start:stop], mean[start:stop], moved[: stop - start]
            for i in range(d.size):
                new = a[i] - g[i] * rate
                d[i] = new - a[i]
                g[i] = new
            peak = peak_of(d, peak)
            sums[block] += _sum(g)
    return peak


@kernel
def momentum(
    anchor: Flat,
    mean: Flat,
    old: Flat,
    new: Flat,
    factors: tuple[np.float32, np.float32, np.float32],
    nesterov: bool,
    sums: Sums,
    sums_of_new: Sums,
) -> Peaks:
    """``u <- mu * u + scale * Delta``; ``A <- A - rate * d``, in the memory of ``mean``, with ``d = u`` or, if
    ``nesterov``, ``d = scale * Delta + mu * u``. ``factors``: scale, mu, rate. Returns the largest change, and the
    peak of ``u``."""
    scale, mu, rate = factors
    moved, peak, peak_of_new = np.empty(_CHUNK, np.float32), np.int32(0), np.int32(0)
    for block in range(sums.size):
        sums[block] = sums_of_new[block] = 0
        for start in range(block * BLOCK, min((block + 1) * BLOCK, mean.size), _CHUNK):
            stop = min(start + _CHUNK, mean.size)
            a, g, d = anchor[start:stop], mean[start:stop], moved[: stop - start]
            before, u = old[start:stop], new[start:stop]
            if scale != 1:
                for i in range(d.size):
                    g[i] = g[i] * scale
            for i in range(d.size):
                u[i] = before[i] * mu + g[i]
            if nesterov:
                for i in range(d.size):
                    g[i] = a[i] - (g[i] + u[i] * mu) * rate
            else:
                for i in range(d.size):
                    g[i] = a[i] - u[i] * rate
            for i in range(d.size):
                d[i] = g[i] - a[i]
            peak, peak_of_new = peak_of(d, peak), peak_of(u, peak_of_new)
            sums[block] += _sum(g)
            sums_of_new[block] += _sum(u)
    return peak, peak_of_new


@kernel
def adam(
    anchor: Flat,
    mean: Flat,
    old_m: Flat,
    old_v: Flat,
    new_m: Flat,
    new_v: Flat,
    factors: tuple[np.float32, ...],
    sums: Sums,
    sums_of_m: Sums,
    sums_of_v: Sums,
) -> Peaks:
    """``m <- beta1 * m + rest1 * Delta``; ``v <- beta2 * v + rest2 * Delta^2``;
    ``A <- A - rate * m / (sqrt(unbiased * v) + eps)``, in the memory of ``mean``. ``factors``: beta1, rest1, beta2,
    rest2, rate, unbiased, eps. Returns the largest change, and the peak of ``m`` and ``v``."""
    beta1, rest1, beta2, rest2, rate, unbiased, eps = factors
    moved, peak, peak_of_new = np.empty(_CHUNK, np.float32), np.int32(0), np.int32(0)
    for block in range(sums.size):
        sums[block] = sums_of_m[block] = sums_of_v[block] = 0
        for start in range(block * BLOCK, min((block + 1) * BLOCK, mean.size), _CHUNK):
            stop = min(start + _CHUNK, mean.size)
            a, g, d = anchor[start:stop], mean[start:stop], moved[: stop - start]
            p, q, m, v = old_m[start:stop], old_v[start:stop], new_m[start:stop], new_v[start:stop]
            for i in range(d.size):
                m[i] = p[i] * beta1 + g[i] * rest1
            for i in range(d.size):
                v[i] = q[i] * beta2 + g[i] * g[i] * rest2
            for i in range(d.size):
                g[i] = a[i] - m[i] * rate / (np.sqrt(v[i] * unbiased) + eps)
            for i in range(d.size):
                d[i] = g[i] - a[i]
            peak = peak_of(d, peak)
            peak_of_new = peak_of(v, peak_of(m, peak_of_new))
            sums[block] += _sum(g)
            sums_of_m[block] += _sum(m)
            sums_of_v[block] += _sum(v)
    return peak, peak_of_new


_FLAT, _SUMS = types.float32[::1], types.int64[::1]

SIGNATURES = {
    displace: (*(_FLAT,) * 3, types.float32, types.float64[::1]),
    average: (_FLAT, _FLAT, _SUMS),
    plain: (_FLAT, _FLAT, types.float32, _SUMS),
    momentum: (*(_FLAT,) * 4, types.UniTuple(types.float32, 3), types.boolean, _SUMS, _SUMS),
    adam: (*(_FLAT,) * 6, types.UniTuple(types.float32, 7), *(_SUMS,) * 3),
}
"""The types of each kernel's arguments."""

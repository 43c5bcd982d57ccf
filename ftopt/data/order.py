"""One global order of the samples: for each epoch a seeded permutation, computed position by position.

No list of indices is kept: the sample at a position is the position's number through a small block cipher on [0, n).
So a data set of a billion samples needs as much memory as one of ten, and every replica computes the same order from
the seed alone, on any machine (integer arithmetic only).

The cipher is a generalised Feistel network. With a = ceil(sqrt(n)) and b = ceil(n / a) a number x < a b is written as
x = l b + r. Rounds go in turn:

    l <- (l + F_k(r)) mod a
    r <- (r + F_k(l)) mod b

with F_k the finaliser of SplitMix64 under the round's key, k from SHA-256 of (seed, epoch). Each round is invertible,
so the whole is a permutation of [0, a b). A result of n or above is sent through again until it is below n (*cycle
walking*), which gives a permutation of [0, n). Since a b < n + a, this is rare.

Source: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), sections 4 and 5; the finaliser:
G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014), in S. Vigna's variant. The
purpose is an even order, not secrecy: the number of rounds was chosen by statistical tests.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ftopt.errors import UserError

ROUNDS = 12
"""Rounds of the network: with 8 the orders of five samples are visibly uneven; with 4, those of a dozen."""
BLOCK = 1024
"""Positions computed together: a call for the few of a unit costs as much as a call for all of these."""
MAX_SAMPLES = 1 << 62

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
_HALF = np.uint64(32)


class Order:
    """The order of the samples in each epoch. ``samples``: their number, n; 1 to 2^62. ``seed``: any integer."""

    def __init__(self, samples: int, *, seed: int) -> None:
        if not 1 <= samples <= MAX_SAMPLES:
            raise UserError(f"samples={samples}; must be 1 to 2^62")
        self.samples = samples
        self.seed = seed
        self._rows = math.isqrt(samples - 1) + 1
        self._columns = -(-samples // self._rows)
        self._last: tuple[int, int, Indices] = (-1, -1, np.empty(0, np.int64))

    def indices(self, epoch: int, positions: range) -> Indices:
        """The samples at the consecutive ``positions`` of ``epoch``, int64, 1-D. Cheap if successive calls have
        successive positions. IndexError: a position is outside of the epoch."""
        if not 0 <= positions.start <= positions.stop <= self.samples:
            raise IndexError(
                f"positions {positions.start} to {positions.stop - 1} of an epoch of {self.samples} samples"
            )
        first, last = positions.start // BLOCK, max(positions.start, positions.stop - 1) // BLOCK
        parts = [self._block(epoch, block) for block in range(first, last + 1)]
        at = positions.start - first * BLOCK
        return (np.concatenate(parts) if len(parts) > 1 else parts[0])[at : at + len(positions)]

    def at(self, epoch: int, positions: Indices) -> Indices:
        """The samples at any ``positions`` of ``epoch``, int64, 1-D, each at least 0 and below `samples`."""
        keys = _keys(self.seed, epoch)
        found = self._through(positions.astype(np.uint64), keys)
        limit = np.uint64(self.samples)
        outside = np.flatnonzero(found >= limit)
        while outside.size:
            found[outside] = self._through(found[outside], keys)
            outside = outside[found[outside] >= limit]
        return found.astype(np.int64)

    def _block(self, epoch: int, block: int) -> Indices:
        if self._last[:2] != (epoch, block):
            positions = np.arange(block * BLOCK, min((block + 1) * BLOCK, self.samples))
            self._last = (epoch, block, self.at(epoch, positions))
        return self._last[2]

    def _through(self, x: _Words, keys: _Words) -> _Words:
        """A permutation of [0, rows * columns)."""
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        left = x // columns
        right = x - left * columns
        for key in keys[: ROUNDS // 2]:
            left = _add(left, _below(right, key[0], rows), rows)
            right = _add(right, _below(left, key[1], columns), columns)
        return left * columns + right


def _below(x: _Words, key: np.uint64, limit: np.uint64) -> _Words:
    """F: a hash of ``x`` below ``limit`` (at most 2^32): the upper half of the word, scaled."""
    z = x + key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return ((z >> _HALF) * limit) >> _HALF


def _add(x: _Words, y: _Words, limit: np.uint64) -> _Words:
    """(x + y) mod limit, of two numbers below it."""
    total = x + y
    return np.where(total >= limit, total - limit, total)


@lru_cache(maxsize=8)
def _keys(seed: int, epoch: int) -> _Words:
    """(ROUNDS / 2, 2) words, the same on every machine."""
    stream = b"".join(hashlib.sha256(f"order/{seed}/{epoch}/{block}".encode()).digest() for block in range(ROUNDS // 4))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64).reshape(ROUNDS // 2, 2)

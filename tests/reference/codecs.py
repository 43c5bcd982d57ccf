"""The lossy codecs and the reduction through them, value by value in plain Python.

Python's floats are doubles; `fp32` rounds after each operation, which gives the same as fp32 arithmetic does for one
addition, multiplication or division.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ftopt.codecs import Codec, Int8, TopK, codec_named
from ftopt.codecs.top_k import TopKSum
from ftopt.transport.local import roundtrip

BF16_MAX = (2 - 2**-7) * 2.0**127
FP32_MAX = (2 - 2**-23) * 2.0**127


def fp32(x: float) -> float:
    """The nearest fp32, ties to even."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def bf16(x: float) -> float:
    """The nearest bf16, ties to even, of an fp32 that does not round to Inf."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    bits += 0x7FFF + (bits >> 16 & 1)
    return float(struct.unpack("<f", struct.pack("<I", bits >> 16 << 16))[0])


def through_bf16(block: Sequence[float]) -> list[float]:
    """Each value by itself."""
    return [bf16(max(-BF16_MAX, min(BF16_MAX, x))) for x in block]


def through_int8(block: Sequence[float]) -> list[float]:
    """One step size, 127 steps up and 127 down."""
    step = min(fp32(max(map(abs, block)) * fp32(1 / 127)), FP32_MAX / 128)
    if step == 0:
        return [0.0] * len(block)
    return [fp32(max(-127, min(127, round(fp32(x / step)))) * step) for x in block]


def through_fp4(block: Sequence[float]) -> list[float]:
    """The first of s, s/2, ... s/64 of which at least three quarters are reached, or zero."""
    s = bf16(min(max(map(abs, block)), BF16_MAX))
    out = []
    for x in block:
        r = bf16(fp32(abs(x) / s)) if s else 0.0
        powers = [2.0**e for e in range(0, -7, -1) if r >= 0.75 * 2.0**e]
        out.append(math.copysign(fp32(powers[0] * s), x) if powers else 0.0)
    return out


def through_top_k(block: Sequence[float], fraction: float, bits: int) -> list[float]:
    """The k largest, each moved to the nearest of 2^(bits-1) levels between the smallest and the largest kept."""
    k = max(1, math.ceil(fraction * len(block)))
    kept = sorted(range(len(block)), key=lambda i: -abs(block[i]))[:k]
    lo = bf16(min(abs(block[kept[-1]]), BF16_MAX))
    hi = bf16(min(abs(block[kept[0]]), BF16_MAX))
    top = 2 ** (bits - 1) - 1
    step = fp32(fp32(hi - lo) * fp32(1 / top))
    out = [0.0] * len(block)
    for i in kept:
        j = round(fp32(fp32(abs(block[i]) - lo) / step)) if step else 0
        out[i] = math.copysign(fp32(fp32(max(0, min(top, j)) * step) + lo), block[i])
    return out


def through(name: str, values: Sequence[float]) -> list[float]:
    """What is decoded of ``values`` encoded, with the codec of that name."""
    word, *settings = name.split(":")
    size = 4096 if word == "top_k" else 256
    out: list[float] = []
    for start in range(0, len(values), size):
        block = values[start : start + size]
        if word == "top_k":
            out += through_top_k(block, float(settings[0]), int(settings[1]))
        else:
            out += {"fp32": list, "bf16": through_bf16, "int8": through_int8, "fp4": through_fp4}[word](block)
    return out


def mean_encoded(flats: Sequence[Tensor], codec: Codec, shares: Sequence[float]) -> Tensor:
    """The weighted mean as all members get it, with nothing owed from before."""
    return mean_and_owed(flats, codec, shares, torch.zeros_like(flats[0]))[0]


def mean_and_owed(
    flats: Sequence[Tensor], codec: Codec, shares: Sequence[float], owed: Tensor
) -> tuple[Tensor, Tensor]:
    """The weighted mean as all members get it, and what the second hop leaves out of it.

    Both hops are encoded, sums in fp32 in the order of the ranks. Span r of each flat goes to rank r, which adds up
    ``share * decoded``, adds what is ``owed``, and gives the sum, encoded, to everybody. Sums of top-k payloads keep as
    many values as there can be, in 8 bits. One member alone sends nothing and loses nothing.
    """
    size, n = len(flats), flats[0].numel()
    if size == 1:
        return flats[0] * shares[0] + owed, torch.zeros_like(owed)
    blocks = math.ceil(n / codec.block)
    contributors = sum(share > 0 for share in shares)
    for_sum: Codec = codec
    if isinstance(codec, TopK):
        kept = min(4096, contributors * math.ceil(codec.fraction * 4096))
        sparse, dense = 4 + math.ceil(kept * (12 + 8) / 8), 16 * (4 + 256)  # bytes of 4096 values
        for_sum = TopKSum(codec.fraction, 8, payloads=contributors) if sparse < dense else Int8()
    gathered, left = [], []
    for r in range(size):
        span = slice(min(n, blocks * r // size * codec.block), min(n, blocks * (r + 1) // size * codec.block))
        total = torch.zeros(span.stop - span.start)
        if codec.exact:
            total = mean_of_values([flat[span] for flat in flats], shares)
        for m in range(size):
            if shares[m] > 0 and not codec.exact:
                received = codec.decode(codec.encode(flats[m][span].clone()), torch.empty(total.shape))
                total = total + received * shares[m]
        total = total + owed[span]
        gathered.append(for_sum.decode(for_sum.encode(total), torch.empty(total.shape)))
        left.append(total - gathered[-1])
    return torch.cat(gathered), torch.cat(left)


def mean_of_values(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The weighted mean, from the first one of positive share on: of equal values exactly that value."""
    brought = [(value, share) for value, share in zip(values, shares, strict=True) if share > 0]
    first, apart = brought[0][0], torch.zeros_like(brought[0][0])
    for value, share in brought[1:]:
        apart = apart + (first - value) * share
    return first - apart


class Mean:
    """The mean of what all replicas bring, as each of them gets it: encoded and with error feedback, if asked for.

    Letters as in `ftopt.step.outer.error_feedback`: a replica brings Delta, offers ``v = beta * e + Delta``, and
    keeps what was left out as its residual e. Sums run in the order of the replicas, shares first.

    Args:
        codec: by its name.
        feedback: beta.
        names: of all parameters: tensors travel in the order of their names.
    """

    def __init__(self, codec: str = "fp32", *, feedback: float = 1.0, names: Sequence[str] = ()) -> None:
        self._names = list(names)
        self._codec = codec_named(codec)
        self._feedback = feedback
        self._residuals: dict[Hashable, list[Tensor]] = {}
        self._owed: dict[Hashable, Tensor] = {}

    @property
    def lossy(self) -> bool:
        """Parameters are then sent as differences."""
        return not self._codec.exact

    def __call__(
        self,
        brought: Sequence[Sequence[Tensor]],
        shares: Sequence[float] | None = None,
        *,
        place: Hashable = 0,
        values: bool = False,
        names: Sequence[str] = (),
    ) -> list[Tensor]:
        """The mean, tensor by tensor; they travel together, one behind the other.

        Args:
            brought: each replica's tensors.
            shares: of the replicas. Default: the same for all.
            place: what has residuals of its own: a fragment, gradients, payloads of other units.
            values: they bring values, not differences; the mean of equal ones is exact.
            names: of these tensors. Default: of all parameters, where all are brought.
        """
        names = names or (self._names if len(self._names) == len(brought[0]) else [""] * len(brought[0]))
        order = sorted(range(len(brought[0])), key=names.__getitem__)
        flats = [torch.cat([tensors[i].detach().reshape(-1) for i in order]) for tensors in brought]
        shares = shares or [1 / len(flats)] * len(flats)
        mean = mean_of_values(flats, shares) if values else self._of(flats, shares, place)
        parts = dict(zip(order, mean.split([brought[0][i].numel() for i in order]), strict=True))
        return [parts[i].view(t.shape) for i, t in enumerate(brought[0])]

    def _of(self, deltas: list[Tensor], shares: Sequence[float], place: Hashable) -> Tensor:
        if not self.lossy:
            mean = deltas[0] * shares[0]
            for delta, share in zip(deltas[1:], shares[1:], strict=True):
                mean = mean + delta * share
            return mean
        if len(deltas) == 1 or not self._feedback:
            return mean_encoded(deltas, self._codec, shares)
        residuals = self._residuals.get(place, [torch.zeros_like(delta) for delta in deltas])
        offers = [delta + e * self._feedback for delta, e in zip(deltas, residuals, strict=True)]
        self._residuals[place] = [v - roundtrip(self._codec, v, torch.empty_like(v)) for v in offers]
        owed = self._owed.get(place, torch.zeros_like(deltas[0])) * self._feedback
        mean, self._owed[place] = mean_and_owed(offers, self._codec, shares, owed)
        return mean

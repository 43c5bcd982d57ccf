"""Codecs, block by block: what a block needs stays in the innermost cache. Only `ftopt.kernels.loader` imports this
file.

``ftopt/codecs`` has the formats, and the operations whose bits these are. Without fp32 arithmetic, numbers are handled
as their bits (int32). Values are flat fp32, encoded ones flat uint8.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ftopt.kernels import OF_BF16, OF_FP4, OF_TOP_K
from ftopt.kernels.jit import NO_SIGN, Flat, helper, kernel, peak_of, types

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]
Form = tuple[int, int, int, int, int, int]

_I, _F = np.int32, np.float32
_NOT_FINITE, _BF16_MAX = _I(0x7F800000), _I(0x7F7F0000)
_STEP_MAX = _F((2 - 2.0**-23) * 2.0**127 / 128)
_LOWEST, _HIGHEST = _I(64 - (120 << 7)), _I((7 << 7) | 0x7F)
_INDEX_BITS = 12


@helper
def _bf16(bits: np.int32) -> np.int32:
    """The upper half of a finite fp32 without a sign, rounded to nearest, ties to even."""
    odd = _I(_I(bits >> _I(16)) & _I(1))
    return _I(_I(_I(bits + _I(0x7FFF)) + odd) >> _I(16))


@helper
def _put(encoded: Bytes, at: int, bits: np.int32, count: int) -> None:
    for i in range(count):
        encoded[at + i] = np.uint8(_I(bits >> _I(8 * i)))


@helper
def _bf16_at(encoded: Bytes, at: int) -> np.float32:
    return _I((_I(encoded[at]) << 16) | (_I(encoded[at + 1]) << 24)).view(_F)


@helper
def _half(bits: np.int32) -> np.int32:
    """The same of an fp32 with a sign; what would become infinite becomes the largest bf16."""
    return _I(_bf16(min(_I(bits & NO_SIGN), _BF16_MAX)) | _I(_I(bits >> _I(16)) & _I(0x8000)))


@helper
def _encode_bf16(x: Flat, out: Bytes, left: Flat) -> None:
    """Computes ``left``, too, unless it is empty: a block is written once."""
    found = x.view(np.int32)
    if left.size:
        for i in range(x.size):
            half = _half(found[i])
            out[2 * i], out[2 * i + 1] = np.uint8(half), np.uint8(_I(half >> _I(8)))
            left[i] = x[i] - _I(half << _I(16)).view(_F)
    else:
        for i in range(x.size):
            half = _half(found[i])
            out[2 * i], out[2 * i + 1] = np.uint8(half), np.uint8(_I(half >> _I(8)))


@helper
def _decode_bf16(encoded: Bytes, out: Flat, share: np.float32, add: bool) -> None:
    if add:
        for i in range(out.size):
            out[i] = out[i] + _bf16_at(encoded, 2 * i) * share
    else:
        for i in range(out.size):
            out[i] = _bf16_at(encoded, 2 * i)


@helper
def _encode_int8(x: Flat, peak: np.int32, out: Bytes) -> None:
    step = min(_I(peak).view(_F) * _F(1 / 127), _STEP_MAX)
    _put(out, 0, _F(step).view(_I), 4)
    divisor, codes = step if step != 0 else _F(1), out[4:].view(np.int8)
    for i in range(x.size):
        codes[i] = np.int8(_I(max(_F(-127), min(_F(127), np.rint(x[i] / divisor)))))


@helper
def _decode_int8(encoded: Bytes, out: Flat) -> None:
    low, high = _I(encoded[0]) | (_I(encoded[1]) << 8), (_I(encoded[2]) << 16) | (_I(encoded[3]) << 24)
    step, codes = _I(low | high).view(_F), encoded[4:].view(np.int8)
    for i in range(out.size):
        out[i] = _F(_I(codes[i])) * step


@helper
def _code_of(ratio: np.float32) -> np.int32:
    bits = _F(ratio).view(_I)
    field = _I(_I(_bf16(_I(bits & NO_SIGN)) + _LOWEST))
    return _I(_I(max(_I(0), min(_HIGHEST, field)) >> _I(7)) | _I(_I(bits >> _I(28)) & _I(8)))


@helper
def _encode_fp4(x: Flat, peak: np.int32, out: Bytes) -> None:
    scale = _bf16(min(peak, _BF16_MAX))
    _put(out, 0, scale, 2)
    divisor, half = _I(scale << _I(16)).view(_F) if scale != 0 else _F(1), (x.size + 1) // 2
    low, high, codes = x[:half], x[half:], out[2:]
    for i in range(high.size):
        codes[i] = np.uint8(_I(_code_of(low[i] / divisor) | _I(_code_of(high[i] / divisor) << _I(4))))
    if high.size < half:
        codes[half - 1] = np.uint8(_code_of(low[half - 1] / divisor))


@helper
def _power_of(code: np.int32) -> np.float32:
    field = _I(code & _I(7))
    power = _I(_I(field + _I(120)) << _I(23)) if field > _I(0) else _I(0)
    return _I(power | _I(_I(code & _I(8)) << _I(28))).view(_F)


@helper
def _decode_fp4(encoded: Bytes, out: Flat) -> None:
    scale, half = _bf16_at(encoded, 0), (out.size + 1) // 2
    low, high, codes = out[:half], out[half:], encoded[2:]
    for i in range(half):
        low[i] = _power_of(_I(codes[i])) * scale
    for i in range(high.size):
        high[i] = _power_of(_I(_I(codes[i]) >> _I(4))) * scale


@helper
def _at_least(sizes: Ints, bound: np.int32) -> np.int32:
    """How many are as large as ``bound``."""
    found = _I(0)
    for i in range(sizes.size):
        found = _I(found + _I(sizes[i] >= bound))
    return found


@helper
def _largest(sizes: Ints, peak: np.int32, k: int, places: Ints) -> np.int32:
    """Finds the places of the k largest, of equal ones the first; returns the smallest of the k.

    Bisects the values: counting takes a tenth of a cycle for each, so that it is faster than to sort anything.
    """
    low, high, found = _I(0), _I(peak + _I(1)), _I(0)
    while _I(high - low) > _I(1) and found != k:
        bound = _I(low + _I(_I(high - low) >> _I(1)))
        found = _at_least(sizes, bound)
        if found >= k:
            low = bound
        else:
            high = bound
    n, ties, kept = 0, k, 0
    for i in range(sizes.size):
        places[n] = i
        n += sizes[i] >= low
    if n == k:
        return _I(sizes[places[:k]].min())
    for i in range(n):
        ties -= sizes[places[i]] > low
    for i in range(n):
        place = places[i]
        tie = sizes[place] == low
        places[kept] = place
        kept += not tie or ties > 0
        ties -= tie
    return low


@helper
def _encode_top_k(x: Flat, peak: np.int32, out: Bytes, k: int, bits: int, room: Flat, places: Ints) -> None:
    found, sizes = x.view(np.int32), room[: x.size].view(np.int32)
    for i in range(x.size):
        sizes[i] = _I(found[i] & NO_SIGN)
    least = _largest(sizes, peak, k, places)
    _put(out, 0, _bf16(min(least, _BF16_MAX)), 2)
    _put(out, 2, _bf16(min(peak, _BF16_MAX)), 2)
    top, width, at, packed, filled = _F((1 << (bits - 1)) - 1), _INDEX_BITS + bits, 4, np.int64(0), 0
    low, high = _bf16_at(out, 0), _bf16_at(out, 2)
    step = (high - low) * _F(1 / top)
    divisor = step if step != 0 else _F(1)
    for i in range(k):
        value = x[places[i]]
        level = max(_F(0), min(top, np.rint((abs(value) - low) / divisor)))
        word = (np.int64(places[i]) << bits) | (np.int64(value < 0) << (bits - 1)) | np.int64(level)
        packed |= word << filled
        filled += width
        while filled >= 8:
            out[at] = np.uint8(packed & 255)
            at, packed, filled = at + 1, packed >> 8, filled - 8
    if filled:
        out[at] = np.uint8(packed)


@helper
def _decode_top_k(encoded: Bytes, out: Flat, share: np.float32, add: bool, k: int, bits: int) -> bool:
    """Sets the values kept, or adds their share. False: a place is beyond the row."""
    low, high = _bf16_at(encoded, 0), _bf16_at(encoded, 2)
    top, width, at, room, filled = (1 << (bits - 1)) - 1, _INDEX_BITS + bits, 4, np.int64(0), 0
    step = (high - low) * _F(1 / _F(top))
    for _ in range(k):
        while filled < width:
            room |= np.int64(encoded[at]) << filled
            at, filled = at + 1, filled + 8
        word, room, filled = room & ((1 << width) - 1), room >> width, filled - width
        value, place = _F(word & top) * step + low, word >> bits
        if place >= out.size:
            return False
        value = -value if word & (top + 1) else value
        out[place] = out[place] + value * share if add else value
    return True


@kernel
def encode(flat: Flat, out: Bytes, left: Flat, more: Flat, form: Form) -> np.int32:
    """Encodes ``flat + more``; ``left`` becomes what that leaves out. Either of the two may be empty.

    ``form``: the codec; the values of a block, and its bytes; how many of a block's values top_k keeps, and of those of
    a shorter last one; its bits. Returns the `peak_of` all values; what is not finite ends the work.
    """
    kind, block, block_bytes, k, last_k, bits = form
    worst = _I(0)
    room, total, places = np.empty(block, np.float32), np.empty(block, np.float32), np.empty(block + 1, np.int32)
    for start in range(0, flat.size, block):
        stop, at = min(start + block, flat.size), start // block * block_bytes
        x, place, rest = flat[start:stop], out[at : at + block_bytes], left[start:stop]
        if more.size:
            y, z = more[start:stop], total[: x.size]
            for i in range(x.size):
                z[i] = x[i] + y[i]
            x = z
        peak = peak_of(x, _I(0))
        worst = max(worst, peak)
        if worst >= _NOT_FINITE:
            break
        if kind == OF_TOP_K:
            k = k if x.size == block else last_k
            _encode_top_k(x, peak, place, k, bits, room, places)
        elif kind == OF_FP4:
            _encode_fp4(x, peak, place)
        elif kind == OF_BF16:
            _encode_bf16(x, place, rest)
        else:
            _encode_int8(x, peak, place)
        if not left.size or kind == OF_BF16:
            continue
        if kind == OF_TOP_K:
            rest[:] = x
            _decode_top_k(place, rest, _F(-1), True, k, bits)
            continue
        if kind == OF_FP4:
            _decode_fp4(place, rest)
        else:
            _decode_int8(place, rest)
        for i in range(x.size):
            rest[i] = x[i] - rest[i]
    return worst


@kernel
def decode(encoded: Bytes, flat: Flat, share: np.float32, add: bool, form: Form) -> bool:
    """Decodes into ``flat``; ``add``: adds ``share`` times what is decoded. False: no encoder makes such bytes."""
    kind, block, block_bytes, k, last_k, bits = form
    if kind == OF_BF16:
        _decode_bf16(encoded, flat, share, add)
        return True
    room = np.empty(block, np.float32)
    for start in range(0, flat.size, block):
        stop, at = min(start + block, flat.size), start // block * block_bytes
        out, place = flat[start:stop], encoded[at : at + block_bytes]
        if kind == OF_TOP_K:
            if not add:
                out[:] = _F(0)
            if not _decode_top_k(place, out, share, add, k if out.size == block else last_k, bits):
                return False
            continue
        term = room[: out.size] if add else out
        if kind == OF_FP4:
            _decode_fp4(place, term)
        else:
            _decode_int8(place, term)
        if add:
            for i in range(out.size):
                out[i] = out[i] + term[i] * share
    return True


_FLAT, _BYTES, _FORM = types.float32[::1], types.uint8[::1], types.UniTuple(types.int64, 6)

SIGNATURES = {
    encode: (_FLAT, _BYTES, _FLAT, _FLAT, _FORM),
    decode: (_BYTES, _FLAT, types.float32, types.boolean, _FORM),
}
"""The types of each kernel's arguments."""

"""Independent seeds."""

from __future__ import annotations

import hashlib


def seed_of(*parts: object) -> int:
    """A seed of 63 bits from any printable values, e.g. seed, replica and incarnation: the hash of their text."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 1

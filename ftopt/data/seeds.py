"""Seeds that have nothing to do with each other."""

from __future__ import annotations

import hashlib


def seed_of(*parts: object) -> int:
    """A seed of 63 bits from anything that prints, e.g. seed, replica and incarnation; no two are near each other."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 1

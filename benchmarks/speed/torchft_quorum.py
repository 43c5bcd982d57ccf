"""torchft's counterpart of a round with an empty payload: its quorum, and its vote on the commit."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.speed.orders import obey
from benchmarks.speed.theirs import manager


def main() -> None:
    """One replica group of one rank."""
    rank, size, house = json.loads(sys.argv[1])
    with manager(rank, house, size) as theirs:

        def rounds(verb: str, count: int) -> dict[str, Any]:
            taken_s = []
            for _ in range(count):
                start = time.monotonic()
                theirs.start_quorum(allow_heal=False)
                theirs.should_commit()
                taken_s.append(time.monotonic() - start)
            return {"taken_s": taken_s}

        obey(rounds)


if __name__ == "__main__":
    main()

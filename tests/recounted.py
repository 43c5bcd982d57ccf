"""The samples of a run, from its events."""

from __future__ import annotations

from collections.abc import Sequence

from ftopt.watch.jsonl import Line
from ftopt.watch.samples import Ledger


def recounted(events: Sequence[Line]) -> Ledger:
    """The ledger after the lines of ``events.jsonl``."""
    ledger = Ledger()
    for event in events:
        ledger.add(event)
    return ledger

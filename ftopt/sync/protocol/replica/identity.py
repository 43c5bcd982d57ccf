"""How a replica identifies itself when it connects."""

from __future__ import annotations

from dataclasses import dataclass

from ftopt.sync.protocol.samples import Samples


@dataclass(frozen=True)
class Identity:
    """A replica's fixed fields of each hello. ``replaces``: its launcher knows that the former process under its id has
    ended. ``start_step``: the inner step of version 0, if that is this replica's state."""

    job: str
    replica: str
    lines: dict[str, str]
    settings: dict[str, int | float | str | None]
    initial: str
    fragments: int = 1
    address: str = ""
    samples: Samples | None = None
    arithmetic: str = ""
    replaces: bool = False
    start_step: int = 0

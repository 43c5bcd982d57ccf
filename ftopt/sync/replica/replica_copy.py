"""The copy of a replica, and what a newcomer adopts of its dead predecessor (``recover: replay``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ftopt.sync.protocol.intervals import Ranges
from ftopt.sync.protocol.messages import IncarnationId


@dataclass(frozen=True)
class ReplicaCopy:
    """A copy of a replica at the start of a round.

    Args:
        incarnation_id: the replica's.
        versions: of the committed state that it was based on, one per fragment.
        used: units that its pending steps had used.
        queue: its other units, in the order in which it would have used them.
        text: plain values, JSON.
        tensors: tensors, by names that are in the text.
    """

    incarnation_id: IncarnationId
    versions: tuple[int, ...]
    used: Ranges
    queue: Ranges
    text: str
    tensors: Mapping[str, Tensor]

    def meta(self) -> dict[str, str]:
        """Everything but the tensors, to be sent with them."""
        about = {"of": self.incarnation_id, "versions": self.versions, "used": self.used, "queue": self.queue}
        return {"copy": json.dumps(about, separators=(",", ":")), "text": self.text}

    @classmethod
    def of(cls, meta: dict[str, str], tensors: Mapping[str, Tensor]) -> ReplicaCopy:
        """The reverse of `meta`. Raises ValueError if this is no copy."""
        try:
            about, text = json.loads(meta["copy"]), meta["text"]
            (replica, incarnation), versions = about["of"], tuple(int(v) for v in about["versions"])
            used, queue = _ranges(about["used"]), _ranges(about["queue"])
            return cls((str(replica), int(incarnation)), versions, used, queue, text, tensors)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"it is no copy of a replica: {error!r}") from None


@dataclass(frozen=True)
class AdoptedWork:
    """What a newcomer adopts of the incarnation before it.

    Args:
        copy: its copy.
        inner_step: its last known inner step.
        fetch_s: seconds that fetching the copy took.
    """

    copy: ReplicaCopy
    inner_step: int
    fetch_s: float


def _ranges(value: Any) -> Ranges:
    return tuple((int(start), int(stop)) for start, stop in value)

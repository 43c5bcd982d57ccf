"""What is kept of a replica, and what a newcomer adopts of its dead predecessor (``recover: replay``)."""

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
    """What a replica was at the start of a round.

    Args:
        incarnation_id: which one.
        versions: of the committed state that it was based on, one a fragment.
        used: units that its pending steps had used.
        queue: units that it held besides, in the order in which they would have been used.
        text: plain values, JSON.
        tensors: named in the text.
    """

    incarnation_id: IncarnationId
    versions: tuple[int, ...]
    used: Ranges
    queue: Ranges
    text: str
    tensors: Mapping[str, Tensor]

    def meta(self) -> dict[str, str]:
        """All but the tensors, to be sent beside them."""
        about = {"of": self.incarnation_id, "versions": self.versions, "used": self.used, "queue": self.queue}
        return {"copy": json.dumps(about, separators=(",", ":")), "text": self.text}

    @classmethod
    def of(cls, meta: dict[str, str], tensors: Mapping[str, Tensor]) -> ReplicaCopy:
        """The reverse. ValueError: it is none."""
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
        copy: of that one.
        inner_step: how far it had come, as far as it had told.
        fetch_s: seconds that fetching the copy took.
    """

    copy: ReplicaCopy
    inner_step: int
    fetch_s: float


def _ranges(value: Any) -> Ranges:
    return tuple((int(start), int(stop)) for start, stop in value)

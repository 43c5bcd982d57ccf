"""The last versions that a job had before its startup phase, and whether it has ended (END)."""

from __future__ import annotations

from collections.abc import Iterable

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.entry.admission import JOB_ENDED
from ftopt.sync.protocol.coordinator.roster.effects import Decided
from ftopt.sync.protocol.samples import Samples


class Past:
    """The last versions that the job had, and sentences about that of fragment 0.

    Args:
        decided: decisions, oldest first; none: the job has had no state, as far as this coordinator knows.

    Attributes:
        tops: the last decision of each fragment; ``last``: that of fragment 0.
    """

    def __init__(self, decided: Iterable[Decided]) -> None:
        self.tops = {each.fragment: each for each in decided}
        self.last = self.tops.get(0)
        self.ended = False
        """END: whether the job's replicas have left at their end, or all samples are in that version."""

    @property
    def chain(self) -> str:
        """The chain of the last version; "" if there is none."""
        return self.last.chain if self.last is not None else ""

    def know_end(self, samples: Samples | None, *, finished: bool) -> None:
        """END: notes whether the job has ended. ``finished``: a replica that has left was at its end."""
        done = self.last.done if self.last is not None else ()
        all_done = samples is not None and samples.units is not None and done == ((0, samples.units),)
        self.ended = finished or all_done

    def end(self) -> str:
        """Says that the job has ended, and where."""
        last = self.last
        return JOB_ENDED + (f" at version {last.version}, inner step {last.inner_step}" if last else "")

    def has_ended(self) -> str:
        """Tells latecomers that the job has ended, and what they can do."""
        return (
            f"{self.end()}, and its replicas have left: this one came too late, and takes no step. The model is in "
            "what they have saved. To train on from a checkpoint, resume it (checkpoints.resume(), in a recipe "
            "checkpoint.resume); to train anew, give the job another name (job=, --job or FTOPT_JOB)"
        )

    def had(self) -> str:
        """Says that the job has had a state, which nobody holds."""
        assert self.last is not None
        at = f"version {self.last.version}, inner step {self.last.inner_step}"
        return f"the job had come to {at}; nobody who is here holds that state"

    def undone(self, version: int) -> str:
        """Says that the job goes on from ``version``, although it had a later one; "" if it had none."""
        if (last := self.last) is None or version >= last.version:
            return ""
        return (
            f"the job goes back from version {last.version}, inner step {last.inner_step}, which nobody who is here "
            f"holds, to version {version}: the outer steps in between are undone"
        )

    def anew(self, hellos: Iterable[m.Hello]) -> str:
        """Says, at a cold start from ``hellos``, that the job has had a state before, or may have had one; ""
        otherwise."""
        if self.last is not None:
            return f"{self.had()}, and there is no checkpoint of it at hand: it starts anew"
        saved = max((h.checkpoint.version for h in hellos if h.checkpoint is not None), default=0)
        if not saved:
            return ""
        return (
            f"a new job starts: nobody has asked to resume the checkpoint of version {saved} in a replica's folder, "
            "which is of this job or of an earlier one"
        )

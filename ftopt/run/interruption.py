"""What is recorded of the signals that end a run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from ftopt.errors import Unreachable, UserError
from ftopt.events import Event
from ftopt.run.fault_spec import COORDINATOR
from ftopt.run.processes import Child
from ftopt.watch.status import Job
from ftopt.watch.story import Story


def signal_of(number: int) -> str:
    """A signal as its sender knows it: ``Ctrl-C``, ``SIGTERM``."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def killer(interrupts: Sequence[int], child: Child, leave_s: float) -> str:
    """What has made the runner kill a replica that it has asked to leave by the first of these signals; "": it has
    not."""
    if not interrupts or child.process.poll() != -signal.SIGKILL:
        return ""
    first, *again = map(signal_of, interrupts)
    if not again:
        return f"its launcher, since it had not left {leave_s:.0f} s after {first}"
    return f"the second {first}" if again[0] == first else again[0]


class Interrupts(list[int]):
    """The signals that have come to a launch.

    Args:
        story: what it knows of its job.
        own: its replicas.

    Attributes:
        at: the inner step at which the first signal came: of the job, or of the launch's furthest replica. Replicas of
            other launches may train on.
    """

    def __init__(self, story: Story, own: Collection[str]) -> None:
        super().__init__()
        self._story, self._own, self.at = story, own, 0

    def come(self, number: int) -> None:
        """A signal comes."""
        if not self:
            own = (row for replica, row in self._story.rows.items() if replica in self._own and row.state != "dead")
            self.at = max([self._story.inner_step, *(row.inner_step for row in own)])
        self.append(number)

    def ask(self, look: Callable[[], Iterable[Job]]) -> None:
        """Takes up what the coordinator says of the job just after the first signal, if it answers."""
        with suppress(UserError, Unreachable):
            own = (x for job in look() for x in job["replicas"] if x["replica"] in self._own and x["state"] != "away")
            self.at = max([self.at, *(x["inner_step"] for x in own)])


def interruption(interrupts: Sequence[int], inner_step: int, asked: Sequence[str], **more: object) -> Event:
    """The last event of a run that these signals have ended, the first one at ``inner_step``. ``more``: other fields,
    of which empty ones are left out."""
    first, *again = map(signal_of, interrupts)
    more["again"] = "".join(again[:1])
    data = {"by": first, "asked": [*asked], **{name: value for name, value in more.items() if value}}
    return Event("interrupted", COORDINATOR, inner_step=inner_step, data=data)

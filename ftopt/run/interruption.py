"""What is recorded of the signals that end a run."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from ftopt.events import Event
from ftopt.run.fault_spec import COORDINATOR
from ftopt.run.processes import Child


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


def interruption(interrupts: Sequence[int], inner_step: int, asked: Sequence[str], **more: object) -> Event:
    """The last event of a run that these signals have ended. ``more``: other fields, of which empty ones are left
    out."""
    first, *again = map(signal_of, interrupts)
    more["again"] = "".join(again[:1])
    data = {"by": first, "asked": [*asked], **{name: value for name, value in more.items() if value}}
    return Event("interrupted", COORDINATOR, inner_step=inner_step, data=data)

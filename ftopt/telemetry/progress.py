"""Shows a run as it goes: a live table on a terminal, plain lines elsewhere. The one file that imports rich."""

from __future__ import annotations

import time
from collections.abc import Callable

from ftopt.telemetry.view import Row, RunView

_PLAIN_EVERY_S = 5.0


class PlainLines:
    """A line for each notable event, and one every few seconds.

    Args:
        say: writes a line.
        clock: seconds, monotonic.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._started = self._last = clock()

    def note(self, text: str) -> None:
        """Something notable happened."""
        self._say(f"{self._clock() - self._started:7.1f} s  {text}")

    def refresh(self, view: RunView) -> None:
        """The run stands so now."""
        now = self._clock()
        if now - self._last < _PLAIN_EVERY_S:
            return
        self._last = now
        rows = "".join(f" | {row.replica} {row.state} at {row.inner_step}, loss {_loss(row)}" for row in _sorted(view))
        self.note(f"inner step {view.inner_step}/{view.inner_steps}, version {view.version}{rows}")

    def close(self) -> None:
        """The run is over: there is nothing to put away."""


class LiveTable:
    """A table of the replicas that is drawn anew, with the notable events above it."""

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(refresh_per_second=4, transient=False)
        self._live.start()

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def refresh(self, view: RunView) -> None:
        from rich.table import Table

        val = f", held-out loss {view.val_loss:.4f}" if view.val_loss is not None else ""
        title = f"inner step {view.inner_step}/{view.inner_steps}, version {view.version}{val}, {view.aborted} aborted"
        table = Table(title=title, title_justify="left")
        for name in ("replica", "state", "inner step", "loss", "version", "steps/s"):
            table.add_column(name, justify="left" if name in ("replica", "state") else "right")
        for row in _sorted(view):
            rate = f"{row.steps_per_s:.1f}" if row.state == "training" else ""
            table.add_row(row.replica, row.state, str(row.inner_step), _loss(row), str(row.version), rate)
        self._live.update(table)

    def close(self) -> None:
        self._live.stop()


class LiveText:
    """Text that is redrawn in place on a terminal; lines that do not fit are cut."""

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal, now."""
        return self._live.console.size

    def show(self, text: str) -> None:
        from rich.text import Text

        self._live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)

    def close(self) -> None:
        self._live.stop()


Display = PlainLines | LiveTable
"""What the runner tells of a run."""


def _sorted(view: RunView) -> list[Row]:
    return [view.rows[replica] for replica in sorted(view.rows)]


def _loss(row: Row) -> str:
    return f"{row.loss:.3f}" if row.loss is not None else "-"

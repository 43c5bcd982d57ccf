"""Shows a run as it goes: a live table on a terminal, plain lines elsewhere. The one file that imports rich."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ftopt.common.plural import count
from ftopt.errors import from_extra
from ftopt.watch.sentences import Note, clock, figure
from ftopt.watch.status import fitted, short
from ftopt.watch.story import Story

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_PLAIN_S = 5.0
_PLAIN_MOST_S = 60.0
_LOOK_S = 0.5
_BURST, _BURST_S = 30, 10.0
"""In a log: at most this number of notes in this number of seconds."""
_COLORS = {"good": "green", "warn": "yellow", "bad": "bold red"}
_STATE_COLORS = {
    "training": "green", "waiting": "yellow", "fetching": "cyan", "starting": "dim", "evaluating": "cyan",
    "standby": "cyan", "done": "bold green", "left": "dim", "failed": "bold red", "dead": "bold red",
    "stalled": "bold red",
}  # fmt: skip
_STATE_COLORS |= dict.fromkeys(("slow", "away", "cut off", "stopped", "hanging", r"no step for \d+ s"), "bold yellow")


def display_for(say: Callable[[str], None], *, quiet: bool = False, dated: bool = False) -> Display:
    """The display for standard output; ``say`` writes a line to it. ``quiet``, ``dated``: see `PlainLines`."""
    if quiet or not sys.stdout.isatty() or not can_redraw():
        return PlainLines(say, quiet=quiet, dated=dated)
    return LiveTable()


def can_redraw() -> bool:
    """Whether what `LiveText` needs is installed."""
    return find_spec("rich") is not None


class PlainLines:
    """A line for each notable event, and one for the progress, every five seconds at first and every minute later.

    Args:
        quiet: only notes about problems.
        dated: begin lines with date and time, to compare them with other machines' logs; else with the seconds since
            the start.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        quiet: bool = False,
        dated: bool = False,
    ) -> None:
        self._say, self._clock, self._quiet, self._dated = say, clock, quiet, dated
        self._started = self._last = clock()
        self._looked = -math.inf
        self._burst_s, self._notes, self._text = self._started, 0, ""

    def note(self, note: Note) -> None:
        now = self._clock()
        if self._quiet and note.tone != "bad":
            return
        if now - self._burst_s >= _BURST_S:
            self._tell_left_out()
            self._burst_s, self._notes = now, 0
        self._notes += 1
        if self._notes <= _BURST:
            self._line(now, note.text)

    def refresh(self, story: Story, look: Callable[[], str] = lambda: "") -> None:
        """Writes the figures, if it is time, and they are new. ``look``: called before; what it returns is written in
        place of them, unless it is ""."""
        now = self._clock()
        elapsed = now - self._started
        due_s = min(_PLAIN_MOST_S, max(_PLAIN_S, elapsed / 20))
        if self._quiet or now - self._last < due_s or now - self._looked < _LOOK_S:
            return
        self._looked = now
        text = look() or ", ".join(figures(story))
        if not text or (text == self._text and now - self._last < _PLAIN_MOST_S):
            return
        self._last, self._text = now, text
        self._line(now, text)

    def close(self) -> None:
        self._tell_left_out()

    def _tell_left_out(self) -> None:
        if (more := self._notes - _BURST) > 0:
            self._line(self._clock(), f"... and {more} more events; events.jsonl has all of them")
        self._notes = 0

    def _line(self, now: float, text: str) -> None:
        when = time.strftime("%Y-%m-%d %H:%M:%S") if self._dated else f"{now - self._started:7.1f} s"
        self._say(f"{when}  {text}")


def figures(story: Story) -> list[str]:
    """The job's figures, the most important ones first; empty for one replica that has not joined yet."""
    if story.standby:
        at = f"standing by: the job is at version {story.version}, inner step {story.inner_step}"
        return [at] if story.version else []
    if not story.whole and not story.started:
        return []
    of = f"/{story.inner_steps} ({story.share():.0%})" if story.inner_steps else ""
    parts = [f"inner step {story.at()}{of}", f"version {story.version}"]
    if (loss := story.loss()) is not None:
        parts.append(f"loss {figure(loss)}")
    if story.score:
        parts.append(story.score)
    if tokens := story.tokens_per_s():
        parts.append(f"{short(tokens)} {story.unit}/s")
    elif steps := sum(row.steps_per_s for row in story.rows.values() if row.state in ("training", "waiting")):
        parts.append(f"{steps:.1f} steps/s")
    if (waits := story.waiting_share()) is not None:
        parts.append(f"sync wait {waits:.0%}")
    if story.whole:
        parts += [f"{count} {state}" for state, count in sorted(story.states().items(), key=lambda x: (-x[1], x[0]))]
    if story.aborted:
        parts.append(count(story.aborted, "failed attempt"))
    if (left_s := story.left_s() or 0.0) >= _PLAIN_S:  # later it would be wrong: a job ends with an outer step
        parts.append(f"{clock(left_s)} left")
    return parts


class LiveText:
    """Text that is redrawn in place on a terminal; lines that do not fit are cut off, and states are coloured."""

    def __init__(self, console: Console | None = None) -> None:
        with from_extra("cli", "a live table"):
            from rich.console import Console
            from rich.live import Live

        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal now."""
        return self._console.size

    def show(self, text: str) -> None:
        self._live.update(_coloured(text), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def note(self, note: Note) -> None:
        """Writes a note above the text, with the time."""
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(padding=(0, 1))
        line.add_row(Text(time.strftime("%H:%M:%S"), style="dim"), Text(note.text, style=_COLORS.get(note.tone, "")))
        self._console.print(line)

    def say(self, text: str) -> None:
        """Writes a line above the text, with the colours that it has."""
        from rich.text import Text

        self._console.print(Text.from_ansi(text))


class LiveTable(LiveText):
    """A bar and a table of the replicas that are redrawn in place, with the notable events above them."""

    def refresh(self, story: Story) -> None:
        self._live.update(draw(story, *self.size), refresh=True)


Display = PlainLines | LiveTable


def draw(story: Story, width: int, height: int) -> RenderableType:
    """The whole picture, at most ``height`` lines minus two for the notes above."""
    from rich.console import Group

    table = "\n".join(line[:width] for line in fitted(story.replicas(), width, max(2, height - 4)))
    return Group(_bar(story, width), _line_of_figures(story, width), *([_coloured(table)] if table else []))


def _coloured(text: str) -> Text:
    from rich.text import Text

    lines = Text(text, no_wrap=True, overflow="crop")
    for state, color in _STATE_COLORS.items():
        lines.highlight_regex(rf"(?<=  ){state}(?=  )", color)
    return lines


def _bar(story: Story, width: int) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    left_s, at = story.left_s(), story.at()
    ends = f"{clock(left_s)} left" if left_s is not None else clock(story.now_s)
    grid = Table.grid(padding=(0, 1), expand=False)
    grid.add_row(
        Text(story.name or "inner step", style="bold", overflow="ellipsis", no_wrap=True),
        ProgressBar(story.inner_steps, min(at, story.inner_steps), width=max(10, min(60, width - 56))),
        Text(f"{at}/{story.inner_steps} inner steps", no_wrap=True),
        Text(f"{story.share():.0%}", no_wrap=True),
        Text(ends, style="cyan", no_wrap=True),
    )
    return grid


def _line_of_figures(story: Story, width: int) -> Text:
    from rich.text import Text

    shown = figures(story)
    parts = [part for part in (shown if story.standby else shown[1:]) if not part.endswith(" left")]
    text = " · ".join(parts)
    while len(text) > width and len(parts) > 1:
        parts.pop()
        text = " · ".join(parts)
    return Text(text, style="dim", no_wrap=True, overflow="ellipsis")

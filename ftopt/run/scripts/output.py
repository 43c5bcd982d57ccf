"""What a launched replica writes, shown with its id."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

_MOST_BYTES, _MOST_CHARS = 1 << 18, 10_000
"""Of a replica's output: read at a time, and shown of a line. Its log has all."""


class Output:
    """Shows what a replica writes, line by line, with its id."""

    def __init__(self, log: Path, replica: str, say: Callable[[str], None]) -> None:
        self._log, self._replica, self._say = log, replica, say
        self._read, self._rest = 0, b""

    def mark(self, text: str) -> None:
        """Writes a line to the log, where a new process begins; call it after the former one's last `more`."""
        with self._log.open("ab") as stream:
            stream.write(f"\n--- {text}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())
            self._read = stream.tell()

    def more(self, *, last: bool = False) -> None:
        """Shows the new lines; at the ``last`` call also one without an end."""
        try:
            with self._log.open("rb") as stream:
                stream.seek(self._read)
                new = stream.read(-1 if last else _MOST_BYTES)
        except FileNotFoundError:
            return
        self._read += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        self._rest = self._rest[-_MOST_BYTES:]
        if last and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        shown = []
        for each in lines:  # of a progress bar the last state
            text = each.rstrip(b"\r").rpartition(b"\r")[2][:_MOST_CHARS].decode(errors="replace")
            text = re.sub(rf"^(replica )?{re.escape(self._replica)}: ", "", text)  # the line begins with it already
            shown.append(f"{self._replica} | {text}")
        if shown:
            self._say("\n".join(shown))

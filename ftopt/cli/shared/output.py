"""Output of the command line: results to standard output, everything else to standard error.

Either may be lost while a command runs: its reader has ended (``| head``), a full disk, a terminal that is gone. A
command that trains goes on without; any other one ends.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
import textwrap
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TextIO

from ftopt.common.timers import if_longer
from ftopt.errors import FtoptError

_LONG_S = 5.0

_TRAIN = ("run", "launch", "resume", "replica", "coordinator")
_goes_on = False


def begin(verb: str) -> None:
    """Call before anything is opened. A process started without one of its standard streams (``>&-``) would give the
    stream's number to its next file, and write the stream's output into that file."""
    global _goes_on
    _goes_on = verb in _TRAIN
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # this is the lowest free number
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 (until the end of the process)
    sys.stderr = sys.stderr or sys.stdout
    for stream in (sys.stdout, sys.stderr):  # a terminal may not have a character that a replica writes
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # one that was written to before it was put on a pipe, as by a fork
                stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Writes one line of the result. If that fails and the command does not train, raises FtoptError, or
    BrokenPipeError if its reader has ended."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError, ValueError):  # discards further output, including the interpreter's at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.stdout.flush()
        if _goes_on:
            complain(f"standard output: {error.strerror}; what follows is not shown there, and the work goes on")
        elif isinstance(error, BrokenPipeError):
            raise
        else:
            raise FtoptError(f"standard output: {error.strerror}") from error


def explain(text: str) -> None:
    """Writes sentences of the result, one per line; a terminal shows them broken between words."""
    say(broken(text, columns(sys.stdout)))


def show_command(what: str, command: str) -> None:
    """Writes a command to paste into a shell, after what it is for; whole, on a line of its own where the terminal is
    too narrow for both."""
    width = columns(sys.stdout)
    fits = width is None or len(what) + 1 + len(command) <= width
    say(f"{what} {command}" if fits else f"{broken(what, width)}\n  {command}")


def columns(stream: TextIO) -> int | None:
    """The width of the terminal that shows ``stream``; None: no terminal does."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def broken(text: str, width: int | None) -> str:
    """``text`` with each of its lines broken between words at ``width``, if any, and further indented from there on."""
    lines = text.split("\n")
    if width is None or max(map(len, lines)) <= width:
        return text
    fill = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        fill.subsequent_indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines[number] = fill.fill(line) if len(line) > width else line
    return "\n".join(lines)


def complain(text: str) -> None:
    _to_stderr(f"{broken(f'ftopt: {text}', columns(sys.stderr))}\n")


def _to_stderr(text: str) -> None:
    with suppress(OSError):  # there is no other place to report it
        sys.stderr.write(text)
        sys.stderr.flush()


def set_up_logging(*, dated: bool = False) -> None:
    """Sends warnings of all libraries to standard error, unless the process has set up its logging. ``dated``: with
    date and time, like a coordinator's other lines."""
    when = "%(asctime)s  " if dated else ""
    logging.basicConfig(format=f"{when}ftopt: %(message)s", datefmt="%Y-%m-%d %H:%M:%S", level=logging.WARNING)


def tell(text: str) -> None:
    """Writes one line about progress to a terminal. A script's log would get it each time."""
    if sys.stderr.isatty():
        _to_stderr(f"{text}\n")


def loading(text: str = "loading PyTorch ...") -> AbstractContextManager[None]:
    """Wraps the preparations of a command: says so on a terminal if they take long, as on a busy machine."""
    return working(text, after_s=_LONG_S)


def working(text: str, *, after_s: float = 1.0) -> AbstractContextManager[None]:
    """Says on a terminal what is under way if the block takes longer than ``after_s``."""
    return if_longer(after_s, tell, text) if sys.stderr.isatty() else nullcontext()

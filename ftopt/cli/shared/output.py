"""Output of the command line: results to standard output, everything else to standard error.

Either may be lost while a command runs: its reader has ended (``| head``), a full disk, a terminal that is gone. A
command that trains goes on without; any other one ends.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import AbstractContextManager, suppress
from pathlib import Path

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
        _drop_stdout()
        if _goes_on:
            complain(f"standard output: {error.strerror}; what follows is not shown there, and the work goes on")
        elif isinstance(error, BrokenPipeError):
            raise
        else:
            raise FtoptError(f"standard output: {error.strerror}") from error


def _drop_stdout() -> None:
    """Discards all further output, including what the interpreter writes at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stdout.flush()


def complain(text: str) -> None:
    """Writes one error message."""
    _to_stderr(f"ftopt: {text}\n")


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
    """Writes one line about progress."""
    _to_stderr(f"{text}\n")


def loading(text: str = "loading PyTorch ...") -> AbstractContextManager[None]:
    """Wraps the preparations of a command: says so if they take long, as on a busy machine."""
    return working(text, after_s=_LONG_S)


def working(text: str, *, after_s: float = 1.0) -> AbstractContextManager[None]:
    """Says what is under way if the block takes longer than ``after_s``."""
    return if_longer(after_s, tell, text)

"""Ctrl-C while the command line starts, or imports what it needs, ends the process at once, with one line.

An exception would not do: outside of `ftopt.cli.main.main` nobody catches it, and during the imports of torch and numpy
it is lost, or becomes another one. `ftopt` imports this first; other programs are not affected.
"""

import os
import signal
import sys
from types import FrameType

_IMPORTS = "<frozen importlib._bootstrap>"


def _is_command() -> bool:
    """Whether this process is ``ftopt`` or ``python -m ftopt``."""
    if sys.argv[:1] == ["-m"]:  # Python is looking for the module
        return "-m" in sys.orig_argv and sys.orig_argv[sys.orig_argv.index("-m") + 1] == "ftopt"
    return bool(sys.argv) and sys.argv[0].rpartition("/")[2] == "ftopt"


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None and frame.f_code.co_filename != _IMPORTS:
        if frame.f_globals.get("__name__") == "ftopt.cli.main" and frame.f_code.co_name == "main":
            raise KeyboardInterrupt  # it handles this
        frame = frame.f_back
    os.write(2, b"ftopt: interrupted\n")
    os._exit(128 + number)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler and _is_command():
    signal.signal(signal.SIGINT, _interrupt)

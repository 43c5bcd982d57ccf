"""``python -m ftopt.run.scripts.tied PARENT COMMAND...``: becomes the command, which gets SIGTERM when its parent ends.

So no replica outlives a launcher that was killed (Linux; elsewhere the command runs without).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Ties this process to its parent, and becomes the command. Execution keeps the tie."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended before
        raise SystemExit(128 + signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

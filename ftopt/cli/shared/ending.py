"""How a command ends: the exit status, and one message instead of a traceback for what a user can mend."""

from __future__ import annotations

import atexit
import gc
import signal
from collections.abc import Callable

from ftopt.cli.shared.output import complain
from ftopt.errors import FtoptError, UserError


def status_of(run: Callable[[], int]) -> int:
    """The exit status of ``run``: its own; 2 the user's input was wrong; 1 any other error of ftopt's; 130 Ctrl-C."""
    # At the end of a process Python searches all objects that torch has created for cycles, which takes half a second.
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    try:
        return run()
    except UserError as error:
        complain(str(error))
        return 2
    except FtoptError as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt as interrupt:
        exec("")  # else Python ends the process by SIGINT if the interrupt came in an exec(), such as a dataclass's
        complain("interrupted")
        return 128 + int(getattr(interrupt, "number", signal.SIGINT))
    except BrokenPipeError:  # `ftopt ls | head`
        return 1

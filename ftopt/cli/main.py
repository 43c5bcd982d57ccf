"""The commands, and what all of them have in common: exit status and error messages.

Exit status: 0 success; 1 the run failed; 2 the user's input was wrong; 130 or 143 ended by Ctrl-C or SIGTERM
(`ftopt.cli.run`). A user's mistake produces one message, never a traceback.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import signal
import sys
from collections.abc import Callable, Sequence

from ftopt.cli.shared.output import begin, complain, set_up_logging
from ftopt.cli.shared.parser import parse
from ftopt.errors import FtoptError, UserError

GROUPS = {
    "start and stop a job": {
        "run": "run a recipe's whole job on this machine",
        "launch": "run your own script as the replicas of a job",
        "resume": "go on with a run from its newest checkpoint",
        "stop": "end a job of yours on this machine in good order",
    },
    "look": {
        "ls": "list the recipes that ship with ftopt",
        "validate": "check a recipe, and report all errors together",
        "plan": "forecast a recipe's goodput, bytes and loss",
        "ps": "list your jobs on this machine",
        "status": "show a job's replicas, versions and rounds",
        "report": "write what happened in a run, or in several, as HTML",
    },
    "take": {
        "cp": "copy a recipe to edit it",
        "export": "write the trained parameters as a plain state dict",
    },
    "on a cluster": {
        "coordinator": "run the coordinator alone, which decides outer steps",
        "replica": "run one replica of a recipe's job",
    },
}
"""Group -> command -> description. A command's file is ``ftopt/cli/<command>.py``, imported when it is used."""

VERBS = {verb: text for group in GROUPS.values() for verb, text in group.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)

    def run() -> int:
        begin(given[0] if given else "")
        # The runner of a supervised coordinator looks for its messages at the beginning of a line.
        set_up_logging(dated=given[:1] == ["coordinator"] and "--supervised" not in given)
        parsed = parse(given, GROUPS)
        parsed.given = given  # `ftopt replica` starts its ranks with the same arguments
        return int(importlib.import_module(f"ftopt.cli.{parsed.verb}").run(parsed))

    return status_of(run)


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

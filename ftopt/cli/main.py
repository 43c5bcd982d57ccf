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
from collections.abc import Sequence

from ftopt.cli.shared.output import begin, complain, set_up_logging
from ftopt.cli.shared.parser import parse
from ftopt.errors import FtoptError, UserError

VERBS = {
    "ls": "list the recipes that ship with ftopt",
    "cp": "copy a recipe to edit it",
    "validate": "check a recipe, its data and factories, and report all errors together",
    "plan": "forecast utilization, goodput, bytes and loss, and recommend settings",
    "run": "run a whole job on this machine: coordinator and replicas",
    "launch": "run your own script as the replicas of a job",
    "resume": "go on with a run from its newest checkpoint",
    "coordinator": "run the coordinator alone: it forms quorums and decides outer steps",
    "replica": "run one replica of a job",
    "ps": "list your jobs on this machine",
    "stop": "end a job of yours on this machine; its replicas hand in their steps",
    "status": "show a coordinator's jobs: members, versions, rounds",
    "report": "write what happened in a run, or in several, as one HTML file",
    "export": "write the trained parameters as a plain state dict",
    "simulate": "`simulate goodput`: how much of the work is kept when machines fail, by policy",
    "completion": "print a script that completes ftopt's commands in your shell",
    "help": "describe a command",
}
"""Command -> description. Its file is ``ftopt/cli/<command>.py``, imported when the command is used."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # At the end of a process Python searches all objects that torch has created for cycles, which takes half a second.
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    try:
        begin(given[0] if given else "")
        # The runner of a supervised coordinator looks for its messages at the beginning of a line.
        set_up_logging(dated=given[:1] == ["coordinator"] and "--supervised" not in given)
        parsed = parse(given, VERBS)
        parsed.given = given  # `ftopt replica` starts its ranks with the same arguments
        return int(importlib.import_module(f"ftopt.cli.{parsed.verb}").run(parsed))
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

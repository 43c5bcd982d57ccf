"""The table of verbs, and what all verbs have in common: exit status and error messages.

Exit status: 0 success, 1 the run failed, 2 the user's input was wrong. A user's mistake produces one message, never a
traceback.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from ftopt.cli.output import complain
from ftopt.errors import FtoptError, UserError

VERBS = {
    "ls": "list the recipes that ship with ftopt",
    "cp": "copy a recipe to edit it",
    "validate": "check a recipe and report every error at once",
    "run": "run a whole job on this machine: coordinator and replicas",
    "coordinator": "run the coordinator alone: it forms quorums and decides outer steps",
    "replica": "run one replica of a job",
    "status": "show a coordinator's jobs: members, versions, rounds",
    "report": "write what happened in a run, or in several, as one HTML file",
    "export": "write a checkpoint's anchor as a plain safetensors state dict",
    "simulate": "run the protocol under random faults and check every invariant",
}
"""Verb -> what it does. Its file is ``ftopt/cli/<verb>.py``, imported when the verb is used."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(format="ftopt: %(message)s", level=logging.WARNING)
    verb = given[0] if given and given[0] in VERBS else None
    parser = argparse.ArgumentParser(
        prog="ftopt",
        description="Semi-synchronous, fault-tolerant optimizers for PyTorch.",
        epilog="`ftopt VERB --help` describes a verb. To begin: `ftopt ls`, then `ftopt run diloco_bytes`.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, text in VERBS.items():
        sub = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        if name == verb:
            importlib.import_module(f"ftopt.cli.{name}").add(sub)
    parsed, rest = parser.parse_known_args(given)
    if (overrides := vars(parsed).get("overrides")) is not None:  # argparse takes only those that follow RECIPE at once
        overrides += [word for word in rest if not word.startswith("-")]
        rest = [word for word in rest if word.startswith("-")]
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    parsed.given = given  # `ftopt replica` starts its ranks with the same words
    try:
        return int(importlib.import_module(f"ftopt.cli.{parsed.verb}").run(parsed))
    except UserError as error:
        complain(str(error))
        return 2
    except FtoptError as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        complain("interrupted")
        return 1
    except BrokenPipeError:  # `ftopt ls | head`
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1

"""``ftopt help [COMMAND]``: describes a command, or lists all of them."""

from __future__ import annotations

import argparse

from ftopt.cli.main import GROUPS
from ftopt.cli.shared.parser import make, parse


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", metavar="COMMAND", nargs="?", help="the command to describe (default: all of them)")


def run(arguments: argparse.Namespace) -> int:
    """Prints what ``ftopt COMMAND --help`` does."""
    if arguments.command is None:
        make(GROUPS).print_help()
        return 0
    parse([arguments.command, "--help"], GROUPS)  # ends by SystemExit
    return 0

"""``ftopt cp NAME [PATH]``: a copy of a recipe to edit."""

from __future__ import annotations

import argparse
from pathlib import Path

from ftopt.cli.output import say
from ftopt.config.shipped import locate
from ftopt.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    """NAME [PATH]."""
    parser.add_argument("name", metavar="NAME", help="a shipped recipe")
    parser.add_argument("path", metavar="PATH", nargs="?", help="file or folder (default: NAME.yaml here)")


def run(arguments: argparse.Namespace) -> int:
    """Copies; never over a file that is there."""
    source = locate(arguments.name)
    target = Path(arguments.path or f"{arguments.name}.yaml")
    if target.is_dir():
        target /= source.name
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise UserError(f"{target} is there already; give another PATH, or remove it first") from None
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}; give another PATH") from error
    say(f"{target}  (run it: ftopt run {target})")
    return 0

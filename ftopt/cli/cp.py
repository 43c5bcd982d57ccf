"""``ftopt cp NAME [PATH]``: copies a recipe to edit it."""

from __future__ import annotations

import argparse
from pathlib import Path

from ftopt.cli.output import say
from ftopt.config.shipped import locate
from ftopt.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of a recipe, as `ftopt ls` lists it")
    parser.add_argument("path", metavar="PATH", nargs="?", help="file or folder to copy it to (default: ./NAME.yaml)")


def run(arguments: argparse.Namespace) -> int:
    """Copies the recipe; never overwrites a file."""
    source = locate(arguments.name)
    target = Path(arguments.path or f"{arguments.name}.yaml")
    if target.is_dir():
        target /= source.name
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise UserError(f"{target} already exists; give another PATH, or remove the file first") from None
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}; give another PATH") from error
    say(f"{target}  (to run it: ftopt run {target})")
    return 0

"""``ftopt cp NAME [PATH]``: copies a recipe to edit it, with its Python file if it has one."""

from __future__ import annotations

import argparse

from ftopt.cli.shared.output import explain
from ftopt.common.paths import user_path
from ftopt.config.shipped import locate
from ftopt.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of a recipe, as `ftopt ls` lists it")
    parser.add_argument("path", metavar="PATH", nargs="?", help="file or folder to copy it to (default: ./NAME.yaml)")


def run(arguments: argparse.Namespace) -> int:
    """Copies the recipe, and the file of the same name with its factories; never overwrites a file."""
    source = locate(arguments.name)
    target = user_path(arguments.path or source.name)
    if target.is_dir():
        target /= source.name
    files = {source: target}
    if (code := source.with_suffix(".py")).is_file():
        files[code] = target.with_name(code.name)
    for there in files.values():
        if there.exists():
            raise UserError(f"{there} already exists; give another PATH, or remove the file first")
    for file, copy in files.items():
        try:
            with copy.open("x", encoding="utf-8") as stream:
                stream.write(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{copy} cannot be written: {error.strerror}; give another PATH") from error
    also = f", {target.with_name(code.name)}" if code in files else ""
    explain(f"{target}{also}  (to run it: ftopt run {target})")
    return 0

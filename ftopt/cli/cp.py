"""``ftopt cp NAME [PATH]``: copies a recipe to edit it, with its Python file if it has one.

A copy keeps its ``base`` if that is a shipped recipe, whose name means the same everywhere. A base that is a file is
found from the folder of the recipe alone: then the copy has all settings, as with ``--full``.
"""

from __future__ import annotations

import argparse
import re
from itertools import takewhile
from pathlib import Path

from ftopt.cli.shared.output import explain
from ftopt.common.paths import user_path
from ftopt.config.shipped import locate, shipped
from ftopt.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of a recipe, as `ftopt ls` lists it")
    parser.add_argument("path", metavar="PATH", nargs="?", help="file or folder to copy it to (default: ./NAME.yaml)")
    parser.add_argument("--full", action="store_true", help="write all settings, those of its base and defaults, too")


def run(arguments: argparse.Namespace) -> int:
    """Copies the recipe, and the file of the same name with its factories; never overwrites a file."""
    source = locate(arguments.name)
    target = user_path(arguments.path or source.name)
    if target.is_dir():
        target /= source.name
    files = {source: target}
    if (code := source.with_suffix(".py")).is_file():
        files[code] = target.with_name(code.name)
    text, base = _text(source, full=arguments.full)
    for there in files.values():
        if there.exists():
            raise UserError(f"{there} already exists; give another PATH, or remove the file first")
    for file, copy in files.items():
        try:
            with copy.open("x", encoding="utf-8") as stream:
                stream.write(text if file == source else file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{copy} cannot be written: {error.strerror}; give another PATH") from error
    also = f", {target.with_name(code.name)}" if code in files else ""
    explain(f"{target}{also}  (to run it: ftopt run {target})")
    if base:
        explain(
            f"it says what differs from its base, {base}: `ftopt cp {base}` copies that, --full writes all settings"
        )
    return 0


_BASE = re.compile(r"""^["']?base["']?\s*:\s*["']?([^"'#\n]*)""", re.MULTILINE)
"""Found without reading YAML, which an installation without extras cannot."""


def _text(source: Path, *, full: bool) -> tuple[str, str]:
    """The text of the copy, and the shipped recipe that is its base, if it has one."""
    text = source.read_text(encoding="utf-8")
    found, plain = _BASE.search(text), not text.lstrip("\ufeff \n").startswith("{")
    base = found[1].strip() if found is not None else ""
    if not full and plain and (found is None or base in shipped()):
        return text, base
    from ftopt.config.loader import dump, load

    comments = "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    code = source.with_suffix(".py")
    return f"{comments}\n{dump(load(str(source))).replace(f'{code.resolve()}:', f'{code.name}:')}", ""

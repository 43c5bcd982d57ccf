"""``ftopt ls``: lists the recipes that ship with ftopt, one per line."""

from __future__ import annotations

import argparse

from ftopt.cli.shared.output import say
from ftopt.config.shipped import shipped, title


def add(parser: argparse.ArgumentParser) -> None:
    """Adds no arguments."""


def run(arguments: argparse.Namespace) -> int:
    recipes = shipped()
    width = max(map(len, recipes), default=0)
    for name, path in recipes.items():
        say(f"{name:{width}}  {title(path)}")
    return 0

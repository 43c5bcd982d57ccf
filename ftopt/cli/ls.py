"""``ftopt ls``: the recipes shipped, a line each."""

from __future__ import annotations

import argparse

from ftopt.cli.output import say
from ftopt.config.shipped import shipped, title


def add(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Lists them."""
    recipes = shipped()
    width = max(map(len, recipes), default=0)
    for name, path in recipes.items():
        say(f"{name:{width}}  {title(path)}")
    return 0

"""``ftopt validate RECIPE [key=value ...]``: every error at once."""

from __future__ import annotations

import argparse

from ftopt.cli.output import say


def add(parser: argparse.ArgumentParser) -> None:
    """RECIPE [key=value ...]."""
    parser.add_argument("recipe", metavar="RECIPE", help="a shipped name or a path")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="e.g. train.inner_steps=200")


def run(arguments: argparse.Namespace) -> int:
    """Loads it; `UserError` says what is wrong."""
    from ftopt.config.loader import load

    recipe = load(arguments.recipe, arguments.overrides)
    say(f"{arguments.recipe}: valid; {recipe.replicas} replicas, {recipe.train.inner_steps} inner steps")
    return 0

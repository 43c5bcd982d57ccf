"""``ftopt validate RECIPE [key=value ...]``: reports every error at once."""

from __future__ import annotations

import argparse

from ftopt.cli.output import say


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe that ships with ftopt, or path of a file")
    text = "settings to override, e.g. train.inner_steps=200"
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=text)


def run(arguments: argparse.Namespace) -> int:
    """Loads the recipe; raises `UserError` with everything that is wrong."""
    from ftopt.config.loader import load

    recipe = load(arguments.recipe, arguments.overrides)
    of_ranks = f" of {recipe.ranks} ranks" if recipe.ranks > 1 else ""
    say(f"{arguments.recipe}: valid; {recipe.replicas} replicas{of_ranks}, {recipe.train.inner_steps} inner steps")
    return 0

"""``ftopt validate RECIPE [key=value ...]``: reports every error at once."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from ftopt.cli.shared.output import complain, loading, say
from ftopt.common.plural import count
from ftopt.config.shipped import check_words

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ftopt.config.loader import Reading
    from ftopt.config.schema import Recipe
    from ftopt.run.check import Checked


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe that ships with ftopt, or path of a file")
    text = "settings to override, e.g. train.inner_steps=200"
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=text)


def run(arguments: argparse.Namespace) -> int:
    """Loads the recipe, opens its data, and calls its factories; raises `UserError` with all errors."""
    check_words(arguments.recipe, arguments.overrides)
    with loading("reading the recipe ..."):
        from ftopt.config.loader import examine

        recipe = _valid(arguments.recipe, examine(arguments.recipe, arguments.overrides))
    of_ranks = f" of {recipe.ranks} ranks" if recipe.ranks > 1 else ""
    say(
        f"{arguments.recipe}: valid; {count(recipe.replicas, 'replica')}{of_ranks}, "
        f"{count(recipe.train.inner_steps, 'inner step')}"
    )
    return 0


def loaded(source: str, overrides: Sequence[str]) -> Recipe:
    """Returns a recipe whose own code may still be wrong; if anything else is, raises UserError with all errors."""
    from ftopt.config.loader import examine, listed
    from ftopt.config.plain import Attempts, check_installed, is_plain

    reading = examine(source, overrides)
    if reading.recipe is None or reading.errors or is_plain(reading.recipe):
        return _valid(source, reading)
    attempt = Attempts(())
    check_installed(reading.recipe, attempt)
    if attempt.errors:
        raise listed(source, attempt.errors)
    _warn(reading.warnings)
    return reading.recipe


def checked(source: str, overrides: Sequence[str], unchecked: Collection[str] = ()) -> tuple[Recipe, Checked]:
    """Returns a recipe and the objects of its sections on this machine, without those that need a section or setting
    in ``unchecked``. Output of the user's factories goes to standard error.

    Raises:
        UserError: the recipe is wrong; lists all errors at once.
    """
    from ftopt.config.loader import examine

    return _checked(source, examine(source, overrides), unchecked)


def _valid(source: str, reading: Reading) -> Recipe:
    """A recipe that can run on this machine; imports torch only if the check needs it."""
    from ftopt.config.loader import listed
    from ftopt.config.plain import Attempts, check_plain, is_plain

    if reading.recipe is None or not is_plain(reading.recipe):
        return _checked(source, reading)[0]
    attempt = Attempts(reading.wrong)
    check_plain(reading.recipe, attempt)
    if errors := [*reading.errors, *attempt.errors]:
        raise listed(source, errors)
    _warn([*reading.warnings, *attempt.warnings])
    return reading.recipe


def _checked(source: str, reading: Reading, unchecked: Collection[str] = ()) -> tuple[Recipe, Checked]:
    from ftopt.config.loader import listed

    if reading.recipe is None:
        raise listed(source, reading.errors)
    from ftopt.run.check import check

    with redirect_stdout(sys.stderr):
        found = check(reading.recipe, {*reading.wrong, *unchecked})
    if errors := [*reading.errors, *found.errors]:
        raise listed(source, errors)
    _warn([*reading.warnings, *found.warnings])
    return reading.recipe, found


def _warn(warnings: Sequence[str]) -> None:
    for text in warnings:
        complain(text)

"""Where the shipped recipes lie (inside the package when installed from a wheel, beside it in a checkout), and what is
wrong with a recipe's name and overrides as words: told before torch is imported, which takes seconds."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from ftopt.common.paths import user_path
from ftopt.errors import UserError

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped() -> dict[str, Path]:
    """Name -> file of every shipped recipe, sorted by name."""
    for folder in (_PACKAGE / "recipes", _PACKAGE.parent / "recipes"):
        found = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
        if found:
            return found
    return {}


def locate(source: str) -> Path:
    """The file of ``source``, a shipped name or a path.

    Raises:
        UserError: there is neither.
    """
    recipes = shipped()
    if source in recipes:
        return recipes[source]
    path = user_path(source)
    if path.is_file():
        return path
    if path.is_dir():
        inside = path / "recipe.yaml"
        hint = f"its recipe is {inside}" if inside.is_file() else "give a file in it"
        raise UserError(f"{source!r} is a folder; {hint}")
    beside = _beside(path)
    near = [str(beside[name]) for name in difflib.get_close_matches(path.name, beside, n=1)]
    near = near or difflib.get_close_matches(source, recipes, n=1)
    hint = f"did you mean {near[0]}?" if near else "`ftopt ls` lists the shipped ones"
    raise UserError(
        f"no recipe {source!r}; it is neither a file nor a shipped recipe ({', '.join(recipes) or 'none'}); {hint}"
    )


def _beside(path: Path) -> dict[str, Path]:
    """Name -> file of the recipes in the folder of a file that is not there: it may be misspelt, or ``.yml``."""
    try:
        return {x.name: x for x in sorted(path.parent.iterdir()) if x.suffix in (".yaml", ".yml") and x.is_file()}
    except (OSError, ValueError):  # no such folder, or no path at all
        return {}


def title(path: Path) -> str:
    """The first comment line of a recipe: what it is."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def check_words(source: str, overrides: Sequence[str]) -> None:
    """UserError: there is no such recipe, or an override is none. Whether there are such keys, `load` tells."""
    locate(source)
    check_overrides(overrides)


def check_overrides(overrides: Sequence[str]) -> None:
    """UserError: some are not ``key=value``; it names all of them."""
    wrong = [repr(item) for item in overrides if "=" not in item or item.startswith("=")]
    if wrong:
        said = "is not an override" if len(wrong) == 1 else "are not overrides"
        raise UserError(f"{', '.join(wrong)} {said}; write key=value, e.g. train.inner_steps=200")

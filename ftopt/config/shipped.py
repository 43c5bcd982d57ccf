"""Finds the shipped recipes (inside the package if installed from a wheel, next to it in a checkout), and checks a
recipe's name and the form of overrides before torch is imported, which takes seconds."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from ftopt.common.paths import user_path
from ftopt.common.whose import shipped_folder
from ftopt.errors import UserError


def shipped() -> dict[str, Path]:
    """Name -> file of every shipped recipe, sorted by name."""
    return {path.stem: path for path in sorted(shipped_folder("recipes").glob("*.yaml"))}


def locate(source: str) -> Path:
    """The file of ``source``, a shipped name or a path. UserError: neither exists."""
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
    raise UserError(
        f"no recipe {source!r}; it is neither a file nor a shipped recipe ({', '.join(recipes) or 'none'}); "
        f"{nearest(source, path)}"
    )


def nearest(source: str, path: Path) -> str:
    """The recipe that was probably meant by ``source``, which is none, nor is ``path``."""
    beside = _beside(path)
    if source in shipped():
        return f"did you mean {source}?"
    near = [str(beside[name]) for name in difflib.get_close_matches(path.name, beside, n=1)]
    near = near or difflib.get_close_matches(source, shipped(), n=1)
    return f"did you mean {near[0]}?" if near else "`ftopt ls` lists the shipped ones"


def _beside(path: Path) -> dict[str, Path]:
    """Name -> file of the recipes in the folder of a missing file: its name may be misspelt, or end in ``.yml``."""
    try:
        return {x.name: x for x in sorted(path.parent.iterdir()) if x.suffix in (".yaml", ".yml") and x.is_file()}
    except (OSError, ValueError):  # no such folder, or not a path at all
        return {}


def title(path: Path) -> str:
    """The first comment line of a recipe, which describes it."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def check_words(source: str, overrides: Sequence[str]) -> None:
    """Raises UserError if there is no such recipe, or an override is malformed. `load` checks that its key exists."""
    locate(source)
    check_overrides(overrides)


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises UserError if overrides are not ``key=value``; names all of them."""
    wrong = [repr(item) for item in overrides if "=" not in item or item.startswith("=")]
    if wrong:
        said = "is not an override" if len(wrong) == 1 else "are not overrides"
        raise UserError(f"{', '.join(wrong)} {said}; write key=value, e.g. train.inner_steps=200")

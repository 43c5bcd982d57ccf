"""The nested mappings of a recipe: its file on top of its base's, and overrides on top of both."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftopt.common.paths import user_path
from ftopt.config.choices import LISTS, WITH_FACTORIES, choices_of, class_of, join, section_of
from ftopt.config.own_code import located
from ftopt.config.shipped import check_overrides, locate, nearest, shipped
from ftopt.config.values import of_file, of_overrides
from ftopt.errors import UserError

_MOST_FILES, _MOST_CHARS = 20, 200
"""Files in a chain of bases."""


def read(source: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The nested mappings of a recipe, a shipped name or a path; paths to files of factories are absolute."""
    path = locate(source)
    given = _named(of_overrides(_with_names(overrides)))
    if "base" in given:
        raise UserError(
            f"base={given['base']!r}: an override cannot change the base; write it into a file, with the settings that "
            "differ from it, or run the other recipe"
        )
    raw: dict[str, Any] = _merge(_with_base(path, ()), given, "")
    return _located(raw, path)


def _with_names(overrides: Sequence[str]) -> list[str]:
    """The overrides, with a section's word as its name beside settings of that section, of which one would replace the
    other: ``method.outer=adam method.outer.lr=0.1``. UserError: the word is no name, or an override is malformed."""
    check_overrides(overrides)
    pairs = [(key, value) for key, _, value in (override.partition("=") for override in overrides)]
    for index, (key, value) in enumerate(pairs):
        inside = next((f"{k}={v}" for k, v in pairs if k.startswith(f"{key}.")), None)
        if inside is None or value[:1] in ("{", "["):
            continue
        if value not in (names := choices_of(key) or {}):
            allowed = f"; with settings of its own, {key}.name may be {', '.join(names)}" if names else ""
            raise UserError(f"{key}={value} and {inside}: one replaces the other; leave one out{allowed}")
        pairs[index] = f"{key}.name", value
    return [f"{key}={value}" for key, value in pairs]


def _with_base(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """The settings of a file on top of its base's. ``above``: the files that have it as a base, from the recipe on."""
    raw = _located(_named(of_file(path)), path)
    if "base" not in raw:
        return raw
    base, chain = _base(path, raw.pop("base")), (*above, path)
    if any(base.samefile(each) for each in chain):
        names = " -> ".join(each.name for each in (*chain, base))
        raise UserError(f"{path}: base is a circle: {names}; one of them must have no base")
    if len(chain) >= _MOST_FILES:
        raise UserError(f"{chain[0]}: base: more than {_MOST_FILES} files on top of each other; use fewer")
    merged: dict[str, Any] = _merge(_with_base(base, chain), raw, "")
    return merged


def _base(path: Path, name: Any) -> Path:
    """The file that ``base: name`` in the file ``path`` means: a shipped recipe, or a file, relative to its folder."""
    if not isinstance(name, str) or not name:
        raise UserError(f"{path}: base={name!r}; must be the name of a shipped recipe, or the path of a file")
    if name in (recipes := shipped()):
        return recipes[name]
    found = path.resolve().parent / user_path(name)
    if not os.path.isfile(found):  # noqa: PTH113 (Path.is_file raises for a name that no file can have)
        raise UserError(
            f"{path}: base={name!r:.200} is neither a shipped recipe nor a file in {found.parent}; "
            f"{nearest(name.removesuffix('.yaml')[:_MOST_CHARS], found)}"
        )
    return found


def _located(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Makes paths to files of factories absolute."""
    for section in (raw[key] for key in WITH_FACTORIES if isinstance(raw.get(key), dict)):
        if isinstance(spec := section.get("factory"), str):
            section["factory"] = located(spec, path.resolve().parent)
    return raw


def _named(raw: dict[str, Any]) -> dict[str, Any]:
    """Names sections with a ``factory`` and no ``name``: they are the user's own."""
    for key in WITH_FACTORIES:
        if isinstance(section := raw.get(key), dict) and "factory" in section:
            section.setdefault("name", "factory")
    return raw


def _merge(base: Any, over: Any, path: str) -> Any:
    """``over`` on top of ``base``. Another name in a choice drops the settings that the new choice does not have."""
    if section_of(path) in LISTS and isinstance(base, list) and isinstance(over, dict) and over and "name" not in over:
        return _merge_items(base, over, path)
    if isinstance(base, str) and base in (choices_of(path) or {}):
        base = {"name": base}
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    name = over.get("name")
    if choices_of(path) and name not in (None, base.get("name")):
        with contextlib.suppress(UserError):  # a wrong name is reported later with the other errors
            kept = {field.name for field in dataclasses.fields(class_of(path, name))}
            base = {key: value for key, value in base.items() if key in kept}
    merged = {key: _merge(base[key], value, join(path, key)) if key in base else value for key, value in over.items()}
    return base | merged


def _merge_items(base: list[Any], over: dict[Any, Any], path: str) -> list[Any]:
    """Merges ``over``, which has settings of list items by their numbers, ``inner.0.lr=1e-3``."""
    if wrong := [key for key in over if not (str(key).isdecimal() and int(key) < len(base))]:
        raise UserError(
            f"{join(path, str(wrong[0]))}: {path} is a list here; name one of its items, {path}.0 to "
            f"{path}.{len(base) - 1}, or override it as a whole"
        )
    merged = list(base)
    for key, value in over.items():
        merged[int(key)] = _merge(base[int(key)], value, f"{path}[{key}]")
    return merged

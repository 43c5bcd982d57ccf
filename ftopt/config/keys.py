"""The keys of a recipe: their paths, and what is said of one that does not exist."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Sequence

from ftopt.config.choices import CHOICES, choices_of
from ftopt.config.schema import Recipe

_OTHER_NAMES = {
    "learning_rate": ("lr",),
    "steps": ("inner_steps",),
    "max_steps": ("inner_steps",),
}
"""What a setting is called elsewhere -> its names here, the likeliest first."""
_LETTERS = {
    "H": ("sync_every",),
    "k": ("sync_every",),
    "tau": ("delay", "sync_every"),
    "P": ("fragments",),
    "alpha": ("slow_lr", "mix"),
    "beta": ("slow_momentum",),
}
"""Of a method's settings, as the papers and the documentation have them."""


def unknown(key: str, path: str, valid: Sequence[str]) -> str:
    """What is said of a key that the section ``path`` does not have; ``valid``: those that it has."""
    if names := [name for name, cls in (choices_of(path) or {}).items() if key in _fields(cls)]:
        its = " or ".join(names[:2])
        return f"{join(path, key)}: unknown key; did you mean {join(path, key)} with {join(path, 'name')}={its}?"
    others = (_OTHER_NAMES | (_LETTERS if path in ("", "method") else {})).get(key, (key,))
    near = [name for name in others if name in valid]
    near = near or (difflib.get_close_matches(key, valid, n=1, cutoff=0.5) if path else [])
    if not near and (homes := _homes(others[0])):
        return f"{join(path, key)}: unknown key; did you mean {' or '.join(homes)}?"
    near = near or difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    hint = f"did you mean {join(path, near[0])}?" if near else f"allowed: {', '.join(valid)}"
    return f"{join(path, key)}: unknown key; {hint}"


def _homes(key: str) -> list[str]:
    """The sections that have a setting ``key``: it was given without its section."""
    plain = {f.name: hint for f in dataclasses.fields(Recipe) if isinstance(hint := _HINTS[f.name], type)}
    sections = {**{name: [cls] for name, cls in plain.items()}, **{p: list(c.values()) for p, c in CHOICES.items()}}
    return [
        f"{path}.{key}"
        for path, classes in sections.items()
        if path.count(".") < 2 and any(key in _fields(cls) for cls in classes)
    ][:3]


def _fields(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()


_HINTS = typing.get_type_hints(Recipe)


def join(path: str, key: str) -> str:
    """The path of a key in a section; "": the recipe itself."""
    return f"{path}.{key}" if path else key

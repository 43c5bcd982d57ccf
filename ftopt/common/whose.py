"""Whose code a file has: the user's, an installed package's, or ftopt's own."""

from __future__ import annotations

import sysconfig
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")})
_THEIRS = _PACKAGE / "recipes", _PACKAGE / "examples"
"""Shipped with the package, but a user's program like any other."""


def shipped_folder(name: str) -> Path:
    """The folder ``docs``, ``examples`` or ``recipes``: in the package, or next to it in a checkout."""
    return _PACKAGE / name if (_PACKAGE / name).is_dir() else _PACKAGE.parent / name


def is_ours(name: str) -> bool:
    """Whether a frame's file name is of ftopt's own code, or of no file."""
    path = Path(name)
    shipped = any(path.is_relative_to(folder) for folder in _THEIRS)
    return (path.is_relative_to(_PACKAGE) and not shipped) or name.startswith("<")


def is_users(name: str) -> bool:
    """Whether a frame's file name is of a user's program, and of no installed package."""
    path = Path(name)
    installed = any(path.is_relative_to(folder) for folder in _INSTALLED)
    return not is_ours(name) and (not installed or path.is_relative_to(_PACKAGE))

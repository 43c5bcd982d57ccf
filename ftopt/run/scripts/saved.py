"""The newest checkpoint that a launch's replicas have saved, by what each has told of its folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ftopt.errors import UserError


class Saved(NamedTuple):
    """A complete checkpoint. ``resumes``: the script calls ``resume()``."""

    path: Path
    inner_step: int
    resumes: bool


def keeps(told: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a replica saves checkpoints. ``told``: as for `newest_saved`."""
    return any("checkpoints" in each for each in told)


def newest_saved(told: Iterable[Mapping[str, Any]]) -> Saved | None:
    """The newest complete checkpoint; None: there is none. ``told``: by each replica (`ftopt.common.launched`)."""
    folders = {str(each["checkpoints"]): bool(each.get("resumes")) for each in told if "checkpoints" in each}
    if not folders:
        return None
    from ftopt.checkpoint.reader import Checkpoint, whole  # it imports safetensors

    found = []
    for folder, resumes in folders.items():
        for path in whole(Path(folder))[-1:]:
            with suppress(UserError, OSError):  # it is damaged, or just being removed
                found.append(Saved(path, Checkpoint(path).manifest.inner_step, resumes))
    return max(found, key=lambda saved: saved.inner_step, default=None)

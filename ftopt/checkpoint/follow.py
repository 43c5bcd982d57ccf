"""Following a job from outside: a process that is no member reads each newer checkpoint's weights."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftopt.checkpoint.manifest import BadCheckpoint, order
from ftopt.checkpoint.reader import OF_A_RUN, Checkpoint, newest_in
from ftopt.common.paths import user_path
from ftopt.errors import UserError, check_number, names_arguments

if TYPE_CHECKING:
    from torch import Tensor

_LOOK_S = 0.5
"""Seconds between two looks at the folder."""


class Weights(NamedTuple):
    """The global parameters of one checkpoint.

    ``version``: fragment 0's. ``inner_step``: the job's committed inner step. ``state_dict``: every name of
    ``model.state_dict()``, tied ones as copies, on the CPU, in the model's shapes and dtypes.
    """

    version: int
    inner_step: int
    state_dict: dict[str, Tensor]


class Follower:
    """What `ftopt.follow` returns: an endless iterator over newer checkpoints' `Weights`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._age = (-1, -1)  # of the checkpoint returned last

    def __iter__(self) -> Iterator[Weights]:
        return self

    def __next__(self) -> Weights:
        found = self.newer(math.inf)
        assert found is not None
        return found

    def newer(self, timeout_s: float = 0.0) -> Weights | None:
        """Returns the newest complete checkpoint's weights if it is newer than those returned last.

        Args:
            timeout_s: seconds to wait for one; default: 0, which looks once. ``math.inf``: as long as it takes.

        Returns:
            None if no newer checkpoint was complete in time.

        Raises:
            UserError: the newest checkpoint is damaged or renamed, and stays the newest. A later call looks again.
        """
        timeout_s = check_number("timeout_s", timeout_s, "[0, inf]", of="seconds", hint="use newer(timeout_s=60)")
        deadline = time.monotonic() + timeout_s
        while True:
            path = newest_in((self._folder, self._folder / OF_A_RUN))
            if path is not None and (age := order(path.name) or self._age) > self._age:
                if (weights := self._read(path)) is not None:
                    self._age = age
                    return weights
            elif (left_s := deadline - time.monotonic()) > 0:
                time.sleep(min(_LOOK_S, left_s))
            else:
                return None

    def _read(self, path: Path) -> Weights | None:
        """Returns None if newer checkpoints have replaced this one meanwhile."""
        from ftopt.checkpoint.export import state_dict  # here: it imports torch

        try:
            checkpoint = Checkpoint(path)
            tensors = state_dict(checkpoint)
        except BadCheckpoint as bad:
            if newest_in((path.parent,)) == path:
                hint = "call newer() again when it is mended, or the job has written a newer one"
                raise BadCheckpoint(bad.path, f"{bad.reason}; {hint}") from None
            return None
        return Weights(checkpoint.manifest.version, checkpoint.manifest.inner_step, tensors)


@names_arguments("ftopt.follow(folder)")
def follow(folder: str | Path) -> Follower:
    """Reads a job's newest weights in a process that is no member of it: inference, rollouts, evaluation.

        for version, inner_step, state_dict in ftopt.follow("/shared/job7"):  # waits for each newer checkpoint
            model.load_state_dict(state_dict)
            ...

        follower = ftopt.follow("/shared/job7")
        while True:
            if (weights := follower.newer()) is not None:  # does not wait
                model.load_state_dict(weights.state_dict)
            ...

    The first weights are those of the newest complete checkpoint, if there is one. Checkpoints that become complete
    while the caller works are skipped, but for the newest. Files are compared with their digests before they are used,
    and a checkpoint that the job removes meanwhile is replaced by a newer one. The job is not told: it may end, die and
    resume in the same folder. If it resumed from an older version, ``version`` goes back, too.

    Args:
        folder: a folder of checkpoints (`ftopt.Checkpoints`, ``checkpoint.dir``), or a run's folder. It may appear
            later.

    Returns:
        An endless iterator. Its ``newer(timeout_s=0)`` returns None if there is nothing newer in time.

    Raises:
        UserError: ``folder`` is a file, or a single checkpoint; from the iterator: the newest checkpoint is damaged.
    """
    if not isinstance(folder, str | os.PathLike):
        raise UserError(f"folder={folder!r:.60}; must be the path of a folder of checkpoints, or of a run's folder")
    where = user_path(folder)
    if where.exists() and not where.is_dir():
        raise UserError(f"follow needs a folder of checkpoints, and {folder} is a file; give the job's folder")
    if order(where.name) is not None:
        raise UserError(f"{folder} is a single checkpoint, which never changes; give its folder: {where.parent}")
    return Follower(where)

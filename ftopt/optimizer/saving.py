"""The interface between a replica and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ftopt.common.tree import Tree
from ftopt.optimizer.ranks.alone import Parts
from ftopt.optimizer.ranks.loops import unlike
from ftopt.optimizer.saved.capture import Cut, SavedReplica, cut_of
from ftopt.optimizer.saved.loop import Loop
from ftopt.optimizer.saved.restore import Fallback
from ftopt.optimizer.training import Training
from ftopt.step.tensors.pool import CopyPool


def _nothing(*_: object) -> None:
    pass


class Saving:
    """The functions of a replica for its checkpoints, and the checkpoints' callbacks.

    Attributes:
        loop: the objects that the user's loop has included.
        folder: the folder of the job's checkpoints.
        fallback: the job's checkpoints, for a start in which no replica holds its state any more.
        while_waiting: called repeatedly while the loader waits for units, after newer states have been applied.
        before_leaving: called by `close` with the remaining seconds when everything is handed in.
        after_leaving: called when the replica has left in whatever way, and saves no more.
        before_loop: called before the loop's state is captured: brings schedules to the job's inner step.
    """

    def __init__(self, training: Training) -> None:
        self.loop: Loop | None = None
        self.folder: Path | None = None
        self.fallback: Fallback | None = None
        self.while_waiting: Callable[[], object] = _nothing
        self.before_leaving: Callable[[float], object] = _nothing
        self.after_leaving: Callable[[], object] = _nothing
        self.before_loop: Callable[[], object] = _nothing
        self._training, self._ranks = training, training.ranks

    def let_go(self) -> None:
        """Drops the callbacks when the replica has left. They refer to its optimizer, which would otherwise live until
        Python's next collection."""
        self.before_leaving, self.while_waiting, self.fallback = _nothing, _nothing, None
        self.after_leaving()

    def unsaved(self) -> str:
        """Why the job cannot go on from a checkpoint; "": it can."""
        if self.folder is None:
            return (
                "ftopt has saved nothing: make checkpoints = ftopt.Checkpoints(FOLDER, optimizer), call "
                "checkpoints.resume() before the loop, and checkpoints.step() after each step"
            )
        from ftopt.checkpoint.reader import whole  # it imports safetensors

        return "" if whole(self.folder) else f"ftopt has saved nothing yet in {self.folder}"

    def cut(self) -> Cut | None:
        """The outer step of fragment 0 that the parameters are based on, if this replica could be saved now.

        None: before the start, while the global parameters are in the model, or when this replica has fetched that
        version instead of making it.
        """
        outer = self._training.outer
        return None if outer is None or self._training.anchor.there else cut_of(outer)

    def on_leader(self, call: str, act: Callable[[], bool]) -> bool:
        """Rank 0 runs ``act``, which may `capture`; returns its result on all ranks."""
        return bool(self._ranks.lead(call, act))

    @property
    def model(self) -> nn.Module | None:
        """The model that determines the names and places of a checkpoint's tensors."""
        return self._ranks.saved_model or self._training.model

    @property
    def place(self) -> tuple[int, int]:
        """This process's rank in its replica, and the number of ranks."""
        return self._ranks.rank, self._ranks.size

    def check_included(self, call: str) -> bool:
        """Whether all ranks' loops are known to have included the same names; before the start this is not known.
        UserError: they have not."""
        if self._training.outer is None or self._training.closed:
            return self._ranks.size == 1
        with self._ranks.call(call):
            found = self._ranks.all(None if self.loop is None else sorted(self.loop.watched))
        for rank, names in enumerate(found):
            if names != found[0]:
                raise unlike(found[0] or [], names, rank)
        return True

    def parts(self) -> Parts:
        """The actions of all ranks when rank 0 captures."""
        return {"loops": self._capture_loop, "capture": self._capture}

    def capture_loops(self, copies: CopyPool) -> list[Tree]:
        """Each rank's loop state, with copies of the values that training changes. Within `on_leader`."""
        found = self._ranks.each("loops", partial(self._capture_loop, copies))
        if isinstance(found, Exception):
            raise found
        return found

    def _capture_loop(self, copies: CopyPool | None = None) -> list[Tree] | Exception:
        assert self.loop is not None
        self.before_loop()
        return self._ranks.capture_loop(self.loop, copies or CopyPool())

    def capture(self, copies: CopyPool) -> SavedReplica:
        """Captures this replica between two inner steps. State that training changes is copied into ``copies``. Within
        `on_leader`."""
        return self._ranks.each("capture", partial(self._capture, copies))

    @torch.inference_mode(False)
    def _capture(self, copies: CopyPool | None = None) -> SavedReplica:
        training = self._training
        outer = training.started()
        assert training.model is not None
        training.set_back()
        self._ranks.pull()
        training.finish_freezing(outer)
        return self._ranks.capture(outer, training.inner, training.model, copies or CopyPool(), self.folder)

"""The recipe as the processes of a run read it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ftopt.checkpoint.reader import verified
from ftopt.config.schema import Recipe
from ftopt.telemetry.folder import RunFolder


def resumable(recipe: Recipe) -> Recipe:
    """The recipe with the one checkpoint that all replicas go on from, every file of it verified.

    Raises:
        UserError: it cannot be used.
    """
    path = recipe.checkpoint.resume
    if path is None:
        return recipe
    return replace(recipe, checkpoint=replace(recipe.checkpoint, resume=str(verified(Path(path).resolve()).path)))


def resolved(recipe: Recipe, wandb: str, folder: RunFolder) -> Recipe:
    """The recipe as the run's processes read it: wandb's mode settled, a folder for checkpoints."""
    checkpoint = recipe.checkpoint
    if checkpoint.every:
        where = Path(checkpoint.dir) if checkpoint.dir is not None else folder.checkpoints
        checkpoint = replace(checkpoint, dir=str(where.resolve()))
    return replace(recipe, log=replace(recipe.log, wandb=wandb), checkpoint=checkpoint)

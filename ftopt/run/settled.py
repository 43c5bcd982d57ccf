"""The recipe with its run-time settings resolved, as a run's processes read it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftopt.checkpoint.manifest import BadCheckpoint
from ftopt.checkpoint.reader import Checkpoint, check_no_other_job, verified
from ftopt.config.schema import Recipe
from ftopt.errors import UserError
from ftopt.watch.folder import RunFolder

if TYPE_CHECKING:
    from torch import nn


def resumable(recipe: Recipe) -> Recipe:
    """The recipe with the one checkpoint from which all replicas resume, every file of it verified.

    Raises:
        UserError: it cannot be used; the folder to write to holds checkpoints of another job.
    """
    settings = recipe.checkpoint
    found = verified(Path(settings.resume).resolve()) if settings.resume is not None else None
    if settings.every and settings.dir is not None:
        check_no_other_job(Path(settings.dir).resolve(), {} if found is None else found.record)
    return recipe if found is None else replace(recipe, checkpoint=replace(settings, resume=str(found.path)))


def resolved(recipe: Recipe, wandb: str, folder: RunFolder) -> Recipe:
    """The recipe as the run's processes read it, with wandb's mode and the folder for checkpoints resolved."""
    checkpoint = recipe.checkpoint
    if checkpoint.every:
        where = Path(checkpoint.dir) if checkpoint.dir is not None else folder.checkpoints
        checkpoint = replace(checkpoint, dir=str(where.resolve()))
    return replace(recipe, log=replace(recipe.log, wandb=wandb), checkpoint=checkpoint)


def check_model(path: Path, model: nn.Module | None) -> None:
    """Refuses a checkpoint of another model: compares names and shapes of trainable parameters.

    Raises:
        UserError: names the first parameter that differs.
    """
    from ftopt.config.optimizers import parameters_of  # here, since it imports torch

    assert model is not None
    try:
        places = next(iter(Checkpoint(path).notes.values()))["model"]["tensors"]
        there = {name: tuple(place["shape"]) for name, place in places.items() if "shape" in place}
    except (AttributeError, KeyError, TypeError) as error:
        raise BadCheckpoint(path, f"does not describe a model ({type(error).__name__}: {error})") from None
    for here in parameters_of(model):
        name = here.name.replace("_orig_mod.", "")  # the name before `torch.compile`
        if there.get(name) != here.shape:
            raise UserError(
                f"{path}: it is of another model: {name} is {there.get(name, 'missing')} there, {here.shape} here; "
                "give a checkpoint of a run of this recipe's model"
            )

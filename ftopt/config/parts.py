"""The parts of a training loop that a recipe describes, for `ftopt run` and for scripts: one file for both."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ftopt.config.inner_settings import factor
from ftopt.config.models import build_model
from ftopt.config.optimizers import inner_optimizers
from ftopt.config.schema import Recipe
from ftopt.config.tasks import Task, task_of
from ftopt.data.loader import DataLoader
from ftopt.errors import UserError, names_arguments
from ftopt.optimizer import ReplicaOptimizer
from ftopt.sync.group import ReplicaGroup

_log = logging.getLogger("ftopt.recipe")


class ScriptRecipe(Recipe):
    """A recipe, and the objects that a script makes from it. Its sections are attributes, as in `Recipe`: `ftopt.wrap`
    and `ftopt.connect` take ``method`` and ``policy``, ``train.inner_steps`` is a number, and so on."""

    def build_model(self) -> nn.Module:
        """The model, on the CPU. Call ``torch.manual_seed(recipe.train.seed)`` first: all replicas must start equal.

        Raises:
            UserError: the user's factory fails, or returns no model.
        """
        return build_model(self.model)

    def build_task(self) -> Task:
        """Model, data and objective: ``task.model``, ``task.loss(batch)``, ``task.score(thorough=True)``. Seed torch
        first, as for `build_model`.

        Raises:
            UserError: data or model are not available, or do not suit each other.
        """
        return task_of(self)

    def inner_optimizers(self, model: nn.Module) -> list[Optimizer]:
        """The inner optimizers of the section ``inner``, over the parameters of ``model``: the first argument of
        `ftopt.wrap`.

        Raises:
            UserError: a section finds no parameter, or parameters are left over.
        """
        return inner_optimizers(self.inner_sections(), model)

    def loader(self, task: Task, group: ReplicaGroup) -> DataLoader:
        """Draws each sample once, as ``data.sampling: once`` does. Create it before ``with optimizer:``.

        Raises:
            UserError: the recipe says ``data.sampling: random``, which has no loader.
        """
        if self.data.sampling != "once":
            raise UserError(
                f"data.sampling={self.data.sampling}; a loader draws each sample once: use data.sampling=once, or draw "
                "in your own loop, of task.dataset()"
            )
        return make_loader(self, task, group)

    def scheduler(self, optimizer: ReplicaOptimizer, inner: Sequence[Optimizer]) -> LambdaLR:
        """The schedules of the section ``inner``, by the job's inner step. Create it inside ``with optimizer:``."""
        return make_scheduler(self, optimizer, inner)


@names_arguments('ftopt.recipe("my.yaml", ["train.inner_steps=200"])')
def recipe(source: str, overrides: Sequence[str] = ()) -> ScriptRecipe:
    """Reads a recipe for a script, so that the script and ``ftopt run`` share one file.

    Args:
        source: the name of a shipped recipe, or a file.
        overrides: ``key=value``, as on the command line. Default: none.

    Raises:
        UserError: the recipe is wrong; lists all errors at once.
    """
    from ftopt.config.loader import load  # here: the module's names are there without the extra `cli`

    found = load(str(source), overrides, warn=_log.warning)
    return ScriptRecipe(**{field.name: getattr(found, field.name) for field in dataclasses.fields(found)})


def make_loader(
    recipe: Recipe, task: Task, group: ReplicaGroup, *, drop_last: bool = False, pin_memory: bool = False
) -> DataLoader:
    """The loader of ``data.sampling: once``. ``drop_last``: the meaning of ``data.drop_last: null``."""
    data = recipe.data
    return DataLoader(
        task.dataset(),
        data.batch_size,
        group=group,
        seed=recipe.train.seed,
        epochs=data.epochs,
        drop_last=drop_last if data.drop_last is None else data.drop_last,
        accumulate=recipe.train.accumulate,
        num_workers=data.workers,
        collate_fn=task.collate,
        pin_memory=pin_memory and data.workers > 0,
        global_batch=data.global_batch,
        split=data.split,
    )


def make_scheduler(recipe: Recipe, optimizer: ReplicaOptimizer, inner: Sequence[Optimizer]) -> LambdaLR:
    """A scheduler that gives each parameter group the schedule of its section."""
    steps = recipe.train.inner_steps
    rates: list[Callable[[int], float]] = [
        lambda _, schedule=section.schedule: factor(schedule, optimizer.inner_step, steps)  # type: ignore[misc]
        for section, part in zip(recipe.inner_sections(), inner, strict=True)
        for _ in part.param_groups
    ]
    return LambdaLR(optimizer, rates)

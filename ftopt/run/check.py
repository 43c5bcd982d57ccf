"""What is wrong with a recipe beyond its values: everything that a replica would find at its start, found at once.

The user's factories are called, data are opened, and one small batch goes through the user's own model and task. The
built-in models are made without memory (on torch's meta device).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

import ftopt
from ftopt.config.data_settings import OwnData, TokensConfig
from ftopt.config.model_settings import FactoryConfig
from ftopt.config.models import build_model
from ftopt.config.objectives import Objective, objective_of
from ftopt.config.optimizers import inner_optimizers, parameters_of
from ftopt.config.own_code import warned
from ftopt.config.parts import make_loader
from ftopt.config.plain import OPENED, SAMPLED, Attempts, check_places, read_some, too_few
from ftopt.config.schema import Recipe
from ftopt.config.tasks import Task, task_of
from ftopt.run.devices import check_compiler, device_of


@dataclass
class Checked:
    """What a recipe's sections have become; None: its section is wrong, or was not made.

    Args:
        errors: what is wrong.
        warnings: what is allowed, and perhaps not meant.
    """

    errors: list[str]
    warnings: list[str]
    model: nn.Module | None = None
    task: Task | None = None
    inner: list[Optimizer] | None = None
    fragments: list[list[str]] | None = None


def check(recipe: Recipe, wrong: Collection[str] = ()) -> Checked:
    """Checks a recipe on this machine.

    Args:
        recipe: whose values are sound.
        wrong: paths of settings, or of sections, that are not the user's: what needs one is not looked at.
    """
    attempt = Attempts(wrong)
    found = Checked(attempt.errors, attempt.warnings)
    device = attempt(lambda: device_of(recipe.train.device, "r0"), "train.device")
    if device is not None and recipe.train.compile:
        attempt(lambda: check_compiler(device), "train.compile")
    check_places(recipe, attempt)
    of_model = ("model.factory", "model.args") if isinstance(recipe.model, FactoryConfig) else ("model",)
    found.model = attempt(lambda: _model(recipe), *of_model)
    objective = attempt(lambda: objective_of(recipe.task), "task")
    if not any(problem.startswith("model.") for problem in recipe.problems()):
        needs = ("data.factory", "data.args") if isinstance(recipe.data, OwnData) else OPENED
        found.task = attempt(lambda: _task(recipe, found.model, objective), *needs)
    if found.task is not None:
        attempt(lambda: _check_samples(recipe, found.task, attempt), *SAMPLED)
        if found.model is not None and objective is not None:
            attempt(lambda: _try_out(found.task, attempt), "data", "model", "task")
    if (model := found.model) is not None:
        with _compiler_left_out():
            found.inner = attempt(lambda: inner_optimizers(recipe.inner_sections(), model), "inner")
        found.fragments = attempt(lambda: recipe.method.partition(parameters_of(model)), "method")
    return found


@contextmanager
def _compiler_left_out() -> Iterator[None]:
    """Making an optimizer imports torch's compiler (torch 2.13), which takes nearly as long as torch itself, to leave a
    method uncompiled that nobody compiles here."""
    decorated = Optimizer.add_param_group
    Optimizer.add_param_group = getattr(decorated, "__wrapped__", decorated)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.add_param_group = decorated  # type: ignore[method-assign]


def _model(recipe: Recipe) -> nn.Module:
    torch.manual_seed(recipe.train.seed)
    if isinstance(recipe.model, FactoryConfig):
        return build_model(recipe.model)
    with torch.device("meta"), _Unfilled():
        return build_model(recipe.model)


class _Unfilled(TorchFunctionMode):
    """Parameters without memory get no values: to draw them torch imports its compiler, see `_compiler_left_out`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("normal_", "uniform_"):  # of a tensor, and of torch.nn.init
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


class _Nothing:
    """In the place of a task that is wrong."""

    def loss(self, model: nn.Module, batch: object) -> None: ...


def _task(recipe: Recipe, model: nn.Module | None, objective: Objective | None) -> Task:
    """Opens the data, also if model or task are wrong."""
    parts = model or nn.Linear(1, 1), objective or Objective(_Nothing(), "task")
    return task_of(recipe, parts, trusted=model is None or objective is None)


def _check_samples(recipe: Recipe, task: Task | None, attempt: Attempts) -> None:
    assert task is not None
    attempt.warnings += too_few(recipe, len(task.dataset()))
    if recipe.data.sampling == "once":
        alone = replace(recipe, data=replace(recipe.data, workers=0))
        make_loader(alone, task, ftopt.solo(), drop_last=recipe.ranks > 1)
    if isinstance(recipe.data, TokensConfig):
        windows = task.dataset()
        read_some(len(windows), len(windows[0][0]), windows.__getitem__)


def _try_out(task: Task | None, attempt: Attempts) -> None:
    assert task is not None
    if task.has_own_code and not any(p.is_meta for p in task.model.parameters()):
        with warned("while a batch was tried") as told:
            task.try_out(backward=True)
        attempt.warnings += told

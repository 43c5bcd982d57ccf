"""Errors of a recipe beyond its values: all that a replica would find at its start, found at once.

It calls the user's factories, opens data, and passes one small batch through the user's own model and task. Built-in
models are made without memory (on torch's meta device).
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
    """The objects of a recipe's sections; None: the section is wrong, or was not built.

    Args:
        errors: messages about errors.
        warnings: messages about settings that are allowed, but perhaps not meant.
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
        recipe: its values are valid.
        wrong: paths of settings or sections that are not the user's: checks that need one are skipped.
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
    """Prevents the creation of an optimizer from importing torch's compiler (torch 2.13), which takes nearly as long as
    torch itself, only to exclude from compilation a method that nobody compiles here."""
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
    """Leaves parameters without memory unfilled: to draw values, torch imports its compiler (`_compiler_left_out`)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("normal_", "uniform_"):  # methods of tensors, and functions of torch.nn.init
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


class _Nothing:
    """Stands in for a task that is wrong."""

    def loss(self, model: nn.Module, batch: object) -> None: ...


def _task(recipe: Recipe, model: nn.Module | None, objective: Objective | None) -> Task:
    """Opens the data, even if model or task are wrong."""
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
            task.try_out()
        attempt.warnings += told

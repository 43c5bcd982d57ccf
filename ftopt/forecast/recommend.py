"""The settings that are tried for a recipe, and the choice of the recommended ones.

Settings cannot win if they have no figure for their loss, late results, or an outer optimizer that does not suit the
run. Among all others that reach the requested goodput, the one with the least loss wins; among equal ones, the one with
the fewest parts: no codec before one, no delay before one, few fragments before many. If none reaches it, the choice is
among those within 0.01 of the best.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ftopt.common.plural import count
from ftopt.config.choices import class_of
from ftopt.config.optimizers import parameters_of
from ftopt.config.schema import Recipe
from ftopt.errors import UserError
from ftopt.forecast.losses import Penalty, penalty
from ftopt.forecast.plan import Forecast, Machines, forecast, link_seconds
from ftopt.fragments import Balanced
from ftopt.methods import DiLoCo
from ftopt.methods.short_runs import keeps_memory, outer_problems
from ftopt.run.preview import Plan, plan_of

PERIODS = (2, 5, 10, 20, 30, 50, 100, 200, 300, 500, 1000)
FRAGMENTS = (2, 3, 4, 8)
DELAYS = (1, 2, 5, 10, 20, 50)
CODECS = ("fp32", "bf16", "int8", "fp4")
SLACK = 0.01
_PIECE_BYTES = 4 << 20
_DEPTH = 4
"""Pieces of a payload that are on the link at once (`ftopt.transport.gloo`)."""

Build = Callable[[Sequence[str]], Recipe]
"""The recipe with more overrides; raises UserError."""


@dataclass(frozen=True)
class Choice:
    """A recipe, and its forecast. ``overrides``: the changes to the original recipe, ``key=value``."""

    recipe: Recipe
    plan: Plan
    reached: Forecast
    loss: Penalty
    overrides: tuple[str, ...] = ()

    @property
    def cannot_win(self) -> str:
        """Why another choice is recommended in any case; "": none need be."""
        if self.reached.late_steps:
            return f"its results come {count(self.reached.late_steps, 'step')} later than its delay"
        if problems := outer_problems(self.recipe.method, self.plan.inner_steps):
            return problems[0]
        return "" if self.loss.percent is not None else self.loss.source


@dataclass(frozen=True)
class Candidate:
    """Settings to try."""

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    codec: str = "fp32"

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe with these settings. As on the command line, settings that both methods have keep the recipe's
        values. UserError: the recipe cannot have them."""
        cls = class_of("method", self.method)
        own = {f.name for f in dataclasses.fields(cls)}
        kept = {f.name: getattr(recipe.method, f.name) for f in dataclasses.fields(recipe.method) if f.name in own}
        made = replace(recipe, method=cls(**kept | self.settings | {"codec": self.codec}))
        if problems := made.problems():
            raise UserError("; ".join(problems))
        return made

    def overrides(self) -> list[str]:
        """The settings as on the command line."""
        given = [f"method.{key}={_shown(value)}" for key, value in self.settings.items()]
        return [f"method.name={self.method}", *given, f"method.codec={self.codec}"]


def _shown(value: Any) -> str:
    if isinstance(value, Balanced):
        return f"{{name: balanced, n: {value.n}}}"
    return "null" if value is None else str(value)


class Planner:
    """Forecasts of one recipe, as it is and with other settings. Of ``model`` and ``inner`` only the sizes count."""

    def __init__(self, build: Build, model: nn.Module, inner: Sequence[Optimizer], machines: Machines) -> None:
        self._build = build
        self._model = model
        self._inner = inner
        self._parameters = parameters_of(model)
        self._machines = machines
        self._recipe = build(())
        self.refused: dict[str, str] = {}
        """Method -> why the recipe cannot have it."""

    def as_it_is(self) -> Choice:
        return self._choice(self._recipe)

    def recommended(self, target: float) -> Choice | None:
        """The best of the recipe as it is and all candidates: of those that fit into the memory, if any does, and of
        those that can win. None: the recipe can have no other method. ``target``: the requested goodput, in (0, 1]."""
        tried = list(self._tried())
        if not tried:
            return None
        tried.append((None, self.as_it_is()))
        room = self._machines.memory_bytes or math.inf
        tried = [pair for pair in tried if pair[1].reached.memory_bytes <= room] or tried
        known = [pair for pair in tried if not pair[1].cannot_win]
        if any(choice.recipe.method.name != "sync_sgd" for _, choice in known):
            tried = known
        enough = min(target, max(choice.reached.goodput for _, choice in tried) - SLACK)
        candidate, best = min(
            ((candidate, choice) for candidate, choice in tried if choice.reached.goodput >= enough),
            key=lambda pair: _order(pair[1]),
        )
        settings = candidate.overrides() if candidate is not None else []
        overrides = self._needed([*settings, *time_outs(best, self._machines)])
        return replace(self._choice(self._build(overrides)), overrides=tuple(overrides))

    def _choice(self, recipe: Recipe) -> Choice:
        plan = plan_of(recipe, self._model, self._inner, recipe.method.partition(self._parameters))
        reached = forecast(recipe, plan, self._machines)
        loss = penalty(
            recipe.method, recipe.method.codec, plan.parameters,
            late_steps=reached.late_steps, inner_steps=plan.inner_steps,
        )  # fmt: skip
        return Choice(recipe, plan, reached, loss)

    def _tried(self) -> Iterator[tuple[Candidate | None, Choice]]:
        """All candidates whose results arrive within their delay."""
        possible = set[str]()
        for candidate in candidates(self._recipe):
            try:
                choice = self._choice(candidate.of(self._recipe))
            except UserError as error:  # Streaming may allow fewer fragments only
                self.refused.setdefault(candidate.method, str(error))
                continue
            possible.add(candidate.method)
            if not choice.reached.late_steps:
                yield candidate, choice
        self.refused = {method: why for method, why in self.refused.items() if method not in possible}

    def _needed(self, overrides: Sequence[str]) -> list[str]:
        """The overrides that change the recipe."""
        wanted, kept = self._build(overrides), list(overrides)
        for each in overrides:
            fewer = [other for other in kept if other != each]
            try:
                kept = fewer if self._build(fewer) == wanted else kept
            except UserError:
                continue
        return kept


def candidates(recipe: Recipe) -> Iterator[Candidate]:
    """All candidates for a run as long as the recipe's; its own period, delay and codec do not matter. Outer settings
    that do not suit run or period become ``auto``."""
    method, steps = recipe.method, recipe.train.inner_steps
    trigger = {} if method.trigger is None else {"trigger": None}
    yield Candidate("sync_sgd", {"sync_every": 1, **trigger})
    own = getattr(method, "outer", None)
    for every in (every for every in PERIODS if keeps_memory(DiLoCo(sync_every=every), steps)):
        fits = own is not None and not outer_problems(DiLoCo(sync_every=every, outer=own), steps)
        common = {"sync_every": every, **trigger, **({} if fits else {"outer": "auto"})}
        for codec in CODECS:
            yield Candidate("diloco", common, codec)
        for codec, n, delay in itertools.product(CODECS, FRAGMENTS, DELAYS):
            if 2 * delay <= every:
                settings = {**common, "fragments": Balanced(n=n), "delay": delay}
                yield Candidate("streaming_diloco", settings, codec)


def _order(choice: Choice) -> tuple[float, ...]:
    """Sort key: the least loss first, then the fewest parts; without a figure for the loss last."""
    name = choice.recipe.method.codec
    codec = CODECS.index(name) if name in CODECS else len(CODECS)
    loss = 100.0 if choice.loss.percent is None else round(choice.loss.percent, 2)
    delay = choice.recipe.method.overlap.delay
    return loss, codec, delay, len(choice.plan.fragments), -choice.reached.goodput


def time_outs(choice: Choice, machines: Machines) -> list[str]:
    """Overrides of the time-outs that the links and steps need; longer values of the recipe stay.

    ``dead_after_s``, after which an attempt without a reduced piece fails: three times what `_DEPTH` pieces of 4 MiB
    take together, plus ten round trips. ``grace_s``: two inner steps.
    """
    policy = choice.recipe.policy
    largest = min(choice.reached.sync_bytes, _PIECE_BYTES)
    dead_after_s = max(policy.dead_after_s, 3 * _DEPTH * link_seconds(largest, machines) + 10 * machines.latency_s)
    grace_s = max(policy.grace_s, 2 * machines.step_s)
    found = [f"policy.dead_after_s={dead_after_s:.3g}", f"policy.grace_s={grace_s:.3g}"]
    if dead_after_s > policy.evict_after_s:
        found.append(f"policy.evict_after_s={10 * dead_after_s:.3g}")
    return found

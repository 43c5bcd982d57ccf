"""The base of all methods: settings and equations, tensors in and tensors out.

Symbols, the same in all methods' files:

=========  ==========================================================================================
``A``      the anchor, flat fp32
``a``      ``cast(A)``: the anchor rounded to the parameters' dtypes; replicas start from it
``p``      this replica's parameters at its snapshot, flat fp32 (exact for bf16 and fp16 too)
``Delta``  the outer gradient ``a - p``, a direction of descent: outer optimizers *subtract* it
``w``      this replica's weight, ``W`` the sum of all members' weights; ``w / W`` is its share
``H``      inner steps between two outer steps of a fragment, ``sync_every``
``tau``    inner steps between a contribution's snapshot and the application of its result, ``delay``
=========  ==========================================================================================

``Delta`` is ``a - p`` rather than ``A - p``: with the latter a bf16 replica counts its own rounding again in every
round, and four such replicas made only 12 % of the true progress.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ftopt.codecs.codec import Codec
from ftopt.codecs.named import codec_named
from ftopt.common.later import torch
from ftopt.common.plural import count
from ftopt.errors import Settings, UserError, check_choice, check_number, check_whole
from ftopt.methods.fragments import Parameter
from ftopt.methods.timing import BySpeed, Timing
from ftopt.methods.triggers import LOCAL, Trigger
from ftopt.methods.values import Aggregation, ContributionStats, Execution, OuterState, Overlap, ReplicaView, Round

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = ("steps", "uniform", "tokens", "tokens_per_step")
BUFFERS = ("local", "mean")


@dataclass(frozen=True, kw_only=True)
class Method(Settings, ABC):
    """A semi-synchronous method. Subclasses are frozen dataclasses: their fields are their settings and their recipe.

    A method answers three questions: when (`timing`, from its settings), what is sent (`payload`), and what the agreed
    result does (`outer_step`). A subclass must define ``name`` and `outer_step`; the rest has the defaults of a plain
    method: one fragment, no overlap, due every ``sync_every`` inner steps, ``Delta`` is sent. No state, no I/O. Members
    of a quorum that call `outer_step` with the same tensors must get the same bits.

    Args:
        sync_every: ``H``, >= 1. May differ between replicas. With a ``trigger``: the maximum.
        trigger: when to propose before ``sync_every`` steps have passed. Default: never.
        weights: the weight of a contribution in the mean: its inner ``steps`` (default), ``uniform`` (1, the papers'),
            its ``tokens`` (needs ``optimizer.log``), or ``tokens_per_step``: tokens times tokens per step (an
            uncounted step is one token).
        average_until_step: until the job's committed inner step reaches this, replicas average their parameters after
            every inner step (post-local SGD, arXiv 1808.07217). Default 0.
        buffers: for buffers that training changes, such as BatchNorm's statistics. ``local`` (default): each replica
            keeps its own. ``mean``: floating-point buffers of the model's state dict are averaged with the parameters,
            without the outer optimizer.
        codec: wire precision of the payloads: ``fp32`` (default), ``bf16``, ``int8``, ``fp4``, or ``top_k``, whose
            settings follow after colons (``top_k:0.01:4``) or in a section of their own (in Python a codec,
            ``ftopt.codecs.TopK(fraction=0.01, bits=4)``); see ``docs/methods.md``.
        error_feedback: the part of what a lossy codec left out of one contribution that is added to the next (beta of
            ``e <- beta * e + Delta``), 0 to 1. Default 1; 0: nothing is kept.

    Raises:
        UserError: a setting is out of range; the message says what is allowed. The same holds for all subclasses.
    """

    name: ClassVar[str]
    """Its name in recipes, one lower-case word."""

    sync_every: int = field(metadata=LOCAL)
    trigger: Trigger | None = None
    weights: str = "steps"
    average_until_step: int = 0
    buffers: str = "local"
    codec: str | Codec = "fp32"
    error_feedback: float = 1.0

    def __post_init__(self) -> None:
        hint = "use 1 to synchronize after every step, 500 for DiLoCo's default"
        check_whole("sync_every", self.sync_every, 1, of="inner steps", hint=hint)
        name = self.codec if isinstance(self.codec, str) else getattr(self.codec, "name", None)
        if not isinstance(name, str):
            raise UserError(f"codec={self.codec!r:.60}; must be a codec or its name; use fp32 or top_k:0.01:4")
        object.__setattr__(self, "codec", codec_named(name).name)
        if self.inner_state == "average" and not self.wire.exact:
            raise UserError(
                f"codec={name} with inner_state=average; moments must not be rounded, or steps explode; use "
                "codec=fp32, or inner_state=keep"
            )
        check_number("error_feedback", self.error_feedback, "[0, 1]", hint="0 is off, 1 forgets nothing")
        trigger, period = self.trigger, self.timing.period
        if not isinstance(trigger, Trigger | None):
            raise UserError(f"trigger={trigger!r}; must be a trigger of ftopt; use ftopt.triggers.Every(100)")
        if trigger is not None and trigger.longest is not None and period is not None and trigger.longest > period:
            raise UserError(
                f"trigger={type(trigger).__name__} may wait {count(trigger.longest, 'step')}, but sync_every={period} "
                f"comes before that; use sync_every={trigger.longest} or more"
            )
        check_choice("weights", self.weights, WEIGHTS, "use steps")
        check_choice("buffers", self.buffers, BUFFERS, "use mean to average BatchNorm's statistics")
        check_whole("average_until_step", self.average_until_step, 0, of="inner steps", hint="use 0 for none")

    # When, and which parameters.

    @property
    def timing(self) -> Timing:
        """When contributions are due. A rule of your own is a `Trigger`."""
        return Timing(sync_every=self.sync_every, trigger=self.trigger, average_until_step=self.average_until_step)

    def partition(self, parameters: Sequence[Parameter]) -> list[list[str]]:
        """The names of each fragment's parameters. Here: one fragment with all of them.

        Args:
            parameters: all that train, in the model's order.

        Raises:
            UserError: the model cannot be partitioned as the settings say.
        """
        return [[parameter.name for parameter in parameters]]

    # What is sent.

    @property
    def wire(self) -> Codec:
        """The ``codec`` as an object."""
        return codec_named(self.codec) if isinstance(self.codec, str) else self.codec

    def payload(self, view: ReplicaView, out: Tensor) -> Tensor:
        """What this replica sends, before it is multiplied by its share ``w / W``. Here: ``Delta = a - p``.

        Args:
            view: this replica's side of the round.
            out: flat fp32, overwritten.

        Returns:
            ``out``.
        """
        return torch.sub(view.start, view.params, out=out)

    def weight(self, stats: ContributionStats) -> float:
        """``w``, >= 0."""
        steps, tokens = stats.steps, stats.tokens or stats.steps
        if not steps:
            return 0.0
        rate = tokens * (tokens / steps)
        weights = {"steps": float(steps), "uniform": 1.0, "tokens": float(stats.tokens), "tokens_per_step": rate}
        return weights[self.weights]

    def scalars(self, view: ReplicaView) -> tuple[float, ...]:
        """A few numbers that the outer step needs from every member; the same number of them on all. Here: none."""
        return ()

    # What the agreed result does.

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """The outer state at version 0. Here: none."""
        return {}

    @abstractmethod
    def outer_step(
        self, anchor: Tensor, state: OuterState, mean: Tensor, round: Round
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The next anchor and outer state, from the weighted mean of the payloads (or its `aggregation`).

        ``mean`` may be overwritten and may be returned as the anchor. ``anchor`` and ``state`` are left as
        they are, and nothing returned shares memory with them.
        """

    def average(self, anchor: Tensor, mean: Tensor, round: Round) -> Tensor:
        """Plain averaging, before ``average_until_step``: ``A - mean(Delta)``. May overwrite ``mean``."""
        return torch.sub(anchor, mean, out=mean)

    # What only some methods need.

    @property
    def overlap(self) -> Overlap:
        """How outer steps overlap with training. Here: training waits for them."""
        return Overlap()

    @property
    def execution(self) -> Execution:
        """How the equations may be computed. Here: on whole fragments, by every member."""
        return Execution()

    @property
    def aggregation(self) -> Aggregation | None:
        """How the payloads become what `outer_step` gets. None: their weighted mean. Not used by `average`."""
        return None

    @property
    def gradients(self) -> Method | None:
        """The method for gradients, which form a separate first fragment; None: they are not exchanged."""
        return None

    @property
    def inner_state(self) -> str:
        """What happens to the inner optimizer's state when a round that counted this replica is applied.

        ``keep``: nothing. ``reset``: it returns to its state before the first step. ``average``: its moments are
        averaged with the parameters (only for methods with one fragment).
        """
        return "keep"


@dataclass(frozen=True, kw_only=True)
class Paced(Method):
    """A method whose rounds may be divided by speed.

    Args:
        pacing: how the inner steps of a round are divided among replicas; see `ftopt.methods.timing`. None (default):
            every replica takes ``sync_every``. ``BySpeed()``: that is their average. ``BySpeed(round_steps=200)``: all
            replicas together take 200, whatever ``sync_every`` is.
    """

    pacing: BySpeed | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pacing, BySpeed | None):
            raise UserError(f"pacing={self.pacing!r}; must be None or ftopt.methods.BySpeed(round_steps=200)")
        super().__post_init__()

    @property
    def timing(self) -> Timing:
        return replace(super().timing, pacing=self.pacing)


def has_scalars(method: Method) -> bool:
    """Whether members exchange scalars: only then are the rates of all steps summed."""
    return type(method).scalars is not Method.scalars


def reads_tensors(method: Method) -> bool:
    """Whether scalars or units are computed from tensors, which are then copied to be available as a whole."""
    own = has_scalars(method) and getattr(type(method).scalars, "reads_tensors", True)
    return own or method.aggregation is not None


def needs_whole(method: Method) -> bool:
    """Whether the method needs more than a slice of the tensors, so that the ranks of an island cannot each do a slice
    of its outer step: gradients with the model and the inner state, whole tensors, or what lies behind the parameters.
    """
    whole = not method.execution.elementwise or method.aggregation is not None or reads_tensors(method)
    return whole or method.gradients is not None or method.inner_state == "average" or method.buffers == "mean"


def settings_of(method: Method) -> dict[str, str]:
    """The settings that all replicas of a job must share, besides the name: setting -> value."""
    pacing = method.timing.pacing
    usual = {"sync_every": str(method.sync_every)} if pacing is not None and pacing.round_steps is None else {}
    return _flat(method, "") | usual


def _flat(instance: Any, prefix: str) -> dict[str, str]:
    """The fields of nested dataclasses, as ``a.b``; also the class of each inner dataclass, under its field's name."""
    found: dict[str, str] = {}
    for f in [f for f in dataclasses.fields(instance) if not f.metadata.get("local")]:
        value, key = getattr(instance, f.name), prefix + f.name
        parts = {f"{key}.{i}": part for i, part in enumerate(value)} if isinstance(value, tuple) else {key: value}
        for where, part in parts.items():
            if dataclasses.is_dataclass(part):
                found[where] = type(part).__name__
                found |= _flat(part, f"{where}.")
            else:
                found[where] = repr(float(part)) if isinstance(part, float) else str(part)
    return found

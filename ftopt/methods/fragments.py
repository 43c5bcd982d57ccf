"""Rules that partition a model's parameters into fragments, each with its own outer steps.

A *block* is a run of parameters whose names agree up to their first number (``layers.3.mlp.weight`` and
``layers.3.norm.weight``: block ``layers.3``), or, without a number, in their first part (``embedding``). `Strided`
deals out whole blocks, `Balanced` single tensors.
"""

from __future__ import annotations

import fnmatch
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from ftopt.common.plural import count
from ftopt.errors import Settings, UserError, check_whole

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parameter:
    """The properties of a parameter that a rule may use.

    Args:
        name: as in ``model.named_parameters()``; the first name of tied parameters.
        shape: its shape (of the whole parameter if it is sharded).
        embedding: whether it is the weight of a `torch.nn.Embedding`.
    """

    name: str
    shape: tuple[int, ...]
    embedding: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Span:
    """Where a parameter lies in its fragment's flat tensors: elements ``start`` to ``stop - 1``."""

    name: str
    start: int
    stop: int
    embedding: bool = False


Layout = tuple[Span, ...]
"""A fragment's parameters in the order of the flat tensors, without gaps."""


class Partition(Protocol):
    """A rule that partitions a model. A frozen dataclass."""

    def fragments(self, parameters: Sequence[Parameter]) -> list[list[str]]:
        """The names of each fragment's parameters: every parameter once, no fragment empty.

        Raises:
            UserError: the model cannot be partitioned so; the message says how it can.
        """


@dataclass(frozen=True, kw_only=True)
class Dealt(Settings, ABC):
    """Base of the rules that deal out a model's blocks or tensors to fragments.

    Args:
        n: fragments (the paper's P), >= 1. Default 1. A model with fewer blocks (`Balanced`: tensors) has one fragment
            for each; the log says so.

    Raises:
        UserError: ``n`` is not a positive whole number.
    """

    n: int = 1

    def __post_init__(self) -> None:
        check_whole("fragments.n", self.n, 1, of="fragments")

    @abstractmethod
    def fragments(self, parameters: Sequence[Parameter]) -> list[list[str]]:
        """See `Partition`."""

    def _blocks(self, parameters: Sequence[Parameter]) -> list[list[str]]:
        """Names, block by block, in the model's order."""
        blocks: dict[str, list[str]] = {}
        for parameter in parameters:
            parts = parameter.name.split(".")
            number = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
            blocks.setdefault(".".join(parts[: number + 1]), []).append(parameter.name)
        return list(blocks.values())

    def _count(self, parts: int, of: str) -> int:
        """The number of fragments: ``n``, or ``parts`` if the model has fewer."""
        if parts < self.n:
            _tell_fewer(type(self).__name__, self.n, parts, of)
        return min(self.n, parts)


@cache
def _tell_fewer(rule: str, n: int, parts: int, of: str) -> None:
    """Warns once per process, since a model is partitioned several times."""
    _log.warning(
        "%s(n=%d): the model has %s, so there %s",
        rule, n, count(parts, of), "is 1 fragment" if parts == 1 else f"are {parts} fragments",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Strided(Dealt):
    """Block ``i`` belongs to fragment ``i mod n``: each fragment has blocks of all depths.

    Source: Streaming DiLoCo (arXiv 2501.18512), section 3.2, its default. The paper deals out transformer blocks; ours
    also deals out the layers around them (embedding, last norm, head), as blocks of their own.
    """

    def fragments(self, parameters: Sequence[Parameter]) -> list[list[str]]:
        blocks = self._blocks(parameters)
        n = self._count(len(blocks), "block")
        return [[name for block in blocks[f::n] for name in block] for f in range(n)]


@dataclass(frozen=True, kw_only=True)
class Balanced(Dealt):
    """Fragments of nearly equal size: greedy bin packing of single tensors, the largest first.

    Source: Decoupled DiLoCo (arXiv 2604.21428): 24 fragments balanced by greedy bin packing of tensors.
    """

    def fragments(self, parameters: Sequence[Parameter]) -> list[list[str]]:
        tensors = len(parameters)
        n = self._count(tensors, "tensor")
        bins: list[list[int]] = [[] for _ in range(n)]
        sizes = [0] * n
        for place in sorted(range(tensors), key=lambda place: -parameters[place].numel):
            # Empty fragments first: tensors without elements must not leave a fragment empty.
            f = min(range(n), key=lambda f: (bool(bins[f]), sizes[f]))
            bins[f].append(place)
            sizes[f] += parameters[place].numel
        return [[parameters[place].name for place in sorted(places)] for places in bins]


@dataclass(frozen=True, kw_only=True)
class Named(Settings):
    """Fragments by the names of modules or parameters.

    Args:
        patterns: a shell pattern or a module's name for each fragment, e.g. ``["embedding", "layers.[0-5].*", "*"]``. A
            parameter belongs to the first pattern that matches it.
    """

    patterns: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        patterns = self.patterns if isinstance(self.patterns, list | tuple) else []
        if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
            raise UserError(f"fragments.patterns={self.patterns!r}; give one for each fragment, as in ['head', '*']")

    def fragments(self, parameters: Sequence[Parameter]) -> list[list[str]]:
        found: list[list[str]] = [[] for _ in self.patterns]
        left: list[str] = []
        for name in [parameter.name for parameter in parameters]:
            matches = [name.startswith(f"{p}.") or fnmatch.fnmatchcase(name, p) for p in self.patterns]
            (found[matches.index(True)] if True in matches else left).append(name)
        if left:
            raise UserError(
                f"fragments.patterns leave {count(len(left), 'parameter')} out, e.g. {left[0]!r}; "
                'add a pattern for them, or "*" at the end'
            )
        for names, pattern in zip(found, self.patterns, strict=True):
            if not names:
                raise UserError(f"fragments.patterns: nothing is left for {pattern!r}; remove it, or put it first")
        return found

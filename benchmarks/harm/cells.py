"""The cells of the table: which bit flips, where, when, under what, and what becomes of the replica. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

BITS = tuple(range(32))
METHODS = (
    "DiLoCo", "Streaming", "Streaming-2", "Decoupled", "LocalSGD", "SlowMo", "SyncSGD", "PAFT", "PAFT-1",
)  # fmt: skip
INNERS = ("sgd", "adamw")
CODECS = ("fp32", "bf16", "int8", "fp4", "top_k:0.1:4")
SIZES = (1, 2, 3, 4)
TARGETS = ("params", "grads", "inner", "anchor", "outer", "payload", "sum", "result")
MOMENTS = ("inner", "boundary", "reduction")
"""In an inner step in the middle of a round; in the last one, or behind it; while the payloads are reduced."""
ROUNDS = ("first", "second", "middle", "late")
FATES = ("stays", "leaves", "leaves-later", "dies", "dies-later")
"""At once, or a round later."""
FACTORS: Mapping[str, Sequence[object]] = {
    "method": METHODS,
    "inner": INNERS,
    "codec": CODECS,
    "size": SIZES,
    "target": TARGETS,
    "bit": BITS,
    "moment": MOMENTS,
    "round": ROUNDS,
    "fate": FATES,
}
"""Factor -> its levels, in the order of a cell's name."""

WORST = 30
"""The exponent's highest bit: 0.5 becomes 1.7e38. The others make numbers smaller, or little greater."""
TRIPLES = (
    ("method", "target", "codec"),
    ("method", "target", "fate"),
    ("method", "target", "size"),
    ("method", "target", "moment"),
    ("method", "target", "round"),
    ("target", "size", "fate"),
    ("target", "moment", "round"),
    ("method", "inner", "target"),
)

_WITH_OUTER = ("DiLoCo", "Streaming", "Streaming-2", "Decoupled", "SlowMo")
_REDUCED = ("payload", "sum", "result")


@dataclass(frozen=True)
class Cell:
    """One run with one flipped bit; a field for each factor."""

    method: str
    inner: str
    codec: str
    size: int
    target: str
    bit: int
    moment: str
    round: str
    fate: str

    @property
    def name(self) -> str:
        """E.g. ``DiLoCo/adamw/fp32/3/params/30/boundary/late/stays``."""
        return "/".join(map(str, asdict(self).values()))

    @property
    def possible(self) -> bool:
        """Whether there is such a thing."""
        if self.target in _REDUCED and self.moment != "reduction":
            return False
        if self.target == "grads" and self.moment == "reduction":
            return False
        if self.target == "anchor" and self.method == "SyncSGD":
            return False  # it has none
        if self.target == "outer" and self.method not in _WITH_OUTER:
            return False
        return self.size > 1 or self.fate == "stays"


def named(name: str) -> Cell:
    """The cell of this name. ValueError: there is none."""
    parts = name.split("/")
    if len(parts) != len(FACTORS):
        raise ValueError(f"{name!r} is no cell; it must have {len(FACTORS)} parts: {'/'.join(FACTORS)}")
    levels = {}
    for part, (factor, allowed) in zip(parts, FACTORS.items(), strict=True):
        found = [level for level in allowed if str(level) == part]
        if not found:
            raise ValueError(f"{name!r}: {factor} {part!r}; must be one of {', '.join(map(str, allowed))}")
        levels[factor] = found[0]
    cell = Cell(**levels)  # type: ignore[arg-type]
    if not cell.possible:
        raise ValueError(f"{name!r}: there is no such cell; see Cell.possible")
    return cell


def matching(words: Sequence[str]) -> Callable[[Cell], bool]:
    """Tells the cells that words like ``bit=29,30`` ask for; all words must fit. ValueError: a word makes no sense."""
    wanted = dict[str, set[str]]()
    for word in words:
        factor, _, levels = word.partition("=")
        wanted[factor] = set(levels.split(","))
        if factor not in FACTORS or not wanted[factor] <= set(map(str, FACTORS[factor])):
            known = "; ".join(f"{name}={','.join(map(str, levels))}" for name, levels in FACTORS.items())
            raise ValueError(f"{word!r}; use FACTOR=LEVEL[,LEVEL], of {known}, or a cell's name")
    return lambda cell: all(str(getattr(cell, factor)) in levels for factor, levels in wanted.items())


def every() -> Iterator[Cell]:
    """The full product."""
    cells = (Cell(*levels) for levels in itertools.product(*FACTORS.values()))  # type: ignore[arg-type]
    return (cell for cell in cells if cell.possible)


def core(seed: int) -> list[Cell]:
    """Each bit x target x method at fp32; the other factors take turns, from a place that the seed gives."""
    chance, cells = random.Random(f"core {seed}"), []
    others = {name: list(FACTORS[name]) for name in ("inner", "size", "moment", "round", "fate")}
    for method, target in itertools.product(METHODS, TARGETS):
        turns = {name: _turns(levels, chance) for name, levels in others.items()}
        for bit in BITS:
            for _ in range(64):
                cell = Cell(
                    method=method, codec="fp32", target=target, bit=bit, **{k: next(v) for k, v in turns.items()}
                )
                if cell.possible:
                    cells.append(cell)
                    break
    return cells


def _turns(levels: list[object], chance: random.Random) -> Iterator[object]:
    """All levels before any comes again, each time in another order."""
    while True:
        yield from chance.sample(levels, len(levels))


def pairs(seed: int) -> list[Cell]:
    """Every possible pair of levels of any two factors."""
    return _covering(seed, FACTORS, list(itertools.combinations(FACTORS, 2)))


def worst(seed: int) -> list[Cell]:
    """Of the bit that does most harm: every possible triple of levels of the other factors that `TRIPLES` names."""
    return _covering(seed, {**FACTORS, "bit": (WORST,)}, TRIPLES)


def design(seed: int) -> list[Cell]:
    """The cells that are run by default."""
    return list(dict.fromkeys([*core(seed), *pairs(seed), *worst(seed)]))


def _covering(seed: int, factors: Mapping[str, Sequence[object]], tuples: Sequence[tuple[str, ...]]) -> list[Cell]:
    """Greedy: a cell begins with a combination that is missing; the rest is the best of some draws."""
    chance, cells = random.Random(f"covering {seed}"), []
    possible = {names: _combinations(names, factors, chance) for names in tuples}
    for names in sorted(possible, key=lambda f: -len(possible[f])):
        missing = possible[names]
        while missing:
            start = dict(zip(names, next(iter(missing)), strict=True))
            drawn = [cell for _ in range(8) if (cell := _drawn(start, factors, chance)) is not None]
            best = max(drawn, key=lambda cell: sum(_levels(cell, f) in left for f, left in possible.items()))
            cells.append(best)
            for f, left in possible.items():
                left.pop(_levels(best, f), None)
    return cells


def _levels(cell: Cell, factors: Sequence[str]) -> tuple[object, ...]:
    return tuple(getattr(cell, name) for name in factors)


def _combinations(
    names: Sequence[str], factors: Mapping[str, Sequence[object]], chance: random.Random
) -> dict[tuple[object, ...], None]:
    """Those that some possible cell has, in a drawn order."""
    found = list(itertools.product(*(factors[name] for name in names)))
    chance.shuffle(found)
    return {c: None for c in found if _drawn(dict(zip(names, c, strict=True)), factors, chance) is not None}


def _drawn(start: Mapping[str, object], factors: Mapping[str, Sequence[object]], chance: random.Random) -> Cell | None:
    """A possible cell with these levels."""
    for _ in range(200):
        levels = {name: start[name] if name in start else chance.choice(factors[name]) for name in factors}
        cell = Cell(**levels)  # type: ignore[arg-type]
        if cell.possible:
            return cell
    return None

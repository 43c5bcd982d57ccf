"""The scenarios: methods x inner optimizers x numbers of replicas x what happens meanwhile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from tests.oracle.problems import INNER
from tests.oracle.scenario import CUTS, Change, Outer, Rate, Scenario, Spec

NESTEROV = Outer(lr=0.7, momentum=0.9, nesterov=True)
HEAVY_BALL = Outer(lr=0.5, momentum=0.6)
ADAM = Outer(kind="adam", lr=0.3)
STREAMING = Outer(lr=0.4, momentum=0.9, nesterov=True)

BLOCKING: dict[str, Spec] = {
    "local_sgd": Spec("local_sgd", 4),
    "local_sgd-every-step": Spec("local_sgd", 1),
    "post-local": Spec("local_sgd", 4, average_until=6),
    "diloco-sgd": Spec("diloco", 4, outer=Outer(lr=0.8)),
    "diloco-nesterov": Spec("diloco", 4, outer=NESTEROV),
    "diloco-heavy-ball": Spec("diloco", 4, outer=HEAVY_BALL),
    "diloco-adam": Spec("diloco", 4, outer=ADAM),
    "diloco-warmup": Spec("diloco", 4, outer=replace(NESTEROV, warmup=3)),
    "diloco-cosine": Spec("diloco", 4, outer=replace(HEAVY_BALL, warmup=2, cosine=5, floor=0.2)),
    "diloco-adam-cosine": Spec("diloco", 4, outer=replace(ADAM, warmup=2, cosine=5, floor=0.2)),
    "diloco-synchronous-start": Spec("diloco", 4, outer=NESTEROV, average_until=6),
    "slowmo": Spec("slowmo", 4),
    "slowmo-alpha": Spec("slowmo", 4, slow_lr=0.7, slow_momentum=0.3),
    "slowmo-reset": Spec("slowmo", 4, inner_state="reset"),
    "slowmo-average": Spec("slowmo", 4, inner_state="average"),
    "slowmo-synchronous-start": Spec("slowmo", 4, average_until=6),
}
GRADIENTS: dict[str, Spec] = {
    "sync_sgd": Spec("sync_sgd", 1),
    "sync_sgd-clipped": Spec("sync_sgd", 1, clip=0.3),
    "sync_sgd-accumulates": Spec("sync_sgd", 3, clip=0.5),
    "paft": Spec("paft", 4),
    "paft-clipped": Spec("paft", 4, clip=0.3),
    "paft-average": Spec("paft", 4, inner_state="average"),
    "paft-delay": Spec("paft", 4, delay=1),
    "paft-synchronous-start": Spec("paft", 4, delay=1, average_until=6),
}
ONE_FRAGMENT = BLOCKING | GRADIENTS

OVERLAPS: dict[str, dict[str, Any]] = {
    "wait": {"every": 6, "delay": 0},
    "delay": {"every": 6, "delay": 2},
    "long-delay": {"every": 6, "delay": 5},
    "odd": {"every": 7, "delay": 3},
    "mix": {"every": 6, "delay": 2, "mix": 0.5, "weights": "uniform"},
    "mix-drops": {"every": 6, "delay": 2, "mix": 0.0, "weights": "uniform"},
    "mix-ignores": {"every": 6, "delay": 1, "mix": 1.0, "weights": "uniform"},
    "mix-without-delay": {"every": 6, "delay": 0, "mix": 0.5, "weights": "uniform"},
    "synchronous-start": {"every": 6, "delay": 2, "average_until": 5},
}


def _cosine(tick: int) -> float:
    return 0.025 * (1 + math.cos(math.pi * tick / 24))


def _warmup(tick: int) -> float:
    return 0.03 * min(1.0, tick / 7)


def _restarts(tick: int) -> float:
    return 0.02 * (1 + math.cos(math.pi * ((tick - 1) % 8) / 8))


def _zeros(tick: int) -> float:
    """Within rounds, over whole rounds, and at the end."""
    return 0.0 if tick in (3, 4, *range(9, 13)) or tick > 20 else 0.03


RATES: dict[str, Rate] = {"cosine": _cosine, "warmup": _warmup, "restarts": _restarts, "zeros": _zeros}

MEMBERSHIP: dict[str, dict[str, Any]] = {
    "join-at-boundary": {"changes": (Change(9, "join"),)},
    "join-between": {"changes": (Change(11, "join"),)},
    "two-joins": {"changes": (Change(8, "join"), Change(14, "join"))},
    "death-at-boundary": {"replicas": 3, "changes": (Change(9, "die", 1),)},
    "death-between": {"replicas": 3, "changes": (Change(11, "die", 1),)},
    "death-of-the-first": {"replicas": 3, "changes": (Change(3, "die", 0),)},
    "leave-at-boundary": {"replicas": 3, "changes": (Change(9, "leave", 1),)},
    "leave-between": {"replicas": 3, "changes": (Change(11, "leave", 1),)},
    "everything": {
        "replicas": 3,
        "changes": (Change(6, "leave", 0), Change(7, "join"), Change(10, "die", 1), Change(15, "join")),
    },
}
UNEQUAL: dict[str, dict[str, Any]] = {
    "unequal": {"replicas": 3, "skips": frozenset({(1, 0), (2, 0), (6, 1), (9, 2), (10, 2), (11, 2), (17, 0)})},
    "unequal-and-join": {"skips": frozenset({(1, 0), (2, 0), (6, 1)}), "changes": (Change(11, "join"),)},
}
FREEZING: dict[str, dict[str, Any]] = {
    "freeze": {"changes": (Change(6, "freeze", what="bias"),)},
    "freeze-and-thaw": {"changes": (Change(6, "freeze", what="bias"), Change(14, "thaw", what="bias"))},
    "freeze-on-one": {"changes": (Change(6, "freeze", 1, what="bias"), Change(15, "thaw", 1, what="bias"))},
}
WEIGHTS = ("steps", "uniform", "tokens", "tokens_per_step")

LATER: dict[str, dict[str, Any]] = {
    "join-at-boundary": {"changes": (Change(13, "join"),)},
    "death-at-boundary": {"replicas": 3, "changes": (Change(13, "die", 1),)},
    "death-between": {"replicas": 3, "changes": (Change(17, "die", 1),)},
    "leave-at-boundary": {"replicas": 3, "changes": (Change(13, "leave", 1),)},
    "leave-between": {"replicas": 3, "changes": (Change(17, "leave", 1),)},
    "freeze": {"changes": (Change(9, "freeze", what="layers.1"), Change(20, "thaw", what="layers.1"))},
}
"""For methods with fragments of H = 6."""


def averages_moments(spec: Spec, inner: str) -> bool:
    """Whether a method wants moments averaged that the inner optimizer does not have: ftopt refuses it."""
    return spec.inner_state == "average" and inner in ("sgd", "rmsprop", "adagrad")


def plain() -> Iterator[tuple[str, Scenario]]:
    """All methods, inner optimizers, 1 to 4 replicas."""
    for (name, spec), inner, n in _product(ONE_FRAGMENT.items(), INNER, range(1, 5)):
        if not averages_moments(spec, inner):
            problem = "linear" if n % 2 else "quadratic"
            noisy = spec.kind == "paft"
            yield f"{name}-{inner}-{n}", Scenario(spec, inner, problem, replicas=n, noisy=noisy)

    for inner in ("momentum", "adamw"):
        yield (
            f"paft-delay-average-{inner}",
            Scenario(Spec("paft", 4, delay=1, inner_state="average"), inner, replicas=3, noisy=True),
        )


def rates() -> Iterator[tuple[str, Scenario]]:
    """Learning rate schedules, and each replica's own clipping."""
    for (name, spec), (rate, f), inner in _product(
        ONE_FRAGMENT.items(), RATES.items(), ("sgd", "nesterov", "adamw", "rmsprop")
    ):
        if not averages_moments(spec, inner):
            yield f"{name}-{rate}-{inner}", Scenario(spec, inner, replicas=3, rate=f, noisy=spec.kind == "paft")
    for (name, spec), norm in _product(ONE_FRAGMENT.items(), (0.2, 0.7)):
        yield f"{name}-clip-{norm}", Scenario(spec, "momentum", clip=norm)


def changes() -> Iterator[tuple[str, Scenario]]:
    """Who comes and goes, unequal steps, frozen parameters, all weights."""
    k = 0
    for (name, spec), (what, settings), inner in _product(
        ONE_FRAGMENT.items(), (MEMBERSHIP | FREEZING | UNEQUAL).items(), ("momentum", "adamw")
    ):
        if what in UNEQUAL and (spec.kind in ("sync_sgd", "paft") or spec.average_until or spec.every == 1):
            continue  # a replica that skips a step would stop the others
        k += 1
        weighted = spec if spec.kind in ("sync_sgd", "paft") else replace(spec, weights=WEIGHTS[k % 4])
        yield f"{name}-{what}-{inner}-{weighted.weights}", Scenario(weighted, inner, rate=_cosine, **settings)


def fragments() -> Iterator[tuple[str, Scenario]]:
    """Streaming and Decoupled DiLoCo."""
    all_ = _product(("streaming", "decoupled"), ("", *CUTS), OVERLAPS.items(), (1, 2, 3))
    for k, (kind, cut, (overlap, settings), n) in enumerate(all_):
        inner = list(INNER)[(k + n) % 6]
        weights = "tokens_per_step" if kind == "decoupled" else "steps"
        spec = Spec(kind, **{"outer": STREAMING, "cut": cut, "weights": weights, **settings})
        rate = _cosine if inner in ("sgd", "adamw") else None
        yield f"{kind}-{cut}-{overlap}-{inner}-{n}", Scenario(spec, inner, "mlp", replicas=n, ticks=26, rate=rate)
    for kind, cut, delay, (what, settings) in _product(
        ("streaming", "decoupled"), ("", "strided", "named"), (0, 2), LATER.items()
    ):
        spec = Spec(kind, 6, cut=cut, delay=delay, outer=NESTEROV, weights="tokens")
        yield f"{kind}-{cut}-{delay}-{what}", Scenario(spec, "adamw", "mlp", ticks=30, **settings)


def bfloat16() -> Iterator[tuple[str, Scenario]]:
    """Parameters in bf16."""
    some = {"streaming": Spec("streaming", 6, cut="strided", delay=2, outer=STREAMING)}
    some["mixed"] = replace(some["streaming"], mix=0.5)
    some["decoupled"] = replace(some["streaming"], kind="decoupled")
    for (name, spec), inner in _product((ONE_FRAGMENT | some).items(), ("sgd", "momentum", "adamw")):
        if not averages_moments(spec, inner):
            yield f"{name}-{inner}", Scenario(spec, inner, "mlp", bf16=True)


def _product(*several: Iterable[Any]) -> Iterator[Any]:
    return itertools.product(*several)

"""What replicas compare: that they train the same model in the same way, and that they hold the same state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ftopt.methods import Method
from ftopt.methods.method import settings_of
from ftopt.optimizer.inner import Inner
from ftopt.optimizer.outer.fragment import Fragment
from ftopt.optimizer.tensors.digest import digest, digest_of
from ftopt.sync.group import OWN, Fingerprint

_DESCRIBED = 8
"""So many fragments are described one by one to the other replicas, the others by a hash."""
_CHARS = 300
"""Of settings, that are told."""


def fingerprint(
    fragments: Sequence[Fragment], method: Method, inner: Mapping[str, str], arithmetic: str, frozen: Mapping[str, str]
) -> Fingerprint:
    """What must agree among the replicas. ``inner``: lines of the inner optimizers. ``arithmetic``: as in
    `Fingerprint`. ``frozen``: of what does not train, `frozen_lines`."""
    views = [fragment.view.describe() for fragment in fragments]
    if len(views) > _DESCRIBED:
        views = [*views[:_DESCRIBED], f"{len(views) - _DESCRIBED} more fragments, {_short(views)[:12]}"]
    lines = {"model": "; ".join(views), "method": method.name, **inner, **frozen}
    if len(fragments) > 1:
        lines["names"] = _short(sorted(name for fragment in fragments for name in fragment.view.names))[:12]
    lines |= {f"method.{name}": value for name, value in settings_of(method).items()}
    initial = fragments[0].state.digest
    if len(fragments) > 1:
        initial = _short(fragment.state.digest for fragment in fragments)
    period = fragments[0].timing.period
    return Fingerprint(lines=lines, initial=initial, fragments=len(fragments), period=period, arithmetic=arithmetic)


def inner_lines(inner: Inner) -> dict[str, str]:
    """What the inner optimizers are, which must agree, and their rates and settings, which may differ on purpose."""
    rates = list(dict.fromkeys(_rate(group) for group in inner.param_groups if "lr" in group))
    settings = [
        ", ".join(f"{k}={v}" for k, v in sorted(each.param_groups[0].items()) if k not in _OTHERWISE and _is_plain(v))
        for each in inner.optimizers
    ]
    return {
        "inner optimizer": ", ".join(type(each).__name__ for each in inner.optimizers),
        f"{OWN}learning rate": ", ".join(rates[:_DESCRIBED]),
        f"{OWN}settings of the inner optimizer": "; ".join(settings)[:_CHARS],
        f"{OWN}version of torch": torch.__version__,
    }


_OTHERWISE = frozenset({"params", "lr", "initial_lr", "max_lr", "min_lr", "foreach", "fused", "capturable", "names"})
"""Of a group: what is told elsewhere, is a schedule's, or changes nothing but the speed."""


def _rate(group: Mapping[str, Any]) -> str:
    """The rate before its schedule, if there is one. Some optimizers have none, and compute it."""
    rate = group.get("initial_lr", group["lr"])
    return "none" if rate is None else f"{float(rate):.6g}"


def _is_plain(value: object) -> bool:
    values = value if isinstance(value, tuple | list) else (value,)
    return len(values) < _DESCRIBED and all(isinstance(v, int | float | str) for v in values)


def digest_of_all(fragments: Sequence[Fragment]) -> str:
    """The digest of the committed states of several fragments together."""
    if all(fragment.state.described is not None for fragment in fragments):
        described = [(f"{f.index}.", f.state.described or {}) for f in fragments]
        return digest_of({prefix + name: what for prefix, each in described for name, what in each.items()})
    states = [(f"{fragment.index}.", fragment.state.tensors()) for fragment in fragments]
    return digest({prefix + name: t for prefix, tensors in states for name, t in tensors.items()})


def _short(parts: Iterable[str]) -> str:
    """SHA-256 (hex) of many strings."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()

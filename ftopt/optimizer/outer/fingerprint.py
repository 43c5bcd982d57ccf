"""What replicas compare: that they train the same model in the same way, and that they hold the same state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from ftopt.methods import Method
from ftopt.methods.method import settings_of
from ftopt.optimizer.outer.fragment import Fragment
from ftopt.optimizer.tensors.digest import digest, digest_of
from ftopt.sync.group import Fingerprint

_DESCRIBED = 8
"""So many fragments are described one by one to the other replicas, the others by a hash."""


def fingerprint(
    fragments: Sequence[Fragment], method: Method, inner_kinds: str, arithmetic: str, frozen: Mapping[str, str]
) -> Fingerprint:
    """What must agree among the replicas. ``inner_kinds``: the inner optimizers', of replicas that step alike; else
    "". ``arithmetic``: as in `Fingerprint`. ``frozen``: of what does not train, `frozen_lines`."""
    views = [fragment.view.describe() for fragment in fragments]
    if len(views) > _DESCRIBED:
        views = [*views[:_DESCRIBED], f"{len(views) - _DESCRIBED} more fragments, {_short(views)[:12]}"]
    lines = {"model": "; ".join(views), "method": method.name, **frozen}
    if len(fragments) > 1:
        lines["names"] = _short(sorted(name for fragment in fragments for name in fragment.view.names))[:12]
    lines |= {f"method.{name}": value for name, value in settings_of(method).items()}
    if inner_kinds:
        lines["inner optimizer"] = inner_kinds
    initial = fragments[0].state.digest
    if len(fragments) > 1:
        initial = _short(fragment.state.digest for fragment in fragments)
    period = fragments[0].timing.period
    return Fingerprint(lines=lines, initial=initial, fragments=len(fragments), period=period, arithmetic=arithmetic)


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

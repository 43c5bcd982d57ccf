"""Fingerprints that replicas compare: of the model and how they train it, and of the states that they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import torch

from ftopt.methods import Method
from ftopt.methods.method import settings_of
from ftopt.step.inner import Inner
from ftopt.step.outer.fragment import Fragment
from ftopt.step.tensors.digest import digest, digest_of
from ftopt.sync.group import OWN, Fingerprint

_DESCRIBED = 8
"""Number of fragments described one by one to the other replicas; a hash describes the rest."""
_CHARS = 300
"""Maximum characters of settings in errors."""


def fingerprint(
    fragments: Sequence[Fragment], method: Method, inner: Mapping[str, str], arithmetic: str, frozen: Mapping[str, str]
) -> Fingerprint:
    """The settings on which replicas must agree. ``inner``: lines of the inner optimizers. ``arithmetic``: as in
    `Fingerprint`. ``frozen``: `frozen_lines` of the parameters that do not train."""
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


def kinds_of(inner: Inner) -> str:
    """The classes of the inner optimizers, in order."""
    return _listed([type(each).__name__ for each in inner.optimizers], ", ")


def own_lines(inner: Inner) -> dict[str, str]:
    """The settings of the inner optimizers that may differ on purpose. A rate that was restored, or set by a loop, is
    not one of these and is left out."""
    stepped = any(each.state for each in inner.optimizers)
    rates = [_plain(g.get("initial_lr", None if stepped else g.get("lr"))) for g in inner.param_groups]
    settings = [
        ", ".join(f"{k}={text}" for k, v in sorted(defaults.items()) if k not in _OTHERWISE and (text := _plain(v)))
        for each in inner.optimizers
        if isinstance(defaults := getattr(each, "defaults", None), dict)
    ]
    lines = {
        f"{OWN}learning rate": _listed(list(dict.fromkeys(rates)), ", ") if all(rates) else "",
        f"{OWN}settings of the inner optimizer": _listed(settings, "; "),
        f"{OWN}version of torch": torch.__version__,
    }
    return {name: line for name, line in lines.items() if line}


_OTHERWISE = frozenset({"lr", "foreach", "fused", "capturable", "differentiable"})
"""Settings of an optimizer that are compared separately, or only affect the speed."""


def _listed(texts: Sequence[str], between: str) -> str:
    """Joins texts, equal neighbours as one with their number; replaces the end of a long result by a hash."""
    runs = [(text, len(list(same))) for text, same in groupby(texts)]
    listed = between.join(text if number == 1 else f"{number} x {text}" for text, number in runs)
    return listed if len(listed) <= _CHARS else f"{listed[:_CHARS]}... {_short(texts)[:12]}"


def _plain(value: object) -> str:
    """The text of a number, a word or a short sequence of these; "" for anything else."""
    if isinstance(value, tuple | list) and 0 < len(value) < _DESCRIBED:
        texts = [_plain(v) for v in value]
        return f"({', '.join(texts)})" if all(texts) else ""
    if isinstance(value, bool | str):
        return str(value)
    try:
        return f"{float(value):.6g}"  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # None, a tensor of several values
        return ""


def digest_of_all(fragments: Sequence[Fragment]) -> str:
    """The common digest of the committed states of several fragments."""
    if all(fragment.state.described is not None for fragment in fragments):
        described = [(f"{f.index}.", f.state.described or {}) for f in fragments]
        return digest_of({prefix + name: what for prefix, each in described for name, what in each.items()})
    states = [(f"{fragment.index}.", fragment.state.tensors()) for fragment in fragments]
    return digest({prefix + name: t for prefix, tensors in states for name, t in tensors.items()})


def _short(parts: Iterable[str]) -> str:
    """SHA-256 (hex) of many strings."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()

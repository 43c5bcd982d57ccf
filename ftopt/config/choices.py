"""The sections whose ``name`` picks a dataclass, and the message about a key that a section does not have. New methods,
models and schedules are registered only here."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Mapping, Sequence

from ftopt import fragments, methods, outer, triggers
from ftopt.codecs.named import CODECS
from ftopt.config import data_settings as data
from ftopt.config import inner_settings as inner
from ftopt.config import model_settings as model
from ftopt.config import own_code as own
from ftopt.config import task_settings as task
from ftopt.config.schema import Recipe
from ftopt.errors import UserError
from ftopt.methods import Method

_RATES = {"constant": outer.ConstantRate, "linear": outer.LinearRate, "cosine": outer.CosineRate}

CHOICES: Mapping[str, Mapping[str, type]] = {
    "model": {"gpt": model.GptConfig, "convnet": model.ConvnetConfig, "factory": model.FactoryConfig},
    "data": {
        "stdlib_bytes": data.StdlibBytes,
        "text": data.Text,
        "tokens": data.TokensConfig,
        "digits": data.Digits,
        "factory": data.OwnData,
    },
    "task": {"cross_entropy": task.CrossEntropyConfig, "factory": task.OwnTask},
    "method.codec": CODECS,
    "inner": {
        "adamw": inner.AdamWConfig,
        "adam": inner.AdamConfig,
        "sgd": inner.SgdConfig,
        "muon": inner.MuonConfig,
        "torch": inner.TorchConfig,
    },
    "inner.schedule": {"constant": inner.ConstantConfig, "cosine": inner.CosineConfig},
    "method": {
        "diloco": methods.DiLoCo,
        "sparse_loco": methods.SparseLoCo,
        "local_sgd": methods.LocalSGD,
        "streaming_diloco": methods.StreamingDiLoCo,
        "decoupled_diloco": methods.DecoupledDiLoCo,
        "slowmo": methods.SlowMo,
        "sync_sgd": methods.SyncSGD,
        "paft": methods.PAFT,
    },
    "method.pacing": {"by_speed": methods.BySpeed},
    "method.fragments": {
        "strided": fragments.Strided,
        "balanced": fragments.Balanced,
        "named": fragments.Named,
    },
    "method.outer": {"sgd": outer.SGD, "adam": outer.Adam, "torch": outer.Torch},
    "method.outer.schedule": _RATES,
    "method.outer.momentum_schedule": _RATES,
    "method.trigger": {
        "every": triggers.Every,
        "every_seconds": triggers.EverySeconds,
        "local_condition": triggers.LocalCondition,
        "linear_fda": triggers.LinearFDA,
        "adacomm": triggers.AdaComm,
        "qsr": triggers.QSR,
        "signal_to_noise": triggers.SignalToNoise,
        "paft_ratio": triggers.PAFTRatio,
        "any_of": triggers.AnyOf,
    },
}
"""Path of a section -> name -> dataclass. A section without a name is ``factory`` if it has a ``factory``, else the
setting's own default (`DecoupledDiLoCo`'s fragments are balanced), else the first choice; `REQUIRED` sections must have
a name."""

REQUIRED = frozenset({"method", "method.trigger", "method.codec"})

WITH_FACTORIES = tuple(path for path, choices in CHOICES.items() if "factory" in choices)

SHORT = frozenset({"method.codec", "method.outer"})
"""Sections that may also be a single word."""

LISTS: Mapping[str, str] = {"method.trigger.triggers": "method.trigger", "inner": "inner"}
"""Path of a list of sections -> the section whose choices each of its items has."""


def choices_of(path: str) -> Mapping[str, type] | None:
    """The choices of the section ``path``, which may be a list item, ``a.b[3]``; None: it has no ``name``."""
    return CHOICES.get(section_of(path))


def class_of(path: str, name: object) -> type:
    """The dataclass that ``name`` picks in the section ``path``; for a method also the user's,
    ``package.module.Class``. UserError: there is no such class, or it is not a method."""
    choices, word = CHOICES[section_of(path)], str(name)
    if word in choices:
        return choices[word]
    if section_of(path) != "method" or "." not in word:
        near = difflib.get_close_matches(_plain(word), choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{path}.name={name!r}; allowed: {', '.join(choices)}{hint}")
    module, _, attribute = word.rpartition(".")
    found = own.find(f"{path}.name", f"{module}:{attribute}", shown=word)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UserError(
            f"{path}.name={name!r} is not a method; must be a subclass of ftopt.methods.Method, a frozen dataclass"
        )
    return found


def _plain(word: str) -> str:
    """A name as recipes write it: also recognizes ``StreamingDiLoCo``, ``Streaming DiLoCo`` and ``SGD``."""
    letters = re.sub(r"[^a-z0-9]", "", word.lower())
    known = {name.replace("_", ""): name for choices in CHOICES.values() for name in choices}
    return known.get(letters, word.lower())


def name_of(path: str, instance: object) -> str:
    own = type(instance)
    names = {cls: name for name, cls in CHOICES[section_of(path)].items()}
    return names.get(own, f"{own.__module__}.{own.__name__}")


def section_of(path: str) -> str:
    """``path`` with each list item replaced by the section whose choices it has."""
    for items, section in LISTS.items():
        pattern = re.compile(rf"^{re.escape(items)}\[\d+\]")
        while pattern.match(path):
            path = pattern.sub(section, path)
    return path


_OTHER_NAMES = {
    "learning_rate": ("lr",),
    "steps": ("inner_steps",),
    "max_steps": ("inner_steps",),
    "gone_after_s": ("evict_after_s",),
    "slow_replicas": ("stragglers",),
    "sync": ("policy",),
}
"""A setting's name elsewhere -> its names here, the likeliest first."""
_LETTERS = {
    "H": ("sync_every",),
    "k": ("sync_every",),
    "tau": ("delay", "sync_every"),
    "P": ("fragments",),
    "alpha": ("slow_lr", "mix"),
    "beta": ("slow_momentum",),
}
"""Letters of a method's settings in the papers and the documentation."""


def unknown(key: str, path: str, valid: Sequence[str]) -> str:
    """The message about a key that the section ``path`` does not have; ``valid``: the keys that it has."""
    if having := [name for name, cls in (choices_of(path) or {}).items() if key in _fields(cls)]:
        which = f"{join(path, 'name')}={' or '.join(having)}"
        return f"{join(path, key)}: unknown key; it is a setting of {which}; allowed: {', '.join(valid)}"
    others = (_OTHER_NAMES | (_LETTERS if path in ("", "method") else {})).get(key, (key,))
    near = [name for name in others if name in valid]
    near = near or (difflib.get_close_matches(key, valid, n=1, cutoff=0.5) if path else [])
    if not near and (homes := _homes(others[0])):
        return f"{join(path, key)}: unknown key; did you mean {' or '.join(homes)}?"
    near = near or difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    hint = f"did you mean {join(path, near[0])}?" if near else f"allowed: {', '.join(valid)}"
    return f"{join(path, key)}: unknown key; {hint}"


def _homes(key: str) -> list[str]:
    """The sections that have a setting ``key``, which was given without its section."""
    plain = {f.name: hint for f in dataclasses.fields(Recipe) if isinstance(hint := _HINTS[f.name], type)}
    sections = {**{name: [cls] for name, cls in plain.items()}, **{p: list(c.values()) for p, c in CHOICES.items()}}
    return [
        f"{path}.{key}"
        for path, classes in sections.items()
        if path.count(".") < 2 and any(key in _fields(cls) for cls in classes)
    ][:3]


def _fields(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()


_HINTS = typing.get_type_hints(Recipe)


def join(path: str, key: str) -> str:
    """The path of a key in a section; ``path`` "" is the recipe itself."""
    return f"{path}.{key}" if path else key

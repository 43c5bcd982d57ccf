"""The sections whose ``name`` picks a dataclass. Nothing else has to know a new method, model or schedule."""

from __future__ import annotations

from collections.abc import Mapping

from ftopt.config import schema
from ftopt.methods.diloco import DiLoCo
from ftopt.methods.fragments import Balanced, Named, Sequential, Strided
from ftopt.methods.local_sgd import LocalSGD
from ftopt.methods.outer_optimizers import SGD, Adam
from ftopt.methods.paft import PAFT
from ftopt.methods.schedules import ConstantRate, CosineRate
from ftopt.methods.slowmo import SlowMo
from ftopt.methods.streaming import StreamingDiLoCo
from ftopt.methods.sync_sgd import SyncSGD
from ftopt.methods.torch_optimizers import Torch

CHOICES: Mapping[str, Mapping[str, type]] = {
    "model": {"gpt": schema.Gpt, "convnet": schema.Convnet, "factory": schema.Factory},
    "data": {"stdlib_bytes": schema.StdlibBytes, "text": schema.Text, "digits": schema.Digits},
    "inner": {"adamw": schema.AdamW, "sgd": schema.Sgd},
    "inner.schedule": {"constant": schema.Constant, "cosine": schema.Cosine},
    "method": {
        "diloco": DiLoCo,
        "local_sgd": LocalSGD,
        "streaming_diloco": StreamingDiLoCo,
        "slowmo": SlowMo,
        "sync_sgd": SyncSGD,
        "paft": PAFT,
    },
    "method.fragments": {"strided": Strided, "sequential": Sequential, "balanced": Balanced, "named": Named},
    "method.outer": {"sgd": SGD, "adam": Adam, "torch": Torch},
    "method.outer.schedule": {"constant": ConstantRate, "cosine": CosineRate},
}
"""Path of a section -> name -> dataclass. The first name is meant when a recipe gives none; `REQUIRED` ones ask."""

REQUIRED = frozenset({"method"})


def name_of(path: str, instance: object) -> str:
    """The name under which ``instance`` stands in the section ``path``."""
    return next(name for name, cls in CHOICES[path].items() if type(instance) is cls)

"""Semi-synchronous optimizers for PyTorch in which replicas come and go and no survivor loses an inner step.

Wrap the inner optimizer with `wrap`, choose a method (`DiLoCo`, `LocalSGD`), connect with `connect`, `solo` or
`local_groups`. ``docs/`` explains the rest.

The names that need torch are looked up when they are first used: the command line and the coordinator do without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ftopt.connect import connect as connect
from ftopt.connect import local_groups as local_groups
from ftopt.connect import solo as solo
from ftopt.errors import FtoptError as FtoptError
from ftopt.errors import Refused as Refused
from ftopt.errors import Unreachable as Unreachable
from ftopt.errors import UserError as UserError
from ftopt.events import Event as Event
from ftopt.sync.protocol.settings import Sync as Sync

if TYPE_CHECKING:
    from ftopt.checkpointing import Checkpoints as Checkpoints
    from ftopt.data.loader import DataLoader as DataLoader
    from ftopt.data.tokens import TokenWindows as TokenWindows
    from ftopt.methods import PAFT as PAFT
    from ftopt.methods import SGD as SGD
    from ftopt.methods import AdaComm as AdaComm
    from ftopt.methods import Adam as Adam
    from ftopt.methods import AllOf as AllOf
    from ftopt.methods import AnyOf as AnyOf
    from ftopt.methods import Balanced as Balanced
    from ftopt.methods import ConstantRate as ConstantRate
    from ftopt.methods import CosineRate as CosineRate
    from ftopt.methods import DecoupledDiLoCo as DecoupledDiLoCo
    from ftopt.methods import DiLoCo as DiLoCo
    from ftopt.methods import Every as Every
    from ftopt.methods import EverySeconds as EverySeconds
    from ftopt.methods import EveryStaged as EveryStaged
    from ftopt.methods import ExactDivergence as ExactDivergence
    from ftopt.methods import LinearFDA as LinearFDA
    from ftopt.methods import LocalCondition as LocalCondition
    from ftopt.methods import LocalSGD as LocalSGD
    from ftopt.methods import Named as Named
    from ftopt.methods import Sequential as Sequential
    from ftopt.methods import SignalToNoise as SignalToNoise
    from ftopt.methods import SlowMo as SlowMo
    from ftopt.methods import StreamingDiLoCo as StreamingDiLoCo
    from ftopt.methods import Strided as Strided
    from ftopt.methods import SyncSGD as SyncSGD
    from ftopt.methods import Torch as Torch
    from ftopt.optimizer import OuterOptimizer as OuterOptimizer
    from ftopt.optimizer import undo_step as undo_step
    from ftopt.optimizer import undoable as undoable
    from ftopt.optimizer import wrap as wrap
    from ftopt.sync.group import ReplicaGroup as ReplicaGroup

__version__ = "0.1.0"

_LATER = {
    "AdaComm": "ftopt.methods",
    "Adam": "ftopt.methods",
    "AllOf": "ftopt.methods",
    "AnyOf": "ftopt.methods",
    "Balanced": "ftopt.methods",
    "Checkpoints": "ftopt.checkpointing",
    "ConstantRate": "ftopt.methods",
    "CosineRate": "ftopt.methods",
    "DataLoader": "ftopt.data.loader",
    "DecoupledDiLoCo": "ftopt.methods",
    "DiLoCo": "ftopt.methods",
    "Every": "ftopt.methods",
    "EverySeconds": "ftopt.methods",
    "EveryStaged": "ftopt.methods",
    "ExactDivergence": "ftopt.methods",
    "LinearFDA": "ftopt.methods",
    "LocalCondition": "ftopt.methods",
    "LocalSGD": "ftopt.methods",
    "Named": "ftopt.methods",
    "OuterOptimizer": "ftopt.optimizer",
    "PAFT": "ftopt.methods",
    "ReplicaGroup": "ftopt.sync.group",
    "SGD": "ftopt.methods",
    "Sequential": "ftopt.methods",
    "SignalToNoise": "ftopt.methods",
    "SlowMo": "ftopt.methods",
    "StreamingDiLoCo": "ftopt.methods",
    "Strided": "ftopt.methods",
    "SyncSGD": "ftopt.methods",
    "TokenWindows": "ftopt.data.tokens",
    "Torch": "ftopt.methods",
    "undo_step": "ftopt.optimizer",
    "undoable": "ftopt.optimizer",
    "wrap": "ftopt.optimizer",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'ftopt' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})

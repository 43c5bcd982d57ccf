"""Semi-synchronous optimizers for PyTorch in which replicas come and go and no survivor loses an inner step.

Wrap the inner optimizer with `wrap`, choose a method (`DiLoCo`, `LocalSGD`), connect with `connect`, `solo` or
`local_groups`. A method's parts are in `outer` (outer optimizers), `fragments` and `triggers`; what a method
of your own needs is in `methods`; wire precisions are in `codecs`. ``docs/`` explains the
rest.

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
    from ftopt import codecs as codecs
    from ftopt import fragments as fragments
    from ftopt import methods as methods
    from ftopt import outer as outer
    from ftopt import triggers as triggers
    from ftopt.checkpointing import Checkpoints as Checkpoints
    from ftopt.data.loader import DataLoader as DataLoader
    from ftopt.data.tokens import TokenWindows as TokenWindows
    from ftopt.methods import PAFT as PAFT
    from ftopt.methods import BySpeed as BySpeed
    from ftopt.methods import DecoupledDiLoCo as DecoupledDiLoCo
    from ftopt.methods import DiLoCo as DiLoCo
    from ftopt.methods import LocalSGD as LocalSGD
    from ftopt.methods import Method as Method
    from ftopt.methods import SlowMo as SlowMo
    from ftopt.methods import StreamingDiLoCo as StreamingDiLoCo
    from ftopt.methods import SyncSGD as SyncSGD
    from ftopt.optimizer import OuterOptimizer as OuterOptimizer
    from ftopt.optimizer import Undone as Undone
    from ftopt.optimizer import undo_step as undo_step
    from ftopt.optimizer import undoable as undoable
    from ftopt.optimizer import wrap as wrap
    from ftopt.sync.group import ReplicaGroup as ReplicaGroup

__version__ = "0.1.0"

_METHODS = (
    "PAFT", "BySpeed", "DecoupledDiLoCo", "DiLoCo", "LocalSGD", "Method", "SlowMo", "StreamingDiLoCo", "SyncSGD",
)  # fmt: skip
_OPTIMIZER = ("OuterOptimizer", "Undone", "undo_step", "undoable", "wrap")
_LATER = {
    "Checkpoints": "ftopt.checkpointing",
    "DataLoader": "ftopt.data.loader",
    "ReplicaGroup": "ftopt.sync.group",
    "TokenWindows": "ftopt.data.tokens",
    **dict.fromkeys(_METHODS, "ftopt.methods"),
    **dict.fromkeys(_OPTIMIZER, "ftopt.optimizer"),
}
_MODULES = ("codecs", "fragments", "methods", "outer", "triggers")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"ftopt.{name}")
    if name not in _LATER:
        raise AttributeError(f"module 'ftopt' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_MODULES})

"""Semi-synchronous optimizers for PyTorch in which replicas come and go and no survivor loses an inner step.

Wrap the inner optimizer with `wrap`, choose a method (`DiLoCo`, `LocalSGD`), connect with `connect`, `solo` or
`local_groups`. A method's parts are in `outer` (outer optimizers), `fragments` and `triggers`; the base for your own
method is in `methods`; wire precisions are in `codecs`. ``docs/`` explains the rest.

Names that need torch are looked up on first use, so that the command line and the coordinator work without it.
"""

from ftopt.common import interrupts as interrupts

# isort: split
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ftopt.connect import connect, local_groups, solo
from ftopt.errors import FtoptError, JobFailed, JobOver, Refused, Unreachable, UserError
from ftopt.events import Event
from ftopt.sync.protocol.settings import Sync

if TYPE_CHECKING:
    from ftopt import codecs, fragments, methods, outer, triggers
    from ftopt.checkpoint.checkpoints import Checkpoints
    from ftopt.config.parts import recipe
    from ftopt.data.loader import DataLoader
    from ftopt.data.tokens import TokenWindows
    from ftopt.methods import PAFT, BySpeed, DecoupledDiLoCo, DiLoCo, LocalSGD, Method, SlowMo, StreamingDiLoCo, SyncSGD
    from ftopt.optimizer import OuterOptimizer, Undone, undo_step, undoable, wrap
    from ftopt.sync.group import ReplicaGroup
    from ftopt.watch.trackers.tensorboard import TensorBoard
    from ftopt.watch.trackers.wandb import Wandb

__all__ = [
    "PAFT", "BySpeed", "Checkpoints", "DataLoader", "DecoupledDiLoCo", "DiLoCo", "Event", "FtoptError", "JobFailed",
    "JobOver",
    "LocalSGD", "Method", "OuterOptimizer", "Refused", "ReplicaGroup", "SlowMo", "StreamingDiLoCo", "Sync", "SyncSGD",
    "TensorBoard", "TokenWindows", "Undone", "Unreachable", "UserError", "Wandb", "codecs", "connect", "fragments",
    "local_groups", "methods", "outer", "recipe", "solo", "triggers", "undo_step", "undoable", "wrap",
]  # fmt: skip
__version__ = "0.1.0"

_METHODS = (
    "PAFT", "BySpeed", "DecoupledDiLoCo", "DiLoCo", "LocalSGD", "Method", "SlowMo", "StreamingDiLoCo", "SyncSGD",
)  # fmt: skip
_OPTIMIZER = ("OuterOptimizer", "Undone", "undo_step", "undoable", "wrap")
_LATER = {
    "Checkpoints": "ftopt.checkpoint.checkpoints",
    "DataLoader": "ftopt.data.loader",
    "ReplicaGroup": "ftopt.sync.group",
    "TensorBoard": "ftopt.watch.trackers.tensorboard",
    "TokenWindows": "ftopt.data.tokens",
    "recipe": "ftopt.config.parts",
    "Wandb": "ftopt.watch.trackers.wandb",
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

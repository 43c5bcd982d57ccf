"""Semi-synchronous optimizers for PyTorch in which replicas come and go and no survivor loses an inner step.

Wrap the inner optimizer with `wrap`, choose a method (`DiLoCo`, `LocalSGD`), connect with `connect`, `solo` or
`local_groups`. A method's parts are in `outer` (outer optimizers), `fragments` and `triggers`; the base for your own
method is in `methods`; wire precisions are in `codecs`; `undo` reverts a step; `follow` reads a job's newest weights
from outside. `errors` has what is raised, `events` what is reported. ``docs/``, which `ftopt --help` locates, explains
the rest.

Names that need torch are looked up on first use, so that the command line and the coordinator work without it.
"""

from ftopt.common import interrupts as interrupts

# isort: split
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ftopt import errors as errors
from ftopt import events as events
from ftopt._connect import connect, local_groups, solo
from ftopt.common import launched as launched
from ftopt.sync.protocol.policy import FaultPolicy

if TYPE_CHECKING:
    from ftopt import codecs, fragments, methods, outer, triggers, undo
    from ftopt.checkpoint.checkpoints import Checkpoints
    from ftopt.checkpoint.follow import Follower, follow
    from ftopt.config.parts import recipe
    from ftopt.data.loader import DataLoader
    from ftopt.data.tokens import TokenWindows
    from ftopt.methods import PAFT, DecoupledDiLoCo, DiLoCo, LocalSGD, SlowMo, SparseLoCo, StreamingDiLoCo, SyncSGD
    from ftopt.optimizer import ReplicaOptimizer, wrap
    from ftopt.sync.group import ReplicaGroup
    from ftopt.watch.trackers.tensorboard import TensorBoard
    from ftopt.watch.trackers.wandb import Wandb

__all__ = [
    "PAFT", "Checkpoints", "DataLoader", "DecoupledDiLoCo", "DiLoCo", "FaultPolicy", "Follower", "LocalSGD",
    "ReplicaGroup", "ReplicaOptimizer", "SlowMo", "SparseLoCo", "StreamingDiLoCo", "SyncSGD", "TensorBoard",
    "TokenWindows", "Wandb", "codecs", "connect", "errors", "events", "follow", "fragments", "local_groups", "methods",
    "outer", "recipe", "solo", "triggers", "undo", "wrap",
]  # fmt: skip
__version__ = "0.1.0"

_METHODS = ("PAFT", "DecoupledDiLoCo", "DiLoCo", "LocalSGD", "SlowMo", "SparseLoCo", "StreamingDiLoCo", "SyncSGD")
_LATER = {
    "Checkpoints": "ftopt.checkpoint.checkpoints",
    "DataLoader": "ftopt.data.loader",
    "Follower": "ftopt.checkpoint.follow",
    "follow": "ftopt.checkpoint.follow",
    "ReplicaGroup": "ftopt.sync.group",
    "ReplicaOptimizer": "ftopt.optimizer",
    "TensorBoard": "ftopt.watch.trackers.tensorboard",
    "TokenWindows": "ftopt.data.tokens",
    "recipe": "ftopt.config.parts",
    "Wandb": "ftopt.watch.trackers.wandb",
    "wrap": "ftopt.optimizer",
    **dict.fromkeys(_METHODS, "ftopt.methods"),
}
_MODULES = ("codecs", "fragments", "methods", "outer", "triggers", "undo")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"ftopt.{name}")
    if name not in _LATER:
        raise AttributeError(f"module 'ftopt' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_MODULES})

"""Semi-synchronous optimizers for PyTorch in which replicas come and go and no survivor loses an inner step.

Wrap the inner optimizer with `wrap`, choose a method (`DiLoCo`, `LocalSGD`), connect with `connect`, `solo` or
`local_groups`. ``docs/`` explains the rest.
"""

from ftopt.connect import connect as connect
from ftopt.connect import local_groups as local_groups
from ftopt.connect import solo as solo
from ftopt.errors import FtoptError as FtoptError
from ftopt.errors import Refused as Refused
from ftopt.errors import Unreachable as Unreachable
from ftopt.errors import UserError as UserError
from ftopt.events import Event as Event
from ftopt.methods import SGD as SGD
from ftopt.methods import DiLoCo as DiLoCo
from ftopt.methods import LocalSGD as LocalSGD
from ftopt.optimizer import OuterOptimizer as OuterOptimizer
from ftopt.optimizer import wrap as wrap
from ftopt.sync.group import ReplicaGroup as ReplicaGroup
from ftopt.sync.protocol.settings import Sync as Sync

__version__ = "0.1.0"
